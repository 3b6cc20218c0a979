"""Rows that a vision tower has computed, kept by owner and by the digest of the image, within a budget of bytes. Another owner's image is
computed again: the time of an answer must not tell what others have sent.

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
        self._kept: OrderedDict[tuple[str, bytes], mx.array] = OrderedDict()

    def has(self, prepared: PreparedImage, owner: str) -> bool:
        """Whether the rows of this owner's image are kept."""
        return (owner, prepared.digest) in self._kept

    def rows(self, prepared: PreparedImage, owner: str) -> mx.array:
        """(tokens, H), evaluated."""
        key = owner, prepared.digest
        rows = self._kept.get(key)
        if rows is not None:
            self._kept.move_to_end(key)
            return rows
        rows = self._tower(prepared)
        mx.eval(rows)
        self.num_runs += 1
        if rows.nbytes <= self.budget:
            self._kept[key] = rows
            self.nbytes += rows.nbytes
            while self.nbytes > self.budget:
                self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return rows

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()
        self.nbytes = 0


class HeldFeatures:
    """The rows of the images of one request, from the first use until the request ends, so that the tower runs once an image and request,
    whatever else is kept meanwhile. owner: whose request it is."""

    def __init__(self, features: ImageFeatures, owner: str = "") -> None:
        self._features, self._owner = features, owner
        self._held: dict[bytes, mx.array] = {}

    def __contains__(self, prepared: PreparedImage) -> bool:
        return prepared.digest in self._held or self._features.has(prepared, self._owner)

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """(tokens, H), evaluated."""
        rows = self._held.get(prepared.digest)
        if rows is None:
            rows = self._held[prepared.digest] = self._features.rows(prepared, self._owner)
        return rows
