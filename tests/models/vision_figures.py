"""A few numbers of Transformers' towers on our tiny checkpoints, for machines without PyTorch; test_vision_transformers.py checks them."""

from __future__ import annotations

import numpy as np
from PIL import Image

SIZES = ((50, 34), (8, 8), (97, 120), (200, 3))  # (width, height)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def figures(rows: np.ndarray) -> list[float]:
    """Four numbers each of the first, the middle and the last row."""
    chosen = rows[[0, len(rows) // 2, -1]][:, [0, 1, 31, -1]]
    return [round(float(v), 4) for v in chosen.ravel()]


FIGURES: dict[str, list[float]] = {}
