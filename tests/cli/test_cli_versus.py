"""`mlxspec versus`: two servers, printed lines, one JSON, and bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cli_runs import Run, refused

from mlxspec.cli import launch, options
from mlxspec.cli.agents import ServedModel
from tests.bench.rivals import Answer, Handler, rival, saying

TEXT = ["The ", "answer ", "is ", "here", ".\n"] * 6


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The bodies that our server gets, for which another one stands in: it says TEXT, each piece after 2 ms."""
    with rival(saying(*TEXT, seconds=0.002)) as (url, asked):

        @contextmanager
        def started(args: Any) -> Iterator[ServedModel]:
            yield ServedModel(root=url, key="own", model="demo", context=None)

        monkeypatch.setattr(launch, "started", started)
        yield asked


def test_the_same_text_is_compared(run: Run, ours: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_RIVAL_KEY", "theirs")
    with rival(saying(*TEXT, tokens=400, seconds=0.002)) as (url, asked):
        ran = run("versus", url, "--ask", "why?", "--repeat", "1", "--longest", "30")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("prompt 1: other ")
    assert " · mlxspec demo " in ran.out
    assert " · same text · not settled (" in ran.out
    assert "other reports 400 tokens for a text of " in ran.out
    assert "Resident memory: other " in ran.out
    assert [body["key"] for body in (asked[0], ours[0])] == ["Bearer theirs", "Bearer own"]
    assert asked[0]["max_tokens"] == 30


def test_other_texts_give_no_ratio(run: Run, ours: list[Any]) -> None:
    with rival(saying("The ", "answer ", "was ", "here.")) as (url, _):
        ran = run("versus", url, "--ask", "why?", "--repeat", "1")
    assert ran.code == 1
    assert "the texts differ after 11 characters\n" in ran.out
    assert "Speeds of different texts are no ratio" in ran.out
    assert "x (" not in ran.out


def test_one_object_to_give_away(run: Run, ours: list[Any]) -> None:
    with rival(saying(*TEXT, tokens=30)) as (url, _):
        ran = run("versus", url, "--ask", "my secret?", "--repeat", "2", "--json")
    data = json.loads(ran.out)
    assert data["kind"] == "versus"
    assert data["rival"]["model"] == "other"
    assert data["rival"]["resident_bytes"] > 10 << 20
    assert [len(p["turns"]) for p in data["prompts"]] == [2]
    assert data["prompts"][0]["turns"][0]["rival"]["tokens_said"] == 30
    assert "secret" not in ran.out
    assert "answer" not in ran.out


def test_built_in_prompts_are_chat_code_and_an_edit(run: Run, ours: list[Any]) -> None:
    with rival(saying(*TEXT)) as (url, _):
        ran = run("versus", url, "--repeat", "1", "--json")
    assert [p["prompt"] for p in json.loads(ran.out)["prompts"]] == ["chat", "code", "edit"]


def test_a_model_that_is_named_need_not_be_listed(run: Run, ours: list[Any]) -> None:
    """mlx_lm.server lists nothing without a cache of the hub's."""
    with rival(saying(*TEXT), b"<html>") as (url, asked):
        assert run("versus", url, "--rival-model", "mine", "--ask", "why?", "--repeat", "1").code == 0
        assert asked[0]["model"] == "mine"
        refused(run("versus", url), "does not list its models")
    with rival(saying(*TEXT), b'{"data": []}') as (url, _):
        refused(run("versus", url), "lists no model; --rival-model names one")


def html(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(200, {"Content-Type": "text/html"})
    reply.wfile.write(b"<html></html>")


@pytest.mark.parametrize(
    ("answer", "more", "sentence"),
    [
        (html, (), "answers with text/html where a stream was requested"),
        (saying("a"), ("--ask", " "), "--ask is empty"),
        (saying("a"), ("--repeat", "0"), "--repeat must be"),
        (saying("a"), ("--longest", "0"), "--longest must be"),
    ],
)
def test_bad_input_is_one_sentence(
    answer: Answer, more: tuple[str, ...], sentence: str, run: Run, ours: list[Any]
) -> None:
    with rival(answer) as (url, _):
        ran = run("versus", url, *more)
    assert (ran.code, ran.out) == (2, "")
    last = ran.err.splitlines()[-1]
    assert last.startswith("mlxspec: error: ")
    assert sentence in last


def test_an_address_is_checked_before_anything_is_loaded(run: Run) -> None:
    refused(run("versus", "127.0.0.1:8080"), "is no address of a server")
    refused(
        run("versus", "http://example.org"), "is another machine, which would see the prompts; --any-host"
    )


@pytest.mark.slow
def test_two_servers_of_ours_give_the_same_texts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding on one side, drafting on the other."""
    with launch.started(options.parse(["versus", "http://127.0.0.1:1", "--draft", "off"])) as served:
        monkeypatch.setenv("MLXSPEC_RIVAL_KEY", "wrong")
        assert "status 401" in refused(run("versus", served.root))
        monkeypatch.setenv("MLXSPEC_RIVAL_KEY", served.key)
        ran = run("versus", served.root, "--longest", "48", "--json")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    assert all(p["same_text"] and len(p["turns"]) == 3 for p in data["prompts"])
    assert all(t["own"]["tokens"] == t["rival"]["tokens"] for p in data["prompts"] for t in p["turns"])
