"""/v1/completions: writes answers as objects of OpenAI's older protocol, streamed or whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.events import TokenLogprob
from mlxspec.parsers.pieces import Content
from mlxspec.server.chat import finite
from mlxspec.server.job_run import Delta, End, Progress, Update
from mlxspec.server.protocol import AnswerProtocol
from mlxspec.server.usage import Extras, drafting, progress, timings, usage

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats


class CompletionProtocol(AnswerProtocol):
    """One response. echo: what each choice's text begins with."""

    def __init__(
        self,
        model: str,
        num_choices: int,
        *,
        fingerprint: str,
        num_prompts: int = 1,
        extras: Extras | None = None,
        echo: Sequence[str] = (),
        notices: Sequence[str] = (),
    ) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._num_prompts, self._wanted = num_prompts, extras or Extras()
        self._echo = list(echo) or [""] * num_choices
        self._texts = list(self._echo)
        self._offsets = [len(e) for e in self._echo]
        self._logprobs: list[dict[str, list[Any]] | None] = [None] * num_choices
        self._reasons: list[str | None] = [None] * num_choices
        self._stats: dict[int, RequestStats] = {}
        self._notices = tuple(notices)

    def begin(self) -> Iterator[dict[str, Any]]:
        for number, text in enumerate(self._echo):
            if text:
                yield self._chunk(number, text)

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        if isinstance(update, Delta):
            text = _text(update)
            if text or update.logprobs:
                chunk = self._chunk(update.choice, text, logprobs=self._entries(update))
                yield chunk | self._wanted.beside(update)
        elif isinstance(update, Progress):
            if self._wanted.progress:
                yield self._chunk(update.choice, "") | {"prompt_progress": progress(update)}
        elif isinstance(update, End):
            self._stats[update.choice] = update.stats
            last = self._chunk(update.choice, "", reason=_reason(update))
            yield last | (self._extras() if len(self._stats) == len(self._texts) else {})

    def end(self) -> Iterator[dict[str, Any]]:
        if self._wanted.usage:
            stats = self._all_stats()
            yield {**self._head, "choices": [], "usage": usage(stats, self._num_prompts), **self._extras()}

    def take(self, update: Update) -> None:
        if isinstance(update, Delta):
            self._texts[update.choice] += _text(update)
            entries = self._entries(update)
            if entries:
                kept = self._logprobs[update.choice]
                self._logprobs[update.choice] = (
                    entries if kept is None else {k: kept[k] + entries[k] for k in kept}
                )
        elif isinstance(update, End):
            self._stats[update.choice] = update.stats
            self._reasons[update.choice] = _reason(update)

    def whole(self) -> dict[str, Any]:
        choices = [
            {"index": i, "text": t, "logprobs": self._logprobs[i], "finish_reason": self._reasons[i]}
            for i, t in enumerate(self._texts)
        ]
        stats = self._all_stats()
        return {**self._head, "choices": choices, "usage": usage(stats, self._num_prompts), **self._extras()}

    def _all_stats(self) -> list[RequestStats]:
        return [self._stats[i] for i in sorted(self._stats)]

    def _extras(self) -> dict[str, Any]:
        stats = self._all_stats()
        return {"timings": timings(stats), "mlxspec": drafting(stats, self._notices)}

    def _entries(self, update: Delta) -> dict[str, list[Any]] | None:
        """The older form of log-probabilities: parallel lists, offsets in characters of the answer's text."""
        if not update.logprobs:
            return None
        out: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for entry in update.logprobs:
            text = _shown(entry.data)
            out["tokens"].append(text)
            out["token_logprobs"].append(finite(entry.logprob))
            out["top_logprobs"].append(_top(entry))
            out["text_offset"].append(self._offsets[update.choice])
            self._offsets[update.choice] += len(text)
        return out

    def _chunk(
        self, number: int, text: str, *, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self._wanted.usage else chunk


def _text(update: Delta) -> str:
    return "".join(p.text for p in update.pieces if isinstance(p, Content))


def _reason(update: End) -> str:
    return "stop" if update.reason == "tool_calls" else update.reason


def _top(entry: TokenLogprob) -> dict[str, float]:
    return {_shown(other.data): finite(other.logprob) for other in reversed(entry.top)}


def _shown(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
