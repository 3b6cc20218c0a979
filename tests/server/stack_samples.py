"""What the threads of a process do, sampled: `start` writes every 20 ms the innermost functions of each thread and what an engine has, to a
file; `during` reads what stood there between two times. A time without samples is one in which no Python ran: a call that keeps the GIL, or
a machine that gave no time."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY = 0.02
_DEPTH = 6  # functions of a stack that are told


def start(path: str) -> None:
    threading.Thread(target=_sample, args=(Path(path),), name="stack samples", daemon=True).start()


def _sample(path: Path) -> None:
    mine = threading.get_ident()
    with path.open("w") as file:
        while True:
            names = {t.ident: t.name for t in threading.enumerate()}
            frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != mine}
            stacks = {names.get(ident, str(ident)): _told(frame) for ident, frame in frames.items()}
            places = next((found for f in frames.values() if (found := _places(f))), None)
            print(json.dumps([time.monotonic(), stacks, places]), file=file, flush=True)
            time.sleep(EVERY)


def _told(frame: FrameType | None) -> str:
    """The innermost functions of a stack, the outermost of them first."""
    found: list[str] = []
    while frame is not None and len(found) < _DEPTH:
        found.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(reversed(found))


def _places(frame: FrameType | None) -> dict[str, int] | None:
    """Of the engine that a thread steps: number of the step, and requests by what they do."""
    while frame is not None:
        places = (
            getattr(frame.f_locals.get("self"), "_places", None)
            if frame.f_code.co_name == "_advance"
            else None
        )
        if places is not None:
            return {
                "step": places.step,
                "rows": len(places.rows),
                "prompts": len(places.prefills),
                "parked": len(places.parked),
                "queued": len(places.queue),
            }
        frame = frame.f_back
    return None


def during(path: Path, begin: float, end: float, most: int = 4) -> dict[str, list[str]]:
    """What each thread did between two times of the monotonic clock: its most frequent stacks with their share of the samples; and the
    longest time without a sample."""
    seen: dict[str, Counter[str]] = {}
    times, places = [begin], list[dict[str, int]]()
    for line in path.read_text().splitlines()[:-1]:
        at, stacks, found = json.loads(line)
        if begin <= at <= end:
            times.append(at)
            if found:
                places.append(found)
            for thread, stack in stacks.items():
                seen.setdefault(thread, Counter())[stack] += 1
    told = {
        thread: [f"{count} of {len(times) - 1}: {stack}" for stack, count in stacks.most_common(most)]
        for thread, stacks in seen.items()
    }
    silence = max((b - a for a, b in zip(times, [*times[1:], end], strict=True)), default=0.0)
    engine = (
        {name: f"{min(p[name] for p in places)} to {max(p[name] for p in places)}" for name in places[0]}
        if places
        else {}
    )
    return {"no sample for": [f"{silence:.2f} s"], "engine": [f"{v} {k}" for k, v in engine.items()], **told}
