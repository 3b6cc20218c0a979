"""`return_drafted`: every chunk of a stream says how much of its text was drafted, and asking for it changes nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

from mlxspec.engine.stats import RequestStats
from mlxspec.events import TokensEvent
from mlxspec.parsers.formats import ChatFormat
from mlxspec.parsers.pieces import CallStart, Content, Piece, Reasoning, merged
from mlxspec.server.answer_writer import beside
from mlxspec.server.job import Extras
from mlxspec.server.job_run import Delta, _pieces
from tests.server.serving import QUESTION, Served

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}]},
    "/v1/completions": {"prompt": "def main():"},
    "/v1/completion": {"prompt": "def main():"},
}


def text_of(route: str, chunk: dict[str, Any]) -> str:
    if route == "/v1/completion":
        return str(chunk["content"])
    choice = chunk["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def without_marks(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be the same with the marks and without: everything but ids and times."""
    varies = (
        "mlxspec",
        "timings",
        "id",
        "created",
        "tokens_predicted",
    )  # the last counts on while a chunk is on its way
    return [{k: v for k, v in chunk.items() if k not in varies} for chunk in chunks]


def is_marked(chunk: dict[str, Any]) -> bool:
    return "drafted_chars" in chunk.get("mlxspec", {})


@catches(
    "all chunks of an update are told what the first one was",
    "mlxspec.server.answer_writer:beside",
    lambda right: lambda self, update, place=0: right(self, update, 0),
)
def test_each_chunk_of_an_update_is_told_its_own() -> None:
    pieces = [Reasoning("abc"), Content("de"), Content("f")]
    update = Delta(choice=0, pieces=pieces, stats=RequestStats(), drafted=(2, 1, 0), drafter="mtp")
    said = [beside(Extras(drafted=True), update, place)["mlxspec"] for place in range(4)]
    assert [s["drafted_chars"] for s in said] == [2, 1, 0, 0]
    assert [s["drafter"] for s in said] == ["mtp", "mtp", None, None]


@pytest.mark.parametrize("route", ROUTES)
def test_chunks_say_what_was_drafted(demo: Served, route: str) -> None:
    body = {**ROUTES[route], "max_tokens": 60, "seed": 1, "policy": "fixed", "draft": "mtp"}
    asked, _, _ = demo.stream(route, {**body, "return_drafted": True})
    marked = [c for c in asked if is_marked(c)]
    texts = [c for c in asked if text_of(route, c) and not c.get("stop")]
    assert all(is_marked(c) for c in texts)
    for chunk in marked:
        said = chunk["mlxspec"]
        assert 0 <= said["drafted_chars"] <= len(text_of(route, chunk))
        assert said["drafter"] == ("mtp" if said["drafted_chars"] else None)
    assert sum(c["mlxspec"]["drafted_chars"] for c in marked) > 20
    quiet, _, _ = demo.stream(route, body)
    assert not [c for c in quiet if is_marked(c)]
    assert without_marks(quiet) == without_marks(asked)
    plain, _, _ = demo.stream(route, {**body, "return_drafted": True, "draft": "off"})
    assert {c["mlxspec"]["drafted_chars"] for c in plain if is_marked(c)} == {0}
    assert "".join(text_of(route, c) for c in plain) == "".join(text_of(route, c) for c in asked)


TEXTS = st.lists(
    st.sampled_from(["a", " ", "\n", "<", "<think>", "</think>", "think>", "é", "\U0001f600"]), max_size=30
)


@given(
    words=TEXTS,
    cuts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    thinks=st.booleans(),
)
def test_marks_do_not_change_the_pieces(words: list[str], cuts: list[tuple[int, int]], thinks: bool) -> None:
    """Whatever was drafted, the merged pieces are those of the whole text, and no piece has more marked characters than it has."""
    text = "".join(words)
    form = ChatFormat(thinking=("<think>", "</think>"))
    rendered = "<think>" if thinks else ""
    parser, plain = form.parser(rendered, ()), form.parser(rendered, ())
    found: list[Piece] = []
    place = 0
    for length, drafted in [*cuts, (len(text), 0)]:
        part = text[place : place + length]
        place += length
        event = TokensEvent(request=0, tokens=(), text=part, num_drafted_chars=min(drafted, len(part)))
        pieces, counts = _pieces(parser, event)
        assert len(pieces) == len(counts)
        for piece, count in zip(pieces, counts, strict=True):
            assert not isinstance(piece, CallStart)
            assert 0 <= count <= len(piece.text)
        found += pieces
    assert merged([*found, *parser.finish()]) == merged([*plain.push(text), *plain.finish()])


def test_marks_follow_the_text_through_a_parser() -> None:
    parser = ChatFormat(thinking=("<think>", "</think>")).parser("<think>", ())

    def push(drafted: str, own: str) -> tuple[list[Piece], list[int]]:
        event = TokensEvent(request=0, tokens=(), text=drafted + own, num_drafted_chars=len(drafted))
        return _pieces(parser, event)

    assert push("ab", "c") == ([Reasoning("abc")], [2])
    assert push("d</think>", "e") == ([Reasoning("d"), Content("e")], [1, 0])
    assert push("", "f") == ([Content("f")], [0])
    assert push("gh", "") == ([Content("gh")], [2])


@pytest.mark.parametrize(
    ("route", "more"),
    [
        ("/v1/messages", {"messages": ROUTES["/v1/chat/completions"]["messages"], "max_tokens": 60}),
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 60}),
        (
            "/api/chat",
            {
                "model": "demo",
                "messages": ROUTES["/v1/chat/completions"]["messages"],
                "options": {"num_predict": 60},
            },
        ),
    ],
)
def test_the_other_forms_say_it_too(demo: Served, route: str, more: dict[str, Any]) -> None:
    def drafted(**asked: Any) -> list[int]:
        fields = {"policy": "fixed", "draft": "mtp", **asked}
        if route == "/api/chat":
            body = {**more, "stream": True, "options": {**more["options"], **fields}}
        else:
            body = {**more, "stream": True, **fields}
        status, _, data = demo.ask("POST", route, body)
        assert status == 200, data
        return [int(found) for found in re.findall(rb'"drafted_chars": ?(\d+)', data)]

    assert sum(drafted(return_drafted=True)) > 10
    assert drafted() == []
    plain = drafted(return_drafted=True, draft="off")
    assert plain
    assert set(plain) == {0}
