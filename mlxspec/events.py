"""The events of generation, one object a step and row: text as it becomes certain, and how a row ended.

Plain Python: knows no arrays, no tokenizer, no front end. A front end needs nothing but these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class TopToken:
    """One of the likeliest tokens at some place, with its log-probability. data: its bytes."""

    token: int
    logprob: float
    data: bytes


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """An emitted token with its natural log-probability under the model's own distribution, its bytes, and the likeliest tokens at its
    place."""

    token: int
    logprob: float
    data: bytes
    top: tuple[TopToken, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PrefillEvent:
    """An event: a piece of a request's prompt has been read. num_done of its num_total tokens are done, num_cached of them without
    reading because the prefix cache had them. One for each piece, the last with num_done == num_total, before any TokensEvent of the
    request."""

    request: int
    num_done: int
    num_total: int
    num_cached: int = 0


@dataclass(frozen=True, kw_only=True)
class TokensEvent:
    """An event: a round committed tokens for a request. It has the text that became certain through them.

    `tokens` never holds the end-of-sequence token. `num_drafted` of them were drafted and accepted; `drafter` is the name of their
    drafter, and the first `num_drafted_chars` characters of the text became certain through them. `text` may be empty while a character
    or a possible stop string is incomplete. `logprobs`: one for each token, where the request has logprobs.
    """

    request: int
    tokens: tuple[int, ...]
    text: str
    num_drafted: int = 0
    num_drafted_chars: int = 0
    drafter: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class FinishEvent:
    """The last event of a request. Every request has exactly one.

    reason: "stop" (end token or stop string), "length" (token budget or end of the context), "cancelled" or "error". error: the message to
    show if reason is "error", None otherwise. A passed deadline is an error, too.
    """

    request: int
    reason: FinishReason
    error: str | None = None


Event = PrefillEvent | TokensEvent | FinishEvent
