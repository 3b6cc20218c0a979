"""The tokens that a drafter proposes from if it reads only some rows of the language-model head: those of a list, which all texts share,
and for each text the tokens that it holds itself. A text repeats its own rare tokens, and the list cannot know them.

Invariants: what a text may be proposed depends on that text and the list alone, not on the texts drafted beside it; a text brings at most
MOST_OWN tokens of its own, the latest ones. They are found in the row's history when it is drafted for, so it does not matter how they came
there: with a prompt, with a beginning that the prefix store had, or as the answer. Knows histories and logits; knows no forward and no
sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import mlx.core as mx
import numpy as np

from mlxspec.models.head_rows import HeadRows
from mlxspec.models.layers import FusedLinear
from mlxspec.models.sizes import bytes_of

MOST_OWN = 2048  # tokens a text brings that are not in the list


class _Text:
    """The tokens of one row's text that the fixed list of proposals lacks. num_seen: tokens of the history that were examined; own: those
    of them that are not in the list, the latest last; version: a new number whenever `own` changes."""

    def __init__(self, version: int) -> None:
        self.num_seen = 0
        self.own: dict[int, None] = {}
        self.version = version


class Proposals:
    """The rows of the language-model head that one drafter scores: a fixed list, and the tokens of the rows' own texts. `open` is called
    before a draft and names its rows; `logits` and `ids` belong to the last `open`."""

    def __init__(self, head: HeadRows) -> None:
        self.head = head
        self._is_listed = np.zeros(head.vocab_size, np.bool_)
        self._is_listed[head.ids] = True
        self._listed = mx.array(head.ids)
        self._texts: dict[int, _Text] = {}
        self._versions = count()
        self._opened: tuple[tuple[int, int], ...] = ()  # rows, and the versions of their texts
        self._own: FusedLinear | None = None
        self._may: mx.array | None = None  # (rows, E) bool: whose token each of `_own` is
        self.ids = self._listed

    def open(self, histories: Mapping[int, Sequence[int]]) -> None:
        """Select the tokens to score for a draft. histories: by row, all its known tokens."""
        for row, history in histories.items():
            self._follow(row, history)
        opened = tuple((row, self._texts[row].version) for row in histories)
        if opened == self._opened:
            return
        self._opened = opened
        texts = [self._texts[row] for row in histories]
        own = np.asarray(sorted(set[int]().union(*(t.own for t in texts))), np.int32)
        self._own, self._may, self.ids = None, None, self._listed
        if len(own):
            self._own = self.head.of(own)
            self.ids = mx.concatenate([self._listed, mx.array(own)])
        if len(own) and len(texts) > 1:
            self._may = mx.array(np.stack([np.isin(own, list(t.own)) for t in texts]))

    def logits(self, hidden: mx.array, rows: Sequence[int]) -> mx.array:
        """Return logits (N, len(ids)) for hidden (N, H), one hidden state for each of `rows`; -inf for tokens of other rows' texts."""
        logits = self.head(hidden, self._own)
        if self._may is None:
            return logits
        places = {row: i for i, (row, _) in enumerate(self._opened)}
        may = self._may[mx.array([places[row] for row in rows])]
        listed, own = mx.split(logits, [len(self.head.ids)], axis=-1)
        return mx.concatenate([listed, mx.where(may, own, -mx.inf)], axis=-1)

    def forget(self, row: int) -> None:
        """Release what is held for a row."""
        self._texts.pop(row, None)

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.head)

    def own_bytes(self, length: int) -> int:
        """Return the most bytes of head rows that a text of `length` tokens adds."""
        return self.weight_bytes * min(MOST_OWN, length) // len(self.head.ids)

    def _follow(self, row: int, history: Sequence[int]) -> None:
        text = self._texts.get(row)
        if text is None:
            text = self._texts[row] = _Text(next(self._versions))
        new = np.asarray(history[text.num_seen :], np.int64)
        text.num_seen = len(history)
        new = new[(new >= 0) & (new < self.head.vocab_size)]
        changed = False
        for token in new[~self._is_listed[new]].tolist():
            changed = changed or token not in text.own
            text.own.pop(token, None)
            text.own[token] = None
        while len(text.own) > MOST_OWN:
            del text.own[next(iter(text.own))]
        if changed:
            text.version = next(self._versions)
