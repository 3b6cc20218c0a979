"""Adapters that a server has beside one model: by a model's name, or by a request's `lora`."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.cli.main import main
from mlxspec.demo import TARGET
from tests.server.serving import LONG, Served, events

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from test_adapters import write_adapter

ASKED: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
PROMPT = "def read_lines(path):\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = tmp_path_factory.mktemp("adapters")
    for name, seed in (("one", 1), ("two", 2)):
        write_adapter(made / name, TARGET, seed=seed)
    wanted = {"bad": made / "absent", "one": made / "one", "two": made / "two"}
    args = [word for name, folder in wanted.items() for word in ("--model", f"{name}=demo+{folder}")]
    with Served(*args, "--model", "base=demo", "--policy", "fixed") as found:
        yield found


def text(served: Served, **more: Any) -> str:
    status, answer = served.post("/v1/completions", {"prompt": PROMPT, **ASKED, **more})
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def test_each_name_is_its_adapter_and_all_run_together(served: Served) -> None:
    names = ["one", "two", "base"]
    plain = {name: text(served, model=name, draft="off") for name in names}
    assert len(set(plain.values())) == 3
    found: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda n=name: found.setdefault(n, text(served, model=n))) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == plain
    assert served.metrics()["mlxspec_model_loads_total"] == 1
    _, _, listed = served.ask("GET", "/v1/models")
    assert {m["id"]: m["meta"]["loaded"] for m in json.loads(listed)["data"]} == dict.fromkeys(
        ["bad", *names], True
    )


def test_a_request_names_adapters_in_both_forms(served: Served) -> None:
    one, two, base = (text(served, model=name) for name in ("one", "two", "base"))
    assert text(served, model="base", lora="one") == one
    assert text(served, model="one", lora="two") == two
    assert text(served, model="one", lora=[]) == base
    assert text(served, model="base", lora=[{"id": 1, "scale": 1.0}]) == two
    assert text(served, model="base", lora=[{"id": 1}]) == two
    assert text(served, model="two", lora=[{"id": 1, "scale": 0}, {"id": 0, "scale": 1}]) == one
    status, _, told = served.ask("GET", "/lora-adapters?model=two")
    assert (status, json.loads(told)) == (
        200,
        [{"id": 0, "path": "one", "scale": 0}, {"id": 1, "path": "two", "scale": 1}],
    )
    chat = {"messages": [{"role": "user", "content": PROMPT}], **ASKED}
    answers = [
        served.post("/v1/chat/completions", {**chat, "model": "base", **m})[1] for m in ({}, {"lora": "one"})
    ]
    assert answers[0]["choices"][0]["message"] != answers[1]["choices"][0]["message"]


def test_scales_for_requests_that_do_not_say(served: Served) -> None:
    """As a client of llama.cpp sets them; an answer that runs keeps its own."""
    one, two, base = (text(served, model=name) for name in ("one", "two", "base"))
    both = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.25}]
    mixed = text(served, model="base", lora=both)
    assert mixed not in (one, two, base)
    right = text(served, model="base", max_tokens=120, draft="off")
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=LONG)
    body = {"prompt": PROMPT, **ASKED, "model": "base", "max_tokens": 120, "draft": "off", "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    running = connection.getresponse()
    begun = running.readline()
    set_scales(served, both)
    chunks, _, is_whole = events(begun + running.read())
    connection.close()
    assert is_whole
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == right
    try:
        assert text(served, model="base") == mixed
        assert text(served, model="base", lora=[]) == base
        assert (text(served, model="one"), text(served, model="base", lora="two")) == (one, two)
        _, _, told = served.ask("GET", "/lora-adapters?model=base")
        assert [a["scale"] for a in json.loads(told)] == [0.5, 0.25]
        for bad in ({}, [{"id": 2}], [{"scale": 1}], [{"id": 0, "scale": "x"}], [1]):
            status, answer = served.post("/lora-adapters?model=base", bad)
            assert status == 400, answer
            assert answer["error"]["message"].startswith(("The body must be a JSON list.", "body"))
        assert text(served, model="base") == mixed
    finally:
        set_scales(served, [])
    assert text(served, model="base") == base


def test_scales_of_one_key_are_not_those_of_another(served: Served) -> None:
    other = {"Authorization": "Bearer other"}
    set_scales(served, [{"id": 0, "scale": 0.5}])
    try:
        told = [json.loads(served.ask("GET", "/lora-adapters?model=base", headers=h)[2]) for h in ({}, other)]
        assert [[a["scale"] for a in each] for each in told] == [[0.5, 0], [0, 0]]
        body = {"prompt": PROMPT, **ASKED, "model": "base"}
        found = json.loads(served.ask("POST", "/v1/completions", body, headers=other)[2])
        assert found["choices"][0]["text"] == text(served, model="base", lora=[])
        assert found["choices"][0]["text"] != text(served, model="base")
    finally:
        set_scales(served, [])


def set_scales(served: Served, scales: list[dict[str, Any]]) -> None:
    assert served.post("/lora-adapters?model=base", scales) == (200, {"success": True})


def test_what_is_not_there_is_said(served: Served) -> None:
    served.wait_for(r"bad cannot be asked for\. There is no folder")
    status, answer = served.post("/v1/completions", {"prompt": PROMPT, **ASKED, "model": "bad"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "There is no folder" in answer["error"]["message"]
    for lora in ("three", [{"id": 2}], [{"id": -1}], [{"scale": 1.0}], "bad"):
        status, answer = served.post(
            "/v1/completions", {"prompt": PROMPT, **ASKED, "model": "base", "lora": lora}
        )
        assert (status, answer["error"]["param"].partition("[")[0]) == (400, "lora"), answer
    status, answer = served.post("/v1/embeddings", {"model": "one", "input": "x"})
    assert (status, answer["error"]["param"]) == (400, "model"), answer


def test_a_server_without_adapters_says_how_to_have_some(demo: Served) -> None:
    status, answer = demo.post("/v1/completions", {"prompt": PROMPT, **ASKED, "lora": [{"id": 0}]})
    assert status == 400
    assert "--model NAME=MODEL+ADAPTER" in answer["error"]["message"]
    assert demo.post("/v1/completions", {"prompt": PROMPT, **ASKED, "lora": []})[0] == 200


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "a=demo+"], "two sides of +"),
        (["--model", "a=+x"], "two sides of +"),
        (["--model", "a=demo+x", "--adapter", "y"], "--adapter"),
        (["--model", "a=demo+absent"], "There is no folder absent"),
    ],
)
def test_a_start_that_cannot_be(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *args]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert says in said
