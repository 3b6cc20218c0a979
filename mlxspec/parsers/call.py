"""The interface of tool-call parsers: text in, the tool's name and its arguments as JSON out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mlxspec.parsers.tool_schemas import ToolSchemas


class Call(ABC):
    """Feed it text. `name` is that of a declared tool, known once the arguments have begun as the notation wants it. is_done: the call is
    closed, and its arguments are one JSON object. is_whole: it was closed by an end of its own, not by the closing tag where brackets are
    missing. is_broken: this is no call; the caller shows the text as it stands."""

    def __init__(self, schemas: ToolSchemas) -> None:
        self._schemas = schemas
        self.name: str | None = None
        self.is_done = self.is_whole = self.is_broken = False
        self._named: str | None = None  # until the arguments begin
        self._ready: list[str] = []  # arguments that may be given out

    @abstractmethod
    def push(self, text: str) -> str:
        """Returns what stands behind the call, if it ended."""

    @abstractmethod
    def finish(self, *, cut: bool) -> str:
        """No more text comes. Returns the end of the arguments; what is not closed stays so. cut: the answer ended at a limit, so that an
        end that counts only if nothing follows it is none."""

    def take_arguments(self) -> str:
        """Arguments since the last time."""
        if self.name is None:
            return ""
        ready, self._ready = "".join(self._ready), []
        return ready

    def _take_name(self, name: str) -> None:
        """The name is complete. One that no tool has breaks the call."""
        self._named, self.is_broken = name, name not in self._schemas

    def _end(self) -> None:
        """The text has closed the call."""
        self.is_done = self.is_whole = True
