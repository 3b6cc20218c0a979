"""Runs one prompt of the demo with drafting off and on, in turns. Knows the engine; knows no stream and no table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxspec.bench.demo_prompts import DemoPrompt
from mlxspec.bench.prompts import encode
from mlxspec.bench.turns import Contestant, Score, compare
from mlxspec.config import SamplingParams
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.engine.receipt import Difference

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine, Result

_TIMED_TOKENS = 192  # so many tokens of an answer are timed in all, as far as _MOST_TURNS allows
_MOST_TURNS = 8


@dataclass(frozen=True, kw_only=True)
class DemoOutcome:
    """The measurements of one prompt. scores: one for each choice of drafters. differences: by index, those of choices whose text is not
    the plain one."""

    prompt: DemoPrompt
    result: Result  # of plain decoding
    scores: Sequence[Score]
    differences: dict[int, Difference]


def run_prompt(
    engine: Engine, prompt: DemoPrompt, choices: Sequence[tuple[str, ...]], *, max_tokens: int, repeat: int
) -> DemoOutcome:
    """Compare plain decoding with each choice of drafters, `repeat` times, or more often where the answer is so short that its speed
    would be chance; return the outcome."""
    tokens = asked(engine, prompt)
    contestants = [Contestant(name=" + ".join(c), spec=replace(engine.spec, drafters=c)) for c in choices]
    plain, scores = compare(
        engine,
        [[tokens]],
        contestants,
        SamplingParams(max_tokens=max_tokens, temperature=prompt.temperature, seed=prompt.seed),
        repeat=repeat,
        turns=lambda answers: max(repeat, min(_MOST_TURNS, _TIMED_TOKENS // max(1, len(answers[0].tokens)))),
    )
    differences = {
        i: engine.difference(tokens, *(answer.tokens for answer in score.different))
        for i, score in enumerate(scores)
        if score.different is not None
    }
    return DemoOutcome(prompt=prompt, result=plain.newest[0], scores=scores, differences=differences)


def asked(engine: Engine, prompt: DemoPrompt) -> list[int] | PromptWithImages:
    """Return the prompt in the engine's form. Raises ConfigError, and ImageError where the model reads no images."""
    if prompt.image is None:
        return encode(engine, prompt.text, is_chat=prompt.is_chat)
    parts = [{"type": "image", "image": prompt.image}, {"type": "text", "text": prompt.text}]
    return engine.chat_input([{"role": "user", "content": parts}])
