"""Top-n-sigma, typical-p, XTC, DRY and penalties of the last tokens against plain numpy forms; each position by itself; allowed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.sampling import filters
from mlxspec.sampling.history import LONGEST_MATCH, dry_penalties, processors_of
from mlxspec.sampling.noise import xtc_coins
from mlxspec.sampling.processors import process
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

VOCAB = 24
FORMS = ("sigma", "typical", "xtc")
Floats = NDArray[np.float64]


def plain(form: str, row: Floats, value: float) -> NDArray[np.bool_]:
    """Which tokens of one position stay, as the definitions say it."""
    possible = np.isfinite(row)
    if form == "sigma":
        return possible & (row >= row.max() - value * row[possible].std())
    p = np.where(possible, np.exp(row - row.max()), 0.0)
    p /= p.sum()
    if form == "xtc":
        top = [i for i in range(len(row)) if p[i] >= value]
        gone = [i for i in top if p[i] > min(p[top])] if top else []
        return np.array([possible[i] and i not in gone for i in range(len(row))])
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    distance = {i: abs(-np.log(p[i]) - entropy) for i in range(len(row)) if p[i] > 0}
    held, last = 0.0, -1.0
    for i in sorted(distance, key=distance.__getitem__):
        if held >= value:
            break
        held, last = held + p[i], distance[i]
    return np.array([i in distance and distance[i] <= last for i in range(len(row))])


def filtered(form: str, scores: mx.array, value: float) -> mx.array:
    column = mx.full((scores.shape[0], 1), value)
    if form == "sigma":
        return filters.top_n_sigma(scores, column)
    return (
        filters.typical(scores, column)
        if form == "typical"
        else filters.xtc(scores, column, mx.array([[True]]))
    )


@st.composite
def positions(draw: st.DrawFn) -> NDArray[np.float32]:
    """Scores of one to three positions, spaced so far apart that no rounding decides, some of them impossible."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(VOCAB)))
        steps = draw(st.lists(st.sampled_from([0.11, 0.37, 1.03]), min_size=VOCAB, max_size=VOCAB))
        row = np.cumsum(steps)[list(order)] - 8.0
        row[draw(st.lists(st.integers(0, VOCAB - 2), max_size=VOCAB // 2))] = -np.inf
        rows.append(row)
    return np.array(rows, np.float32)


@pytest.mark.parametrize("form", FORMS)
@given(given_scores=positions(), value=st.sampled_from([0.063, 0.17, 0.41, 0.83]))
@settings(max_examples=60, deadline=None)
def test_what_stays_is_what_the_definition_says(
    form: str, given_scores: NDArray[np.float32], value: float
) -> None:
    found = np.asarray(filtered(form, mx.array(given_scores), value))
    for row, kept in zip(given_scores, found, strict=True):
        stays = plain(form, row.astype(np.float64), value)
        assert (kept > -np.inf).tolist() == stays.tolist()
        assert kept[stays].tolist() == row[stays].tolist()
        assert stays.any()
    alone = [
        np.asarray(filtered(form, mx.array(given_scores[i : i + 1]), value))[0] for i in range(len(found))
    ]
    assert np.array_equal(found, np.array(alone))


@pytest.mark.parametrize(
    ("form", "off"), [("sigma", float("inf")), ("typical", 1.0), ("xtc", 1.1)], ids=lambda v: str(v)
)
def test_a_neutral_value_leaves_all(form: str, off: float) -> None:
    scores = mx.random.normal((4, VOCAB), key=mx.random.key(1))
    scores[:, 3] = -mx.inf
    assert mx.array_equal(filtered(form, scores, off), scores)


@catches(
    "impossible tokens are the least likely of XTC's top",
    "mlxspec.sampling.filters:xtc",
    lambda right: lambda s, t, h: mx.where((mx.softmax(s, axis=-1) > 0) & (t <= 0), -mx.inf, s),
    case="xtc-0.0",
)
@catches(
    "a share that is 0 in float32 leaves nothing",
    "mlxspec.sampling.filters:typical",
    lambda right: lambda s, p: mx.where(p > 0, right(s, p), -mx.inf),
    case="typical-1e-60",
)
@pytest.mark.parametrize("value", [0.0, 1e-60, 1e-30, 1e-9, 1.0])
@pytest.mark.parametrize("form", FORMS)
@given(given_scores=positions())
@settings(max_examples=20, deadline=None)
def test_one_of_the_possible_tokens_stays_at_any_value(
    form: str, value: float, given_scores: NDArray[np.float32]
) -> None:
    found = np.asarray(filtered(form, mx.array(given_scores), value))
    assert (found > -np.inf).any(axis=1).all()
    assert ((found == given_scores) | np.isneginf(found)).all()


def test_xtc_leaves_the_least_likely_of_top_k() -> None:
    asked = {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.0}
    assert drawn(SamplingParams(**asked, top_k=3), LOGITS)[2] == 1.0
    assert drawn(SamplingParams(**asked), LOGITS)[-1] == 1.0


def drawn(params: SamplingParams, logits: Sequence[float], num: int = 4000) -> Floats:
    """How often each token is drawn, at `num` positions."""
    rows = [RowSampler(params, [], len(logits))]
    tokens = BatchSampler(rows, len(logits)).sample_at_once(
        mx.broadcast_to(mx.array(logits), (num, len(logits))), [0] * num, range(num)
    )
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / num


LOGITS = [2.0, 1.4, 0.9, 0.2, -0.5, -1.3, -3.0, -6.0]


@pytest.mark.parametrize(
    "params",
    [
        {"top_n_sigma": 0.8},
        {"typical_p": 0.6},
        {"xtc_probability": 0.4, "xtc_threshold": 0.12},
        {"xtc_probability": 0.7, "xtc_threshold": 0.1, "top_k": 5, "temperature": 1.3},
        {"typical_p": 0.8, "top_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.2},
        {"top_n_sigma": 1.0, "top_k": 3},
    ],
    ids=str,
)
@catches(
    "XTC always happens",
    "mlxspec.sampling.scores:xtc_coins",
    lambda right: lambda *a: mx.zeros(len(a[1])),
    case="0.4",
)
def test_the_distribution_that_is_drawn_from(params: dict[str, Any]) -> None:
    asked = SamplingParams(**{"temperature": 1.0, "seed": 3, **params})
    scores = np.array(LOGITS)
    if asked.top_n_sigma:
        scores[~plain("sigma", scores, asked.top_n_sigma)] = -np.inf
    scores = scores / asked.temperature
    if asked.top_k:
        scores[np.argsort(-scores)[asked.top_k :]] = -np.inf
    if asked.top_p < 1:
        p = np.exp(scores) / np.exp(scores).sum()
        order = np.argsort(-p)
        scores[[i for n, i in enumerate(order) if p[order[:n]].sum() >= asked.top_p]] = -np.inf
    if asked.typical_p < 1:
        scores[~plain("typical", scores, asked.typical_p)] = -np.inf
    cut = np.where(plain("xtc", scores, asked.xtc_threshold), scores, -np.inf)
    shares = [np.exp(s) / np.exp(s).sum() for s in (scores, cut)]
    expected = (1 - asked.xtc_probability) * shares[0] + asked.xtc_probability * shares[1]
    found = drawn(asked, LOGITS)
    assert np.all(found[expected == 0] == 0)
    assert np.abs(found - expected).max() < 5 * np.sqrt(0.25 / 4000)  # five standard deviations


def test_xtc_is_keyed_by_place() -> None:
    """The same coins for the same places, however many are sampled together; they are not the noise of the draw."""
    params = SamplingParams(temperature=1.0, seed=9, xtc_probability=0.5, xtc_threshold=0.05)
    sampler = BatchSampler([RowSampler(params, [], 8)], 8)
    logits = mx.broadcast_to(mx.array(LOGITS), (64, 8))
    together = np.asarray(sampler.scores(logits, [0] * 64, positions=range(64)))
    alone = [np.asarray(sampler.scores(logits[:1], [0], positions=[i]))[0] for i in range(64)]
    assert np.array_equal(together, np.array(alone))
    happened = np.isinf(together[:, 0])
    coins = np.asarray(xtc_coins([9] * 64, range(64))) < 0.5
    assert happened.tolist() == coins.tolist()
    assert 10 < happened.sum() < 54
    with pytest.raises(ValueError, match="where tokens stand"):
        sampler.scores(logits, [0] * 64)


def plain_dry(text: list[int], params: SamplingParams, breaks: set[int]) -> dict[int, float]:
    """By trying every earlier place."""
    window = params.dry_penalty_last_n
    text = text[-window:] if window > 0 else [] if window == 0 else text
    found: dict[int, float] = {}
    for end in range(len(text) - 1):
        length = 0
        while (
            length <= end
            and length < LONGEST_MATCH
            and text[end - length] == text[len(text) - 1 - length]
            and text[end - length] not in breaks
        ):
            length += 1
        if length >= params.dry_allowed_length:
            loss = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            found[text[end + 1]] = max(found.get(text[end + 1], 0.0), min(loss, 1e4))
    return found


@given(
    text=st.lists(st.integers(0, 3), max_size=40),
    breaks=st.sets(st.integers(0, 3), max_size=2),
    least=st.integers(1, 4),
    window=st.sampled_from([-1, 0, 5, 20]),
)
@settings(max_examples=200, deadline=None)
def test_dry_is_what_trying_every_place_gives(
    text: list[int], breaks: set[int], least: int, window: int
) -> None:
    params = SamplingParams(
        dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=least, dry_penalty_last_n=window
    )
    holds = np.array([i in breaks for i in range(4)])
    found = dry_penalties(np.array(text, np.int32), params, holds)
    assert dict(found) == pytest.approx(plain_dry(text, params, breaks))


def test_dry_of_a_long_text_ends() -> None:
    found = dry_penalties(np.zeros(200_000, np.int32), SamplingParams(dry_multiplier=1.0), None)
    assert found == {0: 1e4}


@given(
    text=st.lists(st.integers(0, 5), min_size=2, max_size=20),
    num_prompt=st.integers(1, 10),
    window=st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_penalties_of_the_last_tokens(text: list[int], num_prompt: int, window: int) -> None:
    params = SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2, repeat_last_n=window
    )
    logits = np.array([1.0, -2.0, 0.5, 3.0, -1.0, 0.0, 2.0])
    (processor,) = processors_of(params, num_prompt, None)
    found, failure = process(
        [processor],
        text[:1],
        mx.array(text[1:], mx.int32),
        mx.array(np.tile(logits, (len(text), 1)), mx.float32),
    )
    assert failure is None
    for place in range(len(text)):
        before = text[: place + 1]
        last = before[max(0, len(before) - window) :]
        answer = before[max(num_prompt, len(before) - window) :]
        for token, logit in enumerate(logits):
            wanted = (logit / 1.5 if logit > 0 else logit * 1.5) if token in last else logit
            wanted -= 0.3 * (token in answer) + 0.2 * answer.count(token)
            assert found[place, token].item() == pytest.approx(wanted, abs=1e-5)


def test_allowed_tokens_and_bias() -> None:
    params = SamplingParams(temperature=1.0, seed=1, allowed_token_ids=[2, 5, 7], logit_bias={5: 1.0, 0: 9.0})
    found = drawn(params, LOGITS)
    p = np.exp(np.array([LOGITS[2], LOGITS[5] + 1.0, LOGITS[7]]))
    assert np.abs(found[[2, 5, 7]] - p / p.sum()).max() < 0.04
    assert found[[0, 1, 3, 4, 6]].sum() == 0
    with pytest.raises(ConfigError, match="allowed_token_ids names token 8"):
        RowSampler(SamplingParams(allowed_token_ids=[8]), [], 8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be between"),
        ({"min_tokens": 1, "regex": "a"}, "min_tokens and regex"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"typical_p": 2}, "typical_p"),
        ({"typical_p": 0}, "typical_p must be above 0"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"xtc_probability": 0.5, "sampler": max}, "sampler and xtc_probability"),
    ],
)
def test_what_cannot_be(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SamplingParams(**wrong)
