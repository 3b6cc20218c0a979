"""Positions of a forward's tokens in their rows, also while only the device knows how many tokens the last round accepted.

A round may be built before the previous one has been read. The number of accepted tokens is then an array on the device. Lengths on
the host are upper bounds: they give shapes, such as how much of a buffer is read. Values come from the array: where keys are written,
what a query sees, the angle of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import mlx.core as mx
import numpy as np

from mlxspec.kernels.attention import causal_mask
from mlxspec.kernels.flat import FlatRows


class Places:
    """The places of a forward's tokens in their rows. The new tokens of row r follow its first lengths[r] tokens.

    exact: (B,) int32, the number of tokens before the new ones where only the device knows them; lengths are upper bounds then. None
    where lengths are exact. shifts: for each row the difference between a token's rotary position and its index; None where it is 0 in
    every row.
    """

    def __init__(
        self,
        rows: FlatRows,
        lengths: Sequence[int],
        exact: mx.array | None = None,
        shifts: Sequence[int] | None = None,
    ) -> None:
        self.rows, self.lengths, self.exact = rows, list(lengths), exact
        self.shifts = list(shifts) if shifts is not None and any(shifts) else None

    @cached_property
    def positions(self) -> mx.array:
        """Return the index of each new token in its row, (N,) int32."""
        if self.exact is None:
            pieces = [np.arange(n, n + w) for n, w in zip(self.lengths, self.rows.widths, strict=True)]
            return mx.array(np.concatenate(pieces).astype(np.int32))
        offsets = mx.array(np.concatenate([np.arange(w) for w in self.rows.widths]).astype(np.int32))
        if self.rows.num_rows == 1:
            return self.exact + offsets
        owners = np.repeat(np.arange(self.rows.num_rows), self.rows.widths)
        return self.exact[mx.array(owners.astype(np.int32))] + offsets

    @cached_property
    def turns(self) -> mx.array:
        """Return the rotary positions of the new tokens, (N, 1, 1): each token's index plus the shift of its row. float32 where the host
        knows the exact lengths, else int32."""
        if self.exact is not None and self.shifts is None:
            return self.positions[:, None, None]
        if self.exact is not None:
            added = np.repeat(np.asarray(self.shifts, np.int32), self.rows.widths)
            return (self.positions + mx.array(added))[:, None, None]
        firsts = [n + s for n, s in zip(self.lengths, self.shifts or [0] * len(self.lengths), strict=True)]
        pieces = [np.arange(n, n + w) for n, w in zip(firsts, self.rows.widths, strict=True)]
        return mx.array(np.concatenate(pieces).astype(np.float32)[:, None, None])

    @cached_property
    def starts(self) -> list[mx.array] | None:
        """Return for each row the index (1,) int32 of its first new token; None where `lengths` are exact. Each index is an array of one
        number of 4 bytes: MLX's Metal backend made its 8-byte offset in place of larger ones, and before 0.32.2 then did not wait for the
        operation that computes them (mlx #3880)."""
        return None if self.exact is None else mx.split(self.exact, self.rows.num_rows)

    @cached_property
    def masks(self) -> list[mx.array | None]:
        """Return for each row the mask (width, lengths[r] + width) bool of the tokens in its buffer that each of its new tokens sees. None
        where the causal mask is right, as lengths are exact."""
        if self.starts is None:
            return [None] * self.rows.num_rows
        return [
            _seen(start, _up_to(width)[:, None], _up_to(length + width)) if width else None
            for length, width, start in zip(self.lengths, self.rows.widths, self.starts, strict=True)
        ]

    def ends(self, row: int) -> mx.array | None:
        """Return how many of the tokens in a row's buffer each of the row's new tokens sees, (width,) int32: the same as `masks`, as
        counts. None where the causal mask is right, as lengths are exact."""
        if self.starts is None:
            return None
        return self.starts[row] + mx.array(_up_to(self.rows.widths[row]) + 1)


def seen_behind(begin: int, start: mx.array | None, width: int, num_behind: int) -> mx.array | None:
    """Return the mask (width, begin + num_behind) bool of the tokens that each of the last `width` tokens of a row sees. The row has a
    beginning of `begin` tokens and `num_behind` tokens after it. start (1,) int32: how many tokens of the beginning are valid; None: all.
    Returns None where width is 1 and all tokens are seen."""
    if start is None and width == 1:
        return None
    if start is None:
        return causal_mask(width, begin + num_behind)
    own = np.arange(num_behind)[None] <= np.arange(num_behind - width, num_behind)[:, None]
    first = mx.broadcast_to(_up_to(begin) < start, (width, begin))
    return mx.concatenate([first, mx.array(own)], axis=1)


def _up_to(end: int) -> mx.array:
    """Return the numbers from 0 up to `end` as int32. The device computes them, so that the host's work does not grow with a row's
    length."""
    return mx.arange(end, dtype=mx.int32)


@partial(mx.compile, shapeless=True)
def _seen(start: mx.array, own: mx.array, every: mx.array) -> mx.array:
    return every <= start + own
