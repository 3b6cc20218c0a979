"""The flat token axis: all rows' tokens of one forward behind one another, N = sum of widths.

Knows how to lay rows out, pad them and take the padding away again; does not know what the tokens are or who owns the rows.
Matmuls see only the flat axis. What must treat rows apart (attention, recurrences) takes `starts`, or the padded `(B, W)` view.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import mlx.core as mx
import numpy as np

# columns that a product of few tokens gives at once on a CPU, two or four vectors of most: what is projected may be filled up to whole ones
PANEL = 64


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

    @cached_property
    def starts_array(self) -> mx.array:
        """(B + 1,) int32."""
        return mx.array(np.asarray(self.starts, np.int32))

    @cached_property
    def index(self) -> RaggedIndex | None:
        """Arrays that pad and unpad, or None where a reshape does."""
        return None if self.is_uniform else RaggedIndex.build(self)


class RaggedIndex:
    """Gather indices between the flat axis and its padded view; plain arrays, so that a compiled function can take them.

    pad (B, W) int32: which flat token stands at a padded place (0 where none does); valid (B, W) bool; unpad (N,) int32: where a
    flat token stands in the flattened padded view.
    """

    def __init__(self, pad: mx.array, valid: mx.array, unpad: mx.array) -> None:
        self.pad, self.valid, self.unpad = pad, valid, unpad

    @classmethod
    def build(cls, rows: FlatRows) -> RaggedIndex:
        column = np.arange(rows.max_width)
        valid = column[None] < np.asarray(rows.widths)[:, None]
        pad = np.where(valid, np.asarray(rows.starts[:-1])[:, None] + column[None], 0)
        return cls(
            mx.array(pad.astype(np.int32)), mx.array(valid), mx.array(np.flatnonzero(valid).astype(np.int32))
        )

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.pad, self.valid, self.unpad


def pad_rows(x: mx.array, num_rows: int, index: RaggedIndex | None) -> mx.array:
    """(N, ...) to (B, W, ...); padded places repeat flat token 0, so mask what they must not do."""
    if index is None:
        return x.reshape(num_rows, -1, *x.shape[1:])
    return x[index.pad]


def unpad_rows(x: mx.array, index: RaggedIndex | None) -> mx.array:
    """(B, W, ...) back to (N, ...)."""
    flat = x.reshape(-1, *x.shape[2:])
    return flat if index is None else flat[index.unpad]
