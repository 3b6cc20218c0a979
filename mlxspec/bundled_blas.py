"""The OpenBLAS that comes as a Python package (scipy-openblas32), made usable for MLX without a compiler or root.

Its names carry a `scipy_` prefix; patchelf takes it off in a copy that is kept in the cache. Knows files and names; loads nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from mlxspec import folders

_PREFIX = b"scipy_"
_NAMES = re.compile(rb"\0(scipy_(?:cblas|openblas)_[A-Za-z0-9_]+)(?=\0)")
_END_BYTES = 1 << 20
_KEEP_SECONDS = 90 * 24 * 3600


class UnavailableError(Exception):
    """The bundled BLAS cannot be had; the text says what is missing."""


def prepare() -> tuple[Path, str | None]:
    """The path of the renamed library, made at the first call and kept, and a notice where it could not be kept.

    Safe when several processes run it at once: each writes a file of its own and renames it into place.
    Raises UnavailableError.
    """
    source = _source()
    folder, notice = folders.private_folder("blas")
    target = folder / f"libopenblas-{_key(source)}.so"
    if not _is_ours(target):
        try:
            _make(source, target)
        except (OSError, subprocess.SubprocessError) as error:
            raise UnavailableError(
                f"the bundled OpenBLAS could not be prepared ({_one_line(error)})."
            ) from error
    return target, notice


def _source() -> Path:
    """The packaged library. Looked for on sys.path by hand: importing the package would load it under its prefixed names."""
    for entry in sys.path:
        lib = Path(entry or ".") / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
        if lib.is_file():
            return lib
    raise UnavailableError("the package scipy-openblas32 is not installed.")


def _key(source: Path) -> str:
    """A digest of the library's length and both its ends: header with build id, and section table. Reading all 25 MB would
    cost every start 50 ms."""
    digest = hashlib.sha256(_PREFIX)
    with source.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        file.seek(0)
        digest.update(file.read(_END_BYTES))
        file.seek(max(0, size - _END_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:20]


def _is_ours(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _patchelf() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "patchelf"
    if os.access(beside, os.X_OK):
        return str(beside)
    found = shutil.which("patchelf")
    if found is None:
        raise UnavailableError("the package patchelf is not installed.")
    return found


def _make(source: Path, target: Path) -> None:
    names = sorted(set(_NAMES.findall(source.read_bytes())))
    if not names:
        raise UnavailableError("scipy-openblas32 has other names than expected.")
    with tempfile.TemporaryDirectory(prefix="making-", dir=target.parent) as scratch:
        mapping = Path(scratch) / "names"
        mapping.write_bytes(b"".join(name + b" " + name.removeprefix(_PREFIX) + b"\n" for name in names))
        made = Path(scratch) / "lib.so"
        subprocess.run(
            [_patchelf(), "--rename-dynamic-symbols", mapping, "--output", made, source],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
        )
        made.chmod(0o600)
        with made.open(
            "rb"
        ) as file:  # a file that is renamed into place must be whole even after a power cut
            os.fsync(file.fileno())
        made.replace(target)
    _forget_older(target)


def _forget_older(target: Path) -> None:
    """Drop the copies of earlier versions, a season after they were made; processes that still use one keep it mapped."""
    for path in target.parent.glob("libopenblas-*.so"):
        with contextlib.suppress(OSError):
            if path != target and time.time() - path.lstat().st_mtime > _KEEP_SECONDS:
                path.unlink()


def _one_line(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    text = stderr.decode(errors="replace").strip() if stderr else str(error)
    return text.splitlines()[-1] if text else type(error).__name__
