"""How long MLX's CPU streams have computed: the CPU time of their threads, as Linux counts it.

MLX evaluates each CPU stream on a thread of its own and sleeps where nothing is queued there. So the share of a stretch's wall time that
these threads did not use is the time outside evaluation, whatever the host did meanwhile. Knows threads by when they were started, as
nothing else tells them apart: those that are there before MLX is imported (the BLAS's) do not count, nor does the caller's. Products that
the BLAS cuts up run on the stream's thread, too, so a second one beside it is not counted twice.
"""

from __future__ import annotations

import threading
from pathlib import Path

TASKS = Path("/proc/self/task")
_others: set[str] | None = None


def mlx_comes_next() -> None:
    """Threads that exist so far are not MLX's. Call it between loading a BLAS and importing MLX."""
    global _others
    _others = set(_times())


def evaluated_seconds() -> float | None:
    """CPU seconds so far of the threads that were started since `mlx_comes_next`; None where the system does not tell, or nobody asked."""
    times = _times()
    if _others is None or not times:
        return None
    mine = str(threading.get_native_id())
    return sum(spent for thread, spent in times.items() if thread != mine and thread not in _others)


def _times() -> dict[str, float]:
    """CPU seconds of every thread of this process; nothing but on Linux."""
    found = {}
    try:
        for task in TASKS.iterdir():
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return {}
    return found
