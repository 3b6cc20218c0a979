"""The program of a helper process: runs other Python files on data of strangers, one call at a time, within limits of time and memory.

helper.py starts it and is told the results. It imports nothing of the package, whose rooms load a BLAS. What it sends is JSON and bytes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import socket
import struct
import sys
from types import ModuleType
from typing import Any

LENGTHS = struct.Struct("<II")  # bytes of the JSON, bytes of what follows it
# What ends a call at its limit of processor time, and of time by the clock.
ENDED_LATE = (signal.SIGPROF, signal.SIGALRM)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for late in ENDED_LATE:
        signal.signal(late, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = json.loads(sys.argv[1])
    line = socket.socket(fileno=os.dup(0))
    programs: dict[str, ModuleType] = {}
    base, no_memory = 0, {"ended": "memory"}  # made while there is memory
    while (asked := _received(line)) is not None:
        head, body = asked
        if "load" in head:
            programs[head["load"]] = _loaded(head["load"])
            base = _address_space()
            send(line, {}, b"")
            continue
        out = b""
        try:
            _limit(head["seconds"], head["clock"], base + head["memory"])
            said, out = programs[head["program"]].run(head["ask"], body)
        except MemoryError:
            said = no_memory
        except Exception as error:
            said = {"ended": f"{type(error).__name__}: {error}"[:300]}
        _limit(0.0, 0.0, resource.RLIM_INFINITY)
        del body
        send(line, said, out)
        del out


def send(line: socket.socket, said: Any, body: bytes | bytearray) -> None:
    """Send a message: JSON, and bytes after it."""
    head = json.dumps(said).encode()
    line.sendall(LENGTHS.pack(len(head), len(body)) + head)
    if body:
        line.sendall(body)


def _received(line: socket.socket) -> tuple[dict[str, Any], bytearray] | None:
    """Return the next message; None where the other side has closed."""
    lengths = _exactly(line, LENGTHS.size)
    if lengths is None:
        return None
    num_head, num_body = LENGTHS.unpack(lengths)
    head, body = _exactly(line, num_head), _exactly(line, num_body)
    return None if head is None or body is None else (json.loads(head), body)


def _exactly(line: socket.socket, number: int) -> bytearray | None:
    found = bytearray(number)
    view, done = memoryview(found), 0
    while done < number:
        got = line.recv_into(view[done:])
        if not got:
            return None
        done += got
    return found


def _loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _address_space() -> int:
    """Return the bytes of this process's address space; 0 where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit(seconds: float, clock: float, address_space: int) -> None:
    """Limit the process to `seconds` of processor time and `clock` seconds by the clock, 0 for no limit. The address space is limited on
    Linux; elsewhere the parent checks it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, clock)
    if sys.platform == "linux":
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        given = [n for n in (address_space, most) if n != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(given, default=resource.RLIM_INFINITY), most))


if __name__ == "__main__":
    main()
