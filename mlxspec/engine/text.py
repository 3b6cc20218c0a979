"""Decodes the text of one answer and finds its stop strings. Gives out whole characters. Holds back text that may still become a stop
string, or the beginning of a section in which stop strings do not count."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlxspec.loading.tokenizer import TextStream


class AnswerText:
    """A decoder of one answer's tokens into text, which finds the stop strings. It holds back text that may still become a stop string."""

    def __init__(
        self,
        stream: TextStream | None,
        stop: Sequence[str],
        *,
        keeps_stop: bool = False,
        outside: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        """Start with an empty text. stream: decodes tokens; None: there is no text. stop: the stop strings. keeps_stop: whether the stop
        string is part of the text. outside: as SamplingParams.stop_outside."""
        self._stream, self._keeps_stop = stream, keeps_stop
        self._stop = tuple(stop)
        self._outside = tuple(outside) if stop else ()
        self._close: str | None = None  # what ends the text in which no stop string is looked for
        self._held = ""
        self._stopped = False
        self.stop_string: str | None = None  # the one that ended the answer
        self._said: list[str] = []  # what was given out, in order

    @property
    def text(self) -> str:
        """Return all text that `push` and `finish` have returned. Its pieces are joined only here, because adding each token to one
        string would copy the whole answer."""
        if len(self._said) > 1:
            self._said = ["".join(self._said)]
        return self._said[0] if self._said else ""

    def push(self, token: int, *, may_stop: bool = True) -> tuple[str, bool]:
        """Decode a token; return the text that is now certain, and whether a stop string was completed. After True, no more tokens may
        be pushed. may_stop: False ignores stop strings."""
        if self._stream is None:
            return "", False
        return self._give(self._stream.push(token), self._stop if may_stop else ())

    def finish(self, *, cut: bool = False) -> tuple[str, bool]:
        """Return the held-back text at the answer's end and whether it completed a stop string. cut: whether the answer was cut by a
        limit; an incomplete character is then left out."""
        if self._stream is None or self._stopped:
            return "", self._stopped
        piece, stopped = self._give(self._stream.rest(cut=cut), self._stop)
        if not stopped:
            self._said.append(self._held)
            piece, self._held = piece + self._held, ""
        return piece, stopped

    def _give(self, piece: str, stop: Sequence[str]) -> tuple[str, bool]:
        self._held += piece
        skipped = self._skip(stop)
        found = [] if self._close else [(i, s) for s in stop if (i := self._held.find(s)) >= 0]
        if found:
            place, self.stop_string = min(found, key=lambda one: one[0])
            place += len(self.stop_string) if self._keeps_stop else 0
            certain, self._held, self._stopped = self._held[:place], "", True
            self._said.append(skipped + certain)
            return skipped + certain, True
        watched = (self._close,) if self._close else stop
        keep = max((_overlap(self._held, s) for s in watched), default=0)
        if not self._close:
            keep = max(keep, *(_begun(self._held, *pair[:2]) for pair in self._outside), 0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        certain = skipped + certain
        if certain:
            self._said.append(certain)
        return certain, False

    def _skip(self, stop: Sequence[str]) -> str:
        """Remove and return the beginning of the held text in which stop strings need no longer be searched for."""
        skipped: list[str] = []
        while self._outside:
            if self._close:
                place = self._held.find(self._close)
                if place < 0:
                    break
                end, self._close = place + len(self._close), None
            else:
                stops = min((i for s in stop if (i := self._held.find(s)) >= 0), default=len(self._held))
                opened = [
                    (m.end(), close)
                    for a, b, close in self._outside
                    if (m := _opens(a, b).search(self._held)) and m.start() < stops
                ]
                if not opened:
                    break
                end, self._close = min(opened)
            skipped.append(self._held[:end])
            self._held = self._held[end:]
        return "".join(skipped)


def _opens(opener: str, head: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(opener)}\s*{re.escape(head)}")


def _begun(text: str, opener: str, head: str) -> int:
    """Return the length of the longest end of `text` that could still become `opener`, white space and `head`."""
    place = text.rfind(opener)
    if place >= 0 and head.startswith(text[place + len(opener) :].lstrip()):
        return len(text) - place
    return _overlap(text, opener)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
