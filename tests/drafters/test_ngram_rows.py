"""What holds for every n-gram drafter: limits are kept, borders do not matter, rows know nothing of each other. And the follower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Drafter
from mlxspec.drafters.chain import Chain
from mlxspec.drafters.ngram_map import MapK4vRow, MapKRow, NgramMapK, NgramMapK4v
from mlxspec.drafters.ngram_rows import Follower, NgramDrafter, NgramRow
from mlxspec.drafters.ngrams import make_ngram_drafter
from mlxspec.engine.engine import Engine
from mlxspec.policy.drafting import Drafting
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests import tiny_models

ROWS: dict[str, Callable[[], NgramRow]] = {
    "map-k": lambda: MapKRow(2, 6, 1),
    "map-k hits": lambda: MapKRow(1, 8, 3),
    "map-k4v": lambda: MapK4vRow(2, 6, 1),
    "map-k4v hits": lambda: MapK4vRow(1, 8, 2),
}
DRAFTERS: dict[str, Callable[[], NgramDrafter]] = {
    "ngram-map-k": lambda: NgramMapK(2, 6),
    "ngram-map-k4v": lambda: NgramMapK4v(2, 6),
}
TOKENS = st.lists(st.integers(0, 2), max_size=12)
# tokens that come, then a draft of at most so many tokens, of which a share comes and one token more
OPERATIONS = st.lists(
    st.tuples(TOKENS, st.integers(1, 9), st.floats(0, 1), st.integers(0, 2)),
    max_size=20,
)


def certain(value: Any) -> Any:
    """All state of a row as plain data, but what is followed and what is only computed when asked for."""
    if isinstance(value, (int, float, str, bytes, type(None))):
        return value
    if isinstance(value, dict):
        return {k: certain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [certain(v) for v in value]
    names = getattr(value, "__slots__", None) or vars(value)
    return {n: certain(getattr(value, n)) for n in names if n not in ("best", "_follower")}


def asked(row: NgramRow, limit: int) -> tuple[list[int], Any]:
    draft = row.draft(limit)
    assert isinstance(draft.tokens, list)
    assert draft.length == len(draft.tokens) <= limit
    if draft.confidences is not None:
        assert len(draft.confidences) == draft.length
        assert all(0 < p < 1 for p in draft.confidences)
    return draft.tokens, draft.confidences


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_drafts_keep_their_limits_whatever_came(make: Callable[[], NgramRow], operations: Any) -> None:
    """A second row that lives through the same drafts the same."""
    row, twin = make(), make()
    for hears, limit, share, other in operations:
        for each in (row, twin):
            each.extend(hears)
        tokens, confidences = asked(row, limit)
        assert asked(twin, limit) == (tokens, confidences)
        for each in (row, twin):
            each.extend([*tokens[: round(share * len(tokens))], other])
    assert certain(row) == certain(twin)
    assert row.nbytes > 0


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(TOKENS, max_size=8))
def test_borders_between_observations_do_not_matter(make: Any, pieces: list[list[int]]) -> None:
    whole, cut = make(), make()
    whole.extend([t for piece in pieces for t in piece])
    for piece in pieces:
        cut.extend(piece)
    assert certain(whole) == certain(cut)
    assert asked(whole, 6) == asked(cut, 6)


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


def test_p_min_trims_what_knows_probabilities() -> None:
    """Host drafts with confidences pass through the chain's limits."""
    text = [1, 2, 3] * 2 + [1, 2, 4, 5] + [1, 2, 3, 1]
    for p_min, expected in ((0.0, [2, 3, 1, 2]), (0.8, [2]), (0.95, None)):
        drafting = Drafting(Chain([NgramMapK4v(1, 4)]))
        spec = SpecConfig(drafters=("ngram-map-k4v",), ngram_m=4, p_min=p_min)
        drafting.begin(0, spec, RowSampler(SamplingParams(), text, 8))
        drafting.observe(0, text, None)
        won = drafting.propose(drafting.plan({0: 9}, {0: text}, 8))
        assert (won[0].draft.tokens if won else None) == expected, p_min


NAMES = ("ngram-simple", *DRAFTERS)


def test_drafters_are_made_by_name() -> None:
    spec = SpecConfig(drafters=NAMES)
    assert tuple(make_ngram_drafter(name, spec).name for name in NAMES) == NAMES


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=48), SamplingParams(max_tokens=48, temperature=0.8, seed=5)]
)
def test_text_is_that_of_plain_decoding(params: SamplingParams) -> None:
    """Real rounds: every drafter proposes, learns what stood, and the text does not change."""
    model = tiny_models.target()
    spec = SpecConfig(drafters=NAMES, ngram_n=2, ngram_m=6)
    prompts = [[3, 4, 5, 6, 3, 4, 5, 6, 3, 4], [9, 9, 9, 8, 9, 9, 9], [1, 2]]
    plain = Engine(model).generate(prompts, params)
    for names in [*((name,) for name in NAMES), NAMES]:
        own = replace(spec, drafters=names)
        drafters = [make_ngram_drafter(name, own) for name in names]
        results = Engine(model, drafters=drafters, spec=own).generate(prompts, params)
        assert [r.tokens for r in results] == [r.tokens for r in plain], names
        assert not any(r.stats.notices for r in results)
