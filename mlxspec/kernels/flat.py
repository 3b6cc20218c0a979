"""The flat token axis: all rows' tokens of one forward behind one another, N = sum of widths.

Matrix products see only the flat axis. Operations that treat rows apart (attention, recurrences) take `starts`, or padded rows.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

# Widths that rounds with drafts have, in tokens of all rows: few, because each is compiled when it first runs
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


class FlatRows:
    """The widths of B rows whose tokens lie one after another on one flat axis. A row of width 0 takes no part in the forward.

    Attributes: widths (B numbers), starts (B + 1 offsets), num_rows B, num_tokens N, max_width W. repeats: whether forwards of this
    shape are likely to occur again, so that compiling them pays.
    """

    def __init__(self, widths: tuple[int, ...], *, is_prompt: bool = False) -> None:
        """Lay out rows of these widths. is_prompt: the tokens are a prompt's, so the caller did not choose their number; such a shape is
        taken to repeat where it is in LADDER or a power of two, as whole chunks are."""
        if not widths or min(widths) < 0 or max(widths) < 1:
            raise ValueError(f"a forward needs at least one token, got widths {widths}")
        self.widths = tuple(widths)
        self.starts = (0, *accumulate(self.widths))
        self.num_rows = len(self.widths)
        self.num_tokens = self.starts[-1]
        self.max_width = max(self.widths)
        self.repeats = not is_prompt or self.num_tokens in LADDER or self.num_tokens.bit_count() == 1

    @property
    def is_uniform(self) -> bool:
        """Return whether all rows have one width, so that padding is a reshape."""
        return self.num_tokens == self.num_rows * self.max_width

    @cached_property
    def active(self) -> list[int]:
        """Return the numbers of the rows with at least one token."""
        return [r for r, width in enumerate(self.widths) if width]

    @cached_property
    def last_indices(self) -> mx.array:
        """Return the flat index of each active row's last token, (number of active rows,) int32."""
        return mx.array(np.asarray([self.starts[r + 1] - 1 for r in self.active], np.int32))

    def last(self, x: mx.array) -> mx.array:
        """Return the entries of x (N, ...) for each active row's last token, (number of active rows, ...)."""
        return x[self.last_indices] if self.num_tokens > len(self.active) else x

    @cached_property
    def starts_array(self) -> mx.array:
        """Return the starts as an array (B + 1,) int32."""
        return mx.array(np.asarray(self.starts, np.int32))

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """Return a key of everything that the graph of a forward over these rows depends on, at least in the plain twins of kernels."""
        return self.num_tokens, self.num_rows, self.max_width

    @cached_property
    def index(self) -> RaggedIndex | None:
        """Return the arrays that pad rows to the widest one and undo it, None where a reshape does that."""
        if self.is_uniform:
            return None
        starts, widths = np.asarray(self.starts, np.int64), np.asarray(self.widths, np.int64)
        column = np.arange(self.max_width)
        valid = column[None] < widths[:, None]
        tokens = np.where(valid, starts[:-1, None] + column, 0)
        owners = np.repeat(np.arange(self.num_rows), widths)
        places = np.arange(self.num_tokens) - starts[owners]
        return RaggedIndex(
            _array(tokens), mx.array(valid), *map(_array, (np.flatnonzero(valid), owners, places))
        )


def _array(x: np.ndarray) -> mx.array:
    return mx.array(x.astype(np.int32))


class RaggedIndex(NamedTuple):
    """Indices of B rows of different widths, padded to W tokens each. They are arrays, so that a compiled function can take them.

    tokens (B, W) int32: the flat token at each place, 0 for padding; valid (B, W) bool: False for padding; unpad (N,) int32: each
    token's place in B W; owners and places (N,) int32: each token's row, and the number of the row's tokens before it.
    """

    tokens: mx.array
    valid: mx.array
    unpad: mx.array
    owners: mx.array
    places: mx.array
