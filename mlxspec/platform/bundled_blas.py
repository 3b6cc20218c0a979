"""The OpenBLAS that comes as a Python package (scipy-openblas32), made usable for MLX without a compiler or root.

Its names carry a `scipy_` prefix; patchelf takes it off in a copy that is kept in the cache. Knows files and names;
loads nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

from mlxspec.platform import folders

_PREFIX = b"scipy_"
_NAMES = re.compile(rb"\0(scipy_(?:cblas|openblas)_[A-Za-z0-9_]+)(?=\0)")
_PATCHELF_SECONDS = 120


class UnavailableError(Exception):
    """The bundled BLAS cannot be had; the text says what is missing and ends with a full stop."""


def prepare(*, anew: bool = False) -> tuple[Path, str | None]:
    """Return the path of the renamed library, made once and kept, and a sentence where it could not be kept.

    Several processes may call this at once: each writes a file of its own and renames it into place. anew: make it even if it exists.
    Raises UnavailableError.
    """
    source = _source()
    folder, notice = folders.private_folder("blas")
    try:
        found = source.stat()
        name = f"libopenblas-{found.st_size}-{found.st_mtime_ns}"
        for path in folder.glob(f"{name}-*.so") if not anew else ():
            if path.stem == f"{name}-{path.stat().st_size}":  # a cut library can kill who loads it
                return path, notice
        return _make(source, folder, name), notice
    except OSError as error:
        raise UnavailableError(
            f"the bundled OpenBLAS could not be prepared in {folder} ({error.strerror or error}); make room for 30 MB there, or name "
            "another folder in MLXSPEC_CACHE."
        ) from error


def _source() -> Path:
    """Find the packaged library on sys.path. Importing the package would load it under its prefixed names."""
    for entry in sys.path:
        lib = Path(entry or ".") / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
        if lib.is_file():
            return lib
    raise UnavailableError("the package scipy-openblas32 is not installed.")


def _patchelf() -> str:
    import shutil
    import sysconfig

    scripts = sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")
    found = shutil.which("patchelf", path=os.pathsep.join([*scripts, os.environ.get("PATH", "")]))
    if found is None:
        raise UnavailableError("the package patchelf is not installed.")
    return found


def _make(source: Path, folder: Path, name: str) -> Path:
    """Write the renamed copy, and drop those of other versions: who uses one keeps it mapped. Raises OSError, UnavailableError."""
    import subprocess
    import tempfile

    names = sorted(set(_NAMES.findall(source.read_bytes())))
    if not names:
        raise UnavailableError("scipy-openblas32 names its functions in an unknown way.")
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder) as scratch:
        mapping, made = Path(scratch, "names"), Path(scratch, "lib.so")
        mapping.write_bytes(b"".join(name + b" " + name.removeprefix(_PREFIX) + b"\n" for name in names))
        command = [_patchelf(), "--rename-dynamic-symbols", str(mapping), "--output", str(made), str(source)]
        try:
            subprocess.run(
                command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATCHELF_SECONDS, check=True
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError("patchelf did not come to an end.") from error
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().splitlines() or [f"code {error.returncode}"]
            raise UnavailableError(f"patchelf failed on the bundled OpenBLAS ({said[-1]}).") from error
        made.chmod(0o600)
        with made.open("rb") as file:  # what is renamed into place must be whole even after a power cut
            os.fsync(file.fileno())
        path = made.replace(folder / f"{name}-{made.stat().st_size}.so")
    for other in folder.glob("libopenblas-*.so"):
        with contextlib.suppress(OSError):
            if other != path:
                other.unlink()
    return path
