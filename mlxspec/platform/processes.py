"""Finds the process that listens on a port of this machine, and how much memory it has. Knows Linux's /proc, and lsof and ps elsewhere."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_SECONDS = 5.0  # that lsof and ps may take
_LISTENS = "0A"  # a socket's state in /proc/net/tcp


def listening(port: int) -> int | None:
    """Return the number of the process that listens on a TCP port of this machine, None where it cannot be seen."""
    if sys.platform.startswith("linux"):
        return _by_proc(port)
    found = _said("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-t").split()
    return int(found[0]) if found and found[0].isdigit() else None


def resident_bytes(process: int) -> int | None:
    """Return the bytes of memory that a process has resident, None where it cannot be seen."""
    if sys.platform.startswith("linux"):
        with suppress(OSError):
            for line in Path(f"/proc/{process}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name == "VmRSS":
                    return int(value.split()[0]) << 10
        return None
    found = _said("ps", "-o", "rss=", "-p", str(process)).strip()
    return int(found) << 10 if found.isdigit() else None


def _by_proc(port: int) -> int | None:
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").glob("[0-9]*/fd") if sockets else ():
        with suppress(OSError):
            for link in folder.iterdir():
                with suppress(OSError):
                    if str(link.readlink()) in sockets:
                        return int(folder.parent.name)
    return None


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
