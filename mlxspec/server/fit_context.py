"""Leaves out the beginning of a conversation that is longer than the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mlxspec.errors import ContextOverflowError

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]


def fitting(
    messages: Messages, prompt: Callable[[Messages, int], T], max_context: int, room: int
) -> tuple[T, int]:
    """What `prompt` makes of a conversation, and how many messages were left out of it: none where all fit into the context; else as few as
    leave `room` tokens for an answer, those of whole turns. The system's message at the beginning and the last turn always stay.

    prompt: is given messages and how many tokens it must stay below. Raises what it raises, ContextOverflowError for a last turn that is
    too long.
    """
    try:
        return prompt(messages, max_context), 0
    except ContextOverflowError:
        pass
    head = int(messages[0]["role"] == "system")
    starts = [i for i in range(head + 1, len(messages)) if messages[i]["role"] == "user"]
    found: dict[int, T] = {}

    def fits(start: int) -> bool:
        try:
            found[start] = prompt([*messages[:head], *messages[start:]], max_context - room)
        except ContextOverflowError:
            return False
        return True

    place = bisect_left(starts, True, key=fits)
    if place < len(starts):
        return found[starts[place]], starts[place] - head
    last = starts[-1] if starts else head
    return prompt([*messages[:head], *messages[last:]], max_context), last - head
