"""A call that a limit cuts, or that holds a stop string, in every API: nobody can run what was not said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.api_forms import FORMS, Scenario, streamed
from tests.server.serving import Served

COMMAND = "rm -rf /srv/build/cache/old"
CALLS = {
    "json": "<tool_call>\n"
    + json.dumps({"name": "bash", "arguments": {"command": COMMAND}})
    + "\n</tool_call>",
    "tags": f"<tool_call>\n<function=bash>\n<parameter=command>\n{COMMAND}\n</parameter>\n</function>\n</tool_call>",
}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}],
    "messages": [{"name": "bash", "input_schema": SCHEMA}],
    "responses": [{"type": "function", "name": "bash", "parameters": SCHEMA}],
    "ollama": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}],
}


def bodies(form: Any, call: str, stop: tuple[str, ...], num: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request whose answer is this text, whole and as a stream."""
    scenario = Scenario(question="x", max_tokens=num, stop=stop, draft="off")
    found = []
    for body in (form.body(scenario) | {"stream": False}, form.stream_body(scenario)):
        body["tools"] = TOOLS[form.name]
        body.get("options", body)["lark"] = f"start: {json.dumps(call)}"
        found.append(body)
    return found[0], found[1]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("notation", CALLS)
def test_a_cut_call_is_none(demo: Served, form: Any, notation: str) -> None:
    for num in (30, 34):
        body, stream = bodies(form, CALLS[notation], (), num)
        status, answer = demo.post(form.path, body)
        assert status == 200, answer
        whole = form.whole(answer)
        assert (whole.calls, whole.reason, whole.text) == ((), "length", "")
        (notice,) = answer["mlxspec"]["notices"]
        assert notice.startswith("a call was cut")
        assert "rm -" in notice
        said = streamed(form, demo.ask("POST", form.path, stream)[2])
        assert (said.calls, said.reason, said.text) == ((), "length", "")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("notation", CALLS)
def test_stop_strings_do_not_act_inside_a_call(demo: Served, form: Any, notation: str) -> None:
    body, stream = bodies(form, CALLS[notation], ("/build", "</tool_call>"), 90)
    status, answer = demo.post(form.path, body)
    assert status == 200, answer
    for said in (form.whole(answer), streamed(form, demo.ask("POST", form.path, stream)[2])):
        assert (said.calls, said.reason) == ((("bash", {"command": COMMAND}),), "tool_calls")


def test_a_stream_shows_signs_while_a_call_is_written() -> None:
    """The client hears of the server, and of the call's size, before the call is closed; no argument comes before that."""
    call = CALLS["json"].replace(COMMAND, "x" * 800)
    plant = "import mlxspec.server.settings as s; s.ServerConfig.__init__.__kwdefaults__['keepalive_seconds'] = 0.01"
    with Served(plant=plant) as served:
        for form in FORMS:
            _, stream = bodies(form, call, (), 900)
            data = served.ask("POST", form.path, stream)[2]
            signs = {
                "chat": b": a call, ", "responses": b": a call, ", "messages": b'"type": "ping"', "ollama": b'"content": ""}, "done": false'
            }  # fmt: skip
            assert data.count(signs[form.name]) >= 2, data[:2000]
            assert streamed(form, data).calls == (("bash", {"command": "x" * 800}),)
