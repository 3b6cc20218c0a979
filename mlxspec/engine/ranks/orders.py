"""Orders: the one message that rank 0 sends to the other ranks before each step, and how it is written as bytes.

Every rank computes the same tokens from the same logits. An engine decides by five things that other ranks cannot know: what callers ask
(submit, cancel), whether they read, deadlines, how long grammars take, and how long rounds and drafts took. Rank 0 reads them, and orders
hold them.

Invariants:
1. Rank 0 sends the orders of a step before it computes anything in it. Forwards hold sums over all ranks, so a rank that computed first
   would wait for the others, and they for its orders.
2. What rank 0 learns within a step takes effect with the orders of the next step, on rank 0 too. So nothing that is decided within a step
   depends on a value that orders do not hold.
3. Orders are numbered from 0 without gaps, and are obeyed in that order.
4. `checksum` is that of the engine before the step. It covers every token that was chosen and every length, from the first step on. Ranks
   whose checksums differ have computed different texts; they stop.

Knows requests' options as data; knows no engine, no arrays and no sockets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.request import Ending
from mlxspec.errors import ConfigError, RankError

Work = Literal["step", "end"]
_HOOKS = "logits_processors", "sampler"
_MAPPED_BY_TOKEN = "logit_bias"  # JSON's keys are strings


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request that rank 0 has taken. params: with the seed that rank 0 drew, where the caller gave none. deadline: in seconds, for the
    sentence that ends the request; only rank 0 looks at its clock."""

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    spec: SpecConfig
    marks: tuple[int, ...] = ()
    client: str = ""
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.params.has_hooks:
            raise ConfigError(
                "Logits processors and samplers cannot be given to a model that is divided among ranks."
            )
        if self.params.seed is None:
            raise ValueError("rank 0 draws the seed")


@dataclass(frozen=True, kw_only=True)
class Clocked:
    """The time of the last round by rank 0's clock. seconds: all of it; is_warm: nothing was compiled in it."""

    seconds: float
    is_warm: bool


@dataclass(frozen=True, kw_only=True)
class Orders:
    """See the module. work: a step of the engine, or the end of the process. resting: requests whose rows rest
    in the step. clocked: None where the last step ran no round, or one that says nothing about costs."""

    number: int
    checksum: int
    work: Work = "step"
    submitted: tuple[Submission, ...] = ()
    endings: tuple[Ending, ...] = ()
    resting: frozenset[int] = frozenset()
    clocked: Clocked | None = None

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("orders are numbered from 0")
        if self.work not in get_args(Work):
            raise ValueError(f"there is no work {self.work!r}")

    def encode(self) -> bytes:
        """JSON, in which what has its default is left out, so the orders of most steps take about 100 bytes."""
        data: dict[str, Any] = {"n": self.number, "c": self.checksum}
        if self.work != "step":
            data["w"] = self.work
        if self.submitted:
            data["s"] = [_of_submission(s) for s in self.submitted]
        if self.endings:
            data["e"] = [[e.number, e.error, e.is_late] for e in self.endings]
        if self.resting:
            data["r"] = sorted(self.resting)
        if self.clocked is not None:
            c = self.clocked
            data["t"] = [c.seconds, c.is_warm]
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Orders:
        """Raises RankError for what `encode` does not write."""
        try:
            data = json.loads(raw)
            clocked = None
            if "t" in data:
                seconds, is_warm = data["t"]
                clocked = Clocked(seconds=float(seconds), is_warm=bool(is_warm))
            return cls(
                number=int(data["n"]),
                checksum=int(data["c"]),
                work=data.get("w", "step"),
                submitted=tuple(_submission(s) for s in data.get("s", ())),
                endings=tuple(
                    Ending(number=int(number), error=error, is_late=bool(late))
                    for number, error, late in data.get("e", ())
                ),
                resting=frozenset(map(int, data.get("r", ()))),
                clocked=clocked,
            )
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise RankError(
                "Rank 0 sent orders that cannot be read; run the same mlxspec on every rank."
            ) from error


def _of_submission(submission: Submission) -> dict[str, Any]:
    params = _changed(submission.params, _HOOKS)
    if _MAPPED_BY_TOKEN in params:
        params[_MAPPED_BY_TOKEN] = sorted(params[_MAPPED_BY_TOKEN].items())
    data = {
        "n": submission.number,
        "p": list(submission.prompt),
        "o": params,
        "d": _changed(submission.spec, ()),
    }
    if submission.marks:
        data["m"] = list(submission.marks)
    if submission.client:
        data["c"] = submission.client
    if submission.deadline is not None:
        data["l"] = submission.deadline
    return data


def _submission(data: Mapping[str, Any]) -> Submission:
    params = dict(data["o"])
    if _MAPPED_BY_TOKEN in params:
        params[_MAPPED_BY_TOKEN] = {int(token): bias for token, bias in params[_MAPPED_BY_TOKEN]}
    return Submission(
        number=int(data["n"]),
        prompt=tuple(map(int, data["p"])),
        params=SamplingParams(**params),
        spec=SpecConfig(**data["d"]),
        marks=tuple(map(int, data.get("m", ()))),
        client=str(data.get("c", "")),
        deadline=data.get("l"),
    )


def _changed(config: SamplingParams | SpecConfig, but: tuple[str, ...]) -> dict[str, Any]:
    """Fields that differ from what they are where nothing is said, as plain data."""
    default, found = type(config)(), {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in but and value != getattr(default, field.name):
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
