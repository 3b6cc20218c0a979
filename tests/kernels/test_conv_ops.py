"""Convolution, norms and gates before the recurrence, in plain mx against numpy; the window that stands before the next token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels.conv_ops import GdnShape, conv_qkv_ops, conv_window, joined_inputs
from mlxspec.kernels.flat import FlatRows
from mlxspec.platform import compile_folder, device

ROOT = Path(__file__).resolve().parents[2]
SHAPE = GdnShape(num_k_heads=2, num_v_heads=4, k_dim=32, v_dim=16)


class Case:
    """Random inputs of one layer for some rows, and what float64 makes of them."""

    def __init__(self, widths: tuple[int, ...], num_taps: int = 4, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rows, self.num_taps = FlatRows(widths), num_taps
        num = self.rows.num_tokens
        self.qkv = rng.standard_normal((num, SHAPE.conv_size)).astype(np.float32)
        self.b, self.a = rng.standard_normal((2, num, SHAPE.num_v_heads)).astype(np.float32) * 4
        self.window = rng.standard_normal((len(widths), num_taps - 1, SHAPE.conv_size)).astype(np.float32)
        self.weight = rng.standard_normal((num_taps, SHAPE.conv_size)).astype(np.float32)
        self.neg_a = -np.exp(rng.standard_normal(SHAPE.num_v_heads)).astype(np.float32)
        self.dt_bias = rng.standard_normal(SHAPE.num_v_heads).astype(np.float32)

    def ops(self, part: slice = slice(None), window: np.ndarray | None = None) -> list[np.ndarray]:
        alone = window is not None
        index = None if alone else self.rows.index
        found = conv_qkv_ops(
            joined_inputs(mx.array(window if alone else self.window), mx.array(self.qkv[part]), index),
            mx.array(self.b[part]),
            mx.array(self.a[part]),
            mx.split(mx.array(self.weight), self.num_taps),
            mx.array(self.neg_a),
            mx.array(self.dt_bias),
            SHAPE,
            index,
        )
        return [np.asarray(x) for x in found]

    def loop(self) -> list[np.ndarray]:
        mixed = np.zeros(self.qkv.shape)
        for r, width in enumerate(self.rows.widths):
            start = self.rows.starts[r]
            joined = np.concatenate([self.window[r], self.qkv[start : start + width]]).astype(np.float64)
            for t in range(width):
                total = sum(joined[t + i] * self.weight[i] for i in range(self.num_taps))
                mixed[start + t] = total / (1 + np.exp(-total))
        num, key = len(mixed), SHAPE.key_size
        q, k = (
            x.reshape(num, SHAPE.num_k_heads, SHAPE.k_dim) for x in (mixed[:, :key], mixed[:, key : 2 * key])
        )
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        v = mixed[:, 2 * key :].reshape(num, SHAPE.num_v_heads, SHAPE.v_dim)
        softplus = np.log1p(np.exp(self.a.astype(np.float64) + self.dt_bias))
        return [
            q * SHAPE.k_dim**-0.5,
            k,
            v,
            self.neg_a * softplus,
            1 / (1 + np.exp(-self.b.astype(np.float64))),
        ]


@pytest.mark.parametrize("widths", [(1,), (5,), (20,), (1, 1, 1), (3, 3), (2, 0, 5, 1)])
@pytest.mark.parametrize("num_taps", [2, 4])
def test_the_twin_is_what_numpy_computes(widths: tuple[int, ...], num_taps: int) -> None:
    case = Case(widths, num_taps)
    for name, got, wanted in zip(("q", "k", "v", "log_g", "beta"), case.ops(), case.loop(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6, err_msg=name)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(widths=st.lists(st.integers(0, 6) | st.integers(0, 40), min_size=2, max_size=5).filter(any))
def test_a_row_beside_others_is_the_row_alone(widths: list[int]) -> None:
    case = Case(tuple(widths), seed=3)
    together = case.ops()
    for r, width in enumerate(widths):
        if width:
            part = slice(case.rows.starts[r], case.rows.starts[r + 1])
            for a, b in zip(together, case.ops(part, case.window[r : r + 1]), strict=True):
                assert np.array_equal(a[part], b)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    data=st.data(),
    widths=st.lists(st.integers(0, 6) | st.integers(0, 40), min_size=1, max_size=5).filter(any),
)
def test_the_window_is_the_last_inputs_that_stand(data: st.DataObject, widths: list[int]) -> None:
    kept = [data.draw(st.integers(0, w)) for w in widths]
    case = Case(tuple(widths), seed=5)
    got = conv_window(
        mx.array(case.window), mx.array(case.qkv), mx.array(kept, mx.int32), case.rows.starts_array
    )
    for r, count in enumerate(kept):
        start = case.rows.starts[r]
        stands = np.concatenate([case.window[r], case.qkv[start : start + count]])
        assert np.array_equal(np.asarray(got[r]), stands[-3:])


ROWS_COMPILED = """
from mlxspec.platform import device
import mlx.core as mx
from pathlib import Path
from tests.kernels.test_conv_ops import Case, SHAPE
from mlxspec.kernels.conv_ops import conv_qkv_ops, conv_window, joined_inputs

device.compile_kernels()
for widths in ((1, 2), (2, 1, 3), (1, 1, 2, 1, 1)):
    case = Case(widths)
    window, inputs, b, a = map(mx.array, (case.window, case.qkv, case.b, case.a))
    taps, index = mx.split(mx.array(case.weight), case.num_taps), case.rows.index
    layer = mx.compile(lambda x, b, a: conv_qkv_ops(x, b, a, taps, mx.ones(4), mx.ones(4), SHAPE, index))
    starts = mx.array(case.rows.starts, mx.int32)
    with device.private_kernels():
        mx.eval(layer(joined_inputs(window, inputs, index), b, a))
        mx.eval(conv_window(window, inputs, mx.array(widths, mx.int32), starts))
    print(len(list(Path(device.report().kernel_folder).glob("mlx/*/cpu/*.so"))))
"""


@pytest.mark.skipif(
    device.has_gpu() or compile_folder.compiler() is None,
    reason="needs g++, with which MLX compiles for the CPU",
)
def test_what_is_compiled_for_some_rows_serves_any_number_of_them(tmp_path: Path) -> None:
    """A row more would otherwise keep all answers waiting for g++."""
    kept = {k: v for k, v in os.environ.items() if k != "MLX_DISABLE_COMPILE"}
    done = subprocess.run(
        [sys.executable, "-c", ROWS_COMPILED],
        env=kept | {"MLXSPEC_CACHE": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *others = map(int, done.stdout.split())
    assert first > 1
    assert others == [first, first]
