"""`ChatRequest`: a chat request in a form that belongs to no API. Each API's adapter makes one from a checked body, and a job is made from
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxspec.server.answer_format import AnswerFormat
from mlxspec.server.errors import BadField

GoesOn = Literal["content", "reasoning"]


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Which tools an answer may or must call. named: the only one that may be called, once. allowed: those that may be called; None for
    all. The model is told of all tools, so that the prompt begins as it does without a choice."""

    kind: Literal["auto", "none", "required"]
    named: str | None = None
    allowed: tuple[str, ...] | None = None

    def of(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those of the tools that may be called."""
        names = self.allowed if self.named is None else (self.named,)
        return [t for t in tools if names is None or t["function"]["name"] in names]


@dataclass(frozen=True, kw_only=True)
class CustomGrammar:
    """The grammar that the text of a custom tool follows. tool: its name; path: where the request has it; syntax: `lark` or `regex`."""

    tool: str
    path: str
    syntax: str
    definition: str


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """messages: as chat templates read them: the roles are system, user, assistant and tool, the content is text, and a message of the
    assistant's may have `reasoning_content` and `tool_calls`. tools: in OpenAI's nested form. tool_choice: None leaves it to the model.
    several_calls: whether an answer may call more than one tool. goes_on: which part of the last message the answer continues.
    opens_answer: False ends the prompt behind the last message. template: variables of the chat template. wanted: the format of the whole
    answer. options: the fields of forms.shared.Generation. customs: custom tools whose text follows a grammar. notices: sentences about
    what was left out."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice | None = None
    several_calls: bool = True
    goes_on: GoesOn | None = None
    opens_answer: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    wanted: AnswerFormat | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    customs: tuple[CustomGrammar, ...] = ()
    notices: tuple[str, ...] = ()


def goes_on_with(messages: Sequence[Mapping[str, Any]], path: str) -> GoesOn | None:
    """What of the last message an answer continues: None unless it is the assistant's. path: where the API has that message. Raises
    BadField where it cannot be continued."""
    last = messages[-1] if messages else {"role": "user"}
    if last["role"] != "assistant":
        return None
    if last.get("tool_calls"):
        raise BadField(path, "A tool call needs its result before the model goes on.")
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise BadField(
            path,
            "Two messages of the assistant's follow each other at the end, so it is not clear which the answer goes on with.",
        )
    return "content" if last.get("content") else "reasoning"


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a body's fields about thinking tell the chat template."""
    found = {k: v for k, v in (body.get("chat_template_kwargs") or {}).items() if v is not None}
    for name in ("enable_thinking", "preserve_thinking", "reasoning_effort"):
        if body.get(name) is not None:
            found[name] = body[name]
    if found.get("reasoning_effort") == "none":
        found.setdefault("enable_thinking", False)
    return found


def check_same(body: Mapping[str, Any], name: str, value: Any, other: str) -> None:
    """Raises BadField where the field `name` says something else than the field `other`, whose value is given."""
    if body.get(name) not in (None, value):
        raise BadField(name, f"{name} and {other} contradict each other.")
