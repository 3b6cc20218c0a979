"""At which numbers of rows a quantized product takes a step in time on an Apple GPU, by the tiles of the kernels that do it.

A kernel reads a weight once for each tile of rows. Up to the end of a tile a further row costs next to nothing; the row behind it costs one
more reading, or another kernel. `ends` gives the last number of rows before each such step. A kernel that reads the weight for each row
anew has no tiles and no ends.

MLX's choice of kernels is that of August 2026 (commit 846d176, `mlx/backend/metal/quantized.cpp`). Runs nothing; knows shapes and the
device.
"""

from __future__ import annotations

import mlx.core as mx

from mlxspec.kernels.qmv_rows import AFFINE, QuantizedWeight, is_ours
from mlxspec.platform import device

MOST = 64  # rows: behind that a product is a large one, whose tiles are a small part of it
_WIDE_TILE = 5  # rows of `qmv_wide`
_MATRIX_TILE, _LARGE_MATRIX_TILE = (
    32,
    64,
)  # rows of `qmm`; the larger one with matrix units, for more rows than the smaller one has
_READS_WIDE = 15  # first generation on which `qmv_wide` takes affine formats
# first generation, whether it has two dies, and from how many rows on `qmm` multiplies: up to 2048 x 2048, up to 4096 x 4096, larger
_MATRIX_FROM = (
    (17, False, (33, 25, 13)),
    (15, False, (13, 15, 13)),
    (13, False, (14, 10, 6)),
    (0, False, (18, 12, 10)),
    (0, True, (32, 18, 12)),
)
_SMALL, _MIDDLE = 2048, 4096


def ends(weight: QuantizedWeight, dtype: mx.Dtype, *, exact: bool = False) -> tuple[int, ...]:
    """Numbers of rows of `dtype`, from 2 to MOST, behind which a product with `weight` takes a step. exact: as `qmv_rows` has it. Empty
    where there is no Apple GPU, or it does not say which it is."""
    if device.gpu_generation() is None:
        return ()
    ways = [_way(n, weight, dtype, exact) for n in range(1, MOST + 2)]
    return tuple(
        n
        for n, (here, behind) in enumerate(zip(ways, ways[1:], strict=False), 1)
        if n > 1 and here != behind and not here[0] == behind[0] == "qmv"
    )


def _way(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype, exact: bool) -> tuple[str, int]:
    """The kernel that multiplies so many rows, and how often it reads the weight."""
    if is_ours(num_rows, weight, dtype, exact=exact):
        return "qmv_rows", 1
    if num_rows >= _matrix_from(weight):
        large = num_rows > _MATRIX_TILE and device.has_matrix_units() and dtype != mx.float32
        tile = _LARGE_MATRIX_TILE if large else _MATRIX_TILE
        return f"qmm of {tile}", -(-num_rows // tile)
    generation = device.gpu_generation() or 0
    if num_rows > 1 and (weight.mode != AFFINE or generation >= _READS_WIDE):
        return "qmv_wide", -(-num_rows // _WIDE_TILE)
    return "qmv", num_rows


def _matrix_from(weight: QuantizedWeight) -> int:
    generation, size = device.gpu_generation() or 0, max(weight.shape)
    which = 0 if size <= _SMALL else 1 if size <= _MIDDLE else 2
    of_two_dies = device.gpu_has_two_dies()
    return next(
        limits[which]
        for first, two, limits in _MATRIX_FROM
        if two == of_two_dies and (two or generation >= first)
    )
