"""A GET changes nothing: any page of the web can send one, with an image or a link, and no Origin comes with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxspec.server.routes import PAGE_FOLDER, ROUTES
from tests.server.serving import QUESTION, Served

GETS = [path for route in ROUTES if route.method == "GET" for path in route.paths]
IMAGE = {
    "Referer": "https://evil.example/",
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "no-cors",
    "Sec-Fetch-Dest": "image",
}
LOADS = """
from mlxspec.server.app import Server
async def props(self, asked, reply):
    name = self.models.resolve(asked.request.query_params.get("model"))
    async with self.models.use(name):
        await reply.json({})
Server._props = props
"""
LETS_IN = """
from mlxspec.server.http import security
security._is_page = lambda path: True
"""


def filled(path: str) -> str:
    return path.replace("{name:path}", "second").replace("{name}", "page.js" if "page" in path else "second")


@pytest.mark.parametrize(
    "fault",
    [
        "",
        *(pytest.param(f, marks=pytest.mark.slow, id=n) for n, f in (("loads", LOADS), ("lets in", LETS_IN))),
    ],
)
def test_no_get_changes_anything(fault: str) -> None:
    with Served("--model", "first=demo", "--model", "second=demo-gemma", plant=fault) as served:
        try:
            walk(served)
        except AssertionError:
            assert fault
        else:
            assert not fault


def known(served: Served, query: str = "") -> dict[str, Any]:
    """What three routes say of the first model, without the width that an idle server may find at any moment."""
    paths = ("/props", "/tokenizer_info", "/lora-adapters")
    told = {p: json.loads(served.ask("GET", p + query)[2]) for p in paths}
    told["/props"].pop("exact_width")
    return told


def walk(served: Served) -> None:
    assert served.metrics()["mlxspec_model_loads_total"] == 1
    for path in GETS:
        for model in ("second", "first"):
            status, _, told = served.ask("GET", f"{filled(path)}?model={model}")
            assert status in ((200, 404) if model == "first" else (200, 404, 400)), (path, told)
            if status == 400:
                error = json.loads(told)["error"]
                assert error["code"] == "model_not_loaded"
                assert "second is not in memory" in error["message"]
        status, _, _ = served.ask("GET", f"{filled(path)}?model=second", headers=IMAGE)
        is_page = path == "/" or path.startswith(PAGE_FOLDER)
        assert status in (200, 404) if is_page else status == 403, path
    assert served.metrics()["mlxspec_model_loads_total"] == 1
    assert [m["meta"]["loaded"] for m in json.loads(served.ask("GET", "/v1/models")[2])["data"]] == [
        True,
        False,
    ]
    told = known(served)
    served.chat(QUESTION, model="second", max_tokens=1)
    assert served.metrics()["mlxspec_model_loads_total"] == 2
    assert known(served, "?model=first") == told, "what is known stays known without the weights"
    assert json.loads(served.ask("GET", "/props?model=second")[2])["model_alias"] == "second"
    assert served.metrics()["mlxspec_model_loads_total"] == 2


def test_a_page_of_another_site_starts_nothing(demo: Served) -> None:
    """A POST with a script's headers is refused like an image, whatever it says that its body is."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path in ("/v1/chat/completions", "/api/chat", "/lora-adapters"):
        status, _, told = demo.ask("POST", path, body, headers=IMAGE)
        assert status == 403, told
    same = {**IMAGE, "Sec-Fetch-Site": "same-origin"}
    assert demo.ask("GET", "/props", headers=same)[0] == 200
    allowed = {**IMAGE, "Origin": "http://localhost:3000"}
    assert demo.ask("GET", "/props", headers=allowed)[0] == 200
