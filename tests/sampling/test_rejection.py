"""Rejection where there is nothing left to draw from: the distributions of the target and of the drafter are equal but for rounding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.sampling.rejection import reject

VOCAB, NUM = 40, 64


def _never_empty(right: Any) -> SimpleNamespace:
    """MLX, for which the rest always holds something."""
    return SimpleNamespace(**{**vars(right), "max": lambda x, **_: mx.ones_like(x)})


@catches(
    "a rejected token is drawn from an empty rest",
    "mlxspec.sampling.rejection:mx",
    _never_empty,
    case="equal",
)
@pytest.mark.parametrize("off", [0.0, 2.0**-23], ids=["equal", "rounded up"])
def test_where_nothing_is_left_a_rejected_token_is_drawn_from_the_target(off: float) -> None:
    """A drafted token that neither can say is rejected, and so is one that the drafter says with a probability a last bit larger, where the
    uniform is as large as it gets. The first ids have probability 0, so they are what a draw from nothing gives."""
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((NUM, VOCAB)).astype(np.float32)
    scores[:, :4] = -np.inf
    target, noise = mx.array(scores), mx.array(rng.gumbel(size=(NUM, VOCAB)).astype(np.float32))
    wanted = np.argmax(scores + np.asarray(noise), axis=-1)
    impossible = mx.full((NUM,), 2, mx.int32)
    uniform = mx.full((NUM,), 1.0 - 2.0**-24)
    chosen = reject(target, target * (1.0 + off), impossible, uniform, noise)
    assert np.asarray(chosen).min() >= 4
    if not off:
        assert chosen.tolist() == wanted.tolist()


def test_equal_distributions_accept_whatever_is_drawn() -> None:
    rng = np.random.default_rng(4)
    target = mx.array(rng.standard_normal((NUM, VOCAB)).astype(np.float32))
    drafted = mx.array(rng.integers(0, VOCAB, NUM).astype(np.int32))
    uniform = mx.array(rng.random(NUM).astype(np.float32))
    noise = mx.array(rng.gumbel(size=(NUM, VOCAB)).astype(np.float32))
    assert reject(target, target, drafted, uniform, noise).tolist() == drafted.tolist()
