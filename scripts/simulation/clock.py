"""A simulated clock beside a machine's own: what rounds of recorded answers take, by parts that are fitted to timings, and how far off that
is.

An answer takes its rounds and a start. A round takes what its width does, and its parts: a plain round that could not run ahead of the host
waits; a model's draft has a call, steps and known tokens to catch up on; a shape that compiles takes longer. All parts are in plain rounds
that run ahead. Knows timings as numbers; knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np

from .engine_clock import Round

_STEPS = 20_000
MEAN, EACH = 0.03, 0.08  # how far off a clock may be, over all answers of a setting and of one


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A prompt answered with a setting: seconds of several turns, and the rounds of the turn in the middle."""

    setting: str
    prompt: int
    seconds: tuple[float, ...]
    rounds: tuple[Round, ...]

    @property
    def usual(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Seconds of a plain round that runs ahead, and the rest in such rounds. widths: by width; wait: of a plain round that could not run
    ahead; call, step, queued: of a draft; compiling: of a shape's first round; start: of an answer."""

    plain: float
    widths: Mapping[int, float]
    wait: float = 0.0
    call: float = 0.0
    step: float = 0.0
    queued: float = 0.0
    compiling: float = 0.0
    start: float = 0.0

    def seconds(self, rounds: Sequence[Round]) -> float:
        """What an answer of these rounds takes."""
        return self.plain * (self.start + sum(map(self.round, rounds)))

    def round(self, made: Round) -> float:
        """Plain rounds that one round takes."""
        known = sorted(self.widths)
        taken = float(np.interp(made.width, known, [self.widths[w] for w in known]))
        taken += self.wait * _waits(made) + self.compiling * (not made.is_warm)
        return taken + sum(
            self.call + self.step * depth + self.queued * max(0, queued - 1) for depth, queued in made.drafts
        )


def _waits(made: Round) -> bool:
    return made.width == 1 and not made.drafts and not made.is_ahead


def fit(timed: Sequence[Timed]) -> Clock:
    """The clock of a machine, from the seconds of answers. A wider round takes no less, and no part less than nothing: many rounds of a
    width have a draft, so timings alone do not tell the two apart."""
    widths = sorted({r.width for t in timed for r in t.rounds} | {1})
    seconds = np.array([t.usual for t in timed])
    table = np.array([_counts(t.rounds, widths) for t in timed]) / seconds[:, None]  # all answers count alike
    found = _least_squares(table, np.ones(len(timed)))
    plain = float(found[0])
    taken = np.cumsum(found[: len(widths)]) / plain
    wait, call, step, queued, compiling, start = (float(x) / plain for x in found[len(widths) :])
    return Clock(
        plain=plain,
        widths={w: float(x) for w, x in zip(widths, taken, strict=True)},
        wait=wait,
        call=call,
        step=step,
        queued=queued,
        compiling=compiling,
        start=start,
    )


def _counts(rounds: Sequence[Round], widths: Sequence[int]) -> list[float]:
    """How often an answer has each part of a clock: rounds of at least each width, and the others in the order of `fit`."""
    drafts = [d for r in rounds for d in r.drafts]
    others = (
        sum(map(_waits, rounds)),
        len(drafts),
        sum(depth for depth, _ in drafts),
        sum(max(0, queued - 1) for _, queued in drafts),
        sum(not r.is_warm for r in rounds),
        1,
    )
    return [*(float(sum(r.width >= w for r in rounds)) for w in widths), *map(float, others)]


def _least_squares(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The parts, none below 0, that give what is wanted most nearly; one after the other, many times."""
    products, aims = table.T @ table, table.T @ wanted
    parts = np.zeros(table.shape[1])
    for _ in range(_STEPS):
        for i in range(len(parts)):
            if products[i, i] > 0:
                parts[i] = max(0.0, parts[i] + (aims[i] - products[i] @ parts) / products[i, i])
    return parts


@dataclass(frozen=True, kw_only=True)
class Off:
    """How far a clock is off for a setting: of the decoding time over that of `off`, as shares. mean: over all prompts; most: of the prompt
    that is furthest off."""

    setting: str
    mean: float
    most: float
    prompt: int

    @property
    def is_close(self) -> bool:
        return abs(self.mean) <= MEAN and abs(self.most) <= EACH


def compare(timed: Sequence[Timed], clock: Clock) -> list[Off]:
    """By setting, how far off the clock's ratios over plain decoding are."""
    plain = {t.prompt: t for t in timed if t.setting == "off"}
    found = []
    for setting in dict.fromkeys(t.setting for t in timed if t.setting != "off"):
        off = {}
        for t in timed:
            if t.setting == setting:
                beside = plain[t.prompt]
                true = beside.usual / t.usual
                off[t.prompt] = clock.seconds(beside.rounds) / clock.seconds(t.rounds) / true - 1.0
        prompt = max(off, key=lambda p: abs(off[p]))
        found.append(Off(setting=setting, mean=mean(off.values()), most=off[prompt], prompt=prompt))
    return found


def write(path: Path, timed: Sequence[Timed], about: Mapping[str, object]) -> None:
    """about: what else the file says, such as the device."""
    answers = [asdict(t) | {"rounds": [list(r) for r in t.rounds]} for t in timed]
    path.write_text(json.dumps({**about, "answers": answers}) + "\n", encoding="utf-8")


def read(path: Path) -> list[Timed]:
    """What `write` has written."""
    return [
        Timed(
            setting=a["setting"],
            prompt=a["prompt"],
            seconds=tuple(a["seconds"]),
            rounds=tuple(
                Round(w, tuple((d, q) for d, q in drafts), *more) for w, drafts, *more in a["rounds"]
            ),
        )
        for a in json.loads(path.read_text(encoding="utf-8"))["answers"]
    ]
