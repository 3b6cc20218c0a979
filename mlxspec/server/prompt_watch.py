"""Finds clients whose prompts stop sharing their beginning although the conversation goes on.

Something near the beginning changes with each request then, and all behind it is read again. Keeps tokens of recent prompts; tells
positions, and never text.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_PART = 2  # a prompt that shares less than one part of so many of an earlier one has another beginning
_WINDOW = 48  # tokens of an earlier prompt that are looked for in a new one
_WIDTH = 4  # bytes of a token


@dataclass
class _Client:
    """prompts: its last ones, as bytes of int32. is_told: nothing more is said about it."""

    prompts: list[bytes] = field(default_factory=list)
    is_told: bool = False


class PromptWatch:
    """Of all clients; any thread may ask. least: prompts of fewer tokens cost too little to be looked at. most_clients, most_prompts,
    most_bytes: how much is remembered."""

    def __init__(
        self, *, least: int = 1024, most_clients: int = 32, most_prompts: int = 4, most_bytes: int = 16 << 20
    ) -> None:
        self._least, self._most_clients, self._most_prompts = least, most_clients, most_prompts
        self._most_bytes = most_bytes
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def see(self, client: str, prompt: Sequence[int]) -> str | None:
        """Take note of a client's next prompt. A sentence for the log where it goes on from an earlier one but begins otherwise: once a
        client."""
        if len(prompt) < self._least:
            return None
        new = array("i", prompt).tobytes()
        with self._lock:
            known = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            old = list(known.prompts)
            is_told = known.is_told
            self._keep(known, new)
        if is_told:
            return None
        shared = [_shared(one, new) for one in old]
        if any(
            num * _PART >= min(len(one), len(new)) // _WIDTH for num, one in zip(shared, old, strict=True)
        ):
            return None
        found = [num for num, one in zip(shared, old, strict=True) if _goes_on(one, new, num)]
        if not found:
            return None
        with self._lock:
            known.is_told = True
        first = max(found) + 1
        return (
            f"The prompts of a client no longer begin alike, although its conversation goes on: token {first} of {len(prompt)} is "
            "the first that differs from an earlier prompt, so all behind it is read again. Something there changes with each request."
        )

    def _keep(self, known: _Client, new: bytes) -> None:
        """With the lock held."""
        known.prompts.append(new)
        self._num_bytes += len(new)
        if len(known.prompts) > self._most_prompts:
            self._num_bytes -= len(known.prompts.pop(0))
        while len(self._clients) > self._most_clients or (
            self._num_bytes > self._most_bytes and len(self._clients) > 1
        ):
            _, gone = self._clients.popitem(last=False)
            self._num_bytes -= sum(map(len, gone.prompts))


def _shared(one: bytes, other: bytes) -> int:
    """How many tokens at the beginning are the same."""
    same, differs = 0, min(len(one), len(other)) // _WIDTH + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[: middle * _WIDTH] == other[: middle * _WIDTH]:
            same = middle
        else:
            differs = middle
    return same


def _goes_on(one: bytes, new: bytes, shared: int) -> bool:
    """Whether `new` holds a stretch from the second half of what stands in `one` behind their common beginning."""
    num = len(one) // _WIDTH
    start = shared + (num - shared) // 2
    window = one[start * _WIDTH : (start + _WINDOW) * _WIDTH]
    if len(window) < _WINDOW * _WIDTH:
        return False
    place = new.find(window)
    while place >= 0 and place % _WIDTH:
        place = new.find(window, place + 1)
    return place >= 0
