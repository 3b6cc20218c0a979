"""The flat token axis: all rows' tokens of one forward behind one another, N = sum of widths.

Matrix products see only the flat axis. Operations that treat rows apart (attention, recurrences) take `starts`, or groups of padded rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

# columns that a product of few tokens gives at once on a CPU, two or four vectors of most: what is projected may be filled up to whole ones
PANEL = 64
# a recurrence takes as many steps as its widest row has tokens, for all rows that go along: those of very different widths go apart
# up to FEW tokens a CPU takes a row as plain steps do, bit for bit; more may go another way
FEW = 4
CLASSES = (1, FEW, 17, 33)


class FlatRows:
    """Widths of B rows on the flat axis. A row may have width 0: it sits this forward out.

    Attributes: widths (B numbers), starts (B + 1 offsets), num_rows B, num_tokens N, max_width W.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        if not widths or min(widths) < 0 or max(widths) < 1:
            raise ValueError(f"a forward needs at least one token, got widths {widths}")
        self.widths = tuple(widths)
        self.starts = (0, *accumulate(self.widths))
        self.num_rows = len(self.widths)
        self.num_tokens = self.starts[-1]
        self.max_width = max(self.widths)

    @property
    def is_uniform(self) -> bool:
        """All rows equally wide: padding is a reshape."""
        return self.num_tokens == self.num_rows * self.max_width

    @property
    def active(self) -> list[int]:
        """Rows with at least one token."""
        return [r for r, width in enumerate(self.widths) if width]

    @cached_property
    def last_indices(self) -> mx.array:
        """(number of active rows,) int32: flat index of each active row's last token."""
        return mx.array(np.asarray([self.starts[r + 1] - 1 for r in self.active], np.int32))

    def last(self, x: mx.array) -> mx.array:
        """x (N, ...) -> (number of active rows, ...): of each active row's last token."""
        return x[self.last_indices] if self.num_tokens > len(self.active) else x

    @cached_property
    def starts_array(self) -> mx.array:
        """(B + 1,) int32."""
        return mx.array(np.asarray(self.starts, np.int32))

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """All that the graph of a forward over these rows depends on, in the twins of kernels at any rate."""
        return self.num_tokens, tuple((len(g), w, self._is_exact(g, w)) for g, w in self.grouped)

    @cached_property
    def index(self) -> RaggedIndex | None:
        """Arrays that take rows apart and put them together, or None where a reshape does."""
        if self.is_uniform:
            return None
        starts, widths = np.asarray(self.starts, np.int64), np.asarray(self.widths, np.int64)
        unpad, placed, groups = np.zeros(self.num_tokens, np.int32), 0, []
        for rows, width in self.grouped:
            # which flat token stands at a padded place, 0 where none does; and whether one does
            column = np.arange(width)
            valid = column[None] < widths[rows, None]
            tokens = np.where(valid, starts[rows, None] + column, 0)
            unpad[tokens[valid]] = placed + np.flatnonzero(valid)
            placed += valid.size
            groups.append((_array(tokens), *(() if valid.all() else (mx.array(valid),))))
        order = np.concatenate([rows for rows, _ in self.grouped])
        owners = np.repeat(np.arange(self.num_rows), widths)
        flat = unpad, owners, np.arange(self.num_tokens) - starts[owners]
        return RaggedIndex(
            RowGroups(groups, _array(order), _array(np.argsort(order))), *(_array(x) for x in flat)
        )

    @cached_property
    def grouped(self) -> list[tuple[list[int], int]]:
        """Rows that a recurrence takes together, padded to one width, and that width: those in one of the classes that CLASSES end."""
        if self.is_uniform:
            return [(list(range(self.num_rows)), self.max_width)]
        found: dict[int, list[int]] = {}
        for r, width in enumerate(self.widths):
            found.setdefault(bisect_left(CLASSES, width), []).append(r)
        return [(rows, max(1, *(self.widths[r] for r in rows))) for _, rows in sorted(found.items())]

    def _is_exact(self, rows: list[int], width: int) -> bool:
        return all(self.widths[r] == width for r in rows)


def _array(x: np.ndarray) -> mx.array:
    return mx.array(x.astype(np.int32))


class RowGroups:
    """Rows taken apart by how many tokens they have; plain arrays, so that a compiled function can take them.

    tokens: of each group (b, w) int32, which flat token stands at a padded place (0 where none does), and unless all places are taken which
    are, (b, w) bool. order, back (B,) int32: rows group by group, and where each row is in that order.
    """

    def __init__(self, tokens: Sequence[tuple[mx.array, ...]], order: mx.array, back: mx.array) -> None:
        self.tokens, self.order, self.back = [tuple(g) for g in tokens], order, back

    @property
    def arrays(self) -> tuple[object, ...]:
        """What `RowGroups` is made of."""
        return self.tokens, self.order, self.back

    @property
    def max_width(self) -> int:
        return max(g[0].shape[1] for g in self.tokens)

    def split(self, x: mx.array) -> list[mx.array]:
        """(B, ...) to one (b, ...) for each group."""
        sizes = [g[0].shape[0] for g in self.tokens]
        return [x] if len(sizes) == 1 else mx.split(x[self.order], list(accumulate(sizes))[:-1])

    def join(self, parts: Sequence[mx.array]) -> mx.array:
        """The parts of `split` back to (B, ...)."""
        return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))[self.back]


class RaggedIndex:
    """Rows of different widths: their groups; unpad (N,) int32, where each token stands in the groups' places laid end to end; owners and
    places (N,) int32, its row and how many tokens of the row are before it."""

    def __init__(self, groups: RowGroups, unpad: mx.array, owners: mx.array, places: mx.array) -> None:
        self.groups, self.unpad, self.owners, self.places = groups, unpad, owners, places

    @property
    def arrays(self) -> tuple[object, ...]:
        """For `of`, what a compiled function takes."""
        return self.groups.arrays, self.unpad, self.owners, self.places

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> RaggedIndex:
        groups, *flat = arrays
        return cls(RowGroups(*groups), *flat)

    def join_tokens(self, parts: Sequence[mx.array]) -> mx.array:
        """One (b w, ...) a group back to (N, ...)."""
        return (parts[0] if len(parts) == 1 else mx.concatenate(list(parts)))[self.unpad]
