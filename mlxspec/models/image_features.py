"""Rows that a vision tower has computed, kept by the digest of the image within a budget of bytes.

Knows a tower and digests; knows no prompts. Belongs to the thread that owns MLX.
"""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx

from mlxspec.images.prepared import PreparedImage
from mlxspec.models.vision.base import VisionTower

FEATURE_BYTES = 256 << 20  # of rows of images that no running request has


class ImageFeatures:
    """The rows of images, the last used kept. num_runs: how often the tower ran; nbytes: of what is kept, at most `budget`."""

    def __init__(self, tower: VisionTower, budget: int = FEATURE_BYTES) -> None:
        self.budget = budget
        self.num_runs = self.nbytes = 0
        self._tower = tower
        self._kept: OrderedDict[bytes, mx.array] = OrderedDict()

    def __contains__(self, prepared: PreparedImage) -> bool:
        return prepared.digest in self._kept

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """(tokens, H), evaluated."""
        rows = self._kept.get(prepared.digest)
        if rows is not None:
            self._kept.move_to_end(prepared.digest)
            return rows
        rows = self._tower(prepared)
        mx.eval(rows)
        self.num_runs += 1
        if rows.nbytes <= self.budget:
            self._kept[prepared.digest] = rows
            self.nbytes += rows.nbytes
            while self.nbytes > self.budget:
                self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return rows

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()
        self.nbytes = 0


class HeldFeatures:
    """The rows of one request's images, from the first use until the request ends, so that the tower runs once an image and request,
    whatever else is kept meanwhile."""

    def __init__(self, features: ImageFeatures) -> None:
        self._features = features
        self._held: dict[bytes, mx.array] = {}

    def __contains__(self, prepared: PreparedImage) -> bool:
        return prepared.digest in self._held or prepared in self._features

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """(tokens, H), evaluated."""
        rows = self._held.get(prepared.digest)
        if rows is None:
            rows = self._held[prepared.digest] = self._features(prepared)
        return rows
