"""How long MLX's CPU streams have computed: the CPU time of their threads, as Linux counts it.

MLX evaluates each CPU stream on a thread of its own and sleeps where nothing is queued there. So the share of a stretch's wall time that
these threads did not use is the time outside evaluation, whatever the host did meanwhile. Nothing but their age tells threads apart: import
this behind the BLAS, before MLX: those that are there by then do not count, nor does the caller's. Products that the BLAS cuts up run
on the stream's thread, too, so a second one beside it is not counted twice.
"""

from __future__ import annotations

import threading
from pathlib import Path

TASKS = Path("/proc/self/task")


def evaluated_seconds() -> float | None:
    """CPU seconds so far of the threads that were started since this was imported; None where the system does not tell."""
    times = _times()
    if not times:
        return None
    mine = str(threading.get_native_id())
    return sum(spent for thread, spent in times.items() if thread != mine and thread not in _OTHERS)


def _times() -> dict[str, float]:
    """CPU seconds of every thread of this process; nothing but on Linux."""
    found = {}
    try:
        for task in TASKS.iterdir():
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return {}
    return found


_OTHERS = frozenset(_times())
