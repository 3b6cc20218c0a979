"""Drafted tokens before each position, from counts of them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxspec.sampling.scores import DraftedBefore


def drafted(counts: np.ndarray) -> DraftedBefore:
    """As many tokens before each position as counts (N, V) says."""
    places, tokens = np.nonzero(counts)
    times = counts[places, tokens].astype(np.int64)
    return DraftedBefore(np.repeat(places, times), mx.array(np.repeat(tokens, times).astype(np.int32)))
