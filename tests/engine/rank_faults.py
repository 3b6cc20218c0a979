"""Plants faults into ranks and watches how they end: does every answer end with an error in time, is any process left, is the port free?

    .venv/bin/python -m tests.engine.rank_faults [--times 10] [--faults killed stopped ...]

Each fault is planted into a server over two local ranks while it streams an answer, or into the start of one. A line a fault: how often it
ended as it should, and the longest that answers and processes took, in seconds. The exit code is 1 where one did not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import mlxspec.demo
from tests.engine import rank_processes

LIMIT = 10.0  # seconds in which everything has ended
_READY = 180.0
_MODEL = ("--model", "demo")
_DRAFT = ("--draft", "ngram-simple,mtp")


@dataclass
class Outcome:
    """What became of one fault. wrong: sentences on what was not as it should be; answer, processes: seconds from the fault on."""

    wrong: list[str] = field(default_factory=list)
    answer: float = 0.0
    processes: float = 0.0
    said: str = ""


@dataclass(frozen=True)
class Fault:
    """rank: whose it is. signal: what that process is sent. said: a part of the error that the answer ends with, or that the start prints;
    None: rank 0 itself is gone, and the answer breaks off. own: arguments of that rank that differ, for faults of the start."""

    rank: int
    signal: int | None
    said: str | None
    own: Callable[[Path], Sequence[str]] | None = None


def _other_files(folder: Path) -> Sequence[str]:
    copy = folder / "demo"
    shutil.copytree(mlxspec.demo.TARGET, copy)
    weights = next(copy.glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(raw)
    return ("--model", str(copy))


FAULTS = {
    "killed": Fault(1, signal.SIGKILL, "Rank 1 has ended, or the link to it is lost."),
    "terminated": Fault(1, signal.SIGTERM, "Rank 1 has ended, or the link to it is lost."),
    "stopped": Fault(1, signal.SIGSTOP, "Rank 1 has not been heard of"),
    "hangs": Fault(1, signal.SIGUSR1, "Rank 1 hangs"),
    "raises": Fault(1, signal.SIGUSR1, "Rank 1 cannot go on: the planted fault."),
    "differs": Fault(1, signal.SIGUSR1, "computed different texts"),
    "line": Fault(1, signal.SIGUSR1, "Rank 1 has ended, or the link to it is lost."),
    "ring": Fault(1, signal.SIGUSR1, "Rank "),  # which one notices first is a matter of chance
    "rank 0 killed": Fault(0, signal.SIGKILL, None),
    "rank 0 stopped": Fault(0, signal.SIGSTOP, None),
    "version": Fault(1, None, "Rank 1 has another version than rank 0: mlx is 0.0.1 there"),
    "files": Fault(1, None, "Rank 1 has another file than rank 0", _other_files),
    "config": Fault(1, None, "Rank 1 has another", lambda folder: ("--max-context", "512")),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=10, help="how often each is planted")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    options = parser.parse_args()
    print("| fault | as it should | answer ended, s | processes ended, s |", flush=True)
    print("| --- | --- | --- | --- |", flush=True)
    num_wrong = 0
    for name in options.faults:
        outcomes = [plant(name) for _ in range(options.times)]
        right = sum(not o.wrong for o in outcomes)
        num_wrong += len(outcomes) - right
        longest = max(o.answer for o in outcomes), max(o.processes for o in outcomes)
        print(f"| {name} | {right} of {len(outcomes)} | {longest[0]:.1f} | {longest[1]:.1f} |", flush=True)
        for wrong in (w for o in outcomes for w in o.wrong):
            print(f"  {name}: {wrong}", file=sys.stderr, flush=True)
    return int(num_wrong > 0)


def plant(name: str) -> Outcome:
    """Plant one fault once. No process of it is left behind."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        port = rank_processes.free_ports(1)[0]
        command = ["-m", "tests.engine.planted_rank"]
        arguments = [
            [*command, name if r == fault.rank else "none", "serve", "--port", str(port), *_DRAFT]
            for r in (0, 1)
        ]
        for rank, given in enumerate(arguments):
            given += _MODEL if fault.own is None or rank != fault.rank else fault.own(folder)
        processes = rank_processes.start(arguments, folder)
        try:
            return _watch(name, fault, port, processes)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _watch(name: str, fault: Fault, port: int, processes: Sequence[subprocess.Popen[str]]) -> Outcome:
    found, begun = Outcome(), time.monotonic()
    answer: _Answer | None = None
    if fault.signal is not None:
        if not _is_ready(port, processes):
            found.wrong.append("the server did not begin")
            return found
        answer = _Answer(port)
        if not answer.has_begun.wait(60):
            found.wrong.append(f"no answer began: {answer.said[:200]}")
            return found
        begun = time.monotonic()
        os.kill(processes[fault.rank].pid, fault.signal)
    is_stopped = fault.signal == signal.SIGSTOP
    # one that is stopped cannot end; whoever finds it ends it
    watched = [p for r, p in enumerate(processes) if not (is_stopped and r == fault.rank)]
    _wait(watched, begun + (LIMIT if fault.signal is not None else _READY) + 5.0)
    found.processes = time.monotonic() - begun if fault.signal is not None else 0.0
    if any(p.poll() is None for p in watched):
        found.wrong.append("a process is left")
    elif found.processes > LIMIT:
        found.wrong.append(f"processes ended after {found.processes:.1f} seconds")
    for process in processes:
        process.kill()
    said = "".join(p.communicate()[1] for p in processes)
    if answer is not None:
        answer.thread.join(5)
        found.answer, found.said = answer.ended - begun, answer.said
        if answer.thread.is_alive() or found.answer > LIMIT:
            found.wrong.append("the answer did not end in time")
        said = answer.said if fault.said is not None else ""
    if fault.said is not None and fault.said not in said:
        found.wrong.append(f"it should have been said that {fault.said!r}, and was: {said[-400:]!r}")
    if "Traceback" in said:
        found.wrong.append("there was a traceback")
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            again.bind(("127.0.0.1", port))
        except OSError:
            found.wrong.append("the port is not free")
    return found


def _wait(processes: Sequence[subprocess.Popen[str]], until: float) -> None:
    while any(p.poll() is None for p in processes) and time.monotonic() < until:
        time.sleep(0.02)


def _is_ready(port: int, processes: Sequence[subprocess.Popen[str]]) -> bool:
    until = time.monotonic() + _READY
    while time.monotonic() < until and all(p.poll() is None for p in processes):
        with (
            suppress(OSError, ValueError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply,
        ):
            if json.load(reply).get("status") == "ok":
                return True
        time.sleep(0.2)
    return False


class _Answer:
    """A long streamed answer. said: all that came; ended: when it did."""

    def __init__(self, port: int) -> None:
        self.said, self.ended, self.has_begun = "", float("inf"), threading.Event()
        body = {"prompt": "def add(a, b):", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        self._request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=60) as reply:
                for raw in reply:
                    self.said += raw.decode()
                    if raw.startswith(b"data:"):
                        self.has_begun.set()
        except (OSError, ValueError) as error:
            self.said += f"\n{error}"
        self.ended = time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
