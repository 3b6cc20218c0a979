"""Finds the beginning of a conversation's next prompt: the part that is certain once an answer has ended, whatever the next message is.

A chat template writes an earlier answer otherwise than the model wrote it: without its thinking, with other white space around its
calls. So the engine has not read that text, and reads it while the client runs a tool or its user reads the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from mlxspec.parsers.values import loads
from mlxspec.server.job import ChatRequest, TemplateCall, TemplateMessage
from mlxspec.server.prompt import Context, render_prompt

# What the next message may say, and the id that the client may know a call by: texts with no common beginning.
_MESSAGES = (("a", "call_0"), ("\n\n", "0_call"))


def next_beginning(talk: ChatRequest, at: Context, pieces: Sequence[Piece]) -> list[int]:
    """Return the token ids with which the next prompt of this conversation will begin; empty where they are not known. pieces: the
    pieces of the answer, which has ended.

    The next message is assumed to be a tool's result where the answer calls a tool, otherwise the user's. The client is assumed to send
    the answer's thinking back if it has sent the thinking of an earlier answer, or if there is no earlier answer. The result is empty
    for a conversation with images, and for one whose last message the answer continues. Raises subclasses of MlxspecError.
    """
    if talk.goes_on is not None:
        return []
    earlier = [m for m in talk.messages if m["role"] == "assistant"]
    keeps_thinking = not earlier or any(m.get("reasoning_content") for m in earlier)
    found = []
    for text, name in _MESSAGES:
        answer = _message(pieces, name, keeps_thinking=keeps_thinking)
        calls = answer.get("tool_calls")
        after: TemplateMessage = {"role": "user", "content": text}
        if calls:
            after = {
                "role": "tool",
                "content": text,
                "name": calls[0]["function"]["name"],
                "tool_call_id": calls[0]["id"],
            }
        longer = replace(talk, messages=[*talk.messages, answer, after])
        _, _, tokens, _ = render_prompt(at.engine, longer, longer.tools, at.limits)
        if isinstance(tokens, PromptWithImages):
            return []
        found.append(tokens)
    return [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(*found, strict=False))]


def _message(pieces: Sequence[Piece], name: str, *, keeps_thinking: bool) -> TemplateMessage:
    """Return an answer in the form in which the client will send it back. name: the beginning of its calls' ids."""
    texts = {kind: "".join(p.text for p in pieces if isinstance(p, kind)) for kind in (Content, Reasoning)}
    found: TemplateMessage = {"role": "assistant", "content": texts[Content]}
    if texts[Reasoning] and keeps_thinking:
        found["reasoning_content"] = texts[Reasoning]
    calls: list[TemplateCall] = []
    for start in (p for p in pieces if isinstance(p, CallStart)):
        arguments = "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == start.index)
        calls.append(
            {
                "id": f"{name}{start.index}",
                "type": "function",
                "function": {"name": start.name, "arguments": loads(arguments)},
            }
        )
    if calls:
        found["tool_calls"] = calls
    return found
