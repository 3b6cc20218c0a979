"""The OpenBLAS that comes as a Python package (scipy-openblas32), made usable for MLX without a compiler or root.

Its names carry a `scipy_` prefix; patchelf takes it off in a copy that is kept in the cache. Knows files and names;
loads nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import time
from pathlib import Path

from mlxspec.platform import folders

_PREFIX = b"scipy_"
_NAMES = re.compile(rb"\0(scipy_(?:cblas|openblas)_[A-Za-z0-9_]+)(?=\0)")
_END_BYTES = 1 << 16
_KEEP_SECONDS = 90 * 24 * 3600
_PATCHELF_SECONDS = 120


class UnavailableError(Exception):
    """The bundled BLAS cannot be had; the text says what is missing and ends with a full stop."""


def prepare(*, anew: bool = False) -> tuple[Path, str | None]:
    """The path of the renamed library, made once and kept, and a sentence where it could not be kept.

    Several processes may do it at once: each writes a file of its own and renames it into place. `anew` makes it
    even if it is there. Raises UnavailableError.
    """
    source = _source()
    folder, notice = folders.private_folder("blas")
    key = _key(source)
    if not anew:
        for path in folder.glob(f"libopenblas-{key}-*.so"):
            if _is_whole(path):
                return path, notice
    try:
        return _make(source, folder, key), notice
    except OSError as error:
        raise UnavailableError(f"the bundled OpenBLAS could not be prepared ({error}).") from error


def _source() -> Path:
    """The packaged library, looked for on sys.path: importing the package would load it under its prefixed names."""
    for entry in sys.path:
        lib = Path(entry or ".") / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
        if lib.is_file():
            return lib
    raise UnavailableError("the package scipy-openblas32 is not installed.")


def _key(source: Path) -> str:
    """A digest of the library's length, its first pages (build id, symbol hashes) and its section table.

    Reading all of it would cost every start 50 ms.
    """
    digest = hashlib.sha256(_NAMES.pattern)
    with source.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        file.seek(0)
        digest.update(file.read(_END_BYTES))
        file.seek(max(0, size - _END_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:20]


def _is_whole(path: Path) -> bool:
    """Whether the copy is ours alone to write and as long as its name says: a cut library can kill who loads it."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return (
        info.st_uid == os.geteuid()
        and not info.st_mode & 0o022
        and path.stem.rpartition("-")[2] == str(info.st_size)
    )


def _patchelf() -> str:
    import shutil
    import sysconfig

    for scheme in (None, f"{os.name}_user"):
        folder = sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts")
        if os.access(os.path.join(folder, "patchelf"), os.X_OK):
            return os.path.join(folder, "patchelf")
    found = shutil.which("patchelf")
    if found is None:
        raise UnavailableError("the package patchelf is not installed.")
    return found


def _make(source: Path, folder: Path, key: str) -> Path:
    """Write the renamed copy into `folder`. Raises OSError, UnavailableError."""
    import tempfile

    names = sorted(set(_NAMES.findall(source.read_bytes())))
    if not names:
        raise UnavailableError("scipy-openblas32 names its functions in an unknown way.")
    _sweep(folder)
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder) as scratch:
        mapping, made = Path(scratch, "names"), Path(scratch, "lib.so")
        mapping.write_bytes(b"".join(name + b" " + name.removeprefix(_PREFIX) + b"\n" for name in names))
        _run_patchelf(source, mapping, made)
        made.chmod(0o600)
        with made.open("rb") as file:  # what is renamed into place must be whole even after a power cut
            size = os.fstat(file.fileno()).st_size
            os.fsync(file.fileno())
        return made.replace(folder / f"libopenblas-{key}-{size}.so")


def _run_patchelf(source: Path, mapping: Path, made: Path) -> None:
    import subprocess

    command = [_patchelf(), "--rename-dynamic-symbols", str(mapping), "--output", str(made), str(source)]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATCHELF_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError("patchelf did not come to an end.") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"]
        raise UnavailableError(f"patchelf failed on the bundled OpenBLAS ({said[-1]}).")


def _sweep(folder: Path) -> None:
    """Drop what is a season old: copies of earlier versions (who uses one keeps it mapped), left-over scratch."""
    import shutil

    for path in (*folder.glob("libopenblas-*.so"), *folder.glob("making-*")):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _KEEP_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
