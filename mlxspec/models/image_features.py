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
    """The outputs of a vision tower (rows) for images, of which the most recently used are kept. num_runs: how often the tower ran; nbytes:
    bytes of the kept rows, at most `budget`."""

    def __init__(self, tower: VisionTower, budget: int = FEATURE_BYTES) -> None:
        self.budget = budget
        self.num_runs = self.nbytes = 0
        self._tower = tower
        self._kept: OrderedDict[tuple[str, bytes], mx.array] = OrderedDict()

    def has(self, prepared: PreparedImage, owner: str) -> bool:
        """Return whether the rows of this owner's image are kept."""
        return (owner, prepared.digest) in self._kept

    def rows(self, prepared: PreparedImage, owner: str) -> mx.array:
        """Return the evaluated rows (tokens, H) of an image: the kept ones of this owner, or those of a new run of the tower."""
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
        """Drop all kept rows."""
        self._kept.clear()
        self.nbytes = 0


class HeldFeatures:
    """The vision tower's rows for the images of one request, held from their first use until the request ends. The tower so runs once for
    each image of a request. owner: the owner of the request, whose kept rows may be used."""

    def __init__(self, features: ImageFeatures, owner: str = "") -> None:
        self._features, self._owner = features, owner
        self._held: dict[bytes, mx.array] = {}

    def __contains__(self, prepared: PreparedImage) -> bool:
        return prepared.digest in self._held or self._features.has(prepared, self._owner)

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """Return the evaluated rows (tokens, H) of an image."""
        rows = self._held.get(prepared.digest)
        if rows is None:
            rows = self._held[prepared.digest] = self._features.rows(prepared, self._owner)
        return rows
