"""Measures one model on this machine in about a minute: kinds of text with drafting off and as it is by default, in turns, until each is
settled. Knows the engine; prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from mlxspec.bench.demo_prompts import UNIQUE, edit
from mlxspec.bench.prompts import encode
from mlxspec.bench.tasks import TASKS
from mlxspec.bench.turns import PLAIN, Contestant, Score, take_turn
from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.loading.hub import is_local
from mlxspec.version import __version__

SECONDS = 60.0  # in which what is not settled may be measured again
_TURNS = 4  # of each kind, as many as the time should suffice for: one that warms up and three pairs
_LONGEST = 256  # tokens of an answer
_SHORTEST = 16
_CHAT = "What should I see in Lisbon in two days? Answer in a few sentences."


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of text. texts: the prompts of one turn. params: the sampling of their answers."""

    name: str
    texts: Sequence[str]
    params: SamplingParams


def kinds(sampling: SamplingParams, own: Sequence[str] = ()) -> list[Kind]:
    """Return chat, sampled as a conversation is, with a person's own questions where there are any; code; and an edit of code."""
    code = next(task.prompt for task in TASKS if task.name == "code_python")
    greedy = SamplingParams()
    return [
        Kind(name="chat", texts=own or (_CHAT,), params=replace(sampling, seed=1)),
        Kind(name="code", texts=(code,), params=greedy),
        Kind(name="edits", texts=(edit("rename result to output", UNIQUE),), params=greedy),
    ]


def measure(
    engine: Engine,
    wanted: Sequence[Kind],
    *,
    told: Callable[[str], None] = lambda what: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Score]:
    """Return the score of the default drafting for each kind. A first turn of each, in which shapes compile, is not measured; it decides
    how long the answers may be. Raises ConfigError.

    told: called with what is about to be measured.
    """
    plain = Contestant(name=PLAIN, spec=replace(engine.spec, drafters=(), policy="fixed", n_min=0))
    both = [plain, Contestant(name="auto", spec=engine.spec)]
    scores = {k.name: [Score(name=c.name, drafters=c.spec.drafters) for c in both] for k in wanted}
    prompts = {k.name: [encode(engine, text) for text in k.texts] for k in wanted}
    began, longest = clock(), dict.fromkeys(scores, _SHORTEST)
    share = SECONDS / (2 * _TURNS * sum(len(k.texts) for k in wanted))  # seconds of an answer
    turn = 0
    while turn < _TURNS or clock() - began < SECONDS:
        left = [k for k in wanted if turn < _TURNS or _is_open(scores[k.name][1])]
        if not left:
            break
        for kind in left:
            told(kind.name)
            params = replace(kind.params, max_tokens=longest[kind.name])
            for prompt in prompts[kind.name]:
                found = take_turn(engine, [prompt], params, both, scores[kind.name], turn=turn)
            if not turn:
                speed = found[0].num_decoded / found[0].seconds if found[0].seconds else 0.0
                longest[kind.name] = round(min(_LONGEST, max(_SHORTEST, speed * share)))
        turn += 1
    return [scores[k.name][1] for k in wanted]


def _is_open(score: Score) -> bool:
    """Return whether more turns could settle the score."""
    return not score.ratio.refusal and not score.ratio.is_settled


def as_data(engine: Engine, machine: str, wanted: Sequence[Kind], scores: Sequence[Score]) -> dict[str, Any]:
    """Return the scores as plain JSON that can be given away: without texts, and for a model's folder its name alone."""
    import mlx.core as mx

    return {
        "model": Path(engine.name).name if is_local(engine.name) else engine.name,
        "machine": machine,
        "day": date.today().isoformat(),
        "mlxspec": __version__,
        "mlx": mx.__version__,
        "drafters": list(engine.spec.drafters),
        "kinds": [
            {
                "kind": kind.name,
                "num_prompts": len(kind.texts),
                "temperature": kind.params.temperature,
                "off": round(score.plain_speed, 2),
                "auto": round(score.decode_speed, 2),
                "ratio": score.ratio.data(),
                "same_text": not score.num_different,
                "acceptance": score.acceptance,
                "tokens_per_round": score.tokens_per_round,
            }
            for kind, score in zip(wanted, scores, strict=True)
        ],
    }
