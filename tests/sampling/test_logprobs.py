"""Rows of one round that want different numbers of the likeliest tokens: each gets as many as it asked for, and they are its own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.drafters.base import Draft
from mlxspec.engine.round import sample_round
from mlxspec.sampling.row import RowSampler

VOCAB = 30
DATA = [bytes([i]) for i in range(VOCAB)]
WANTED = [None, 0, 2, 5]  # top_logprobs; None: the row wants no log-probabilities


@catches(
    "fewer of the likeliest tokens are found than the row that wants most asked for",
    "mlxspec.sampling.logprobs:logprobs",
    lambda right: lambda logits, chosen, num_top: right(logits, chosen, min(num_top, 2)),
    case="5",
)
@catches(
    "rows get as many of the likeliest tokens as another one asked for",
    "mlxspec.sampling.logprobs:Logprobs.read",
    lambda right: lambda self, tokens, num_top, start, data: right(self, tokens, num_top and 99, start, data),
    case="2-5",
)
@pytest.mark.parametrize(
    "wanted",
    [w for w in itertools.permutations(WANTED, 3) if any(w)],
    ids=lambda wanted: "-".join("none" if w is None else str(w) for w in wanted),
)
def test_each_row_gets_the_likeliest_tokens_that_it_asked_for(wanted: tuple[int | None, ...]) -> None:
    rng, widths = np.random.default_rng(7), (3, 1, 2)
    logits = rng.standard_normal((sum(widths), VOCAB)).astype(np.float32)
    rows, proposals, tokens = [], [], []
    for i, (num, width) in enumerate(zip(wanted, widths, strict=True)):
        params = SamplingParams(seed=i, logprobs=num is not None, top_logprobs=num or 0)
        sampler = RowSampler(params, [1, 2], VOCAB)
        rows.append(SimpleNamespace(params=params, sampler=sampler, history=[1, 2]))
        draft = list(range(width - 1))
        proposals.append(Draft(len(draft), draft, drafter="mtp", width=len(draft)))
        tokens += [2, *draft]
    sampled = sample_round(rows, proposals, mx.array(tokens, mx.int32), mx.array(logits))
    chosen, start = sampled.tokens.tolist(), 0
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    assert sampled.logprobs is not None
    for num, width in zip(wanted, widths, strict=True):
        own = chosen[start : start + width]
        found = [] if num is None else sampled.logprobs.read(own, num, start, DATA)
        for place, entry in enumerate(found):
            here = exact[start + place]
            best = np.argsort(-here)[:num].tolist()
            assert [t.token for t in entry.top] == best
            assert [t.data for t in entry.top] == [DATA[t] for t in best]
            assert np.allclose([t.logprob for t in entry.top], here[best], atol=1e-5)
            assert entry.logprob == pytest.approx(here[entry.token], abs=1e-5)
        start += width
