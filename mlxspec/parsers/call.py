"""Base class of parsers of tool calls written with tags: text in, the tool's name and its arguments as JSON out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mlxspec.parsers.pieces import Scanner


class TaggedCall(ABC):
    """Feed it text. `name` is known before `take_arguments` gives anything; is_done: the call is complete."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self._scanner = Scanner()
        self._ready = ""  # arguments that may be given out

    def push(self, text: str) -> str:
        """Returns what stands behind the call, if it ended."""
        self._scanner.push(text)
        while not self.is_done and self._go_on():
            pass
        return self._scanner.rest() if self.is_done else ""

    def take_arguments(self) -> str:
        """Arguments since the last time."""
        if self.name is None:
            return ""
        ready, self._ready = self._ready, ""
        return ready

    @abstractmethod
    def _go_on(self) -> bool:
        """One element; False to wait for more text."""
