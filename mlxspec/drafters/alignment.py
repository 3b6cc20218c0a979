"""An answer's place in a text that was given beforehand as its probable form, and how the text goes on there.

While the answer agrees the place moves on. Where it does not, places at which the answer's latest tokens stand are compared: the longer and
the rarer the tokens that agree, the more bits speak for a place, and the further a place lies from where the answer left the text, the
fewer. Tokens that the answer has inserted move it by none, deleted ones by their number, and a block that stands elsewhere is found by
two tokens that agree. No place is taken while two are about as good. Bits of a token: the logarithm of how rare it is in the text, as in
alignments by information content.

A mismatch costs some hundred comparisons at most, any other token none. Knows ids; knows no model and no drafts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import log2

from mlxspec.drafters.text_index import CONTEXT, TextSegment, hash_of

SegmentOf = Callable[[Sequence[int], int], TextSegment]  # of a text, by its n-grams
TOKEN_ALIGNED = 150  # bytes of a token of the text, about
AHEAD, BEHIND = 320, 8  # tokens around the place that was left, among which one token that agrees is enough
_ELSEWHERE = 48  # places of two tokens that are compared, the latest ones
_COMPARED = 24  # tokens of the answer that a place is compared by
_RAREST = 12.0  # bits of a token at most
_SETTLED = 3  # tokens that agree in a row: the place was right
_MARGIN = 2.0  # bits by which a place must be better than the next one


class Alignment:
    """The place in a known text that an answer being written has reached. place: index of the token of the text that the answer is expected
    to continue with, None where no place is found. agreed: number of tokens before that place that equal the answer's last tokens."""

    def __init__(self, text: Sequence[int], segment_of: SegmentOf = TextSegment.of) -> None:
        """Follow an answer through `text`. segment_of: builds the index of the text, at once or later."""
        self._text = list(text)
        counts = Counter(self._text)
        self._bits = {token: min(log2(len(self._text) / n), _RAREST) for token, n in counts.items()}
        self._pairs = segment_of(self._text, 2)
        self._said: deque[int] = deque(maxlen=_COMPARED)
        self.place: int | None = 0
        self.agreed = 0
        self.num_met = 0  # tokens of the answer that stood at the place
        self._left, self._since = 0, 0  # the last place that was right, and tokens of the answer since

    def start(self, place: int, said: Sequence[int]) -> None:
        """Set the answer's place in the text. said: the answer's tokens that end at this place."""
        self._said.extend(said)
        self.place, self.agreed, self._left, self._since = place, len(said), place, 0

    @property
    def nbytes(self) -> int:
        """Return about how many bytes the alignment holds."""
        return TOKEN_ALIGNED * len(self._text)

    def next(self, limit: int) -> list[int]:
        """Return at most `limit` tokens of the text from `place` on; none if no place is known."""
        return [] if self.place is None else self._text[self.place : self.place + limit]

    def push(self, tokens: Iterable[int]) -> None:
        """Add the answer's next tokens, and move the place with them."""
        for token in tokens:
            self._said.append(token)
            self._since += 1
            if self.place is not None and self.place < len(self._text) and self._text[self.place] == token:
                self.place += 1
                self.agreed += 1
                self.num_met += 1
                if self.agreed >= _SETTLED:
                    self._left, self._since = self.place, 0
            else:
                self.place, self.agreed = self._found()

    def _found(self) -> tuple[int | None, int]:
        """Return the place in the text that the answer's last tokens fit best, None where no place fits, and how many of these tokens
        precede it."""
        ranked = sorted((self._score(end), end) for end in self._candidates())
        if not ranked or ranked[-1][0] <= 0 or (len(ranked) > 1 and ranked[-1][0] - ranked[-2][0] < _MARGIN):
            return None, 0
        end = ranked[-1][1]
        return end, len(self._agreeing(end))

    def _candidates(self) -> set[int]:
        """Return the places in the text that may be the answer's: those that follow its last token near the place where the answer left the
        text, and those that follow its last two tokens elsewhere."""
        token, left = self._said[-1], self._left
        start, near = max(0, left - BEHIND - 1), self._text[max(0, left - BEHIND - 1) : left + AHEAD]
        found = {start + i for i, one in enumerate(near, 1) if one == token}
        if len(self._said) > 1:
            places = self._pairs.places(0, hash_of((self._said[-2], token)))
            elsewhere = (place - CONTEXT for place in islice(places, _ELSEWHERE))
            found.update(end for end in elsewhere if self._text[end - 1] == token)
        return found

    def _agreeing(self, end: int) -> list[int]:
        """Return the answer's last tokens that equal the tokens of the text before `end`, the last one first."""
        found: list[int] = []
        for token, own in zip(
            reversed(self._said), reversed(self._text[max(0, end - _COMPARED) : end]), strict=False
        ):
            if token != own:
                break
            found.append(token)
        return found

    def _score(self, end: int) -> float:
        """Return the evidence for the place `end` in bits: what the agreeing tokens contribute, less the cost of the jump from the place
        where the answer left the text."""
        bits, skipped = sum(self._bits[t] for t in self._agreeing(end)), end - self._left
        if -BEHIND <= skipped <= AHEAD:
            return bits - 0.7 * (
                log2(1 + abs(skipped - self._since)) + log2(1 + max(abs(skipped), self._since))
            )
        return bits - log2(len(self._text)) - 1


def num_met(text: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many tokens of an answer equal the token of the text that an `Alignment`, which begins at the text's start, expects at
    that point. After another token the alignment searches the whole text for a new place."""
    alignment = Alignment(text)
    alignment.push(answer)
    return alignment.num_met
