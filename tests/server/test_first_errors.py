"""The first faults of a client: a model that is not served, a base URL with a fault, a route of Ollama's that changes the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import mlxspec.demo
from tests.server.serving import Served

ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def test_another_models_name_is_answered_with_a_notice(demo: Served) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        for model in ("gpt-4o", "claude-sonnet-4"):
            status, found = demo.post(path, {**ASKED, "model": model})
            assert status == 200
            assert f"{model} is not served here; demo answers." in json.dumps(found)
        for named in ({"model": "demo"}, {}):
            if path == "/v1/chat/completions" or named:
                assert "not served" not in json.dumps(demo.post(path, {**ASKED, **named})[1])


def test_strict_models_refuse_another_name(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", folder)
    with Served("--model", str(folder), "--strict-models") as served:
        status, found = served.post("/v1/chat/completions", {**ASKED, "model": "gpt-4o"})
        assert (status, found["error"]["code"]) == (404, "model_not_found")
        assert served.post("/v1/chat/completions", {**ASKED, "model": "own"})[0] == 200
        assert served.post("/v1/chat/completions", ASKED)[0] == 200


@pytest.mark.parametrize("path", ["/v1/v1/chat/completions", "/v1/chat/completions/", "/chat/completions/"])
def test_base_urls_with_a_fault_are_understood(demo: Served, path: str) -> None:
    assert demo.post(path, ASKED)[0] == 200


def test_what_is_not_there_says_where_to_look(demo: Served) -> None:
    for path, words in {
        "/v1/nothing": "/openapi.json lists the routes",
        "/v2/chat/completions": "the base URL is http://",
        "/api/create": "`mlxspec pull`",
        "/api/delete": "`mlxspec rm`",
    }.items():
        status, found = demo.post(path, {})
        assert status == 404
        assert words in json.dumps(found), found


def test_an_empty_body_is_called_empty(demo: Served) -> None:
    assert b"The body is no valid JSON: it is empty." in demo.ask("POST", "/v1/chat/completions", raw=b"")[2]


def test_suffix_is_in_the_lists_of_drafters(demo: Served) -> None:
    status, found = demo.post("/v1/chat/completions", {**ASKED, "draft": "mpt"})
    assert status == 400
    assert "loaded are: suffix, ngram-simple, mtp" in found["error"]["message"]
    listed = json.loads(demo.ask("GET", "/v1/models")[2])
    assert listed["data"][0]["meta"]["drafters"] == ["suffix", "ngram-simple", "mtp"]
