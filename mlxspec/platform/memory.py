"""Finds out how much memory this machine gives to MLX."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import mlx.core as mx

from mlxspec.platform import device

UNPACKED_AT_MOST = 6 << 30  # bytes of float32
_CPU_SHARE = 0.9  # of a machine without a GPU; the rest is the system's


def machine_memory() -> int:
    """Return the bytes that MLX may use here: a GPU's working set, or most of the memory that this process may have."""
    info = mx.device_info() if device.has_gpu() else {}
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if isinstance(info.get(key), int) and info[key] > 0:
            return int(info[key])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return int(_CPU_SHARE * total)


def floats_fit(nbytes: int) -> bool:
    """Return whether a quantized model of nbytes as float32 is unpacked on a CPU. There MLX multiplies packed weights with one token 9
    times slower, and with a prompt 130 times slower."""
    return nbytes <= min(UNPACKED_AT_MOST, machine_memory() // 2)
