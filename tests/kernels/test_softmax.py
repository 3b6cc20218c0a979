"""Softmax spelled out as powers of two: against float64, and used where it may be."""

from __future__ import annotations

import numpy as np
import pytest

from mlxspec.kernels.cpu import softmax
from mlxspec.platform import device
from tests.rounding import of_sum

import mlx.core as mx  # isort: skip

FEW = 4


def weights(x: np.ndarray) -> np.ndarray:
    """exp(x - largest)"""
    scores = mx.array(x.astype(np.float32))
    power, whole = softmax._powers(scores, mx.max(scores, axis=-1, keepdims=True))
    return np.asarray(softmax._exponentials(power, whole.view(mx.float32)))


def draw(*shape: int, spread: float = 4.0) -> mx.array:
    return mx.array(np.random.default_rng(0).standard_normal(shape, np.float32) * spread)


@pytest.fixture
def spelled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(device, "has_fused_attention", lambda: False)
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    monkeypatch.setattr(softmax, "_widest_alike", FEW)  # an exact engine in this process had changed it
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


def test_few_tokens_have_the_weights_of_one(spelled: pytest.MonkeyPatch) -> None:
    """Bit for bit, and their sums too. What the BLAS makes of them may depend on the number of tokens: bits of verifies and plain steps
    are equal only where the engine has tried it out (`exact`)."""
    for length in (100, 1364, 1366, 4000):
        used = {width: softmax._is_spelled(mx.zeros((3, width, length))) for width in (1, 2, 4)}
        assert set(used.values()) == {length > 1365}
    assert softmax._is_spelled(mx.zeros((3, 5, 300)))
    scores, values = draw(3, 4, 2000), draw(3, 2000, 8)
    exponentials, shares = softmax._exponentials, softmax._shares
    products: list[mx.array] = []
    seen: list[mx.array] = []
    spelled.setattr(softmax, "_exponentials", lambda *x: (products.append(exponentials(*x)), products[-1])[1])
    spelled.setattr(
        softmax, "_shares", lambda weighed, total: (seen.append(total), shares(weighed, total))[1]
    )
    whole = softmax.weigh(scores, values)
    (all_weights,), (all_totals,) = list(products), list(seen)
    off = error_of(scores, values)
    for i in range(4):
        alone = softmax.weigh(scores[:, i : i + 1], values)
        assert mx.array_equal(products[-1], all_weights[:, i : i + 1])
        assert mx.array_equal(seen[-1], all_totals[:, i : i + 1])
        assert (np.abs(np.asarray(whole[:, i : i + 1] - alone)) <= off[:, i : i + 1]).all()


def test_an_exact_engine_has_more_tokens_weighed_as_one_is(spelled: pytest.MonkeyPatch) -> None:
    scores = mx.zeros((3, 17, 300))
    assert softmax._is_spelled(scores)
    softmax.weigh_alike(17)
    assert not softmax._is_spelled(scores)
    softmax.weigh_alike(2)
    assert not softmax._is_spelled(scores)
    assert softmax._is_spelled(mx.zeros((3, 18, 300)))


def test_other_dtypes_and_devices_have_mlx_own(spelled: pytest.MonkeyPatch) -> None:
    scores = mx.zeros((3, 64, 4000))
    assert softmax._is_spelled(scores)
    assert not softmax._is_spelled(scores.astype(mx.bfloat16))
    spelled.setattr(device, "has_fused_attention", lambda: True)
    assert not softmax._is_spelled(scores)
