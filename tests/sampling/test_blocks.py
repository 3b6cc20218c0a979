"""Positions sampled in blocks: the tokens of one block, to the bit, in a bounded part of the memory."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.config import SamplingParams
from mlxspec.drafters.base import Draft
from mlxspec.engine.round import sample_round
from mlxspec.kernels.flat import FlatRows
from mlxspec.platform import device
from mlxspec.sampling import blocks
from mlxspec.sampling.bits import all_but, only
from mlxspec.sampling.logprobs import logprobs
from mlxspec.sampling.noise import Shifted
from mlxspec.sampling.round import _drafts_before
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

VOCAB = 300
LARGE, WIDE = 248_320, 17  # Qwen3.5's vocabulary, and a verify of 16 drafted tokens
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 1.0}
ASKED = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, **PENALTIES},
    {**PENALTIES},
    {"temperature": 1.0, "logit_bias": {5: 2.0}},
]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    asked=st.lists(st.sampled_from(range(len(ASKED))), min_size=1, max_size=3),
    widths=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    size=st.integers(1, 8),
    is_masked=st.booleans(),
    is_shifted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocks_give_the_tokens_of_one_block(asked, widths, size, is_masked, is_shifted, seed) -> None:
    rng = np.random.default_rng(seed)
    samplers = [
        RowSampler(SamplingParams(seed=i, **ASKED[a]), rng.integers(0, VOCAB, 9).tolist(), VOCAB)
        for i, a in enumerate(asked)
    ]
    rows = FlatRows(tuple(widths[: len(samplers)]))
    num = rows.num_tokens
    owners = [r for r, width in enumerate(rows.widths) for _ in range(width)]
    firsts = [10 * r + i for r, width in enumerate(rows.widths) for i in range(width)]
    logits = mx.array(rng.standard_normal((num, VOCAB)).astype(np.float32) * 2)
    logits[:, :12] = logits[:, :12] + 5.0  # what is drafted would be chosen, but for the penalties
    tokens = mx.array(rng.integers(0, 12, num).astype(np.int32))
    masks = [None if i % 3 else all_but([5, 7, i], VOCAB) for i in range(num)] if is_masked else None
    by = mx.array(rng.integers(0, 3, num).astype(np.int32))
    positions = Shifted(firsts, by, 3) if is_shifted else firsts
    drafts = _drafts_before(rows, tokens)
    sampler = BatchSampler(samplers, VOCAB)
    wanted = sampler.sample_at_once(logits, owners, positions, drafts, masks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchSampler, "block_size", lambda *_, **__: size)
        found = sampler.sample(logits, owners, positions, drafts, masks)
    assert found.tolist() == wanted.tolist()


def row_of(**asked):
    """A request of which `sample_round` reads no more than this."""

    params = SamplingParams(seed=3, **asked)
    sampler = RowSampler(params, [1, 2, 3], LARGE)
    return SimpleNamespace(params=params, sampler=sampler, history=list(range(20)))


WAYS = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-k, top-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": PENALTIES,
    "penalties, top-p": {"temperature": 0.8, "top_p": 0.95, **PENALTIES},
    "penalties, min-p": {"temperature": 0.8, "min_p": 0.05, **PENALTIES},
}


def peak(work, logits: mx.array) -> float:
    """Bytes that it holds at once beyond what was held before, in parts of the logits'."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(work())
    return (mx.get_peak_memory() - before) / logits.nbytes


@pytest.mark.skipif(device.has_gpu(), reason="a GPU samples more positions at once")
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(mx.float32, marks=pytest.mark.slow, id="float32"),
        pytest.param(mx.bfloat16, id="bfloat16"),
    ],
)
def test_17_positions_of_248k_words_hold_at_most_three_times_their_logits(dtype: mx.Dtype) -> None:
    """Every way to sample, with masks, drafts and log-probabilities. The logits' own bytes are not counted."""
    rows, tokens = FlatRows((WIDE,)), mx.arange(WIDE)
    logits = (mx.random.normal((WIDE, LARGE), key=mx.random.key(0)) * 3).astype(dtype)
    masks = [only(range(3, LARGE), LARGE)] * WIDE
    mx.eval(logits, tokens)
    owners, positions = [0] * WIDE, range(20, 20 + WIDE)
    found = {}
    for name, asked in WAYS.items():
        row = row_of(**asked)
        sampler = BatchSampler([row.sampler], LARGE)
        drafts = _drafts_before(rows, tokens) if sampler.needs_drafts else None
        mx.eval([x for x in (row.sampler.counts, row.sampler.prompt_seen) if x is not None])

        def sample(masks=None, sampler=sampler, drafts=drafts) -> mx.array:
            return sampler.sample(logits, owners, positions, drafts, masks)

        found[name] = peak(sample, logits)
        if name in ("greedy", "penalties, top-p", "penalties, min-p"):
            found[f"{name}, masks"] = peak(lambda sample=sample: sample(masks), logits)
    found["log-probabilities"] = peak(lambda: logprobs(logits, tokens, 5).arrays, logits)
    assert max(found.values()) <= 3.0, found


def test_a_usual_round_is_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to four drafted tokens, whatever is asked: no launch more. A wide verify is cut on a CPU only."""
    for name, asked in WAYS.items():
        sampler = BatchSampler([row_of(**asked).sampler], LARGE)
        for num in range(1, blocks.AT_ONCE + 1):
            assert sampler.block_size([0] * num, None) >= num, name
    sampler = BatchSampler([row_of(**WAYS["penalties, top-p"]).sampler], LARGE)
    assert sampler.block_size([0] * WIDE, None) < WIDE
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    assert sampler.block_size([0] * WIDE, None) >= WIDE
    assert sampler.block_size([0] * 64, None) < 64


def test_drafts_take_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of `sample_round` goes through the blocks too."""
    seen: list[int] = []
    whole = BatchSampler.sample_at_once

    def counted(self, logits, *rest):
        seen.append(logits.shape[0])
        return whole(self, logits, *rest)

    monkeypatch.setattr(BatchSampler, "sample_at_once", counted)
    monkeypatch.setattr(BatchSampler, "block_size", lambda *_, **__: 4)
    proposed = [Draft(8, list(range(8)), drafter="mtp", width=8)]
    row = row_of(temperature=1.0)
    row.sampler = RowSampler(row.params, [1], VOCAB)
    sample_round([row], proposed, mx.arange(9), mx.zeros((9, VOCAB)))
    assert seen == [4, 4, 1]
