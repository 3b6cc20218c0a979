"""What the writers of Messages, Responses and Ollama's API share: an answer is one message, made of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxspec.server.blocks import BlockEvent, Blocks
from mlxspec.server.job_run import Delta, End, Progress, Update
from mlxspec.server.protocol import AnswerProtocol
from mlxspec.server.usage import Extras, drafting, timings


class SingleAnswer(AnswerProtocol):
    """One answer. An API says how it writes progress, the events of blocks, and the end.

    extras: what a stream holds beside text. notices: sentences for the client. call_prefix: what ids of calls begin with.
    """

    def __init__(
        self, *, extras: Extras | None = None, notices: Sequence[str] = (), call_prefix: str = "call_"
    ) -> None:
        self._wanted, self._notices = extras or Extras(), tuple(notices)
        self._blocks = Blocks(call_prefix)
        self._end: End | None = None

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        if isinstance(update, Progress):
            if self._wanted.progress:
                yield self._progressed(update)
        elif isinstance(update, Delta):
            for place, piece in enumerate(update.pieces):
                beside = self._wanted.beside(update, place)
                for event in self._blocks.push([piece]):
                    yield from self._written(event, beside)
        else:
            self._end = update
            for event in self._blocks.close():
                yield from self._written(event, {})
            yield from self._ended(update)

    def take(self, update: Update) -> None:
        if isinstance(update, Delta):
            for _ in self._blocks.push(update.pieces):
                pass
        elif isinstance(update, End):
            self._end = update

    def whole(self) -> dict[str, Any]:
        if self._end is None:
            raise RuntimeError("an answer that is whole has ended")
        return self._whole(self._end)

    def _progressed(self, update: Progress) -> dict[str, Any]:
        """The object for a piece of the prompt that has been read."""
        raise NotImplementedError

    def _written(self, event: BlockEvent, beside: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects for what happened to a block. beside: members for the one that holds its text."""
        raise NotImplementedError

    def _ended(self, end: End) -> Iterator[dict[str, Any]]:
        """The last objects of a stream."""
        raise NotImplementedError

    def _whole(self, end: End) -> dict[str, Any]:
        """The answer as one object."""
        raise NotImplementedError

    def _extras(self, end: End) -> dict[str, Any]:
        """What this server says beside the API's own fields."""
        return {"timings": timings([end.stats]), "mlxspec": drafting([end.stats], self._notices)}
