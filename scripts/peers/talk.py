"""How compare_peers.py speaks to its workers: one JSON object a line, a question in, an answer out.

Both ends. Knows no engine and imports nothing that an engine would not have: it runs in every peer's own environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.evaluation import evaluated_seconds

Answer = dict[str, Any]
Handler = Callable[..., Answer]
LIMIT = 600.0  # seconds until a silent worker is given up


class PeerError(Exception):
    """An engine could not be built or started, or did not answer: one sentence."""


class Stopwatch:
    """Of a stretch: wall seconds; the calling thread's own CPU seconds, in which the host was busy; and the seconds in which MLX evaluated,
    None where that cannot be told. The last two overlap."""

    def __init__(self) -> None:
        self.evaluated = evaluated_seconds()
        self.wall, self.host = time.perf_counter(), time.thread_time()

    def read(self) -> Answer:
        found: Answer = {
            "seconds": time.perf_counter() - self.wall,
            "host_seconds": time.thread_time() - self.host,
        }
        evaluated = evaluated_seconds()
        known = evaluated is not None and self.evaluated is not None
        return found | {"evaluated_seconds": evaluated - self.evaluated if known else None}  # type: ignore[operator]


def peak_memory() -> int:
    """Bytes this process has held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def serve(handlers: Mapping[str, Handler]) -> None:
    """The worker's loop: calls the handler that a question names. What handlers print goes to stderr, for stdout is the answer's."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = handlers[question.pop("do")](**question)
        except Exception as error:  # whatever a peer does is an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def answer(tokens: list[list[int]], timed: int, spent: Answer, whole: Stopwatch) -> Answer:
    """What a worker says of a run without drafts. timed: tokens that were decoded in the time `spent`, as a Stopwatch tells it."""
    return {
        "tokens": tokens,
        "num_timed": timed,
        **spent,
        "whole_seconds": whole.read()["seconds"],
        "num_rounds": max(len(t) for t in tokens) - 1,
        "num_drafted": 0,
        "num_accepted": 0,
    }


class Worker:
    """The asking end. Raises PeerError where the worker fails; `close` ends it."""

    def __init__(self, command: Sequence[str | Path], folder: Path, log: Path) -> None:
        self._log = log.open("a")
        self._process = subprocess.Popen(
            [str(c) for c in command],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, do: str, **question: Any) -> Answer:
        if self._process.stdin is None or self._process.stdout is None:
            raise PeerError("The worker has no pipes.")
        try:
            self._process.stdin.write(json.dumps({"do": do, **question}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            raise PeerError(f"The worker is gone: {error}") from error
        if not line:
            raise PeerError(f"The worker ended; its words are in {self._log.name}.")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent to one that had ended
                    pipe.close()
