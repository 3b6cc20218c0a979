"""An answer that must be a call is generated as the chat template writes it when it is an earlier turn."""

from __future__ import annotations

from typing import Any

import pytest

from mlxspec.loading.template import ChatTemplate
from mlxspec.parsers.formats import ChatFormat, detect
from mlxspec.server.messages import call_lead
from tests.server.serving import QUESTION, Served

_TURNS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}ANSWER{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
OPENING{% endif %}{# tools #}"""
_CALL = "<tool_call>\n{{ m.tool_calls[0].function.name }}\n</tool_call>"


def lead(answer: str, opening: str = "", **options: Any) -> str:
    source = _TURNS.replace("ANSWER", answer + _CALL).replace("OPENING", opening)
    return call_lead(ChatTemplate(source, {}), detect(source), options)


@pytest.mark.parametrize(
    ("answer", "opening", "wanted"),
    [
        ("{{ m.content }}", "", ""),
        ("{{ m.content }}\n", "", "\n"),
        ("{{ m.content }}{% if m.content %}\n{% endif %}", "", ""),
        ("<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}", "<think>\n", "\n\n"),
        ("<think>\n\n</think>\n\n{{ m.content }}", "<think>\n\n</think>\n\n", ""),
        # no white space, an earlier turn without its opening, a template that refuses an answer
        ("Calling: ", "", ""),
        ("\n{{ m.content }}", "<think>\n\n</think>\n\n", ""),
        ("{{ raise_exception('no') }}", "", ""),
    ],
)
def test_what_the_template_writes_before_a_call(answer: str, opening: str, wanted: str) -> None:
    assert lead(answer, opening) == wanted


def test_without_calls_there_is_none() -> None:
    assert call_lead(ChatTemplate("{{ messages[0].content }}", {}), ChatFormat(), {}) == ""


def test_the_next_prompt_begins_with_what_was_generated(demo: Served) -> None:
    """Rendered with its result, the call is a text that has the first prompt and the answer's tokens as its beginning."""
    asked = [{"role": "user", "content": QUESTION}]
    parameters = {"type": "object", "properties": {"name": {"enum": ["join"]}}, "required": ["name"]}
    function = {"name": "look_up", "parameters": parameters}
    tools = {"tools": [{"type": "function", "function": function}], "enable_thinking": False}
    status, first = demo.post(
        "/v1/chat/completions",
        {
            "messages": asked,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 80,
            **tools,
        },
    )
    assert status == 200, first
    message = first["choices"][0]["message"]
    assert not message["content"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3 uses, in shutil, glob and pathlib."}
    status, second = demo.post(
        "/v1/chat/completions", {"messages": [*asked, message, result], "max_tokens": 1, **tools}
    )
    assert status == 200, second
    usage = first["usage"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # the last token of an answer is not in the store
    assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - 2
