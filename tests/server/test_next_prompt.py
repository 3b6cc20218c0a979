"""The beginning of a conversation's next prompt: the next prompt begins with it, whatever its message says, and it holds the answer."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.loading.template import ChatTemplate
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from mlxspec.server.job import ChatRequest, TemplateMessage
from mlxspec.server.next_prompt import next_beginning
from mlxspec.server.prompt import Context, render_prompt
from tests import engines
from tests.server.serving import QUESTION, Served

# As Qwen's: thinking is written for answers after the last question alone.
_QWEN = """{%- set last = namespace(at=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.at %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content | trim }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
# As Mistral's: calls and results have ids, and no message has a frame.
_IDS = """{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[R {{ m.tool_call_id }}]{{ m.content }}
{%- else %}{{ m.content }}{% for c in m.tool_calls or [] %}[C {{ c.id }} {{ c.function.name }}]{% endfor %}{% endif %}{% endfor %}"""
TEMPLATES = {"qwen": _QWEN, "ids": _IDS}
USER: TemplateMessage = {"role": "user", "content": "What is in the folder?"}
THOUGHT, SAID = "I could list it.", "It holds three files."
ANSWERS: dict[str, list[Piece]] = {
    "text": [Content(SAID)],
    "thinking": [Reasoning(THOUGHT), Content("It holds "), Content("three files.")],
    "call": [
        Reasoning(THOUGHT),
        Content(SAID),
        CallStart(0, "list"),
        CallArguments(0, '{"path": '),
        CallArguments(0, '"/"}'),
    ],
}


def context(template: str) -> Context:
    tokenizer = copy.copy(engines.demo(draft="off").tokenizer)
    assert tokenizer is not None
    tokenizer.template = ChatTemplate(TEMPLATES[template], {})
    engine: Any = SimpleNamespace(
        tokenizer=tokenizer, name="a model", vision=None, no_images="It sees none.", max_context=1 << 16
    )
    return Context(engine=engine, defaults=SamplingParams())


def sent_back(pieces: list[Piece], *, keeps_thinking: bool) -> TemplateMessage:
    """Return an answer as clients send it back."""
    found: TemplateMessage = {"role": "assistant", "content": SAID}
    if keeps_thinking and any(isinstance(p, Reasoning) for p in pieces):
        found["reasoning_content"] = THOUGHT
    if any(isinstance(p, CallStart) for p in pieces):
        function: Any = {"name": "list", "arguments": {"path": "/"}}
        found["tool_calls"] = [{"id": "id7", "type": "function", "function": function}]
    return found


def first_only(right: Any) -> Any:
    """Return messages of which both begin alike."""
    return (right[0], right[0])


@catches("the next message is taken for known", "mlxspec.server.next_prompt:_MESSAGES", first_only)
@settings(max_examples=40, deadline=None)
@given(
    template=st.sampled_from([*TEMPLATES]),
    kind=st.sampled_from([*ANSWERS]),
    earlier=st.sampled_from(["none", "with thinking", "without"]),
    text=st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20),
)
def test_the_next_prompt_begins_so(template: str, kind: str, earlier: str, text: str) -> None:
    at, messages = context(template), [USER]
    if earlier != "none":
        before = sent_back(ANSWERS["thinking"], keeps_thinking=earlier == "with thinking")
        messages = [USER, before, {"role": "user", "content": "And now?"}]
    talk, pieces = ChatRequest(messages=messages), ANSWERS[kind]
    found = next_beginning(talk, at, pieces)
    answer = sent_back(pieces, keeps_thinking=earlier != "without")
    role = "tool" if kind == "call" else "user"
    after: TemplateMessage = {"role": role, "content": text, "tool_call_id": "id7", "name": "list"}
    _, _, tokens, _ = render_prompt(
        at.engine, ChatRequest(messages=[*messages, answer, after]), (), at.limits
    )
    assert isinstance(tokens, list)
    assert tokens[: len(found)] == found
    assert at.engine.tokenizer is not None
    shown = at.engine.tokenizer.decode(found)
    assert SAID in shown
    if template == "qwen":
        assert shown.endswith(f"{role}\n")
        assert (THOUGHT in shown) == (kind == "call" and earlier != "without")
        assert ('"path": "/"' in shown) == (kind == "call")


def test_an_answer_that_goes_on_with_a_message_expects_nothing() -> None:
    talk = ChatRequest(messages=[USER, {"role": "assistant", "content": "It"}], goes_on="content")
    assert next_beginning(talk, context("qwen"), ANSWERS["text"]) == []


# The template writes earlier answers otherwise than the model wrote them; a line says when a prompt has been read ahead.
_REWRITES = """
import sys
from mlxspec.loading.template import ChatTemplate
from mlxspec.engine import worker
right, read = ChatTemplate.render, worker.read_ahead
def render(self, messages, **options):
    return right(self, [{**m, "content": "So: " + m["content"]} if m["role"] == "assistant" else m for m in messages], **options)
def read_ahead(*given):
    yield from read(*given)
    print("has read ahead", file=sys.stderr, flush=True)
ChatTemplate.render, worker.read_ahead = render, read_ahead
"""


def test_only_the_new_message_is_left_to_read() -> None:
    """By usage: when the second question arrives, the answer before it has been read as the template writes it."""
    with Served(plant=_REWRITES) as served:
        messages = [{"role": "user", "content": QUESTION}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": 90, "temperature": 0, "ignore_eos": True}
        status, first = served.post("/v1/chat/completions", body)
        assert status == 200, first
        served.wait_for("has read ahead")
        messages += [first["choices"][0]["message"], {"role": "user", "content": "and os.path.split?"}]
        _, second = served.post("/v1/chat/completions", {**body, "max_tokens": 4})
    usage = second["usage"]
    left = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] > 100
    assert left <= 16, json.dumps(usage)
