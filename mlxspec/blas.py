"""Which BLAS MLX computes with on Linux: finds a real one and loads it globally, so that MLX binds to it.

MLX's Linux wheel brings the reference BLAS, which is tens of times slower. Any library that exports the plain `cblas_*` names
and is loaded with RTLD_GLOBAL before `mlx.core` takes its place. Knows nothing of MLX itself, of threads policies, or of macOS.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxspec import bundled_blas
from mlxspec.errors import ConfigError

Kind = Literal["system", "bundled", "path", "wheel", "none"]

# Fedora's libopenblas.so.0 has no threads, its libopenblasp.so.0 does; Debian has only the former name, with threads.
_SYSTEM_NAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")


@dataclass(frozen=True, kw_only=True)
class Blas:
    """The BLAS in use. `path` is None where MLX's own is used; `notices` are sentences for a person.

    `max_threads` is how many threads the library would use by itself, 1 where it cannot be asked.
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
    """Load the BLAS that MLXSPEC_BLAS asks for: auto (the default), system, bundled, wheel, or the path of a library.

    Raises ConfigError where an explicit choice cannot be honoured; `auto` never raises, its report carries notices instead.
    """
    wish = os.environ.get("MLXSPEC_BLAS", "") or "auto"
    is_path = "/" in wish
    if not is_path and wish not in ("auto", "system", "bundled", "wheel"):
        raise ConfigError(
            f"MLXSPEC_BLAS must be auto, system, bundled, wheel or the path of a library with a slash in it, not {wish!r}."
        )
    if not sys.platform.startswith("linux"):
        return Blas(kind="none", name="Accelerate" if sys.platform == "darwin" else "MLX's own")
    late = "mlx.core" in sys.modules
    if late and wish != "auto":
        raise ConfigError(f"MLXSPEC_BLAS={wish} came too late: mlx.core was imported before mlxspec.")
    if late:
        return _wheel(
            "mlx.core was imported before mlxspec, so its BLAS could not be replaced; import mlxspec.device first."
        )
    if is_path:
        return _load_path(Path(wish).expanduser())
    if wish == "wheel":
        return _wheel()
    notices: list[str] = []
    if wish in ("auto", "system"):
        found = _load_system(notices)
        if found is not None:
            return found
        if wish == "system":
            raise ConfigError(
                "MLXSPEC_BLAS=system, but there is no OpenBLAS on this system: install it or use bundled."
            )
    try:
        path, notice = bundled_blas.prepare()
        found = _open(str(path), "bundled", (*notices, *([notice] if notice else [])))
    except (OSError, bundled_blas.UnavailableError) as error:
        if wish == "bundled":
            raise ConfigError(f"MLXSPEC_BLAS=bundled cannot be honoured: {error}") from error
        return _wheel(*notices, f"No fast BLAS: {error} MLX's own is used, many times slower.")
    return found


def _wheel(*notices: str) -> Blas:
    return Blas(kind="wheel", name="MLX's own reference BLAS", notices=notices)


def _load_path(path: Path) -> Blas:
    try:
        return _open(str(path), "path", ())
    except OSError as error:
        raise ConfigError(f"MLXSPEC_BLAS={path} cannot be used: {error}") from error


def _load_system(notices: list[str]) -> Blas | None:
    for name in _SYSTEM_NAMES:
        try:
            return _open(name, "system", ())
        except UnfitError as error:
            notices.append(f"The system's {name} was passed over: {error}")
        except OSError:
            continue
    return None


class UnfitError(OSError):
    """A library that loads but is not a BLAS we can use."""


def _open(file: str, kind: Kind, notices: tuple[str, ...]) -> Blas:
    """Load `file` privately, try it, then make its names global. Raises OSError (UnfitError if it loads but fails the trial)."""
    private = ctypes.CDLL(file, mode=ctypes.RTLD_LOCAL)
    problem = _trial(private)
    if problem:
        raise UnfitError(problem)
    library = ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
    if _number(library, "openblas_get_parallel") == 2:
        notices = (
            *notices,
            "This OpenBLAS is built on OpenMP, whose number of threads cannot be set for MLX's own thread.",
        )
    return Blas(
        kind=kind,
        name=_describe(library, file),
        path=_real_path(library) or file,
        max_threads=max(1, min(_number(library, "openblas_get_num_threads"), len(os.sched_getaffinity(0)))),
        notices=notices,
        library=library,
    )


def _trial(library: ctypes.CDLL) -> str | None:
    """Multiply (2, 3) by (3, 2) with `cblas_sgemm`; returns what is wrong with the library, or None."""
    try:
        sgemm = library.cblas_sgemm
    except AttributeError:
        return "it has no cblas_sgemm"
    a = (ctypes.c_float * 6)(1, 2, 3, 4, 5, 6)
    b = (ctypes.c_float * 6)(7, 8, 9, 10, 11, 12)
    c = (ctypes.c_float * 4)()
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    row_major, plain = 101, 111
    sgemm.restype = None
    sgemm(row_major, plain, plain, 2, 2, 3, one, a, 3, b, 2, zero, c, 2)
    return None if list(c) == [58, 64, 139, 154] else "its cblas_sgemm computes something else"


def _number(library: ctypes.CDLL, function: str) -> int:
    getter = getattr(library, function, None)
    return int(getter()) if getter is not None else 1


def _describe(library: ctypes.CDLL, file: str) -> str:
    """ "OpenBLAS 0.3.21" where the library can be asked, else its file name."""
    getter = getattr(library, "openblas_get_config", None)
    if getter is None:
        return Path(file).name
    getter.restype = ctypes.c_char_p
    words = (getter() or b"").decode(errors="replace").split()
    return " ".join(words[:2]) if words[:1] == ["OpenBLAS"] else Path(file).name


def _real_path(library: ctypes.CDLL) -> str | None:
    """Where the loader found the library, read from the process's own map; None if it cannot be told."""

    class DlInfo(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        )

    info = DlInfo()
    try:
        dladdr = ctypes.CDLL(None).dladdr
    except AttributeError:
        return None
    if not dladdr(ctypes.cast(library.cblas_sgemm, ctypes.c_void_p), ctypes.byref(info)):
        return None
    return os.fsdecode(info.file) if info.file else None
