"""Rows of one owner draft from one another's answers while these run; other owners' rows never do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters import lookup
from mlxspec.drafters.text_index import CONTEXT, PIECE, RunningText, TextIndex
from mlxspec.engine.engine import Engine
from tests.engine import equality

AHEAD, SIZE = 24, 40
PARAMS = SamplingParams(max_tokens=SIZE, ignore_eos=True)
SUFFIX = SpecConfig(drafters=("suffix",), policy="fixed")


def followed(owner: str) -> tuple[int, list[tuple[int, ...]]]:
    """The owner "a" asks; when its answer has AHEAD tokens `owner` asks the same. Accepted tokens of the second, and both texts."""
    engine: Engine = equality.engine()
    (prompt,) = equality.prompts(1, 3)
    first = engine.submit(prompt, PARAMS, spec=replace(SUFFIX, owner="a"))
    while first.num_generated < AHEAD:
        engine.step()
    second = engine.submit(prompt, PARAMS, spec=replace(SUFFIX, owner=owner))
    while not engine.is_idle:
        engine.step()
    texts = [tuple(r.history[len(prompt) :]) for r in (first, second)]
    assert engine.texts.num_running == 0
    engine.close()
    return second.stats.num_accepted, texts


@catches(
    "running answers are under no owner's name",
    "mlxspec.drafters.text_index:TextIndex.join",
    lambda right: lambda self, owner, *text: right(self, "", *text),
    case="a",
)
@catches(
    "a row is told of all running answers",
    "mlxspec.drafters.text_index:TextIndex.find",
    lambda right: (
        lambda self, owner, text, limit, own=None: right(
            self, next((o for o in self._running if o != owner), owner), text, limit, own
        )
    ),
    case="b",
)
@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_row_drafts_from_the_answer_its_owner_is_getting(owner: str) -> None:
    accepted, texts = followed(owner)
    assert texts[0] == texts[1] == tuple(equality.engine().generate(*equality.prompts(1, 3), PARAMS).tokens)
    assert (accepted >= AHEAD - 2 * 4) if owner == "a" else (accepted == 0)


def test_answers_that_have_ended_are_let_go() -> None:
    index = TextIndex(1 << 20)
    rows = [lookup.EarlierRow(index, "a", 2) for _ in range(3)]
    for row in rows:
        row.extend([1, 2])
        assert row.nbytes < 200  # a prompt alone is nobody's text
    for row in rows:
        row.extend(range(3, 40))
    assert index.num_running == 3
    rows[1].close()
    assert index.num_running == 2
    for row in (rows[0], rows[2]):
        row.close()
    assert index.num_running == 0


@given(
    st.lists(st.integers(0, 3), max_size=120),
    st.lists(st.integers(0, 3), min_size=4, max_size=60),
    st.integers(1, 20),
)
def test_what_is_drafted_followed_the_same_tokens(said: list[int], text: list[int], limit: int) -> None:
    """Only what the other row has said, and nothing of the row itself."""
    index = TextIndex(0)
    index.join("a", said, 0)
    own = index.join("a", text, 0)
    found = index.find("a", text, limit, own)
    ends = [i for i in range(4, len(said)) if said[i - 4 : i] == text[-4:]]
    assert (found is not None) == bool(ends)
    if found is not None:
        assert len(found.tokens) <= limit
        num = min(found.length, len(text), CONTEXT)
        assert any(
            said[max(0, i - num) : i] == text[-min(i, num) :]
            and said[i : i + len(found.tokens)][:1] == found.tokens[:1]
            for i in ends
        )


def test_the_end_of_a_running_answer_is_the_end_of_a_draft() -> None:
    text = RunningText([1, 2, 3, 4, 5, 6], 0)
    text.catch_up()
    assert text.following(CONTEXT + 4, 10) == [5, 6]


@catches(
    "a text that has grown by less than a piece is passed over",
    "mlxspec.drafters.text_index:RunningText.catch_up",
    lambda right: lambda self: (right(self), setattr(self, "_next", -(-self._next // PIECE) * PIECE))[0],
)
def test_a_text_is_indexed_whole_however_it_grows() -> None:
    said: list[int] = []
    text = RunningText(said, 0)
    for num in (3, 1, PIECE - 1, 7, PIECE, 2):
        said += range(len(said), len(said) + num)
        while text.end - CONTEXT < len(said):
            before = text.end
            text.catch_up()
            assert text.end > before
        assert text.following(CONTEXT, len(said)) == said


def test_a_text_is_indexed_only_for_others_and_in_pieces() -> None:
    index, said = TextIndex(0), list(range(3 * PIECE))
    other, own = index.join("a", said, 0), index.join("a", [], 0)
    before = other.nbytes
    index.find("a", said[:9], 4, other)
    assert other.nbytes == before
    assert index.find("a", said[PIECE : PIECE + 9], 4, own) is None
    found = index.find("a", said[PIECE : PIECE + 9], 4, own)
    assert found is not None
    assert found.tokens == said[PIECE + 9 : PIECE + 13]
