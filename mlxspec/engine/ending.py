"""Why a request ends before its answer does: a deadline, a grammar that takes too long, or its caller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ending:
    """number: of the request. error: the sentence that ends it; None: it is cancelled. is_late: its deadline has passed."""

    number: int
    error: str | None = None
    is_late: bool = False
