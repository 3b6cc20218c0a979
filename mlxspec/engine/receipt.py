"""The receipt of a drafted answer: whether plain decoding gives the same text again.

Noise is keyed by seed and place, so that holds for sampled answers, too. Where the texts differ, the receipt has the first place that does,
and how likely both tokens are there under the model. `Engine.prove` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place, in tokens of the answer, at which a drafted answer and plain decoding differ. answer, plain: the token ids there,
    None after the end of a text. answer_logprob, plain_logprob: their natural log-probabilities under the model, None for a token
    that is not among the likeliest."""

    place: int
    answer: int | None
    plain: int | None
    answer_logprob: float | None
    plain_logprob: float | None

    @classmethod
    def at(
        cls, place: int, answer: Sequence[int], plain: Sequence[int], logprobs: Mapping[int, float]
    ) -> Difference:
        """Return the difference of two answers at `place`. logprobs: log-probabilities of the likeliest tokens there, by token id."""
        both = [tokens[place] if place < len(tokens) else None for tokens in (answer, plain)]
        likely = [None if token is None else logprobs.get(token) for token in both]
        return cls(
            place=place, answer=both[0], plain=both[1], answer_logprob=likely[0], plain_logprob=likely[1]
        )


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The comparison of a drafted answer with plain decoding. seconds, plain_seconds: of decoding, without reading the prompt; each is
    one run, so their ratio is no measurement. difference: None where plain decoding gives the same num_tokens tokens and ends in the
    same way."""

    num_tokens: int
    num_accepted: int
    seconds: float
    plain_seconds: float
    difference: Difference | None

    @property
    def is_equal(self) -> bool:
        """Return whether plain decoding gives the same text."""
        return self.difference is None


def first_difference(answer: Sequence[int], plain: Sequence[int]) -> int:
    """Return the first place at which two texts differ; where one is the beginning of the other, its length."""
    pairs = zip(answer, plain, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(answer), len(plain)))
