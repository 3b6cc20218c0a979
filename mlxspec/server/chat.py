"""/v1/chat/completions: writes answers as objects of OpenAI's chat protocol, streamed or whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.events import TokenLogprob
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from mlxspec.server import sse
from mlxspec.server.job_run import Delta, End, Progress, Update
from mlxspec.server.usage import Extras, drafting, progress, timings, usage

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats

_LEAST = -9999.0  # JSON has no infinity


class ChatProtocol:
    """One response. `chunks` for each update when streaming, `whole` when not; `take` everything either way. extras: what chunks hold
    beside text."""

    last_event = sse.DONE

    def __init__(
        self,
        model: str,
        num_choices: int,
        *,
        fingerprint: str,
        extras: Extras | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._choices = [_Choice(i) for i in range(num_choices)]
        self._wanted = extras or Extras()
        self._notices = tuple(notices)
        self._stats: dict[int, RequestStats] = {}

    def begin(self) -> Iterator[dict[str, Any]]:
        for choice in self._choices:
            yield self._chunk(choice.number, {"role": "assistant", "content": ""})

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        """What to send for one update."""
        if isinstance(update, Delta):
            choice = self._choices[update.choice]
            logprobs = _logprobs(update.logprobs)
            timed = {"timings": timings([update.stats])} if self._wanted.timings else {}
            for delta in choice.deltas(update.pieces) or ([{}] if logprobs else []):
                yield self._chunk(choice.number, delta, logprobs=logprobs) | timed
                logprobs = None
        elif isinstance(update, Progress):
            if self._wanted.progress:
                yield self._chunk(update.choice, {}) | {"prompt_progress": progress(update)}
        elif isinstance(update, End):
            self._stats[update.choice] = update.stats
            last = self._chunk(update.choice, {}, reason=update.reason)
            if len(self._stats) == len(self._choices):
                last |= self._extras()
            yield last

    def end(self) -> Iterator[dict[str, Any]]:
        if self._wanted.usage:
            stats = self._all_stats()
            chunk = {**self._head, "object": "chat.completion.chunk", "choices": []}
            yield {**chunk, "usage": usage(stats, 1), **self._extras()}

    def take(self, update: Update) -> None:
        """Remember, for `whole`."""
        if isinstance(update, Delta):
            self._choices[update.choice].take(update.pieces, update.logprobs)
        elif isinstance(update, End):
            self._stats[update.choice] = update.stats
            self._choices[update.choice].reason = update.reason

    def whole(self) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [c.message() for c in self._choices],
            "usage": usage(self._all_stats(), 1),
            **self._extras(),
        }

    def _all_stats(self) -> list[RequestStats]:
        return [self._stats[i] for i in sorted(self._stats)]

    def _extras(self) -> dict[str, Any]:
        stats = self._all_stats()
        return {"timings": timings(stats), "mlxspec": drafting(stats, self._notices)}

    def _chunk(
        self, number: int, delta: dict[str, Any], *, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if self._wanted.usage else chunk


class _Choice:
    """One answer as it grows."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reason: str | None = None
        self._content, self._reasoning = "", ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] | None = None

    def deltas(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        return [self._delta(p) for p in pieces]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text, "reasoning": piece.text}
        if isinstance(piece, CallStart):
            return {"tool_calls": [{"index": piece.index, **_call(piece.name)}]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def take(self, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob]) -> None:
        for piece in pieces:
            if isinstance(piece, Content):
                self._content += piece.text
            elif isinstance(piece, Reasoning):
                self._reasoning += piece.text
            elif isinstance(piece, CallStart):
                self._calls.append(_call(piece.name))
            elif isinstance(piece, CallArguments):
                self._calls[piece.index]["function"]["arguments"] += piece.text
        if logprobs:
            self._logprobs = (self._logprobs or []) + _entries(logprobs)

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._reasoning:
            message |= {"reasoning_content": self._reasoning, "reasoning": self._reasoning}
        if self._calls:
            message |= {"content": self._content or None, "tool_calls": self._calls}
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {
            "index": self.number,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.reason,
        }


def _call(name: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def _logprobs(found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": _entries(found), "refusal": None} if found else None


def _entries(found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {**_entry(t.logprob, t.data), "top_logprobs": [_entry(o.logprob, o.data) for o in t.top]}
        for t in found
    ]


def _entry(logprob: float, data: bytes) -> dict[str, Any]:
    return {
        "token": data.decode("utf-8", errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(data),
    }


def finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST
