"""Finds the tags that a model uses for thinking and tool calls in the text of its chat template. Renders no template."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxspec.parsers.channels import CHANNEL as CHANNEL_TAG
from mlxspec.parsers.channels import MESSAGE, TAGS, ChannelParser
from mlxspec.parsers.foreign_call import ForeignCalls, foreign_calls
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning, cut_notice, merged
from mlxspec.parsers.reasoning import ReasoningParser, StrayTag
from mlxspec.parsers.tools import FUNCTION_GEMMA, GEMMA4, QWEN, CallTags, Notation, ToolParser
from mlxspec.parsers.values import as_json
from mlxspec.parsers.whole_call import WholeCall

ToolStyle = Literal["json", "xml", "gemma4", "function-gemma"]
THINK = ("<think>", "</think>")
CHANNEL = ("<|channel>thought", "<channel|>")
_TAGS: dict[ToolStyle, CallTags] = {
    "json": QWEN,
    "xml": QWEN,
    "gemma4": GEMMA4,
    "function-gemma": FUNCTION_GEMMA,
}


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """The notations in which a model writes thinking and tool calls. thinking: the opening and closing tag; None for a model that does
    not think. tools: the notation of calls that mlxspec reads itself. foreign: the notation of calls that a parser of mlx-lm reads.
    channels: the answer is written in gpt-oss's channels. is_unknown: the chat template takes tools in a notation that is not
    supported. tools, foreign, channels and is_unknown exclude each other; none is set where the template takes no tools."""

    thinking: tuple[str, str] | None = None
    tools: ToolStyle | None = None
    foreign: ForeignCalls | None = None
    channels: bool = False
    is_unknown: bool = False

    @property
    def takes_tools(self) -> bool:
        return self.tools is not None or self.foreign is not None or self.channels

    @property
    def call_tags(self) -> CallTags | None:
        return None if self.tools is None else _TAGS[self.tools]

    @property
    def call_spans(self) -> tuple[tuple[str, str, str], ...]:
        """Return the notations of the model's own calls: for each the tag that begins a call, the text that must follow this tag after
        white space, and the tag that ends the call."""
        if self.foreign is not None:
            return ((self.foreign.open, "", self.foreign.close or "\0"),)
        if self.channels:
            return (("to=functions.", "", "<|call|>"),)
        calls = self.call_tags
        if calls is None:
            return ()
        if calls.mark:
            return ((calls.open, "call:", calls.close),)
        return (
            (calls.open, "{", calls.close),
            (calls.open, "<function=", calls.close),
            ("<function=", "", "</function>"),
        )

    @property
    def tags(self) -> tuple[str, ...]:
        """Return all tags of the format. The text that a parser receives must contain them, also where they are special tokens."""
        calls = self.call_tags
        found = () if calls is None else (calls.open, calls.close, calls.mark)
        foreign = () if self.foreign is None else self.foreign.tags
        channels = TAGS if self.channels else ()
        return tuple(tag for tag in (*(self.thinking or ()), *found, *foreign, *channels) if tag)

    def parser(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        is_thinking: bool | None = None,
        special: Container[str] = (),
        is_held: bool = False,
    ) -> AnswerParser | ChannelParser:
        """Return a parser for one answer to `prompt`, the text of the rendered prompt. Text that looks like a call of a tool that is not
        among `tools` is content. is_thinking: whether the prompt ends inside thinking; None to read this from the prompt's end.
        special: tags that are special tokens of the vocabulary. is_held: a response format constrains the text, so that calls are
        read only in the model's own notation."""
        if self.channels:
            return ChannelParser(tools)
        opened = self.opens_thinking(prompt) if is_thinking is None else is_thinking
        return AnswerParser(self, tools, opened=opened, special=special, is_held=is_held)

    @property
    def notation(self) -> Notation | None:
        """Return the notation of calls that a ToolParser reads; None where the template takes no tools, or for channels."""
        return self.foreign or self.call_tags

    def opens_thinking(self, prompt: str) -> bool:
        """Return whether the prompt ends with the opening tag of thinking, white space ignored."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking[0])


def detect(template: str | None) -> ChatFormat:
    """Return the format of a model's answers, found by the tags in the source of its chat template. None is a model without a template."""
    source = template or ""
    if CHANNEL_TAG in source and MESSAGE in source:
        return ChatFormat(channels=True)
    thinking = CHANNEL if "<|channel>" in source else THINK if "</think>" in source else None
    style: ToolStyle | None = None
    foreign = foreign_calls(source) if "tools" in source else None
    if "tools" in source and foreign is None:
        if GEMMA4.open in source:
            style = "gemma4"
        elif FUNCTION_GEMMA.open in source:
            style = "function-gemma"
        elif "<function=" in source:
            style = "xml"
        elif QWEN.open in source:
            style = "json"
    is_unknown = "tools" in source and style is None and foreign is None
    return ChatFormat(thinking=thinking, tools=style, foreign=foreign, is_unknown=is_unknown)


# what looks like a call, and the name of the tool
_LIKE_A_CALL = re.compile(
    r'"name"\s*:\s*"(?P<a>[^"\s]+)"\s*,\s*"(?:arguments|parameters)"\s*:|<invoke name="(?P<b>[^"\s]+)"'
    r"|<function=(?P<c>[^<>\s]+)>\s*(?:<parameter=|</function>)|\bcall:(?P<d>[\w./:-]+)\{"
    r"|(?:<｜tool▁sep｜>|<\|tool_call_begin\|>(?:functions\.)?|\[TOOL_CALLS\]\s*|<\|tool_call_start\|>\s*\[)(?P<e>[\w.-]+)"
    r"|<tool_call>(?P<f>[\w.-]+)\s*<arg_key>"
)


class AnswerParser:
    """A parser of one answer into reasoning, followed by content and tool calls. Used for every format except gpt-oss's channels."""

    def __init__(
        self,
        form: ChatFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        opened: bool,
        special: Container[str] = (),
        is_held: bool = False,
    ) -> None:
        """Make the parsers of thinking and of calls. opened: the prompt ends inside thinking. special: tags that are special tokens.
        is_held: a response format constrains the text, so that calls are read only in the model's own notation."""
        notation = form.notation if tools else None
        is_special = notation is not None and notation.open in special
        self._tools = None if notation is None else ToolParser(notation, tools, is_special=is_special)
        self._reasoning = self._stray = None
        if form.thinking:
            call = (
                None if self._tools is None or form.foreign else (self._tools.opener, self._tools.may_begin)
            )
            self._reasoning = ReasoningParser(form.thinking, opened=opened, call=call, is_special=is_special)
            self._stray = StrayTag(form.thinking[1])
        self._whole = WholeCall(() if is_held else tools, [] if notation is None else [notation.open])
        self._has_tools = bool(tools)
        self._said: list[str] = []  # content, where there are tools

    @property
    def is_thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_thinking

    @property
    def notices(self) -> tuple[str, ...]:
        cut = cut_notice("" if self._tools is None else self._tools.cut_call)
        found = _LIKE_A_CALL.search("".join(self._said))
        if found is None:
            return cut
        name = found[found.lastgroup or 0][:80]
        return (
            *cut,
            f"What looks like a call of {name} is text: a call names a tool of the request, begins a line, is closed, and is not in code.",
        )

    def push(self, text: str) -> list[Piece]:
        if self._reasoning is None:
            return self._noted(self._content(text))
        return self._noted(self._behind(self._reasoning.push(text)))

    def finish(self, *, cut: bool = False) -> list[Piece]:
        pieces = self._behind(self._reasoning.finish(cut=cut)) if self._reasoning else []
        calls, text = self._whole.finish()
        for number, (name, arguments) in enumerate(calls):
            pieces += [CallStart(number, name), CallArguments(number, as_json(arguments))]
        if self._tools is not None:
            return self._noted([*pieces, *self._tools.push(text), *self._tools.finish(cut=cut)], is_last=True)
        return self._noted([*pieces, Content(text)], is_last=True)

    def _noted(self, pieces: Sequence[Piece], *, is_last: bool = False) -> list[Piece]:
        if self._stray is not None:
            pieces = self._without_stray(self._stray, pieces, is_last=is_last)
        if self._has_tools:
            self._said += [p.text for p in pieces if isinstance(p, Content)]
        return merged(pieces)

    @staticmethod
    def _without_stray(stray: StrayTag, pieces: Sequence[Piece], *, is_last: bool) -> list[Piece]:
        """Return the pieces with the closing tags of thinking removed from content where no thinking is open. is_last: the answer has
        ended."""
        out: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content):
                out.append(Content(stray.push(piece.text)))
            else:
                out += [Content(stray.rest()), piece]
        return [*out, Content(stray.rest())] if is_last else out

    @property
    def num_held(self) -> int:
        """Return the number of characters of the call that is being written; 0 where there is none."""
        return 0 if self._tools is None else self._tools.num_held

    def _behind(self, pieces: Sequence[Piece]) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            out += [piece] if isinstance(piece, Reasoning) else self._content(getattr(piece, "text", ""))
        return out

    def _content(self, text: str) -> list[Piece]:
        text = self._whole.push(text)
        return self._tools.push(text) if self._tools else [Content(text)]
