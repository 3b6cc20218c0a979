"""Runs a prompt with drafting off and on, alternating, and compares: token ids, speeds, who drafted.

Knows the engine; knows no stream and no table. A speed is the median over repetitions behind one that only warms up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from mlxspec.bench.demo_prompts import DemoPrompt
from mlxspec.bench.prompts import encode
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.engine.receipt import Difference

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine, Result
    from mlxspec.engine.stats import RequestStats

_TIMED_TOKENS = 192  # so many tokens of an answer are timed in all, as far as _MOST_TURNS allows
_MOST_TURNS = 8


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One prompt with one choice of drafters beside plain decoding. Speeds are tokens a second behind the first token, medians."""

    drafters: tuple[str, ...]
    plain_speed: float
    decode_speed: float
    stats: RequestStats
    difference: Difference | None

    @property
    def is_identical(self) -> bool:
        """Whether every run gave the same token ids."""
        return self.difference is None

    @property
    def speedup(self) -> float | None:
        """Drafted over plain speed; None where the texts differ, for then it says nothing, or where there was nothing to time."""
        return self.decode_speed / self.plain_speed if self.is_identical and self.plain_speed > 0 else None


@dataclass(frozen=True, kw_only=True)
class DemoOutcome:
    """All about one prompt."""

    prompt: DemoPrompt
    result: Result  # of plain decoding
    comparisons: tuple[Comparison, ...]


def run_prompt(
    engine: Engine, prompt: DemoPrompt, choices: Sequence[tuple[str, ...]], *, max_tokens: int, repeat: int
) -> DemoOutcome:
    """Run one prompt plainly and with each choice of drafters behind a warm-up, in turns whose order is reversed each time.

    `repeat` turns count, more where the answer is so short that its speed would be chance.
    """
    tokens = asked(engine, prompt)
    params = SamplingParams(max_tokens=max_tokens, temperature=prompt.temperature, seed=prompt.seed)
    specs: list[SpecConfig] = [
        replace(engine.spec, drafters=()),
        *(replace(engine.spec, drafters=c) for c in choices),
    ]
    runs: list[list[Result]] = [[] for _ in specs]
    turns = repeat
    while len(runs[0]) <= turns:
        for i in range(len(specs)) if len(runs[0]) % 2 else reversed(range(len(specs))):
            runs[i].append(engine.generate(tokens, params, spec=specs[i]))
        turns = max(repeat, min(_MOST_TURNS, _TIMED_TOKENS // max(1, len(runs[0][0].tokens))))
    plain = runs[0]
    comparisons = []
    for drafters, drafted in zip(choices, runs[1:], strict=True):
        other = next((r for r in (*plain, *drafted) if r.tokens != plain[0].tokens), None)
        comparisons.append(
            Comparison(
                drafters=drafters,
                plain_speed=_speed(plain[1:]),
                decode_speed=_speed(drafted[1:]),
                stats=drafted[-1].stats,
                difference=None
                if other is None
                else engine.difference(tokens, other.tokens, plain[0].tokens),
            )
        )
    return DemoOutcome(prompt=prompt, result=plain[0], comparisons=tuple(comparisons))


def asked(engine: Engine, prompt: DemoPrompt) -> list[int] | PromptWithImages:
    """The prompt as the engine takes it. Raises ConfigError, and ImageError where the model reads no images."""
    if prompt.image is None:
        return encode(engine, prompt.text, is_chat=prompt.is_chat)
    parts = [{"type": "image", "image": prompt.image}, {"type": "text", "text": prompt.text}]
    return engine.chat_input([{"role": "user", "content": parts}])


def _speed(results: Sequence[Result]) -> float:
    return median(r.stats.decode_speed for r in results)
