"""The events of generation, one object a step and row: text as it becomes certain, and how a row ended.

Plain Python: knows no arrays, no tokenizer, no front end. A front end needs nothing but these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class TopToken:
    """A token that was among the likeliest at some place. `data`: its bytes."""

    token: int
    logprob: float
    data: bytes


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """An emitted token's natural log-probability under the model's own distribution, its bytes, and the likeliest tokens there."""

    token: int
    logprob: float
    data: bytes
    top: tuple[TopToken, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PrefillEvent:
    """A piece of a request's prompt has been read: num_done of its num_total tokens are in, num_cached of them without reading because
    the prefix store had them. Comes once a piece, the last with num_done == num_total, before any TokensEvent of the request."""

    request: int
    num_done: int
    num_total: int
    num_cached: int = 0


@dataclass(frozen=True, kw_only=True)
class TokensEvent:
    """Tokens one round committed for one request, with the text that became certain through them.

    `tokens` never holds the end-of-sequence token. `num_drafted` of them were drafted and accepted; `drafter` names who drafted them, and
    the first `num_drafted_chars` characters of the text became certain through them.
    `text` may be empty while a character or a possible stop string is still incomplete. `logprobs`: one a token, where they were asked for.
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
