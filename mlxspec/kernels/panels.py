"""Float matrices cut into panels so small that a CPU's BLAS reads them in place when it multiplies a few rows.

A whole matrix it would copy at every call of more than one row, which costs more than the product. Pieces of PANEL columns are so small
that it reads them in place. With OpenBLAS on x86-64 the bits of a product do not depend on the number of rows then, up to about a million
multiplications a panel.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.kernels.flat import PANEL

PANELS_AT_MOST = 128  # rows; for more the copy is a small part, and one large product the faster one


def in_panels(weight: mx.array) -> mx.array:
    """(out, in) -> (P, in, PANEL), filled up with zeros."""
    num_out, num_in = weight.shape
    num_panels = -(-num_out // PANEL)
    padded = mx.pad(weight, [(0, num_panels * PANEL - num_out), (0, 0)])
    return mx.contiguous(padded.reshape(num_panels, PANEL, num_in).swapaxes(1, 2))


def side_by_side(panels: mx.array, shape: Sequence[int] = (-1,)) -> mx.array:
    """(P, N, PANEL) -> (N, P * PANEL), or (N, *shape), or a shape of three and more in which -1 is N"""
    num_rows = panels.shape[1]
    whole = shape if len(shape) > 2 and -1 in shape else (num_rows, *shape)
    return (panels if num_rows == 1 else panels.swapaxes(0, 1)).reshape(whole)
