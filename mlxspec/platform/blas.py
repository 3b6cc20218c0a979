"""Finds a real BLAS for MLX on Linux and loads it globally, so that MLX binds to it.

MLX's Linux wheel brings the reference BLAS, which is tens of times slower. Any library that exports the plain
`cblas_*` names and is loaded with RTLD_GLOBAL before `mlx.core` takes its place. Knows no MLX, no thread policy, and
nothing of macOS, where MLX uses Accelerate.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mlxspec.errors import ConfigError
from mlxspec.platform import bundled_blas

Kind = Literal["system", "bundled", "path", "preloaded", "wheel", "none"]

_WISHES = ("auto", "system", "bundled", "wheel")
# Fedora's libopenblas.so.0 has no threads and its libopenblasp.so.0 has; Debian knows the former name only, with threads.
_SYSTEM_NAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")
_OPENMP = 2
_OPENMP_NOTICE = "This OpenBLAS is built on OpenMP: its number of threads is set with OMP_NUM_THREADS only."


class UnfitError(OSError):
    """An error: a library can be loaded but is no BLAS that mlxspec can use."""


@dataclass(frozen=True, kw_only=True)
class Blas:
    """The BLAS in use. path: None where it is MLX's own; notices: sentences for the user.

    max_threads: the number of threads that the library may use here, 1 where it has no function that returns it.
    """

    kind: Kind
    name: str
    path: str | None = None
    max_threads: int = 1
    notices: tuple[str, ...] = ()
    library: ctypes.CDLL | None = None

    def set_threads(self, num_threads: int) -> None:
        """Use `num_threads` from the next call on; does nothing where the library has no such function."""
        setter = getattr(self.library, "openblas_set_num_threads", None)
        if setter is not None:
            setter(ctypes.c_int(num_threads))


def choose() -> Blas:
    """Load the BLAS that MLXSPEC_BLAS asks for: auto (the default), system, bundled, wheel, or a library's path.

    Raises ConfigError where an explicit choice cannot be honoured. `auto` never raises: its notices say what it lacks.
    """
    wish = os.environ.get("MLXSPEC_BLAS", "") or "auto"
    if "/" not in wish and wish not in _WISHES:
        raise ConfigError(
            f"MLXSPEC_BLAS must be {', '.join(_WISHES)} or the path of a library (with a slash in it), not {wish!r}."
        )
    if not sys.platform.startswith("linux"):
        return Blas(kind="none", name="Accelerate" if sys.platform == "darwin" else "MLX's own BLAS")
    is_late = "mlx.core" in sys.modules
    if is_late and wish not in ("auto", "wheel"):
        raise ConfigError(f"MLXSPEC_BLAS={wish} came too late: mlx.core was imported before mlxspec.")
    already = _preloaded()
    if already is not None:
        if wish != "auto" and not is_late:
            raise ConfigError(
                f"MLXSPEC_BLAS={wish} cannot be honoured: {already.path} is loaded globally already."
            )
        return already
    if wish == "wheel":
        return _wheel()
    if is_late:
        return _wheel(
            "mlx.core was imported before mlxspec, so its slow BLAS stays; import mlxspec.platform.device first."
        )
    if "/" in wish:
        try:
            return _open(str(Path(wish).expanduser().absolute()), "path")
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"MLXSPEC_BLAS={wish} cannot be used: {error}") from error
    return _load_real(wish)


def _load_real(wish: str) -> Blas:
    """Load the system's OpenBLAS or the bundled one; under `auto`, if neither can be loaded, MLX's own."""
    notices: list[str] = []
    for name in _SYSTEM_NAMES if wish != "bundled" else ():
        try:
            return _open(name, "system")
        except UnfitError as error:
            notices.append(f"The system's BLAS was passed over: {error}.")
        except OSError:
            continue
    if wish == "system":
        raise ConfigError(
            "MLXSPEC_BLAS is system, but this system has no OpenBLAS: install it, or use bundled."
        )
    try:
        found = _load_bundled()
        return replace(found, notices=(*notices, *found.notices))
    except (OSError, bundled_blas.UnavailableError) as error:
        if wish == "bundled":
            raise ConfigError(f"MLXSPEC_BLAS is bundled, but {error}") from error
        return _wheel(
            *notices, f"MLX computes with its own BLAS, which is many times slower, because {error}"
        )


def _wheel(*notices: str) -> Blas:
    return Blas(kind="wheel", name="MLX's own reference BLAS", notices=notices)


def _preloaded() -> Blas | None:
    """Return a BLAS that was made global before (by LD_PRELOAD, for example), else None. MLX binds to the first, so no other can be
    chosen."""
    library = ctypes.CDLL(None)
    if getattr(library, "cblas_sgemm", None) is None:
        return None
    return _describe(library, "preloaded", os.environ.get("LD_PRELOAD") or "a BLAS loaded before mlxspec")


def _load_bundled() -> Blas:
    for anew in (False, True):  # a damaged copy is made once more
        path, notice = bundled_blas.prepare(anew=anew)
        try:
            found = _open(str(path), "bundled")
            return replace(found, notices=(*found.notices, notice)) if notice else found
        except OSError as error:
            problem = error
    raise UnfitError(f"the bundled OpenBLAS cannot be loaded: {problem}.") from problem


def _open(file: str, kind: Kind) -> Blas:
    """Load `file` privately, test it, then make its symbols global. Raises OSError, and UnfitError if the test fails."""
    problem = _trial(ctypes.CDLL(file, mode=ctypes.RTLD_LOCAL))
    if problem:
        raise UnfitError(f"{file} {problem}")
    return _describe(ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL), kind, file)


def _trial(library: ctypes.CDLL) -> str | None:
    """Multiply (2, 3) by (3, 2) with `cblas_sgemm`; returns what is wrong with the library, or None."""
    sgemm = getattr(library, "cblas_sgemm", None)
    if sgemm is None:
        return "has no cblas_sgemm"
    a = (ctypes.c_float * 6)(1, 2, 3, 4, 5, 6)
    b = (ctypes.c_float * 6)(7, 8, 9, 10, 11, 12)
    c = (ctypes.c_float * 4)()
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    row_major, plain = 101, 111  # CblasRowMajor, CblasNoTrans
    sgemm.restype = None
    sgemm(row_major, plain, plain, 2, 2, 3, one, a, 3, b, 2, zero, c, 2)
    return None if list(c) == [58, 64, 139, 154] else "has a cblas_sgemm that computes something else"


def _describe(library: ctypes.CDLL, kind: Kind, file: str) -> Blas:
    """Describe the library by its own functions. Its number of threads is limited to the cores that this process may use."""
    threads = _number(library, "openblas_get_num_threads", 1)
    blas = Blas(
        kind=kind,
        name=_name(library, file),
        path=file,
        max_threads=max(1, min(threads, num_cores())),
        notices=(_OPENMP_NOTICE,) if _number(library, "openblas_get_parallel", 0) == _OPENMP else (),
        library=library,
    )
    if blas.max_threads != threads:
        blas.set_threads(blas.max_threads)
    return blas


def _number(library: ctypes.CDLL, function: str, default: int) -> int:
    getter = getattr(library, function, None)
    return int(getter()) if getter is not None else default


def _name(library: ctypes.CDLL, file: str) -> str:
    """Return `OpenBLAS 0.3.21` where the library tells its version, else its file name."""
    getter = getattr(library, "openblas_get_config", None)
    if getter is None:
        return Path(file).name
    getter.restype = ctypes.c_char_p
    words = (getter() or b"").decode(errors="replace").split()
    return " ".join(words[:2]) if words[:1] == ["OpenBLAS"] else Path(file).name


def num_cores() -> int:
    """Return the number of cores that this process may use: its affinity, and in a container the CPU quota of its control group (v2)."""
    if sys.platform == "darwin":  # has no affinity and no control groups
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, -(-int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        pass
    return max(1, cores)
