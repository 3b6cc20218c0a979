"""Tells the adapted layers of a model (layers.AdaptedLinear) which adapters apply to each token of a forward.

A row's scales stand in its cache (`ModelCache.scales`), so that every forward over the row is with the row's adapters. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlxspec.kernels.flat import FlatRows


class AdapterGate:
    """The adapters of a model and their factors in the current forward. names: of the adapters, in the order of scales. refused: reasons
    why adapters cannot be used, by name. held: {"scales": (N, adapters) float32} while a forward of N tokens has a row with an adapter;
    else empty. Compiled functions take `held` as an additional input."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.refused: Mapping[str, str] = {}
        self.held: dict[str, mx.array] = {}

    def open(self, scales: Sequence[Sequence[float]], rows: FlatRows) -> None:
        """Set the factors for a forward that begins. scales: for each row the factor of each adapter, () where none is used."""
        self.held.clear()
        if any(map(any, scales)):
            each = [given or (0.0,) * len(self.names) for given in scales]
            owners = np.repeat(np.arange(rows.num_rows, dtype=np.int32), rows.widths)
            self.held["scales"] = mx.array(each, mx.float32)[mx.array(owners)]
