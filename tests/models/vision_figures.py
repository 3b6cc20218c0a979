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


FIGURES: dict[str, list[float]] = {
    "qwen-64": [
        -0.4774,
        0.0065,
        0.1482,
        -1.0781,
        -0.2655,
        0.4591,
        0.0282,
        0.7163,
        0.1957,
        -0.0138,
        0.2602,
        -0.1972,
    ],
    "qwen-72": [
        -0.572,
        1.3652,
        -0.9107,
        -0.3627,
        -0.4855,
        0.237,
        -0.9953,
        -0.6656,
        -0.3829,
        0.7505,
        -0.4203,
        -0.6268,
    ],
    "gemma3": [
        -1.122,
        1.6526,
        0.2324,
        1.1757,
        -1.0653,
        0.4055,
        -0.4037,
        1.865,
        -1.8064,
        0.0383,
        -0.335,
        0.7712,
    ],
    "gemma4-clipped": [
        -1.1256,
        0.1687,
        -0.3101,
        -1.0947,
        -1.3795,
        0.6985,
        -0.0435,
        -0.5019,
        -0.585,
        -0.5363,
        -0.7595,
        0.2021,
    ],
    "gemma4-standard": [
        0.9691,
        1.8062,
        -0.8252,
        0.335,
        0.6932,
        1.3839,
        -0.6941,
        0.0428,
        1.017,
        0.1432,
        -0.6103,
        0.8357,
    ],
    "gemma4-unified": [
        -0.3001,
        0.9378,
        -0.2907,
        -0.152,
        0.1229,
        -1.1431,
        0.3601,
        0.0634,
        -0.7216,
        -0.5046,
        -0.0657,
        -0.9597,
    ],
}
