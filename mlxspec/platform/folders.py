"""The private folders mlxspec writes to: the cache folder, and a temporary one where that cannot be used; and files that are written
whole.

Knows owners and permissions; does not know what is kept there.
"""

from __future__ import annotations

import atexit
import glob
import os
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_LEFT_SECONDS = 3600.0  # a file that has been unfinished for so long belongs to a killed process

_temporary: dict[int, Path] = {}  # by process id: a forked child makes its own


def wanted_cache_folder() -> Path:
    """Return MLXSPEC_CACHE, else `mlxspec` in the platform's cache folder (XDG_CACHE_HOME on Linux)."""
    chosen = os.environ.get("MLXSPEC_CACHE", "")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path("~/Library/Caches/mlxspec").expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG rule: relative values are to be ignored
        base = "~/.cache"
    return Path(base).expanduser() / "mlxspec"


def make_private(folder: Path) -> None:
    """Create `folder` with mode 0700, parents included. Raises OSError where it is no folder or belongs to another user.

    Libraries are loaded from these folders, so any user who can write to one can run code as this user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError("it is not a folder")
    if info.st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if info.st_mode & 0o077:
        folder.chmod(0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError("it cannot be written to")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read. A reader finds the old content or the new, also where several processes write at once.
    What a killed process left is removed later. Raises OSError."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                left.unlink()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def temporary_folder() -> Path:
    """Return a folder of this process with mode 0700, which is removed when the process ends."""
    pid = os.getpid()
    if pid not in _temporary:
        _temporary[pid] = Path(tempfile.mkdtemp(prefix="mlxspec-"))
        atexit.register(_remove_temporary, pid)
    return _temporary[pid]


def _remove_temporary(pid: int) -> None:
    import shutil

    if os.getpid() == pid:
        shutil.rmtree(_temporary.pop(pid, Path()), ignore_errors=True)


def private_folder(name: str) -> tuple[Path, str | None]:
    """Return the folder `name` in the cache, mode 0700, and None; or a temporary folder and a sentence why. A `~` of an unknown user
    counts as a folder that cannot be written to."""
    root: Path | str = os.environ.get("MLXSPEC_CACHE", "")
    try:
        root = wanted_cache_folder()
        make_private(root)
        make_private(root / name)
        return (root / name).resolve(), None
    except (OSError, RuntimeError, ValueError) as error:
        folder = temporary_folder().resolve() / name
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = getattr(error, "strerror", None) or error
        return folder, f"The cache folder {root} cannot be used ({reason}); a temporary one serves this run."
