"""Softmax spelled out as powers of two: against float64, and used where it may be."""

from __future__ import annotations

import numpy as np
import pytest

from mlxspec.kernels.cpu import softmax
from mlxspec.platform import device
from tests.rounding import of_sum

import mlx.core as mx  # isort: skip


def weights(x: np.ndarray) -> np.ndarray:
    """exp(x - largest)"""
    scores = mx.array(x.astype(np.float32))
    power, whole = softmax._powers(scores, mx.max(scores, axis=-1, keepdims=True))
    return np.asarray(softmax._exponentials(power, whole.view(mx.float32)))


def draw(*shape: int, spread: float = 4.0) -> mx.array:
    return mx.array(np.random.default_rng(0).standard_normal(shape, np.float32) * spread)


@pytest.fixture
def spelled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(device, "backend", lambda: "cpu")
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    return monkeypatch


def test_exponentials_are_right_everywhere() -> None:
    x = np.concatenate([[0.0], -np.geomspace(1e-7, 87.0, 200_001)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    # what rounding of the power itself costs grows with it, for MLX's exp too
    assert (np.abs(weights(x) - exact) <= exact * (2e-7 + 1.2e-7 * np.abs(x))).all()


def test_what_is_far_below_weighs_nothing() -> None:
    least = float(np.finfo(np.float32).min)
    found = weights(np.asarray([3.0, -90.0, -1e30, least]))
    assert found[0] == 1.0
    assert (found[1:] < 2e-38).all()
    found = weights(np.asarray([least, least]))
    assert (found == 1.0).all()


def test_no_number_stays_none() -> None:
    assert np.isnan(weights(np.asarray([0.0, np.nan]))).all()


@pytest.mark.parametrize("shape", [(1, 1, 3, 17, 300), (1, 2, 2, 1, 5000), (1, 4, 200, 64)])
def test_both_forms_agree(shape: tuple[int, ...], spelled: pytest.MonkeyPatch) -> None:
    scores, values = draw(*shape), draw(*shape[:-2], shape[-1], 8)
    scores = mx.where(
        mx.array(np.tri(*shape[-2:], shape[-1] - shape[-2], dtype=bool)), scores, mx.finfo(mx.float32).min
    )
    assert softmax._is_spelled(scores)
    found = softmax.weigh(scores, values)
    spelled.setattr(softmax, "_WORTH_IT", scores.size + 1)
    wanted = softmax.weigh(scores, values)
    assert not mx.array_equal(found, wanted)
    assert (np.abs(np.asarray(found) - np.asarray(wanted)) <= error_of(scores, values)).all()


def error_of(scores: mx.array, values: mx.array) -> np.ndarray:
    """By how much two right ways of weighing may differ: (..., w, D)."""
    x, v = (np.asarray(a, np.float64) for a in (scores, values))
    x = x - x.max(-1, keepdims=True)
    weights = np.exp(x)
    # of a weight, as in the first test; then sums of all weights, and of all weighed values
    off = weights * (2e-7 + 1.2e-7 * np.minimum(np.abs(x), 88.0)) + weights * of_sum(x.shape[-1])
    total = weights.sum(-1, keepdims=True)
    shares = np.abs(weights @ v) / total
    return 2 * (off @ np.abs(v) + shares * off.sum(-1, keepdims=True)) / total


def test_other_dtypes_and_devices_have_mlx_own(spelled: pytest.MonkeyPatch) -> None:
    scores = mx.zeros((3, 64, 4000))
    assert softmax._is_spelled(scores)
    assert not softmax._is_spelled(scores.astype(mx.bfloat16))
    assert not softmax._is_spelled(mx.zeros((3, 5, 200)))
    spelled.setattr(device, "backend", lambda: "metal")
    assert not softmax._is_spelled(scores)
