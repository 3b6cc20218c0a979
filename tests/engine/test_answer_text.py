"""Text as it becomes certain, against cutting the whole text at the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches

from mlxspec.engine.text import AnswerText

pytestmark = pytest.mark.smoke


class Pieces:
    """A stream whose tokens are indices into a list of strings; the rest comes at the end."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces, self._rest = pieces, rest

    def push(self, token: int) -> str:
        return self._pieces[token]

    def rest(self, *, cut: bool = False) -> str:
        rest, self._rest = self._rest, ""
        return rest


letters = st.text("ab", max_size=4)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def cut(text: str, stop: list[str]) -> tuple[str, bool]:
    """What stands before the stop string that is complete first; of those complete at once, before the one that begins first."""
    for end in range(1, len(text) + 1):
        begun = [end - len(s) for s in stop if text[:end].endswith(s)]
        if begun:
            return text[: min(begun)], True
    return text, False


@settings(max_examples=400, deadline=None, derandomize=True)
@given(pieces=st.lists(letters, max_size=8), rest=letters, stop=stops)
def test_text_ends_at_the_first_stop_string_and_nothing_is_taken_back(
    pieces: list[str], rest: str, stop: list[str]
) -> None:
    answer, given_out, stopped = AnswerText(Pieces(pieces, rest), stop), "", False
    for token in range(len(pieces)):
        new, stopped = answer.push(token)
        given_out += new
        if stopped:
            break
        # what is held back could still become a stop string, and only that is
        held = "".join(pieces[: token + 1])[len(given_out) :]
        assert held == "" or any(s.startswith(held) for s in stop)
    if not stopped:
        new, stopped = answer.finish()
        given_out += new
    whole = "".join(pieces) + rest
    assert given_out == answer.text
    assert stopped == any(s in whole for s in stop)
    if not stopped:
        assert given_out == whole
    else:
        assert whole.startswith(given_out)
        assert not any(s in given_out for s in stop)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text("ab", max_size=12), stop=stops)
def test_character_by_character_the_stop_string_complete_first_wins(text: str, stop: list[str]) -> None:
    answer = AnswerText(Pieces(list(text)), stop)
    for token in range(len(text)):
        if answer.push(token)[1]:
            break
    answer.finish()
    assert answer.text == cut(text, stop)[0]


CALL = '<call>\n{"a": "one stop two"}</call>'


@catches(
    "a stop string acts inside a call",
    "mlxspec.engine.text:AnswerText._skip",
    lambda right: lambda self, stop: "",
    case="and stop it",
)
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{CALL} and stop it", f"{CALL} and "),
        (f"a{CALL}{CALL}stop", f"a{CALL}{CALL}"),
        (CALL, CALL),
        (CALL[:-4], CALL[:-4]),
        (f"stop {CALL}", ""),
        ("a <call> tag, stop", "a <call> tag, "),
        ("<call>  <call>\n{stop", "<call>  <call>\n{stop"),
        ("<call><call", "<call><call"),
        ("<ca stop", "<ca "),
    ],
)
def test_no_stop_string_is_looked_for_between_these_texts(text: str, wanted: str) -> None:
    for pieces in ([text], list(text), [text[:9], text[9:]]):
        answer = AnswerText(Pieces(pieces), ["stop"], outside=(("<call>", "{", "</call>"),))
        given_out, stopped = "", False
        for token in range(len(pieces)):
            new, stopped = answer.push(token)
            given_out += new
            if stopped:
                break
        if not stopped:
            given_out += answer.finish()[0]
        assert given_out == answer.text == wanted
        assert stopped is (wanted != text)
    answer = AnswerText(Pieces(["<call>{stop"]), ["<call>"], outside=(("<call>", "{", "</call>"),))
    assert answer.push(0) == ("", True)


def test_without_a_stream_there_is_no_text() -> None:
    answer = AnswerText(None, ())
    assert answer.push(3) == ("", False)
    assert answer.finish() == ("", False)
