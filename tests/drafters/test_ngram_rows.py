"""What holds for every n-gram drafter: cuts are exact, borders do not matter, rows know nothing of each other. And the follower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters import ngram_mod
from mlxspec.drafters.base import Ask, Drafter
from mlxspec.drafters.chain import Chain
from mlxspec.drafters.ngram_cache import CacheRow, NgramCache
from mlxspec.drafters.ngram_map import MapK4vRow, MapKRow, NgramMapK, NgramMapK4v
from mlxspec.drafters.ngram_mod import ModRow, NgramMod
from mlxspec.drafters.ngram_rows import Follower, NgramDrafter, NgramRow
from mlxspec.drafters.ngram_table import NgramTable
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import make_ngram_drafter
from mlxspec.policy.drafting import Drafting
from mlxspec.sampling.sampler import BatchSampler, RowSampler
from tests import tiny_models

LEARNED = NgramTable.of([[0, 1, 2, 0, 1, 2, 0, 1, 1, 0, 1, 2, 2, 2] * 4])
ROWS: dict[str, Callable[[], NgramRow]] = {
    "map-k": lambda: MapKRow(2, 6, 1),
    "map-k hits": lambda: MapKRow(1, 8, 3),
    "map-k4v": lambda: MapK4vRow(2, 6, 1),
    "map-k4v hits": lambda: MapK4vRow(1, 8, 2),
    "mod": lambda: ModRow(2, 6),
    "mod of one": lambda: ModRow(1, 9),
    "cache": lambda: CacheRow(6, None, None),
    "cache levels": lambda: CacheRow(6, LEARNED, LEARNED),
}
DRAFTERS: dict[str, Callable[[], NgramDrafter]] = {
    "ngram-map-k": lambda: NgramMapK(2, 6),
    "ngram-map-k4v": lambda: NgramMapK4v(2, 6),
    "ngram-mod": lambda: NgramMod(3, 6),
    "ngram-cache": lambda: NgramCache(6),
}
TOKENS = st.lists(st.integers(0, 2), max_size=12)
# "verify" lets part of the last draft stand, as engines do: without it drafts would hardly ever be right.
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("hear"), TOKENS),
        st.tuples(st.just("ask"), st.integers(1, 9)),
        st.tuples(st.just("verify"), st.tuples(st.integers(1, 9), st.floats(0, 1), st.integers(0, 2))),
        st.tuples(st.just("cut"), st.floats(0, 1)),
    ),
    max_size=40,
)


@pytest.fixture(autouse=True, scope="module")
def _short_rests() -> Any:
    """Rests of ngram-mod short enough to end within a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_mod, "REST", 3)
        yield


def facts(value: Any) -> Any:
    """All state of a row as plain data, but what is followed and what is only computed when asked for."""
    if isinstance(value, (int, float, str, bytes, type(None))):
        return value
    if isinstance(value, dict):
        return {k: facts(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [facts(v) for v in value]
    names = getattr(value, "__slots__", None) or vars(value)
    return {n: facts(getattr(value, n)) for n in names if n not in ("best", "_follower")}


def asked(row: NgramRow, limit: int) -> tuple[list[int], Any]:
    draft = row.draft(limit)
    assert isinstance(draft.tokens, list)
    assert draft.length == len(draft.tokens) <= limit
    if draft.confidences is not None:
        assert len(draft.confidences) == draft.length
        assert all(0 < p < 1 for p in draft.confidences)
    return draft.tokens, draft.confidences


class Recorder:
    """Drives a row and keeps what a row with the shorter history would have lived through."""

    def __init__(self, make: Callable[[], NgramRow]) -> None:
        self.row, self.length = make(), 0
        self.log: list[tuple[str, Any]] = []
        self.lengths: list[int] = []  # history length before each entry

    def do(self, kind: str, value: Any) -> None:
        if kind == "verify":
            limit, share, other = value
            self.do("ask", limit)
            tokens, _ = asked(self.row, limit)
            self.do("hear", [*tokens[: round(share * len(tokens))], other])
        elif kind == "cut":
            self._cut(round(value * self.length))
        else:
            self.lengths.append(self.length)
            self.log.append((kind, value))
            self._apply(self.row, kind, value)
            self.length += len(value) if kind == "hear" else 0

    def _cut(self, length: int) -> None:
        self.row.truncate(length)
        self.length = length
        while self.log and (
            self.lengths[-1] > length or (self.log[-1][0] == "hear" and self.lengths[-1] == length)
        ):
            self.log.pop()
            self.lengths.pop()
        if self.log and self.log[-1][0] == "hear":
            self.log[-1] = ("hear", self.log[-1][1][: length - self.lengths[-1]])
        self.lengths.append(length)
        self.log.append(("stay", length))  # a cut ends what was being followed, also for the twin

    def twin(self, make: Callable[[], NgramRow]) -> NgramRow:
        row = make()
        for kind, value in self.log:
            self._apply(row, kind, value)
        return row

    @staticmethod
    def _apply(row: NgramRow, kind: str, value: Any) -> None:
        if kind == "hear":
            row.extend(value)
        elif kind == "ask":
            asked(row, value)
        else:
            row.truncate(value)


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
@settings(max_examples=120, deadline=None)
@given(operations=OPERATIONS, cut=st.floats(0, 1), more=TOKENS)
def test_after_a_cut_it_is_the_row_that_saw_less(
    make: Any, operations: Any, cut: float, more: list[int]
) -> None:
    recorder = Recorder(make)
    for kind, value in operations:
        recorder.do(kind, value)
    recorder.do("cut", cut)
    row, twin = recorder.row, recorder.twin(make)
    assert facts(row) == facts(twin)
    for token in more:
        assert asked(row, 6) == asked(twin, 6)
        row.extend([token])
        twin.extend([token])
    assert asked(row, 6) == asked(twin, 6)


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(TOKENS, max_size=8))
def test_borders_between_observations_do_not_matter(make: Any, pieces: list[list[int]]) -> None:
    whole, cut = make(), make()
    whole.extend([t for piece in pieces for t in piece])
    for piece in pieces:
        cut.extend(piece)
    assert facts(whole) == facts(cut)
    assert asked(whole, 6) == asked(cut, 6)


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_cut_to_nothing_and_beyond_the_end(make: Callable[[], NgramRow]) -> None:
    row = make()
    row.extend([1, 2, 1, 2, 1])
    row.truncate(9)
    before = facts(row)
    row.truncate(5)
    assert facts(row) == before
    row.truncate(0)
    assert facts(row) == facts(make())
    assert row.nbytes > 0


def ask(row: int, limit: int = 6) -> Ask:
    return Ask(row, [], limit, RowSampler(SamplingParams(), [], 8))


def proposed(drafter: Drafter, *rows: int) -> list[list[int] | Any]:
    asks = [ask(row) for row in rows]
    return [d.tokens for d in drafter.propose(asks, BatchSampler([a.sampler for a in asks], 8))]


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_rows_know_nothing_of_each_other(make: Callable[[], NgramDrafter]) -> None:
    drafter, text = make(), [1, 2, 3, 4, 5, 6, 7, 0]
    drafter.begin(0)
    drafter.begin(1)
    for token in text * 3:
        drafter.observe(0, [token], None)
        drafter.observe(1, [7], None)
    drafter.begin(2)
    drafter.observe(2, text[:4], None)
    own, other, fresh = proposed(drafter, 0, 1, 2)
    assert own == text[:6]
    assert other == [7] * 6
    assert fresh == []
    drafter.close(0)
    drafter.observe(2, text[4:], None)
    assert proposed(drafter, 2) == [[]], "what a closed row saw is gone"


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_rows_come_and_go(make: Callable[[], NgramDrafter]) -> None:
    drafter = make()
    assert drafter.nbytes == 0
    drafter.begin(3)
    drafter.observe(3, [1, 2, 3, 4] * 3, None)
    assert proposed(drafter, 3) == [[1, 2, 3, 4, 1, 2]]
    drafter.truncate(3, 4)
    assert proposed(drafter, 3) == [[]]
    assert drafter.nbytes > 0
    drafter.close(3)
    drafter.close(3)
    drafter.close(99)
    assert drafter.nbytes == 0


def test_the_limit_holds() -> None:
    for make in DRAFTERS.values():
        drafter = make()
        drafter.begin(0)
        drafter.observe(0, [1, 2, 3, 4] * 4, None)
        for limit in (1, 2, 6, 50):
            request = ask(0, limit)
            (draft,) = drafter.propose([request], BatchSampler([request.sampler], 8))
            assert draft.length == min(limit, 6)


class TestFollower:
    def test_a_verdict_comes_with_the_first_difference(self) -> None:
        follower: Follower[str] = Follower()
        assert follower.hear(1) is None
        follower.follow([1, 2, 3], "a")
        assert follower.hear(1) is None
        assert follower.hear(9) == ("a", 1, 3)
        assert not follower.is_open

    def test_a_draft_that_stands_is_decided_by_its_last_token(self) -> None:
        follower: Follower[str] = Follower()
        follower.follow([1, 2], "a")
        assert follower.hear(1) is None
        assert follower.hear(2) == ("a", 2, 2)
        assert follower.hear(2) is None

    def test_the_open_proposal_is_followed_to_its_end(self) -> None:
        follower: Follower[str] = Follower()
        follower.follow([1, 2], "first")
        follower.follow([7, 7], "second")
        assert follower.hear(1) is None
        assert follower.hear(2) == ("first", 2, 2)

    def test_dropped(self) -> None:
        follower: Follower[str] = Follower()
        follower.follow([1, 2], "a")
        follower.drop()
        assert follower.hear(9) is None
        follower.follow([3], "b")
        assert follower.hear(3) == ("b", 1, 1)


def test_p_min_trims_what_knows_probabilities() -> None:
    """Host drafts with confidences pass through the chain's limits."""
    text = [1, 2, 3] * 2 + [1, 2, 4, 5] + [1, 2, 3, 1]
    for p_min, expected in ((0.0, [2, 3, 1, 2]), (0.8, [2]), (0.95, None)):
        drafting = Drafting(Chain([NgramMapK4v(1, 4)]))
        spec = SpecConfig(drafters=("ngram-map-k4v",), ngram_m=4, p_min=p_min)
        drafting.begin(0, spec, RowSampler(SamplingParams(), text, 8))
        drafting.observe(0, text, None)
        won = drafting.propose({0: 9}, {0: text}, 8)
        assert (won[0].draft.tokens if won else None) == expected, p_min


NAMES = ("ngram-simple", *DRAFTERS)


def test_drafters_are_made_by_name() -> None:
    spec = SpecConfig(drafters=NAMES)
    assert tuple(make_ngram_drafter(name, spec, 96).name for name in NAMES) == NAMES


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=48), SamplingParams(max_tokens=48, temperature=0.8, seed=5)]
)
def test_text_is_that_of_plain_decoding(params: SamplingParams) -> None:
    """Real rounds: every drafter proposes, learns what stood, and the text does not change."""
    model = tiny_models.target()
    spec = SpecConfig(drafters=NAMES, ngram_n=2, ngram_m=6, ngram_mod_n=2)
    prompts = [[3, 4, 5, 6, 3, 4, 5, 6, 3, 4], [9, 9, 9, 8, 9, 9, 9], [1, 2]]
    plain = Engine(model).generate(prompts, params)
    for names in [*((name,) for name in NAMES), NAMES]:
        own = replace(spec, drafters=names)
        drafters = [make_ngram_drafter(name, own, tiny_models.VOCAB) for name in names]
        results = Engine(model, drafters=drafters, spec=own).generate(prompts, params)
        assert [r.tokens for r in results] == [r.tokens for r in plain], names
        assert not any(r.stats.notices for r in results)
