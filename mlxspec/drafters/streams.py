"""Hidden states and residual streams of a target forward, as one array for all drafters, and the columns that each drafter reads.

The array is (N, W): the final hidden (H columns), then the residual stream behind each layer that a drafter of the engine asks for, H
columns each, layers ascending. A forward of rows that show no layers gives the final hidden alone, (N, H). Knows arrays and `Needs`; knows
no model, no rows and no rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from mlxspec.drafters.base import Drafter, Needs
from mlxspec.models.base import Output


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The target's outputs that drafters need: the final hidden state and the residual streams of some layers. size: H, the target's hidden
    size. layers: 0-based ids of these layers, ascending."""

    size: int
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, drafters: Iterable[Drafter], size: int) -> Streams:
        """Return the streams that cover the layers which any of these drafters needs."""
        return cls(size=size, layers=tuple(sorted({i for d in drafters for i in d.needs.layers})))

    @property
    def width(self) -> int:
        """Return W, the number of columns of the final hidden state and all layers together."""
        return (1 + len(self.layers)) * self.size

    def join(self, out: Output) -> mx.array:
        """Concatenate the final hidden and the residual streams of `layers`, cast to the hidden's dtype, and return (N, W). Where the
        forward was made without taps, the final hidden alone, (N, H), is returned."""
        if not out.taps:
            return out.hidden
        streams = (out.taps[i].astype(out.hidden.dtype) for i in self.layers)
        return mx.concatenate([out.hidden, *streams], axis=-1)

    def final(self, seen: mx.array) -> mx.array:
        """Return the final hidden state (N, H) of `seen`, which is (N, W) or (N, H)."""
        return seen if seen.shape[1] == self.size else seen[:, : self.size]

    def given(self, needs: Needs, seen: mx.array | None) -> mx.array | None:
        """Return the columns of `seen` (N, W) that a drafter needs, (N, needs.width * H). None where it needs none, or where `seen` lacks
        these layers."""
        if seen is None or not needs.wants_hidden:
            return None
        if not needs.layers:
            return self.final(seen)
        if seen.shape[1] != self.width:
            return None
        blocks = [0] * needs.hidden + [1 + self.layers.index(i) for i in needs.layers]
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            return seen[:, blocks[0] * self.size : (blocks[-1] + 1) * self.size]
        parts = mx.split(seen, 1 + len(self.layers), axis=-1)
        return mx.concatenate([parts[i] for i in blocks], axis=-1)
