"""The private folders mlxspec writes to: the cache folder, and a temporary one where that cannot be used.

Knows owners and permissions; does not know what is kept there.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

_temporary: list[Path] = []


def wanted_cache_folder() -> Path:
    """MLXSPEC_CACHE, else the platform's cache folder (XDG_CACHE_HOME honoured on Linux) with `mlxspec` appended."""
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
    """Create `folder` with mode 0700, parents included. Raises OSError if it is not ours, or others may write to it.

    Libraries are loaded from these folders, so whoever can write to one can run code as us.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if info.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if info.st_mode & 0o077:
        folder.chmod(0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to")


def temporary_folder() -> Path:
    """A folder of this process with mode 0700, removed when it ends."""
    if not _temporary:
        _temporary.append(Path(tempfile.mkdtemp(prefix="mlxspec-")))
        atexit.register(_remove_temporary, os.getpid())
    return _temporary[0]


def _remove_temporary(pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        for folder in _temporary:
            shutil.rmtree(folder, ignore_errors=True)


def private_folder(name: str) -> tuple[Path, str | None]:
    """The folder `name` in the cache, mode 0700, and None; or one in a temporary folder and the sentence that says why."""
    root = wanted_cache_folder()
    try:
        make_private(root)
        make_private(root / name)
        return root / name, None
    except (OSError, RuntimeError) as error:
        folder = temporary_folder() / name
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = getattr(error, "strerror", None) or str(error)
        return (
            folder,
            f"The cache folder {root} cannot be used ({reason}), so a temporary one serves this run.",
        )
