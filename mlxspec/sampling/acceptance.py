"""Acceptance: which drafted tokens are verified, and which are accepted, given the tokens that the target sampled.

`match`: the target samples at each position with the request's full sampler. A draft is accepted while it equals that sample. The
sample at a position is drawn from the same logits with the same keyed noise as in plain decoding. So the text is that of plain decoding,
whoever drafted. One token always follows the accepted drafts: the correction, or the bonus if all are accepted.

`rejection` (sampling/rejection.py) makes the target's choice equal to the draft with the right probability, so it counts with
`match` as well. But it is exact only if the decision to verify token i depends on nothing but the history, the drafter's
distributions up to i and the tokens before i. So each rule has a way of its own to submit drafts. The one for rejection gets no
tokens, so it cannot depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DraftOutline:
    """A draft without its tokens: its length and the drafter's confidences.

    length: how many tokens were drafted, decided before any was drawn. tops: the probability of the drafter's most likely token at each of
    them (not of the token drawn, which may be another); None where the drafter has no distribution.
    """

    length: int
    tops: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.tops is not None and len(self.tops) != self.length:
            raise ValueError(f"{self.length} drafted tokens have {len(self.tops)} confidences")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """p_min and n_min of a row."""

    p_min: float = 0.0
    n_min: int = 0


@dataclass(frozen=True)
class ForMatch:
    """So many tokens of a draft are verified by matching."""

    length: int


@dataclass(frozen=True)
class ForRejection:
    """So many tokens of a draft are verified by rejection. Made by submit_for_rejection only."""

    length: int


Submission = ForMatch | ForRejection
NOTHING = ForMatch(0)


def submit_for_match(
    outline: DraftOutline, limits: Limits, valid: Callable[[int], int] | None = None
) -> ForMatch:
    """How many tokens to verify. `valid(n)` says how many of the first n tokens could be accepted at all."""
    length = _until_doubt(outline, limits)
    if valid is not None and length:
        length = valid(length)
    return ForMatch(length if outline.tops is None or length >= limits.n_min else 0)


def submit_for_rejection(outline: DraftOutline, limits: Limits) -> ForRejection:
    """How many tokens to verify: the draft ends before the first token below p_min, whatever the tokens are and whatever follows.

    Raises ValueError for an n_min, which would drop tokens for what came behind them.
    """
    if limits.n_min:
        raise ValueError("n_min does not go with rejection")
    return ForRejection(_until_doubt(outline, limits))


def match(drafted: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of the k drafted tokens are accepted. sampled has k + 1 entries; the one after the last accepted draft
    is the round's own token.

    Raises ValueError when the lengths do not fit.
    """
    if len(sampled) != len(drafted) + 1:
        raise ValueError(f"{len(drafted)} drafted tokens need {len(drafted) + 1} samples, not {len(sampled)}")
    for i, token in enumerate(drafted):
        if sampled[i] != token:
            return i
    return len(drafted)


def trim(confidences: Sequence[float], *, p_min: float, n_min: int) -> int:
    """How many drafted tokens are worth verifying, in llama.cpp's meaning.

    The draft ends before the first token whose confidence is below p_min; what is then shorter than n_min is dropped whole.
    """
    length = next((i for i, p in enumerate(confidences) if p < p_min), len(confidences))
    return length if length >= n_min else 0


def _until_doubt(outline: DraftOutline, limits: Limits) -> int:
    if outline.tops is None:
        return outline.length
    return trim(outline.tops, p_min=limits.p_min, n_min=0)
