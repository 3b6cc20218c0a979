"""Small JSON files that mlxspec keeps in its cache folder. One that cannot be read is as good as none; one that cannot be written is no
error, because everything that is kept can be found again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxspec.platform import folders

LARGEST = 1 << 20  # bytes of a file that is read
_DIGITS = 32  # of a file's name


def kept_file(folder: str, described: Any, *more: bytes) -> Path:
    """Return the file in this folder of the cache for `described`, plain JSON, and for further bytes `more`."""
    found = hashlib.sha256(json.dumps(described).encode())
    for part in more:
        found.update(part)
    return folders.private_folder(folder)[0] / f"{found.hexdigest()[:_DIGITS]}.json"


def machines_file(folder: str, described: Any) -> Path:
    """Return the file for `described` on this machine: of several with one home each has its own."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = [platform.system(), platform.machine(), os.cpu_count(), memory]
    return kept_file(folder, [*machine, described])


def kept_files(folder: str) -> list[Path]:
    """Return all files in this folder of the cache."""
    return sorted(folders.private_folder(folder)[0].glob("[!.]*.json"))


def read(path: Path) -> Any:
    """Return the JSON in a file, unchecked; None where there is no JSON of at most LARGEST bytes."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size <= LARGEST else None
    except (OSError, ValueError, RecursionError):
        return None


def write(path: Path, data: Any) -> None:
    """Write the whole file at once: another process reads the old content or the new."""
    with suppress(OSError):
        folders.write_whole(path, json.dumps(data).encode())
