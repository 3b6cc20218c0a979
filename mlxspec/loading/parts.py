"""Reads parts of the tensors of safetensors files: what a process keeps of a model that several processes run together.

Knows byte ranges; what is kept of which tensor is told by the caller. Gaps of less than GAP bytes between two ranges are read and dropped,
because another call costs more than they do, and disks read whole pages anyway. In stacks of more than MANY_ROWS rows, which experts are,
calls would take longer than the disk does, so there gaps of less than WIDE_GAP bytes are read too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.errors import ModelError
from mlxspec.loading import progress
from mlxspec.loading.names import printable
from mlxspec.loading.safetensors import read_entries

Range = tuple[int, int]  # the first, and the one behind the last
GAP, WIDE_GAP, MANY_ROWS = 512, 8192, 1 << 16  # bytes, bytes, rows
_BLOCK = 1 << 20  # bytes that are read at once where gaps are dropped
_CARRIERS: Mapping[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Cut(NamedTuple):
    """What is kept of a tensor: these ranges of an axis that has `total` numbers, ascending, one behind the other. axis: counted from the
    end. A packed axis has fewer words or scales than numbers, and is cut in proportion."""

    axis: int
    ranges: tuple[Range, ...]
    total: int

    def of(self, name: str, shape: Sequence[int]) -> tuple[int, tuple[Range, ...]]:
        """The axis, counted from the front, and the ranges of a tensor of this shape. Raises ModelError where it has no such axis, or where
        a group of quantized numbers would be torn apart."""
        if len(shape) < -self.axis:
            raise ModelError(
                f"{printable(name)} has shape {tuple(shape)}, which cannot be divided among ranks."
            )
        axis = len(shape) + self.axis
        found = []
        for span in self.ranges:
            (first, odd), (end, over) = (divmod(at * shape[axis], self.total) for at in span)
            if odd or over:
                raise ModelError(
                    f"The groups of the quantized tensor {printable(name)} cannot be divided among so many ranks; use fewer."
                )
            found.append((first, end))
        return axis, tuple(found)


def sliced(name: str, value: mx.array, cut: Cut) -> mx.array:
    """What is kept of a tensor, lazily: when it is evaluated, all of the tensor is read. Raises ModelError."""
    axis, ranges = cut.of(name, value.shape)
    parts = [value[(slice(None),) * axis + (slice(first, end),)] for first, end in ranges]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def read_parts(path: Path, cuts: Mapping[str, Cut], dtypes: Mapping[str, mx.Dtype]) -> dict[str, mx.array]:
    """What is kept of these tensors of a file, read and evaluated. dtypes: of the same tensors. Raises ModelError."""
    found = {}
    try:
        with path.open("rb", buffering=0) as file:
            entries, data = read_entries(path)
            with progress.steps(
                "reading", sum(entries[name].end - entries[name].begin for name in cuts)
            ) as step:
                for name, cut in cuts.items():
                    entry = entries[name]
                    axis, ranges = cut.of(name, entry.shape)
                    own = (
                        *entry.shape[:axis],
                        sum(end - first for first, end in ranges),
                        *entry.shape[axis + 1 :],
                    )
                    numbers = np.empty(own, _CARRIERS[dtypes[name].size])
                    inner = prod(entry.shape[axis + 1 :]) * numbers.itemsize
                    _Strip(
                        start=data + entry.begin,
                        step=entry.shape[axis] * inner,
                        spans=tuple((first * inner, end * inner) for first, end in ranges),
                    ).read(file, numbers.reshape(-1).view(np.uint8))
                    found[name] = mx.array(numbers).view(dtypes[name])
                    step(entry.end - entry.begin)
    except (OSError, KeyError) as error:
        raise ModelError(f"{path.name} changed while it was read.") from error
    return found


class _Strip(NamedTuple):
    """The same byte ranges of every row of a matrix of bytes. start: of the first row in the file; step: bytes of a row; spans: ranges of a
    row."""

    start: int
    step: int
    spans: tuple[Range, ...]

    def read(self, file: BinaryIO, into: np.ndarray) -> None:
        """Fill `into` with the ranges of one row after another. Raises OSError where the file ends before."""
        width = sum(end - first for first, end in self.spans)
        num_rows = len(into) // width if width else 0
        behind = [first for first, _ in self.spans[1:]] + [self.spans[0][0] + self.step]
        gaps = [first - end for (_, end), first in zip(self.spans, behind, strict=True)]
        if num_rows > 1 and max(gaps) < (GAP if num_rows <= MANY_ROWS else WIDE_GAP):
            self._read_through(file, into, num_rows, width)
            return
        at = 0
        for row in range(num_rows):
            for first, end in self.spans:
                _read(file, self.start + row * self.step + first, into[at : at + end - first])
                at += end - first

    def _read_through(self, file: BinaryIO, into: np.ndarray, num_rows: int, width: int) -> None:
        """Gaps are read too, some rows at once."""
        low, high = self.spans[0][0], self.spans[-1][1]
        at_once = max(1, _BLOCK // self.step)
        block = np.empty(at_once * self.step, np.uint8)
        kept = into.reshape(num_rows, width)
        for row in range(0, num_rows, at_once):
            num = min(at_once, num_rows - row)
            length = (num - 1) * self.step + high - low
            _read(file, self.start + row * self.step + low, block[:length])
            grid, at = block.reshape(-1, self.step), 0
            for first, end in self.spans:
                kept[row : row + num, at : at + end - first] = grid[:num, first - low : end - low]
                at += end - first


def _read(file: BinaryIO, at: int, into: np.ndarray) -> None:
    file.seek(at)
    left = into.data
    while left:
        num = file.readinto(left)  # type: ignore[attr-defined]
        if not num:
            raise OSError("the file ends before a tensor does")
        left = left[num:]
