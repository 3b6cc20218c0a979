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
from mlxspec.drafters.chain import Proposal
from mlxspec.engine.sample_round import sample_round
from mlxspec.kernels.flat import FlatRows
from mlxspec.platform import device
from mlxspec.sampling import blocks
from mlxspec.sampling.acceptance import ForMatch, ForRejection
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
    sampler = RowSampler(params, [1, 2, 3], LARGE, drafts_by="independent", keeps_drafts=True)
    return SimpleNamespace(params=params, sampler=sampler, history=list(range(20)))


def proposals(vocab: int, length: int, *, scores: bool) -> list[Proposal]:
    q = mx.random.normal((length, vocab), key=mx.random.key(5)) if scores else None
    draft = Draft(length, list(range(length)), scores=q)
    return [Proposal(drafter="mtp", draft=draft, submission=ForRejection(length))]


@pytest.mark.parametrize("size", [1, 3, 5, 8])
@pytest.mark.parametrize("scores", [True, False], ids=["drawn", "certain"])
def test_rejection_in_blocks_decides_as_in_one(size: int, scores: bool) -> None:
    vocab, width = 300, 9
    row = row_of(temperature=1.0, top_p=0.9)
    row.sampler = RowSampler(row.params, [1, 2, 3], vocab, drafts_by="independent", keeps_drafts=True)
    logits = mx.random.normal((width, vocab), key=mx.random.key(1))
    tokens = mx.array([9, *range(width - 1)], mx.int32)
    logits[:, :width] = logits[:, :width] + 6.0  # some drafts are accepted
    given = [row], proposals(vocab, width - 1, scores=scores), tokens, logits
    wanted = sample_round(*given).tokens.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchSampler, "block_size", lambda *_, **__: size)
        assert sample_round(*given).tokens.tolist() == wanted
    assert wanted[: width - 1] != list(range(width - 1))
    assert any(a == b for a, b in zip(wanted, range(width - 1), strict=False))


@pytest.mark.parametrize("size", [2, 7, 99])
def test_rows_of_both_rules_in_one_round_take_what_each_takes_alone(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected, matched, plain and rejected: also where a block ends inside a row. Nobody's noise is drawn for a token that is not."""
    widths, rules = (5, 3, 1, 4), (ForRejection, ForMatch, ForMatch, ForRejection)
    rows = FlatRows(widths)
    logits = mx.random.normal((rows.num_tokens, VOCAB), key=mx.random.key(2))
    tokens = mx.array([i for width in widths for i in (9, *range(width - 1))], mx.int32)
    requests, proposed = [], []
    for i, (width, rule) in enumerate(zip(widths, rules, strict=True)):
        row = row_of(temperature=1.0, top_p=0.9)
        row.sampler = RowSampler(row.params, [1], VOCAB, drafts_by="independent", keeps_drafts=True)
        row.sampler.seed = i
        q = mx.random.normal((width - 1, VOCAB), key=mx.random.key(i)) if rule is ForRejection else None
        requests.append(row)
        draft = Draft(width - 1, list(range(width - 1)), scores=q)
        proposed.append(Proposal(drafter="mtp", draft=draft, submission=rule(width - 1)))
        logits[rows.starts[i] : rows.starts[i + 1], : width + 1] += 4.0
    wanted = []
    for i in range(len(widths)):
        own = slice(rows.starts[i], rows.starts[i + 1])
        alone = sample_round([requests[i]], [proposed[i]], tokens[own], logits[own])
        wanted += alone.tokens.tolist()
    drawn: list[int] = []

    def counted(self, scores, owners, positions):
        drawn.append(len(owners))
        return chosen(self, scores, owners, positions)

    chosen = BatchSampler.choose
    monkeypatch.setattr(BatchSampler, "choose", counted)
    monkeypatch.setattr(BatchSampler, "block_size", lambda *_, **__: size)
    assert sample_round(requests, proposed, tokens, logits).tokens.tolist() == wanted
    assert sum(drawn) == 1 + 3 + 1 + 1


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
    """Every way to sample, with masks, drafts, log-probabilities and rejection. The logits' own bytes are not counted."""
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
    row = row_of(temperature=1.0, top_p=0.95)
    for scores in (True, False):
        proposed = proposals(LARGE, WIDE - 1, scores=scores)
        mx.eval([p.draft.scores for p in proposed if p.draft.scores is not None])
        found[f"rejection, {scores}"] = peak(
            lambda proposed=proposed: sample_round([row], proposed, tokens, logits).tokens, logits
        )
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


def test_matched_drafts_take_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of `sample_round` goes through the blocks too."""
    seen: list[int] = []
    whole = BatchSampler.sample_at_once

    def counted(self, logits, *rest):
        seen.append(logits.shape[0])
        return whole(self, logits, *rest)

    monkeypatch.setattr(BatchSampler, "sample_at_once", counted)
    monkeypatch.setattr(BatchSampler, "block_size", lambda *_, **__: 4)
    draft = Draft(8, list(range(8)))
    proposed = [Proposal(drafter="mtp", draft=draft, submission=ForMatch(8))]
    row = row_of(temperature=1.0)
    row.sampler = RowSampler(row.params, [1], VOCAB)
    sample_round([row], proposed, mx.arange(9), mx.zeros((9, VOCAB)))
    assert seen == [4, 4, 1]
