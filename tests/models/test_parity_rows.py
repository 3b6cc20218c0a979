"""Ragged rows that draft and keep only some of it: each equals the row alone, and mlx-lm on the text that was kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import pytest
import tiny
from compare import array, assert_same_logits, stepwise_mlx_lm, to_numpy, tokens_of
from zoo import Zoo

from mlxspec.cache.model_cache import ModelCache
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.qwen3_5 import Qwen35

PROMPTS = (23, 5, 17)
# (tokens of each row in this forward, how many of them stand); the first three have the same number of rows, tokens and widest row
ROUNDS = (
    ((4, 1, 3), (2, 1, 3)),
    ((3, 4, 1), (1, 4, 1)),
    ((1, 3, 4), (0, 1, 2)),
    ((3, 3, 3), (3, 1, 2)),
    ((0, 5, 2), (0, 3, 2)),
    ((1, 1, 1), (1, 1, 1)),
    ((1, 0, 6), (1, 0, 6)),
    ((2, 1, 2), (2, 1, 1)),
)


def run(
    model: Qwen35, rows: Sequence[int], prefill: str
) -> tuple[list[np.ndarray], list[list[int]], list[np.ndarray]]:
    """Play PROMPTS and ROUNDS for these rows. Per row: logits of every token of every forward, the kept tokens, the kept ones' logits."""
    prompts = [tokens_of(100 + r, PROMPTS[r], tiny.VOCAB) for r in rows]
    cache, seen = _prefill(model, prompts, prefill)
    kept_logits, text = [list(s) for s in seen], [list(p) for p in prompts]
    for n, (widths, kept) in enumerate(ROUNDS):
        if not any(widths[r] for r in rows):
            continue
        new = [tokens_of(1000 * n + r, widths[r], tiny.VOCAB) for r in rows]
        flat = FlatRows(tuple(widths[r] for r in rows))
        logits = model.forward(array(list(chain.from_iterable(new))), flat, cache).logits
        cache.commit([kept[r] for r in rows])
        for i, r in enumerate(rows):
            own = logits[flat.starts[i] : flat.starts[i + 1]]
            seen[i].append(own)
            kept_logits[i].append(own[: kept[r]])
            text[i] += new[i][: kept[r]]
    return [to_numpy(s) for s in seen], text, [to_numpy(k) for k in kept_logits]


def _prefill(model: Qwen35, prompts: Sequence[Sequence[int]], how: str) -> tuple[ModelCache, list[list]]:
    """ "together": one ragged forward of certain tokens; "apart": a forward a row, then the rows join."""
    if how == "together":
        cache, flat = model.make_cache(len(prompts)), FlatRows(tuple(len(p) for p in prompts))
        logits = model.forward(array(list(chain.from_iterable(prompts))), flat, cache, certain=True).logits
        cache.commit()
        return cache, [[logits[a:b]] for a, b in pairwise(flat.starts)]
    joined, seen = None, []
    for prompt in prompts:
        cache = model.make_cache(1)
        seen.append([model.forward(array(prompt), FlatRows((len(prompt),)), cache, certain=True).logits])
        cache.commit()
        if joined is None:
            joined = cache
        else:
            joined.join(cache)
    return joined, seen


@pytest.mark.parametrize(("shape", "prefill"), [("tied", "together"), ("untied", "apart"), ("moe", "apart")])
def test_ragged_drafts_with_partial_commits(zoo: Zoo, shape: str, prefill: str) -> None:
    model = zoo.ours(shape).model
    seen, text, kept = run(model, (0, 1, 2), prefill)
    for r in range(3):
        alone, text_alone, _ = run(model, (r,), "apart")
        assert text_alone[0] == text[r]
        assert_same_logits(seen[r], alone[0], f"{shape}, row {r} in a batch against alone")
        reference = stepwise_mlx_lm(zoo.mlx_lm(shape), text[r], 0)
        assert_same_logits(kept[r], reference, f"{shape}, row {r} against mlx-lm on the kept text")


@pytest.mark.parametrize("shape", ["tied", "grouped"])
def test_last_logits(zoo: Zoo, shape: str) -> None:
    """logits_at="last" gives one row of logits for each row that has tokens, "none" gives none."""
    model = zoo.ours(shape).model
    cache, flat = model.make_cache(3), FlatRows((3, 0, 2))
    tokens = array(tokens_of(7, 5, tiny.VOCAB))
    everything = model.forward(tokens, flat, cache).logits
    cache.abort()
    last = model.forward(tokens, flat, cache, logits_at="last").logits
    cache.abort()
    assert model.forward(tokens, flat, cache, logits_at="none").logits is None
    np.testing.assert_allclose(to_numpy([last]), to_numpy([everything])[[2, 4]], atol=1e-5)
