"""Runs a prompt with drafting off and on, alternating, and compares: token ids, speeds, who drafted.

Knows the engine; knows no stream and no table. A speed is the median over repetitions behind one that only warms up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from mlxspec.bench.demo_prompts import DemoPrompt
from mlxspec.bench.prompts import encode
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.errors import ConfigError

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine, Result
    from mlxspec.engine.stats import RequestStats

_TIMED_TOKENS = 192  # so many tokens of an answer are timed in all, as far as _MOST_TURNS allows
_MOST_TURNS = 8


@dataclass(frozen=True, kw_only=True)
class Flip:
    """The first place where two answers to a prompt differ. gap: by how much the best token there led, in what the choice was made on."""

    position: int
    gap: float
    plain_token: int | None
    drafted_token: int | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One prompt with one choice of drafters beside plain decoding. Speeds are tokens a second behind the first token, medians."""

    drafters: tuple[str, ...]
    plain_speed: float
    decode_speed: float
    stats: RequestStats
    flip: Flip | None

    @property
    def is_identical(self) -> bool:
        """Whether every run gave the same token ids."""
        return self.flip is None

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
                flip=None
                if other is None
                else find_flip(engine, tokens, params, plain[0].tokens, other.tokens),
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


def find_flip(
    engine: Engine,
    prompt: list[int] | PromptWithImages,
    params: SamplingParams,
    plain: Sequence[int],
    drafted: Sequence[int],
) -> Flip:
    """Where two answers part, and how near a tie that was: logits over temperature plus the position's noise, as in sampling.

    Holds for parameters without penalties, bias and truncation, which the demo does not use.
    """
    import mlx.core as mx

    from mlxspec.engine.image_prompt import in_one_forward
    from mlxspec.kernels.flat import FlatRows
    from mlxspec.platform import device
    from mlxspec.sampling.noise import gumbel

    place = next(
        (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b),
        min(len(plain), len(drafted)),
    )
    model, images = engine.model, None
    if not isinstance(prompt, PromptWithImages):
        known = [*prompt, *plain[:place]]
    elif engine.vision is None or engine.features is None:
        raise ConfigError(engine.no_images)
    else:
        known, images = in_one_forward(
            prompt, plain[:place], engine.vision, partial(engine.features.rows, owner="")
        )
    with device.private_kernels():
        out = model.forward(
            mx.array(known, mx.int32),
            FlatRows((len(known),)),
            model.make_cache(1),
            certain=True,
            logits_at="last",
            images=images,
        )
        if out.logits is None:
            raise ValueError("logits were asked for")
        scores = out.logits.astype(mx.float32)
        if params.temperature > 0:
            scores = scores / params.temperature + gumbel([params.seed or 0], [len(known)], model.vocab_size)
        best = mx.sort(scores[0])[-2:].tolist()
    return Flip(
        position=place,
        gap=best[1] - best[0],
        plain_token=plain[place] if place < len(plain) else None,
        drafted_token=drafted[place] if place < len(drafted) else None,
    )
