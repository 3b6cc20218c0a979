"""ngram-simple, ngram-map-k and ngram-map-k4v: what llama.cpp publishes of them, and drafts against a search through the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.drafts import Drafts
from mlxspec.drafters.lookup import MAX_VOTES, NgramRow, ngram_lookup
from mlxspec.errors import ConfigError
from mlxspec.policy.fixed import Fixed
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

pytestmark = pytest.mark.smoke

NAMES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
FEW = st.integers(0, 2)  # so few tokens that everything repeats
IMAGE = -(2**61)
TEXT = st.lists(st.sampled_from([0, 1, 2, 0, 1, 2, 0, 1, 2, IMAGE]), max_size=40)
A, B, C = [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]
KEY = [1, 2, 3]


def text_of(*values: list[int]) -> list[int]:
    """KEY followed by each value in turn, a token of its own behind each, and KEY at the end."""
    tokens: list[int] = []
    for i, value in enumerate(values):
        tokens += [*KEY, *value, 90 + i]
    return tokens + KEY


def row(name: str, text: Sequence[int], *, n: int = 3, m: int = 4, min_hits: int = 1) -> NgramRow:
    made = NgramRow(name, n, m, min_hits)
    made.extend(text)
    return made


def drafted(name: str, text: Sequence[int], **settings: int) -> list[int]:
    return row(name, text, **settings).draft(20).tokens  # type: ignore[return-value]


# ---- as they are published


def test_simple_searches_the_history_for_the_last_n_tokens_and_drafts_the_m_that_followed() -> None:
    history = [*range(40), 99, *range(10, 22)]
    assert drafted("ngram-simple", history, n=12, m=8) == [*range(22, 30)]
    assert drafted("ngram-simple", history, n=12, m=48)[:18] == [*range(22, 40)]
    assert drafted("ngram-simple", history, n=13, m=8) == [], "13 tokens have not stood before"
    assert drafted("ngram-simple", text_of(A, B)) == B, "the last place counts"


def test_map_k_keeps_how_many_tokens_were_accepted_for_each_key() -> None:
    made = row("ngram-map-k", text_of(A))
    assert made.draft(4).tokens == A
    made.extend([10, 11, 99, 98, *KEY])
    assert made.draft(4).tokens == [10, 11]
    simple = row("ngram-simple", text_of(A))
    simple.draft(4)
    simple.extend([10, 11, 99, 98, *KEY])
    assert simple.draft(4).tokens == [10, 11, 99, 98], "ngram-simple learns nothing"


def test_map_k4v_drafts_a_value_that_is_preferred() -> None:
    draft = row("ngram-map-k4v", text_of(A, A, B)).draft(4)
    assert draft.tokens == A
    assert draft.confidences == [2.5 / 4, 2.5 / 3, 2.5 / 3, 2.5 / 3]
    assert drafted("ngram-map-k", text_of(A, A, B)) == B, "one value a key: the latest"


@catches(
    "min_hits is not looked at",
    "mlxspec.drafters.lookup:GrowingText.earlier",
    lambda right: lambda self, most: right(self, most) * 9,
    case="3-expected2",
)
@pytest.mark.parametrize(("min_hits", "expected"), [(1, A), (2, A), (3, []), (500, [])])
@pytest.mark.parametrize("name", ["ngram-map-k", "ngram-map-k4v"])
def test_min_hits_is_how_often_a_key_must_have_stood(name: str, min_hits: int, expected: list[int]) -> None:
    assert drafted(name, text_of(A, A), min_hits=min_hits) == expected


def test_drafters_are_made_by_name() -> None:
    spec = SpecConfig(drafters=("ngram-mod", *NAMES[1:]))
    assert spec.drafters == ("suffix", *NAMES)
    assert tuple(ngram_lookup(name, 3, 16).name for name in NAMES) == NAMES
    with pytest.raises(ConfigError, match="ngram-cache cannot be made"):
        ngram_lookup("ngram-cache", 3, 16)


# ---- against a search


def ends(text: Sequence[int], n: int) -> list[int]:
    """Where the last n tokens have stood before, latest first: indices behind them. No n-gram holds an image token."""
    tail = text[len(text) - n :]
    if len(text) <= n or min(tail) < 0:
        return []
    return [e for e in range(len(text) - 1, n - 1, -1) if text[e - n : e] == tail]


def followed(text: Sequence[int], start: int, length: int) -> list[int]:
    """What follows `start`, the text being continued by what follows, up to an image token."""
    longer = list(text)
    for i in range(length):
        if longer[start + i] < 0:
            break
        longer.append(longer[start + i])
    return longer[len(text) :]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    pieces=st.lists(TEXT, max_size=4), n=st.integers(1, 4), m=st.integers(1, 12), min_hits=st.integers(1, 3)
)
def test_simple_and_map_k_draft_what_a_search_finds(
    pieces: list[list[int]], n: int, m: int, min_hits: int
) -> None:
    """In whatever pieces the text comes."""
    simple, once = NgramRow("ngram-simple", n, m), NgramRow("ngram-simple", n, m, min_hits)
    text: list[int] = []
    for piece in pieces:
        text += piece
        simple.extend(piece)
        once.extend(piece)
        found = ends(text, n)
        wanted = followed(text, found[0], m) if found else []
        draft = simple.draft(20)
        assert (draft.tokens, draft.length) == (wanted, len(wanted))
        assert once.draft(20).tokens == wanted, "min_hits is the maps'"
        assert simple.may_draft() == bool(found)
        if wanted:
            agree = 0
            while (
                agree < min(found[0] - n, len(text) - n)
                and text[found[0] - n - 1 - agree] == text[-n - 1 - agree] >= 0
            ):
                agree += 1
            assert draft.backing == min(agree, 40)
    found = ends(text, n)
    wanted = followed(text, found[0], m) if len(found) >= min_hits else []
    assert drafted("ngram-map-k", text, n=n, m=m, min_hits=min_hits) == wanted


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.lists(FEW, max_size=40), n=st.integers(1, 3), m=st.integers(1, 9), min_hits=st.integers(1, 3))
def test_map_k4v_drafts_what_two_thirds_of_a_search_agree_on(
    text: list[int], n: int, m: int, min_hits: int
) -> None:
    found = ends(text, n)
    tokens: list[int] = []
    voters = found[:MAX_VOTES] if len(found) >= min_hits else []
    while voters and len(tokens) < m:
        longer = text + tokens
        said = [longer[e + len(tokens)] for e in voters]
        best = max(said, key=said.count)
        if said.count(best) < 2 * sum(t != best for t in said):
            break
        voters = [e for e, t in zip(voters, said, strict=True) if t == best]
        tokens.append(best)
    assert drafted("ngram-map-k4v", text, n=n, m=m, min_hits=min_hits) == tokens


@catches(
    "a match near the end of the text ends the draft",
    "mlxspec.drafters.text_index:IndexedText.following",
    lambda right: lambda self, place, limit: right(self, place, min(limit, self.end - place)),
    case="simple",
)
@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_pattern_is_drafted_at_full_length(name: str) -> None:
    assert drafted(name, [1, 2, 3, 4] * 3, m=9) == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert drafted(name, [5, 5, 5, 5]) == [5, 5, 5, 5], "an n-gram that ended one token ago counts"


@pytest.mark.parametrize("name", NAMES)
def test_image_tokens_are_like_no_token(name: str) -> None:
    """They come in no draft and in no n-gram, however alike."""
    image = [IMAGE, IMAGE + 1]
    assert drafted(name, [1, 2, 3, 7, *image, 8, 1, 2, 3], m=9) == [7]
    assert drafted(name, [1, 2, *image, 5, 1, 2, *image]) == []
    assert drafted(name, [1, *image, 2, 3, 4, 1, *image, 2, 3]) == []


# ---- lengths that are learned


def test_a_key_is_never_silenced_and_grows_back() -> None:
    made = row("ngram-map-k", text_of(A), m=8)
    made.draft(4)
    other = [99, 98, 97, 96, 95, 94, 93, 92, *KEY]  # nothing of A was right
    made.extend(other)
    lengths = []
    for _ in range(5):
        lengths.append(made.draft(8).length)
        made.extend(other)
    assert lengths == [1, 2, 4, 8, 8]


def test_keys_are_judged_apart() -> None:
    made = row("ngram-map-k", [1, 2, 3, 10, 11, 4, 5, 6, 20, 21, 7, 1, 2, 3], m=2)
    made.draft(2)
    made.extend([99, 4, 5, 6])
    assert made.draft(2).tokens == [20, 21]


def test_values_are_judged_apart() -> None:
    made = row("ngram-map-k4v", text_of(A, A, A))
    assert made.draft(4).tokens == A
    made.extend([10, 99, 98, *KEY])
    assert made.draft(4).tokens == [10], "of A one token was right"
    for i in range(9):
        made.extend([*B, 80 + i, *KEY])
    assert made.draft(4).tokens == B, "B never failed"


def test_a_proposal_is_followed_to_its_end_whoever_drafted_the_text() -> None:
    """It came token by token in rounds of others, and was proposed anew meanwhile."""
    made = row("ngram-map-k", text_of(A))
    made.draft(4)
    for token in [10, 11, 99]:
        made.draft(4)
        made.extend([token])
    made.extend([98, *KEY])
    assert made.draft(4).length == 2


def test_a_short_draft_that_was_right_says_nothing_against_a_longer_one() -> None:
    made = row("ngram-map-k", text_of([*A, *B]), m=8)
    made.draft(8)
    made.extend([*A, 20, 99, *KEY])
    assert made.draft(8).length == 5
    made.extend([*A, 20, 98, *KEY])
    assert made.draft(2).length == 2
    made.extend([10, 11, 97, 96, *KEY])
    assert made.draft(8).length == 8, "five of five were right, and doubled"


# ---- votes


def test_a_value_must_be_twice_as_frequent_as_all_others() -> None:
    assert drafted("ngram-map-k4v", text_of(A, B)) == []
    assert drafted("ngram-map-k4v", text_of(A, A, B, C)) == []
    assert drafted("ngram-map-k4v", text_of(A, A, A, A, B, C)) == A
    assert drafted("ngram-map-k4v", text_of(A, A, A, B, B)) == []


def test_a_fifth_value_counts_against_the_winner() -> None:
    others = [[40 + i, 1, 1, 1] for i in range(5)]
    assert drafted("ngram-map-k4v", text_of(*[A] * 9, *others)) == []
    assert drafted("ngram-map-k4v", text_of(*[A] * 10, *others)) == A


def test_a_single_place_counts_once() -> None:
    assert row("ngram-map-k4v", text_of(A)).draft(4).confidences == [0.75] * 4


def test_the_draft_ends_where_they_part() -> None:
    draft = row("ngram-map-k4v", text_of([10, 11, 12], [10, 11, 99])).draft(4)
    assert draft.tokens == [10, 11]
    assert draft.confidences == [2.5 / 3] * 2


def test_old_places_lose_their_vote() -> None:
    assert drafted("ngram-map-k4v", text_of(*[A] * 20, *[B] * MAX_VOTES)) == B


# ---- rows and rounds


def proposed(drafter: Drafter, rows: Sequence[int], limit: int = 6) -> list[Draft]:
    asks = [Ask(number, [], limit, RowSampler(SamplingParams(), [], 8)) for number in rows]
    return drafter.draft(asks, BatchSampler([a.sampler for a in asks], 8))


@pytest.mark.parametrize("name", NAMES)
def test_rows_come_and_go_and_know_nothing_of_each_other(name: str) -> None:
    drafter, text = ngram_lookup(name, 2, 6), [1, 2, 3, 4, 5, 6, 7, 0]
    assert drafter.nbytes == 0
    for number in (0, 1, 2):
        drafter.begin(number)
    for token in text * 3:
        drafter.hear(0, [token], None)
        drafter.hear(1, [7], None)
    drafter.hear(2, text[:4], None)
    assert [d.tokens for d in proposed(drafter, (0, 1, 2))] == [text[:6], [7] * 6, []]
    assert [d.length for limit in (1, 6, 50) for d in proposed(drafter, [0], limit)] == [1, 6, 6]
    assert [drafter.may_draft(number) for number in (0, 1, 2)] == [True, True, False]
    drafter.forget(0)
    drafter.hear(2, text[4:], None)
    assert not proposed(drafter, [2])[0].length, "what a closed row saw is gone"
    assert drafter.nbytes > 0
    for number in (0, 1, 2, 99):
        drafter.forget(number)
    assert drafter.nbytes == 0


def test_p_min_trims_what_knows_probabilities() -> None:
    """Host drafts with confidences pass through the row's limits."""
    text = [1, 2, 3] * 2 + [1, 2, 4, 5] + [1, 2, 3, 1]
    for p_min, expected in ((0.0, [2, 3, 1, 2]), (0.8, [2]), (0.95, None)):
        drafts = Drafts([ngram_lookup("ngram-map-k4v", 1, 4)], 8)
        spec = SpecConfig(drafters=("ngram-map-k4v",), ngram_m=4, p_min=p_min)
        drafts.begin(0, text, spec, RowSampler(SamplingParams(), text, 8), Fixed())
        drafts.hear(0, text, None)
        draft = drafts.propose({0: 9}).draft(0)
        assert (draft.tokens[: draft.width] or None) == expected, p_min
