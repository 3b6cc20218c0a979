"""Top-k, top-p and the likeliest tokens against a twin in NumPy that sorts the vocabulary and counts in Python's integers."""

from __future__ import annotations

import math
from itertools import groupby

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.sampling import truncate
from mlxspec.sampling.bits import only
from mlxspec.sampling.logprobs import logprobs
from mlxspec.sampling.noise import gumbel
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from mlxspec.sampling.truncate import ONE, counted_floor, largest, room, shares_of, sorted_floor, top_p_floor

DTYPES = [mx.float32, mx.bfloat16, mx.float16]
LARGE = 248_320  # Qwen3.5's vocabulary


def in_order(scores: np.ndarray) -> list[int]:
    """Ids by falling score, of ties the lower one first."""
    return np.argsort(-scores, kind="stable").tolist()


def whole(shares: np.ndarray, bits: int) -> list[int]:
    """float32 shares of 1 in units of 2^-bits, rounded as float32 numbers are."""
    return [int(x) for x in np.trunc(shares * np.float32(2.0**bits) + np.float32(0.5))]


def above_the_share(scores: np.ndarray, order: list[int], masses: list[int], share: float) -> float:
    """The lowest score above which the places `order` hold less than the share of their masses."""
    of = dict(zip(order, masses, strict=True))
    bits, total, above = max(1, round(share * (1 << 30))), sum(masses), 0
    floor = math.inf
    for score, ids in groupby(order, key=lambda i: float(scores[i])):
        if share < 1.0 and above << 30 >= bits * total:
            break
        floor, above = score, above + sum(of[i] for i in ids)
    return floor


def stays(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which of one position's tempered float32 scores (V,) stay. MLX gives the exponentials, and nothing else."""
    order = in_order(scores)
    floors = [-math.inf]
    has_room = np.ones(len(scores), bool)
    if 0 < params.top_k < len(scores):
        has_room[order[room(params.top_k) :]] = False
        first = order[: params.top_k]
        weights = mx.exp(mx.array(scores[first]) - mx.array(scores[first[:1]]))
        masses = whole(np.asarray(weights), 40)
        floors.append(above_the_share(scores, first, masses, params.top_p))
    elif params.top_p < 1.0:
        probabilities = np.asarray(mx.softmax(mx.array(scores[None]), axis=-1, precise=True))[0]
        masses = whole(probabilities[order], 31)
        floors.append(above_the_share(scores, order, masses, params.top_p))
    if params.min_p > 0.0:
        floors.append(float(np.float32(scores.max()) + np.float32(math.log(params.min_p))))
    return (scores >= max(floors)) & has_room


def tied(rng: np.random.Generator, num: int, vocab: int, levels: int, spread: float) -> np.ndarray:
    """(num, vocab) float32 scores of at most `levels` values; both zeros among them now and then."""
    values = (rng.standard_normal(levels) * spread).astype(np.float32)
    values[rng.random(levels) < 0.1] = 0.0
    values[rng.random(levels) < 0.1] = -0.0
    return values[rng.integers(0, levels, (num, vocab))]


shapes = st.fixed_dictionaries(
    {
        "vocab": st.one_of(st.integers(1, 40), st.integers(1, 5000)),
        "levels": st.sampled_from([1, 2, 5, 40, 3000]),
        "spread": st.sampled_from([0.01, 1.0, 6.0]),
        "dtype": st.sampled_from(DTYPES),
        "seed": st.integers(0, 10_000),
    }
)
rows_asked = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.2, 0.6, 1.0, 2.0])},
    optional={
        "top_k": st.one_of(st.integers(1, 30), st.integers(1, 6000)),
        "top_p": st.one_of(st.sampled_from([1e-12, 0.25, 0.5, 0.75, 0.95, 1.0 - 1e-7]), st.floats(0.01, 1.0)),
        "min_p": st.floats(0.0, 1.0),
    },
)


def check_rows(shape: dict, asked: list[dict], allowed: list[float]) -> None:
    """Scores and tokens of a batch with these rows, each with up to three positions, are the twin's to the bit."""
    rng, vocab = np.random.default_rng(shape["seed"]), shape["vocab"]
    rows = [RowSampler(SamplingParams(seed=i, **a), [], vocab) for i, a in enumerate(asked)]
    owners = [r for r in range(len(rows)) for _ in range(rng.integers(1, 4))]
    logits = mx.array(tied(rng, len(owners), vocab, shape["levels"], shape["spread"])).astype(shape["dtype"])
    masks = [
        None
        if share == 1.0
        else only({int(rng.integers(vocab)), *np.flatnonzero(rng.random(vocab) < share)}, vocab)
        for share in (allowed[i % len(allowed)] for i in range(len(owners)))
    ]
    sampler = BatchSampler(rows, vocab)
    found = np.asarray(sampler.scores(logits, owners, masks=masks))
    drawn = np.asarray(sampler.sample(logits, owners, range(len(owners)), masks=masks))
    for i, owner in enumerate(owners):
        params = rows[owner].params
        scores = np.asarray(logits[i].astype(mx.float32) / mx.array([params.temperature], mx.float32))
        if masks[i] is not None:
            bits = np.unpackbits(masks[i].view(np.uint8), bitorder="little")[:vocab]
            scores = np.where(bits, scores, np.float32(-np.inf))
        wanted = np.where(stays(scores, params), scores, np.float32(-np.inf))
        assert np.array_equal(found[i], wanted), (i, params)
        noise = np.asarray(gumbel([rows[owner].seed], [i], vocab))[0]
        assert drawn[i] == np.argmax(wanted + noise)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=shapes,
    asked=st.lists(rows_asked, min_size=1, max_size=4),
    allowed=st.lists(st.sampled_from([1.0, 0.5, 0.01]), min_size=1, max_size=3),
)
def test_what_stays_is_what_a_sort_leaves(shape: dict, asked: list[dict], allowed: list[float]) -> None:
    check_rows(shape, asked, allowed)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    shape=shapes,
    asked=st.lists(rows_asked, min_size=1, max_size=4),
    allowed=st.lists(st.sampled_from([1.0, 0.5, 0.01]), min_size=1, max_size=3),
    by_digits=st.booleans(),
)
def test_what_stays_is_what_a_sort_leaves_at_length(
    shape: dict, asked: list[dict], allowed: list[float], by_digits: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if by_digits:
            patch.setattr(truncate, "_SORTED_AT_MOST", 0)
        check_rows(shape, asked, allowed)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(shape=shapes, num=st.one_of(st.integers(1, 30), st.integers(1, 5000)))
def test_the_likeliest_are_those_of_a_sort(shape: dict, num: int) -> None:
    rng, num = np.random.default_rng(shape["seed"]), min(num, shape["vocab"])
    given = mx.array(tied(rng, 3, shape["vocab"], shape["levels"], shape["spread"])).astype(shape["dtype"])
    given = mx.where(mx.array(rng.random(given.shape) < 0.2), -mx.inf, given)
    given[0, -1] = 100.0  # behind the last whole block, where there is such a place
    found = np.asarray(largest(given, num))
    for x, ids in zip(np.asarray(given.astype(mx.float32)), found, strict=True):
        assert ids.tolist() == in_order(x)[:num]


@catches(
    "the mass above a digit is forgotten",
    "mlxspec.sampling.truncate:_rising",
    lambda right: lambda x: right(mx.abs(x)),
)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=shapes, temperature=st.sampled_from([0.3, 1.0, 2.5]), share=st.floats(1e-9, 1.0, exclude_max=True)
)
def test_counting_finds_the_floor_of_a_sort(shape: dict, temperature: float, share: float) -> None:
    rng = np.random.default_rng(shape["seed"])
    given = mx.array(tied(rng, 3, shape["vocab"], shape["levels"], shape["spread"])).astype(shape["dtype"])
    given = mx.where(mx.array(rng.random(given.shape) < 0.2), -mx.inf, given)
    given[:, 0] = 1.0  # something must be possible
    tempered = given.astype(mx.float32) / temperature
    masses = (mx.softmax(tempered, axis=-1, precise=True) * 2.0**31 + 0.5).astype(mx.uint32)
    shares = shares_of([share, 0.9, share])
    assert mx.array_equal(
        counted_floor(given, tempered, masses, shares), sorted_floor(given, tempered, masses, shares)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [1.0, -1.0, 0.0])
def test_counting_tells_neighbouring_floats_apart(dtype: mx.Dtype, first: float) -> None:
    """A run of floats without a gap, on either side of a power of two and of zero: every share has a floor of its own."""
    form = mx.int32 if dtype == mx.float32 else mx.int16
    start = mx.array([first]).astype(dtype).view(form)
    run = start + mx.arange(20).astype(form)
    run = mx.concatenate([run.view(dtype), -run.view(dtype)])[None]
    masses = mx.full((1, 40), 1000, dtype=mx.uint32)
    tempered = run.astype(mx.float32)
    for share in np.linspace(0.01, 0.99, 50).tolist():
        wanted = sorted_floor(run, tempered, masses, shares_of([share]))
        assert mx.array_equal(counted_floor(run, tempered, masses, shares_of([share])), wanted), share


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_vocabulary(dtype: mx.Dtype) -> None:
    """The real size once, where blocks of ids have a rest and the floor is found by counting digits."""
    rng, vocab = np.random.default_rng(3), LARGE - 1
    logits = mx.array(rng.standard_normal((2, vocab)).astype(np.float32) * 3).astype(dtype)
    asked = [
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        SamplingParams(temperature=1.0, top_p=0.9),
    ]
    found = np.asarray(BatchSampler([RowSampler(p, [], vocab) for p in asked], vocab).scores(logits, [0, 1]))
    for i, params in enumerate(asked):
        scores = np.asarray(logits[i].astype(mx.float32) / mx.array([params.temperature], mx.float32))
        assert np.array_equal(found[i] > -np.inf, stays(scores, params))
    ids = np.asarray(logprobs(logits, mx.zeros((2,), mx.int32), 5).top_tokens)
    assert ids.tolist() == [in_order(x)[:5] for x in np.asarray(logits.astype(mx.float32))]


def test_no_more_than_a_few_thousand_numbers_of_a_position_are_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sorted_sizes: list[int] = []
    sort = mx.sort

    def counted(x: mx.array, axis: int = -1) -> mx.array:
        sorted_sizes.append(x.shape[axis])
        return sort(x, axis=axis)

    monkeypatch.setattr(mx, "sort", counted)
    for name in ("argsort", "partition", "argpartition", "topk"):  # a GPU sorts for all of them
        monkeypatch.setattr(mx, name, None)
    logits = mx.zeros((17, LARGE), mx.bfloat16)
    row = RowSampler(SamplingParams(temperature=0.6, top_k=20, top_p=0.95), [], LARGE)
    BatchSampler([row], LARGE).scores(logits, [0] * 17)
    logprobs(logits, mx.zeros((17,), mx.int32), 20)
    assert len(sorted_sizes) == 4
    assert max(sorted_sizes) <= 2 * math.sqrt(32 * LARGE)
    sorted_sizes.clear()
    top_p_floor(logits, logits.astype(mx.float32), [0.95] * 17)
    assert not sorted_sizes


def test_many_positions_hold_little_more_memory_than_their_scores() -> None:
    """Beyond the logits: tempered scores, what is left of them, which ones (a byte each) and noise; for top-p also masses. No pass over the
    vocabulary leaves numbers of its own."""
    num, vocab = 32, 131_072
    logits = mx.array(np.random.default_rng(0).standard_normal((num, vocab)).astype(np.float32))
    for asked, most in (({"top_p": 0.95}, 5.0), ({"top_k": 20, "top_p": 0.95}, 3.5)):
        row = RowSampler(SamplingParams(temperature=0.6, seed=1, **asked), [], vocab)
        mx.eval(logits)
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(BatchSampler([row], vocab).sample(logits, [0] * num, range(num)))
        assert (mx.get_peak_memory() - held) / logits.nbytes < most, asked


def test_equal_scores_stay_together_whatever_blocks_they_lie_in() -> None:
    """All ties at the last place of top-p, and those of top-k that there is room for."""
    scores = np.full((1, 9000), -5.0, np.float32)
    scores[0, [17, 4000, 8999]] = 2.0
    scores[0, ::7] = 1.0
    for asked in ({"top_k": 4}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.999}):
        row = RowSampler(SamplingParams(temperature=1.0, **asked), [], 9000)
        kept = np.asarray(BatchSampler([row], 9000).scores(mx.array(scores), [0]))[0] > -np.inf
        wanted = scores[0] >= 1.0
        if "top_k" in asked:
            wanted[in_order(scores[0])[room(4) :]] = False
        assert np.array_equal(kept, wanted), asked


def test_equally_likely_tokens_are_listed_by_id() -> None:
    logits = mx.array(np.tile(np.asarray([1.0, 3.0, 3.0, 0.0], np.float32), 2000)[None])
    assert np.asarray(logprobs(logits, mx.array([0]), 4).top_tokens).tolist() == [[1, 2, 5, 6]]


def test_positions_that_take_the_likeliest_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a row that samples, a greedy one with top-p costs no search."""
    searched: list[int] = []

    def counted(x: mx.array, scores: mx.array, shares: list[float]) -> mx.array:
        searched.append(len(shares))
        return top_p_floor(x, scores, shares)

    monkeypatch.setattr("mlxspec.sampling.scores.top_p_floor", counted)
    rows = [RowSampler(SamplingParams(temperature=t, top_p=0.9, seed=0), [1], 50) for t in (0.8, 0.0)]
    BatchSampler(rows, 50).scores(mx.random.normal((2, 50), key=mx.random.key(0)), [0, 1])
    assert searched == [1]


@catches(
    "a share of all mass is rounded down",
    "mlxspec.sampling.truncate:_limit",
    lambda right: (
        lambda total, share: mx.where(
            share > ONE, total + 1, (total >> 30) * share + (((total & (ONE - 1)) * share) >> 30)
        )
    ),
)
def test_a_share_of_whole_numbers_is_rounded_up() -> None:
    """To the least that is the share or more, without a number that does not fit into 63 bits."""
    rng = np.random.default_rng(0)
    totals = [1, 7, ONE - 1, ONE, (1 << 62) - 1, *rng.integers(1, 1 << 62, 200).tolist()]
    shares = [1, ONE // 3, ONE, ONE - 1, ONE, *rng.integers(1, ONE + 1, 200).tolist()]
    found = truncate._limit(mx.array(totals, mx.int64)[:, None], mx.array(shares, mx.int64)[:, None])
    assert found[:, 0].tolist() == [
        -(-total * share // ONE) for total, share in zip(totals, shares, strict=True)
    ]
    assert truncate._limit(mx.array([[9]], mx.int64), mx.array([[ONE + 1]], mx.int64)).item() == 10
