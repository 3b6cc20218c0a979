"""Answers that are said to be bit-exact, on emulated kernels: in 4 bits and bfloat16 none of their tokens is another than plain decoding's.

MLX's own products of several rows are off in their last bits, as a newer GPU's are (`gpu_rounding`), and so are those of `qmm_few`, which
multiplies more rows than `qmv_rows` takes. A GPU multiplies one row in the order of `qmv_rows`, so here that does it. Attention is MLX's
own, which goes query by query.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gpu_rounding
import pytest
from test_whole_rounds import Metal, like_gpu  # noqa: F401

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.kernels import launch, qmv_rows
from mlxspec.platform import device
from tests import tiny_models
from tests.engine.equality import Oracle, prompts

NARROW = qmv_rows.MAX_ROWS - 1  # drafted tokens that qmv_rows takes with the row's own
WIDE = 40  # and for which no race is run
# each matrix is multiplied with rows of 512 numbers, which qmv_rows takes, and heads have a size that MLX's attention for few queries takes
WHOLE = replace(
    tiny_models.config((True, False), hidden=512),
    intermediate_size=512,
    num_heads=8,
    head_dim=64,
    num_v_heads=16,
)
LENGTH = 250  # tokens of an answer


@pytest.fixture
def on_gpu(like_gpu: Metal, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    def wins(name: str, key: str) -> bool:
        found = re.search(r"(\d+) rows$", key)
        return found is None or (int(found[1]) <= qmv_rows.MAX_ROWS) == name.startswith("qmv_rows")

    def put(owner: Any, name: str, value: Any) -> None:
        if name != "scaled_dot_product_attention":
            monkeypatch.setattr(owner, name, value)

    monkeypatch.setattr(device, "has_fused_attention", lambda: True)
    gpu_rounding.plant(put)
    monkeypatch.setattr(launch, "wins", wins)
    monkeypatch.setattr(launch, "speedup", lambda name, key: 2.0 if wins(name, key) else 0.5)
    monkeypatch.setattr(launch, "may_mix", launch.in_use)
    with like_gpu():
        yield


def counted(num_tokens: int, depths: tuple[int, ...], known: int | None = None) -> Counter[str]:
    """Answers of so many tokens in all, drafted to these depths in turns and compared with plain ones. known: the exact width that the
    engine is told of, in place of what the probe finds. Returns tokens, answers and flips, by whether they were said to be bit-exact.
    """
    target = tiny_models.make(WHOLE, form="4bit")
    oracle = Oracle([], sure=0.8)
    loaded = SpecConfig(drafters=(oracle.name,), ngram_m=WIDE)
    config = EngineConfig(prefix_budget=0)
    engine = Engine(target, tiny_models.tokenizer(), drafters=[oracle], spec=loaded, config=config)
    found = engine.probe(range(2, 10))
    assert found.exact_width == qmv_rows.MAX_ROWS
    assert not found.widths[-1].is_bitwise
    if known is not None:
        verdicts = [replace(found.widths[0], width=width) for width in range(2, known + 1)]
        engine.stats.probe = replace(found, widths=tuple(verdicts))
    counts: Counter[str] = Counter()
    kinds: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9})
    for number in range(-(-num_tokens // LENGTH)):
        (prompt,) = prompts(1, 100 + number)
        params = SamplingParams(
            max_tokens=min(LENGTH, num_tokens), ignore_eos=True, seed=number, **kinds[number % 3]
        )
        plain = engine.generate(prompt, params)
        assert plain.stats.is_bit_exact
        oracle.learn([[*prompt, *plain.tokens]])
        depth = depths[number % len(depths)]
        spec = SpecConfig(drafters=(oracle.name,), policy="fixed", ngram_m=depth)
        drafted = engine.generate(prompt, params, spec=spec)
        said = "exact" if drafted.stats.is_bit_exact else "other"
        assert drafted.stats.num_accepted
        counts[said] += len(drafted.tokens)
        counts[f"{said} answers"] += 1
        counts[f"{said} flips"] += drafted.tokens != plain.tokens
        print(number, dict(counts), flush=True)
    return counts


@pytest.mark.parametrize(
    ("num_tokens", "depths"),
    [(60, (NARROW,)), pytest.param(20_000, (NARROW, 3), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_no_token_flips_where_an_answer_is_said_to_be_bit_exact(
    on_gpu: None, num_tokens: int, depths: tuple[int, ...]
) -> None:
    counts = counted(num_tokens, depths)
    assert counts["exact"] >= num_tokens
    assert not counts["exact flips"]
    assert not counts["other"]


@pytest.mark.slow
def test_a_width_beyond_the_exact_one_is_not_said_to_be_bit_exact_and_flips(on_gpu: None) -> None:
    """An engine that takes such a width for exact is caught by its flips."""
    assert counted(60, (WIDE,))["other"]
    planted = counted(LENGTH, (WIDE,), known=1 + WIDE)
    assert planted["exact"]
    assert planted["exact flips"]
