"""`Job`: what a request asks for, in a form that belongs to no API. An API's reader makes one from a checked body, the engine runs it, and
the API's writer writes the answers. `ChatRequest` is the part of it that the model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Required, TypedDict

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.parsers.channels import ChannelParser
from mlxspec.parsers.formats import AnswerParser, ChatFormat
from mlxspec.parsers.pieces import Piece
from mlxspec.sampling.constraints import Compiled
from mlxspec.server.answer_format import AnswerFormat
from mlxspec.server.errors import BadField

GoesOn = Literal["content", "reasoning"]
# Of what says why a grammar cannot be compiled, None where it can: a grammar that can be, with sentences on what it leaves free; or None.
Loosen = Callable[[Callable[[str], str | None]], tuple[str, tuple[str, ...]] | None]


class TemplateFunction(TypedDict):
    name: str
    arguments: Mapping[str, Any] | str


class TemplateCall(TypedDict):
    id: str
    type: str
    function: TemplateFunction


class TemplateMessage(TypedDict, total=False):
    """A message as chat templates read it. role: system, user, assistant or tool. content: a text, or parts once images are in their
    places."""

    role: Required[str]
    content: Required[Any]
    reasoning_content: str
    tool_calls: list[TemplateCall]
    tool_responses: list[dict[str, Any]]
    name: str
    tool_call_id: str


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """The tools that an answer may or must call. named: the only one that may be called, once. allowed: those that may be called; None for
    all. The prompt names all tools, so that it begins as it does without a choice."""

    kind: Literal["auto", "none", "required"]
    named: str | None = None
    allowed: tuple[str, ...] | None = None

    def of(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the tools that may be called."""
        names = self.allowed if self.named is None else (self.named,)
        return [t for t in tools if names is None or tool_name(t) in names]


@dataclass(frozen=True, kw_only=True)
class CustomGrammar:
    """The grammar that the text of a custom tool follows. tool: its name; path: where the request has it; syntax: `lark` or `regex`."""

    tool: str
    path: str
    syntax: str
    definition: str


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """tools: in OpenAI's nested form. tool_choice: None leaves it to the model.
    several_calls: whether an answer may call more than one tool. goes_on: which part of the last message the answer continues.
    opens_answer: False ends the prompt behind the last message. template: variables of the chat template. wanted: the format of the whole
    answer. customs: custom tools whose text follows a grammar. notices: sentences about what was left out."""

    messages: Sequence[TemplateMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice | None = None
    several_calls: bool = True
    goes_on: GoesOn | None = None
    opens_answer: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    wanted: AnswerFormat | None = None
    customs: tuple[CustomGrammar, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """One answer that is wanted."""

    prompt: Sequence[int] | PromptWithImages
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Members of a stream beside the text. usage: a last chunk with it (stream_options.include_usage). usages: beside that, in every chunk
    with text, its answer's (stream_options.continuous_usage_stats). progress: chunks while a prompt is read (return_progress). timings: in
    every chunk with text (timings_per_token). drafted: in every chunk with text, how much of it was drafted (return_drafted)."""

    usage: bool = False
    usages: bool = False
    progress: bool = False
    timings: bool = False
    drafted: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """All answers of one request. `parser()` gives a fresh parser for one of them, None for plain text. tools: those that may be
    called. goes_on: which part of the last message the answers continue. compiled: of the parameters that all answers share. notices:
    what the client is told of its request. prompts: of each answer as text, where the client wants to see it. first_tokens: of each
    prompt as text, where log-probabilities of prompts are wanted. special: tags of calls that are special tokens. is_held: a format
    that the request asked for holds the text. loosen: writes the grammar of its calls anew. fingerprint: of the model. proves: each
    answer is decoded again without drafts, and the client gets a receipt. follows: of the pieces of a conversation's answer, the
    token ids with which its next prompt begins. streams: whether answers are sent as they grow. returns_ids:
    whether token ids are sent beside the text."""

    asks: tuple[AnswerRequest, ...]
    spec: SpecConfig
    num_prompts: int = 1
    timeout: float | None = None
    form: ChatFormat = field(default_factory=ChatFormat)
    rendered: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    is_chat: bool = False
    goes_on: GoesOn | None = None
    compiled: Compiled | None = None
    notices: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    first_tokens: tuple[str, ...] = ()
    special: frozenset[str] = frozenset()
    is_held: bool = False
    loosen: Loosen | None = None
    fingerprint: str = ""
    proves: bool = False
    follows: Callable[[Sequence[Piece]], list[int]] | None = None
    streams: bool = False
    extras: Extras = Extras()
    returns_ids: bool = False

    def parser(self) -> AnswerParser | ChannelParser | None:
        if not self.is_chat:
            return None
        is_thinking = None if self.goes_on is None else self.goes_on == "reasoning"
        return self.form.parser(
            self.rendered, self.tools, is_thinking=is_thinking, special=self.special, is_held=self.is_held
        )


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of the function that a tool in OpenAI's nested form is."""
    found: Mapping[str, Any] = tool["function"]
    return found


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool in OpenAI's nested form."""
    return str(function_of(tool)["name"])


def goes_on_with(messages: Sequence[TemplateMessage], path: str) -> GoesOn | None:
    """Return what of the last message an answer continues; None unless it is the assistant's. path: where the API has that message. Raises
    BadField where it cannot be continued."""
    if not messages or messages[-1]["role"] != "assistant":
        return None
    last = messages[-1]
    if last.get("tool_calls"):
        raise BadField(path, "A tool call needs its result before the model goes on.")
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise BadField(
            path,
            "Two messages of the assistant's follow each other at the end, so it is not clear which the answer goes on with.",
        )
    return "content" if last.get("content") else "reasoning"
