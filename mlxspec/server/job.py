"""`Job`: the answers that a request wants, in a form that belongs to no API. An API's reader makes a job from a checked body, the engine
runs the job, and the API's writer writes the answers. `ChatRequest` is the conversation that the prompt is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Required, TypedDict

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.parsers.channels import ChannelParser
from mlxspec.parsers.formats import AnswerParser, ChatFormat
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
    """A message in the form that chat templates read. role: system, user, assistant or tool. content: a text, or a list of parts once
    images are in their places."""

    role: Required[str]
    content: Required[Any]
    reasoning_content: str
    tool_calls: list[TemplateCall]
    tool_responses: list[dict[str, Any]]
    name: str
    tool_call_id: str


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """The tools that an answer may or must call. kind: whether it must, may or must not call a tool. named: the only tool that may be
    called, and once. allowed: the tools that may be called; None for all. The prompt lists all tools in every case, so that its
    beginning does not depend on the choice."""

    kind: Literal["auto", "none", "required"]
    named: str | None = None
    allowed: tuple[str, ...] | None = None

    def of(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return those of these tools that the answer may call."""
        names = self.allowed if self.named is None else (self.named,)
        return [t for t in tools if names is None or tool_name(t) in names]


@dataclass(frozen=True, kw_only=True)
class CustomGrammar:
    """The grammar that the text of a custom tool must follow. tool: the tool's name; path: the tool's place in the request; syntax:
    `lark` or `regex`; definition: the grammar."""

    tool: str
    path: str
    syntax: str
    definition: str


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A conversation that is to be answered, independent of an API. tools: in OpenAI's nested form. tool_choice: None leaves it to the
    model. several_calls: whether an answer may have more than one tool call. goes_on: which part of the last message the answer
    continues; None for a new message. opens_answer: False ends the prompt after the last message. template: variables for the chat
    template. wanted: the format of the whole answer. customs: grammars of custom tools. notices: sentences about what was left out."""

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
    """The prompt and the sampling parameters of one answer."""

    prompt: Sequence[int] | PromptWithImages
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Extras:
    """The additions to a stream that a request wants. usage: a last chunk with the token counts (stream_options.include_usage). usages:
    in addition, the answer's token counts in every chunk with text (stream_options.continuous_usage_stats). progress: chunks while a
    prompt is read (return_progress). timings: timings in every chunk with text (timings_per_token). drafted: in every chunk with
    text, the number of its drafted characters (return_drafted)."""

    usage: bool = False
    usages: bool = False
    progress: bool = False
    timings: bool = False
    drafted: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """All answers of one request, independent of an API. `parser()` returns a new parser for one answer, None where the answer is plain
    text.

    asks: the prompt and parameters of each answer. tools: the tools that may be called. goes_on: which part of the last message the
    answers continue. compiled: the compiled constraints, which all answers share. notices: sentences for the client. prompts: the text
    of each answer's prompt, where the response contains it; first_tokens: the text of each prompt's first token, where log-probabilities
    of prompts are wanted. special: tags of calls that are special tokens. is_held: a format that the request sets constrains the text.
    loosen: makes a less strict grammar of calls, where one cannot be compiled. fingerprint: of the model. proves: each answer is decoded
    again without drafts, and the client gets a receipt. talk: the conversation as the chat template shows it, None for a plain prompt.
    streams: answers are sent as they grow. returns_ids: token ids are sent in addition to the text.
    """

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
    talk: ChatRequest | None = None
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
    """Return the function's description in a tool that is in OpenAI's nested form."""
    found: Mapping[str, Any] = tool["function"]
    return found


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool in OpenAI's nested form."""
    return str(function_of(tool)["name"])


def goes_on_with(messages: Sequence[TemplateMessage], path: str) -> GoesOn | None:
    """Return which part of the last message the answer continues; None unless this message is the assistant's. path: the message's place
    in the body, for errors. Raises BadField where it cannot be continued."""
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
