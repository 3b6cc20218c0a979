"""Conversations that agents send: several system messages, the server's own answers, and what this server has no use for. None ends in an
error that the next request of the conversation would get again."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from mlxspec.errors import ConfigError
from mlxspec.loading.template import ChatTemplate
from mlxspec.server.images import take_images
from mlxspec.server.job import ChatRequest
from mlxspec.server.messages import render_conversation, without_unseen_answers
from mlxspec.server.messages_api import MessagesRequest, OtherBlock
from mlxspec.server.responses_api import ResponsesRequest
from tests.server import readers
from tests.server.readers import normalized
from tests.server.serving import QUESTION, Served

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
_EACH = "{{ '<' + m.role + '>' + m.content }}"
_LOOP = "{% for m in messages %}BODY{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
_LATER = "{% if m.role == 'system' and not loop.first %}"
TEMPLATES = {
    "all": _EACH,
    "refuses": _LATER
    + "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + _EACH,
    "leaves out": _LATER + "{% else %}" + _EACH + "{% endif %}",
}


def shown(kind: str, messages: list[Any]) -> tuple[str, tuple[str, ...]]:
    template = ChatTemplate(_LOOP.replace("BODY", TEMPLATES[kind]), {})
    return render_conversation(template, normalized(messages), {})


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("roles", [("system", "system"), ("developer", "system"), ("system", "developer")])
def test_system_messages_at_the_beginning_are_one(kind: str, roles: tuple[str, str]) -> None:
    begun = [
        {"role": role, "content": text} for role, text in zip(roles, ("Be brief.", "Be kind."), strict=True)
    ]
    assert shown(kind, [*begun, USER]) == ("<system>Be brief.\n\nBe kind.<user>hi<assistant>", ())


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_later_system_message_is_at_its_place_in_every_template(kind: str) -> None:
    answer = {"role": "assistant", "content": "yes"}
    text, notices = shown(kind, [SYSTEM, USER, answer, {"role": "system", "content": "Hurry."}, USER])
    if kind == "all":
        assert (text, notices) == (
            "<system>Be brief.<user>hi<assistant>yes<system>Hurry.<user>hi<assistant>",
            (),
        )
    else:
        assert text == "<system>Be brief.<user>hi<assistant>yes<user>Hurry.\nhi<assistant>"
        assert len(notices) == 1


def test_what_a_template_refuses_for_another_reason_stays_an_error() -> None:
    template = ChatTemplate("{{ raise_exception('No.') }}", {})
    for messages in ([USER], [USER, SYSTEM]):
        with pytest.raises(ConfigError, match=r"No\."):
            render_conversation(template, messages, {})


# As of the templates of Gemma 4's first weeks: calls, results and text are one message, and nobody has the role tool.
_EARLY = """{% for m in messages %}<{{ m.role }}>
{%- for c in m.tool_calls or [] %}[call {{ c.function.name }}]{% endfor %}
{%- for r in m['tool_responses'] or [] %}[{{ r['name'] }} says {{ r['response'] }}]{% endfor %}
{%- set prev = 'tool' %}{{ m.content }}{% endfor %}"""


def test_results_of_tools_for_templates_that_read_them_beside_the_calls() -> None:
    calls = [{"id": n, "type": "function", "function": {"name": f"f{n}", "arguments": "{}"}} for n in "12"]
    results = [{"role": "tool", "tool_call_id": n, "content": f"r{n}"} for n in "12"]
    turns = [USER, {"role": "assistant", "content": "Look.", "tool_calls": calls}, *results]
    wanted = "<user>hi<assistant>Look.<assistant>[call f1][call f2][f1 says r1][f2 says r2]"
    for source, found in (
        (_EARLY, wanted),
        (_EARLY + "{% if messages[0].role == 'tool' %}{% endif %}", "<tool>r1"),
    ):
        text, _ = render_conversation(ChatTemplate(source, {}), normalized(turns), {})
        assert found in text
        assert ("<tool>" in text) == (source != _EARLY)
    answered = [*turns, {"role": "assistant", "content": "Done."}, USER]
    assert (
        render_conversation(ChatTemplate(_EARLY, {}), normalized(answered), {})[0] == wanted + "Done.<user>hi"
    )
    again = [*turns, {"role": "assistant", "content": "", "tool_calls": calls[:1]}, results[0]]
    assert render_conversation(ChatTemplate(_EARLY, {}), normalized(again), {})[0] == (
        wanted + "<assistant>[call f1][f1 says r1]"
    )


def test_a_tool_that_says_nothing() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1"},
    ]
    assert normalized(turns)[-1] == {"role": "tool", "content": "", "tool_call_id": "1"}
    assert normalized([*turns[:-1], {**turns[-1], "content": None}]) == normalized(turns)


EMPTY_ANSWERS: tuple[list[dict[str, Any]], ...] = (
    [], [{"type": "text", "text": ""}], [{"type": "thinking", "thinking": "", "signature": "s"}], [{"type": "redacted_thinking"}],
)  # fmt: skip


@pytest.mark.parametrize("content", [*EMPTY_ANSWERS, ""])
def test_an_empty_answer_is_taken_back(content: Any) -> None:
    answer = {"role": "assistant", "content": content}
    request = readers.messages({"max_tokens": 1, "messages": [USER, answer, USER]})
    assert list(request.messages) == [USER, {"role": "assistant", "content": ""}, USER]
    last = readers.messages({"max_tokens": 1, "messages": [USER, answer]})
    assert (list(last.messages), last.goes_on) == ([USER], None)


def test_answers_of_the_server_are_taken_back_by_every_form(thinker: Served) -> None:
    """Cut while they think, with and without the text of it."""
    asked = [{"role": "user", "content": QUESTION}]
    bodies: tuple[tuple[str, dict[str, Any], str, str], ...] = (
        ("/v1/messages", {"max_tokens": 3}, "messages", "content"),
        ("/v1/messages", {"max_tokens": 3, "thinking": {"type": "adaptive", "display": "omitted"}}, "messages", "content"),
        ("/v1/chat/completions", {"max_tokens": 3}, "messages", "choices"),
        ("/v1/responses", {"max_output_tokens": 3}, "input", "output"),
        ("/api/chat", {"options": {"num_predict": 3}, "stream": False}, "messages", "message"),
    )  # fmt: skip
    for path, body, name, found in bodies:
        status, answer = thinker.post(path, {**body, name: asked})
        assert status == 200, answer
        said = answer[found]
        turns = {
            "content": lambda said=said: [{"role": "assistant", "content": said}],
            "choices": lambda said=said: [said[0]["message"]],
            "output": lambda said=said: said,
            "message": lambda said=said: [said],
        }[found]()
        status, answer = thinker.post(path, {**body, name: [*asked, *turns, USER]})
        assert status == 200, (path, turns, answer)


def test_responses_with_nothing_but_thinking() -> None:
    items = [
        USER,
        {"type": "reasoning", "summary": [], "content": []},
        {"role": "assistant", "content": []},
        USER,
    ]
    messages = readers.responses({"input": items}).messages
    assert json.dumps([m["role"] for m in messages]) == '["user", "assistant", "user"]'


ANSWER = {"role": "assistant", "content": "a"}
_ALTERNATES = "{% if loop.index0 % 2 != (m.role == 'assistant') | int %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
_NOT_EMPTY = "{% if not m.content %}{{ raise_exception('A message is empty.') }}{% endif %}"
_THINKS = "{{ '<' + m.role + '>' }}{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')' }}{% endif %}{{ m.content }}"
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize("body", [_EACH, _ALTERNATES + _EACH, _NOT_EMPTY + _ALTERNATES + _EACH])
@pytest.mark.parametrize("empty", [THOUGHT, {"role": "assistant", "content": ""}])
def test_an_answer_of_only_thinking_is_no_empty_turn(body: str, empty: dict[str, Any]) -> None:
    """With templates that write no reasoning: it is left out, and turns still alternate."""
    template = ChatTemplate(_LOOP.replace("BODY", body), {})

    def read(*messages: dict[str, Any], goes_on: Any = None) -> tuple[ChatRequest, str]:
        asked = ChatRequest(messages=normalized(messages), goes_on=goes_on)
        request = without_unseen_answers(asked, template, {})
        return request, render_conversation(template, request.messages, {})[0]

    for turns, wanted in (
        ([USER, empty, USER], "<user>hi\nhi<assistant>"),
        (
            [USER, ANSWER, USER, empty, USER, ANSWER, USER],
            "<user>hi<assistant>a<user>hi\nhi<assistant>a<user>hi<assistant>",
        ),
        ([USER, empty, USER, empty, USER], "<user>hi\nhi\nhi<assistant>"),
    ):
        request, text = read(*turns)
        assert text == wanted
        (notice,) = request.notices
        assert "left out, because the chat template shows nothing of them" in notice
    request, text = read(USER, THOUGHT, goes_on="reasoning")  # where it was to go on, the answer begins again
    assert (request.goes_on, text) == (None, "<user>hi<assistant>")


def test_an_answer_of_only_thinking_stays_where_the_template_shows_it() -> None:
    template = ChatTemplate(_LOOP.replace("BODY", _THINKS), {})
    for turns, goes_on in (
        ([USER, THOUGHT, USER], None),
        ([USER, THOUGHT], "reasoning"),
        ([USER, ANSWER, USER], None),
    ):
        asked = ChatRequest(messages=normalized(turns), goes_on=goes_on)  # type: ignore[arg-type]
        assert without_unseen_answers(asked, template, {}) is asked


def test_references_to_items_are_left_out_with_what_answers_them(thinker: Served) -> None:
    ask = {"type": "message", "role": "user", "content": QUESTION}
    body: dict[str, Any] = {"max_output_tokens": 6, "enable_thinking": False, "policy": "fixed"}
    gone = {"type": "item_reference", "id": "msg_1"}
    result = {"type": "function_call_output", "call_id": "x", "output": "y"}
    status, answer = thinker.post("/v1/responses", {**body, "input": [ask, gone, result, USER]})
    assert status == 200, answer
    told = "\n".join(answer["mlxspec"]["notices"])
    assert "1 item of the type item_reference was left out" in told
    assert "1 item of the type function_call_output was left out" in told
    counted = thinker.post("/v1/responses/input_tokens", {**body, "input": [ask, {"id": "msg_1"}, USER]})[1]
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]


def test_items_that_cannot_be_used_are_left_out_with_a_notice() -> None:
    kinds = (
        "compaction_summary",
        "web_search_call",
        "computer_call_output",
        "local_shell_call",
        "mcp_call",
        "an_item_of_next_month",
    )
    items = [
        {"type": kind, "id": "x", "action": {"type": "search"}}
        for kind in kinds
        for _ in range(1 + (kind == "compaction_summary"))
    ]
    body = {"input": [USER, *items, ANSWER, USER]}
    assert readers.notices(ResponsesRequest, body) == []
    request = readers.responses(body)
    assert list(request.messages) == [USER, ANSWER, USER]
    told = "\n".join(request.notices)
    assert "2 items of the type compaction_summary were left out" in told
    for kind in {*kinds} - {"compaction_summary"}:
        assert f"1 item of the type {kind} was left out" in told


def test_blocks_that_cannot_be_used_are_left_out_with_a_notice() -> None:
    kinds = get_args(OtherBlock.model_fields["type"].annotation)
    blocks = [{"type": kind, "id": "x", "content": [{"type": "y"}]} for kind in kinds]
    body = {
        "max_tokens": 1,
        "messages": [USER, {"role": "assistant", "content": [*blocks, {"type": "text", "text": "a"}]}, USER],
    }
    assert readers.notices(MessagesRequest, body) == []
    request = readers.messages(body)
    assert list(request.messages) == [USER, ANSWER, USER]
    assert len(request.notices) == len(kinds)


def test_a_compaction_stands_in_place_of_what_is_before_it() -> None:
    summary = {"type": "compaction", "content": "So far: hi.", "encrypted_content": "x"}
    turns = [USER, {"role": "assistant", "content": [summary, {"type": "text", "text": "a"}]}, USER]
    body = {"max_tokens": 1, "messages": turns}
    assert readers.notices(MessagesRequest, body) == []
    request = readers.messages(body)
    assert list(request.messages) == [{"role": "user", "content": "So far: hi."}, ANSWER, USER]
    assert len(request.notices) == 1
    failed = readers.messages(
        {**body, "messages": [USER, {"role": "assistant", "content": [{"type": "compaction"}]}, USER]}
    )
    assert [m["content"] for m in failed.messages] == ["hi", "", "hi"]


INLINED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "tool_reference", "tool_name": "f"}, "The tool f can be used."),
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Text."}, "title": "T"}, "T\nText."),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}, "context": "C"}, "C\na"),
    ({"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "a"}]}, "t\ns\na"),
)  # fmt: skip


@pytest.mark.parametrize(("block", "text"), INLINED)
def test_blocks_that_are_given_as_text(block: dict[str, Any], text: str) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]}
    contents = [[USER, use, result]]
    if block["type"] != "tool_reference":
        contents.append([{"role": "user", "content": [block]}])
    for messages in contents:
        body: dict[str, Any] = {"max_tokens": 1, "messages": messages}
        take_images(body, [])
        assert readers.notices(MessagesRequest, body) == []
        request = readers.messages(body)
        assert request.messages[-1]["content"] == text
        assert [block["type"] in n for n in request.notices] == [True]


def test_more_than_128_tools() -> None:
    tools = [{"name": f"t{i}", "input_schema": {"type": "object"}} for i in range(300)]
    body = {"max_tokens": 1, "messages": [USER], "tools": tools}
    assert readers.notices(MessagesRequest, body) == []
    assert len(readers.messages(body).tools) == 300


def test_tools_of_a_namespace_are_called_by_the_names_the_client_knows(thinker: Served) -> None:
    inner = {
        "type": "function",
        "name": "search",
        "parameters": {"type": "object", "properties": {"q": {"enum": ["a"]}}, "required": ["q"]},
    }
    space = {"type": "namespace", "name": "mcp__docs", "description": "d", "tools": [inner]}
    body = {"input": "hi", "tools": [space], "tool_choice": {"type": "function", "name": "search"}, "enable_thinking": False,
            "max_output_tokens": 90}  # fmt: skip
    assert readers.notices(ResponsesRequest, body) == []
    status, answer = thinker.post("/v1/responses", body)
    assert status == 200, answer
    (call,) = answer["output"]
    assert (call["name"], call["namespace"], json.loads(call["arguments"])) == (
        "search",
        "mcp__docs",
        {"q": "a"},
    )
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    messages = readers.responses({"input": [USER, call, result], "tools": [space]}).messages
    assert messages[1]["tool_calls"][0]["function"]["name"] == "mcp__docs__search"
