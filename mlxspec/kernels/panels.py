"""Float matrices cut into panels so small that a CPU's BLAS reads them in place when it multiplies a few rows.

A whole matrix it would copy at every call of more than one row, which costs more than the product. Pieces of PANEL columns are so small
that it reads them in place. With OpenBLAS on x86-64 the bits of a product do not depend on the number of rows then, up to about a million
multiplications a panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlxspec.kernels.flat import PANEL

PANELS_AT_MOST = 128  # rows; for more the copy is a small part, and one large product the faster one
BLOCK = 32  # outputs of a weight that is read in place without being cut into panels
ROWS_IN_PLACE = 18  # rows; with more than these OpenBLAS adds up otherwise than with one


def in_panels(weight: mx.array) -> mx.array:
    """(out, in) -> (P, in, PANEL), filled up with zeros."""
    num_out, num_in = weight.shape
    num_panels = -(-num_out // PANEL)
    if num_out % PANEL:  # filling up by nothing would be a copy
        weight = mx.pad(weight, [(0, num_panels * PANEL - num_out), (0, 0)])
    return mx.contiguous(weight.reshape(num_panels, PANEL, num_in).swapaxes(1, 2))


def product_in_place(x: mx.array, weight: mx.array) -> mx.array:
    """x (N, in) with a weight (out, in) that must stay as it lies, because rows of it are looked up too -> (N, out). Up to ROWS_IN_PLACE
    rows it is read in blocks of BLOCK outputs."""
    num_blocks, left = divmod(weight.shape[0], BLOCK)
    if x.shape[0] > ROWS_IN_PLACE or not num_blocks:
        return x @ weight.T
    whole = weight[: num_blocks * BLOCK] if left else weight
    every, same = _block_numbers(num_blocks)
    blocks = whole.reshape(num_blocks, BLOCK, -1).swapaxes(1, 2)
    out = side_by_side(mx.gather_mm(x, blocks, lhs_indices=same, rhs_indices=every))
    return mx.concatenate([out, x @ weight[num_blocks * BLOCK :].T], axis=-1) if left else out


@lru_cache(maxsize=16)
def _block_numbers(num_blocks: int) -> tuple[mx.array, mx.array]:
    """Of all blocks, and of the one x that all are multiplied with: numbers, not operations that run anew at every call."""
    return mx.array(np.arange(num_blocks, dtype=np.uint32)), mx.array(np.zeros(num_blocks, np.uint32))


def side_by_side(panels: mx.array, shape: Sequence[int] = (-1,)) -> mx.array:
    """(P, N, PANEL) -> (N, P * PANEL), or (N, *shape), or a shape of three and more in which -1 is N"""
    num_rows = panels.shape[1]
    whole = shape if len(shape) > 2 and -1 in shape else (num_rows, *shape)
    return (panels if num_rows == 1 else panels.swapaxes(0, 1)).reshape(whole)
