"""The interface of tool-call parsers: text in, the tool's name and its arguments as JSON out."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Call(ABC):
    """Feed it text. `name` is known before `take_arguments` gives anything. is_done: the call is complete. is_broken: this is no call; the
    caller shows the text as it stands. The arguments of a call that has a name are one JSON object, `finish` included."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_broken = False
        self._ready: list[str] = []  # arguments that may be given out

    @abstractmethod
    def push(self, text: str) -> str:
        """Returns what stands behind the call, if it ended."""

    @abstractmethod
    def finish(self, *, cut: bool) -> str:
        """No more text comes: the end of the arguments. cut: the answer ended at a limit, inside a tag perhaps."""

    def take_arguments(self) -> str:
        """Arguments since the last time."""
        if self.name is None:
            return ""
        ready, self._ready = "".join(self._ready), []
        return ready
