"""Proposals from rows of the head: the list's tokens and the text's own, each text by itself; drawn as from a whole vocabulary in which
all other tokens are impossible."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.drafters import proposals
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.mtp import Mtp
from mlxspec.drafters.proposals import Proposals
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.head_rows import HeadRows
from mlxspec.sampling.noise import gumbel
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from mlxspec.sampling.scores import spread
from tests import tiny_models
from tests.drafters.test_drafter_models import Driver, play
from tests.tiny_models import VOCAB

LISTED = list(range(40, 88))


def rows_of(model, ids=LISTED) -> HeadRows:
    return HeadRows(model.head_module, ids, VOCAB, capped=model.capped)


def make(kind: str, ids=LISTED) -> ModelDrafter:
    if kind == "mtp":
        return Mtp(tiny_models.mtp_head(), 2048, rows_of(tiny_models.target(), ids))
    return DraftModel(tiny_models.echo(), VOCAB, rows_of(tiny_models.echo(), ids))


def opened(*histories: list[int]) -> Proposals:
    made = Proposals(rows_of(tiny_models.target()))
    made.open(dict(enumerate(histories)))
    return made


def hiddens(num: int) -> mx.array:
    rng = np.random.default_rng(1)
    return mx.array(rng.standard_normal((num, tiny_models.target().hidden_size), np.float32))


@catches(
    "a text brings no tokens of its own to a reduced vocabulary",
    "mlxspec.drafters.proposals:Proposals._follow",
    lambda right: lambda self, row, history: right(self, row, history[:0]),
)
def test_ids_are_the_lists_and_the_texts_own() -> None:
    assert opened([41, 42]).ids.tolist() == LISTED
    made = opened([1, 50, 95, 1])
    assert made.ids.tolist() == [*LISTED, 1, 95]
    x = hiddens(1)
    wanted = tiny_models.target().head(x)[:, made.ids]
    np.testing.assert_allclose(np.asarray(made.logits(x, [0])), np.asarray(wanted), atol=1e-4)


def test_no_text_is_proposed_anothers_tokens() -> None:
    histories, x = ([1, 2, 50], [50], [2, 95]), hiddens(3)
    together = opened(*histories)
    assert together.ids.tolist() == [*LISTED, 1, 2, 95]
    logits = np.asarray(together.logits(x, [0, 1, 2]))
    for row, history in enumerate(histories):
        alone = opened(history)
        for whole, one in (
            (together.ids.tolist(), logits[row]),
            (together.ids.tolist(), np.asarray(together.logits(x[row : row + 1], [row]))[0]),
        ):
            wanted = np.asarray(alone.logits(x[row : row + 1], [0]))[0]
            found = {i: v for i, v in zip(whole, one, strict=True) if np.isfinite(v)}
            assert sorted(found) == sorted(alone.ids.tolist())
            np.testing.assert_allclose([found[i] for i in alone.ids.tolist()], wanted, atol=1e-4)


def test_a_growing_text_brings_its_latest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "MOST_OWN", 3)
    made, history = Proposals(rows_of(tiny_models.target())), [0, 1, 2]
    made.open({7: history})
    assert made.ids.tolist() == [*LISTED, 0, 1, 2]
    history += [0, 3]
    made.open({7: history})
    assert made.ids.tolist() == [*LISTED, 0, 2, 3]
    history += [45, 200, -1]  # in the list; beyond the head's rows; no id
    made.open({7: history})
    assert made.ids.tolist() == [*LISTED, 0, 2, 3]
    made.forget(7)
    made.open({7: [6, 7]})
    assert made.ids.tolist() == [*LISTED, 6, 7]


def test_rows_are_taken_again_only_when_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    inner = HeadRows.of
    monkeypatch.setattr(HeadRows, "of", lambda self, ids: taken.append(ids.tolist()) or inner(self, ids))
    made, history = Proposals(rows_of(tiny_models.target())), [1, 50]
    taken.clear()
    for new in ([], [60], [1], [2], [61]):
        history += new
        made.open({0: history})
    assert taken == [[1], [1, 2]]


@pytest.mark.parametrize("kind", ["mtp", "draft-model"])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=4)],
    ids=["greedy", "sampled"],
)
def test_a_draft_is_the_one_a_fresh_drafter_makes(kind: str, params: SamplingParams) -> None:
    """Whatever rows came and went, and were drafted for beside it."""
    driver = Driver(make(kind))
    play(driver, seed=1)
    got = driver.propose(dict.fromkeys(driver.rows, 4), params)
    for row, history in driver.rows.items():
        fresh = Driver(make(kind))
        fresh.begin(0, history)
        assert fresh.propose({0: 4}, params)[0] == got[row]
        assert set(got[row]) <= {*LISTED, *history}


@pytest.mark.parametrize("kind", ["mtp", "draft-model"])
def test_a_list_of_all_tokens_is_the_whole_head(kind: str) -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0.9, seed=2)):
        whole, listed = Driver(make(kind)), Driver(make(kind, range(VOCAB)))
        whole.drafter.uses_whole_head = True
        for driver in (whole, listed):
            driver.begin(0, [5, 6, 7, 8])
            driver.begin(1, [9, 10])
        assert whole.propose({0: 4, 1: 3}, params) == listed.propose({0: 4, 1: 3}, params)


@pytest.mark.parametrize("kind", ["mtp", "draft-model"])
def test_the_first_draft_is_the_best_of_what_may_be_proposed(kind: str) -> None:
    history = [3, 44, 90]
    driver = Driver(make(kind))
    driver.begin(0, history)
    got = driver.propose({0: 1})[0]
    driver.drafter.uses_whole_head = True
    logits = _logits(driver, history)
    may = [*LISTED, 3, 90]
    assert got == [max(may, key=lambda i: logits[i])]


def _logits(driver: Driver, history: list[int]) -> np.ndarray:
    """The drafter's own logits behind a history, of a whole vocabulary."""
    if isinstance(driver.drafter, Mtp):
        from tests.drafters.test_drafter_models import head_from_scratch

        return head_from_scratch(history)[1]
    model = tiny_models.echo()
    out = model.forward(
        mx.array(history, mx.int32),
        FlatRows((len(history),)),
        model.make_cache(1),
        certain=True,
        logits_at="last",
    )
    return np.asarray(out.logits[0])


PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=3),
    "truncated": SamplingParams(temperature=1.2, top_p=0.8, top_k=9, min_p=0.01, seed=4),
    "penalized": SamplingParams(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={41: 3.0, 2: -5.0}, seed=5
    ),
    "greedy, penalized": SamplingParams(repetition_penalty=1.3, logit_bias={41: 2.0}),
}


@pytest.mark.parametrize("asked", PARAMS)
def test_drawing_from_some_tokens_is_drawing_from_all_where_others_are_impossible(asked: str) -> None:
    """Each token keeps its own noise, penalties and bias: the twin has logits of all tokens."""
    rng = np.random.default_rng(6)
    ids = mx.array(np.concatenate([LISTED, [1, 2, 95]]).astype(np.int32))
    logits = mx.array((3 * rng.standard_normal((16, len(ids)))).astype(np.float32))
    row = RowSampler(PARAMS[asked], [41, 50, 2], VOCAB)
    row.observe([60, 60])
    sampler = BatchSampler([row], VOCAB)
    owners, positions = [0] * 16, list(range(16))
    got = sampler.draft(logits, owners, positions, ids)
    twin = sampler.draft(spread(logits, ids, VOCAB), owners, positions)
    assert got.tokens.tolist() == twin.tokens.tolist()
    assert set(got.tokens.tolist()) <= set(ids.tolist())


def test_shared_noise_is_that_of_the_whole_vocabulary() -> None:
    """Where the target's own choice may be proposed and the drafter agrees with its logits, it is proposed."""
    rng = np.random.default_rng(7)
    logits = mx.array(rng.standard_normal((64, VOCAB)).astype(np.float32))
    row = RowSampler(SamplingParams(temperature=1.0, seed=9), [], VOCAB)
    sampler, owners, positions = BatchSampler([row], VOCAB), [0] * 64, list(range(64))
    target = np.asarray(sampler.sample(logits, owners, positions))
    ids = mx.array(np.asarray(LISTED, np.int32))
    got = np.asarray(sampler.draft(logits[:, ids], owners, positions, ids).tokens)
    listed = np.isin(target, LISTED)
    assert 16 < listed.sum() < 64
    assert (got[listed] == target[listed]).all()
    noisy = np.asarray(logits + gumbel([row.seed] * 64, positions, VOCAB))
    assert (got == np.asarray(LISTED)[noisy[:, LISTED].argmax(axis=1)]).all()


def test_bytes_are_counted() -> None:
    for kind in ("mtp", "draft-model"):
        some, whole = make(kind), make(kind)
        whole.uses_whole_head = True
        rows = len(LISTED) * tiny_models.target().hidden_size * 4
        plain = Mtp(tiny_models.mtp_head(), 2048) if kind == "mtp" else DraftModel(tiny_models.echo(), VOCAB)
        assert some.weight_bytes - plain.weight_bytes == some.reads.head == rows
        assert whole.reads.head == plain.reads.head > some.reads.head
        assert some.row_bytes(100) - plain.row_bytes(100) == some.reads.head * 100 // len(LISTED)


def test_tokens_of_the_answer_count_from_the_next_draft_on() -> None:
    driver = Driver(make("mtp"))
    driver.begin(0, [50, 51])
    assert set(driver.propose({0: 2})[0]) <= set(LISTED)
    driver.hear(0, [1, 2])
    driver.propose({0: 2})
    assert driver.drafter.proposals.ids.tolist() == [*LISTED, 1, 2]
