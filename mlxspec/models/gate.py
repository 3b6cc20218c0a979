"""Tells the adapted layers of a model (layers.AdaptedLinear) which adapters apply to each token of a forward.

A row's scales stand in its cache (`ModelCache.scales`), so that every forward over the row is with the row's adapters. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlxspec.kernels.flat import FlatRows


class AdapterGate:
    """One model's. names: of the adapters, in the order of scales. refused: of those that cannot be used, why. held: "scales" (N, adapters)
    float32 while the forward of N tokens has a row with an adapter; empty else. A compiled function takes it as an input beside its own."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.refused: Mapping[str, str] = {}
        self.held: dict[str, mx.array] = {}

    def open(self, scales: Sequence[Sequence[float]], rows: FlatRows) -> None:
        """Set the adapters of a forward that begins. scales: of each row, how much each adapter counts; empty where none does."""
        self.held.clear()
        if any(map(any, scales)):
            each = [given or (0.0,) * len(self.names) for given in scales]
            owners = np.repeat(np.arange(rows.num_rows, dtype=np.int32), rows.widths)
            self.held["scales"] = mx.array(each, mx.float32)[mx.array(owners)]
