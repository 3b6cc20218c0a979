"""NVIDIA GPUs on Linux: whether the driver finds one, and how MLX comes to compute on it.

MLX's wheels for CPUs and for CUDA hold a file of the same name, so an environment with both computes with the one installed last, and with
CUDA's it starts only where there is a driver. Imports no MLX, and nothing at all before it is asked: the command line names it.
"""

from __future__ import annotations

import functools
import sys

_DRIVER = "libcuda.so.1"
_WHEELS = ("mlx-cuda-13", "mlx-cuda-12")  # by CUDA's version; the extra `cuda` brings the last
_LAST = "MLX's wheels for CPUs and for CUDA hold a file of the same name, and the one installed last counts"


@functools.cache
def has_gpu() -> bool:
    """Return whether the driver finds a GPU. Needs no CUDA toolkit."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    count = ctypes.c_int(0)
    found = not driver.cuInit(0) and not driver.cuDeviceGetCount(ctypes.byref(count))
    return found and count.value > 0


def advice() -> str:
    """Return what to do where there is a GPU and MLX computes without it."""
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, version

    for wheel in _WHEELS:
        with suppress(PackageNotFoundError):
            return f"Run `pip install --force-reinstall --no-deps {wheel}=={version(wheel)}`: {_LAST}."
    return (
        "Install mlxspec with its extra `cuda` (in a checkout: pip install '.[cuda]'), then run "
        f"`pip install --force-reinstall --no-deps {_WHEELS[-1]}`: {_LAST}."
    )


def explained(error: ImportError) -> str | None:
    """Return a sentence for an error of the loader where MLX's wheel for CUDA does not start; None for any other error."""
    if _DRIVER not in str(error):
        return None
    return (
        f"MLX's wheel for CUDA is installed, and there is no NVIDIA driver here ({_DRIVER}). To compute on the CPU, "
        f"run `pip uninstall -y {' '.join(_WHEELS)}` and `pip install --force-reinstall --no-deps mlx-cpu`."
    )
