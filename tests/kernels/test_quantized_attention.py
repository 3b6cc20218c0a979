"""Attention to keys and values in few bits against float64 over the numbers that the bits stand for, in both ways that it is done."""

from __future__ import annotations

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels import attention, quantized_kv
from mlxspec.kernels.attention import Heads, attend, attend_tailed, score_bytes
from mlxspec.kernels.quantized_kv import QuantizedTokens, token_bytes
from tests.kernels.test_attention import exact
from tests.rounding import of_attention

SCALE = 0.125


@pytest.fixture(params=[False, True], ids=["unpacked", "packed products"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether MLX's products with quantized matrices are used, as on a GPU."""
    use(monkeypatch, request.param)
    return request.param


def use(patch: pytest.MonkeyPatch, packed: bool) -> None:
    for module in (quantized_kv, attention):
        patch.setattr(module, "has_products", lambda: packed)


def draw(
    width: int,
    length: int,
    heads: tuple[int, int, int],
    bits: int,
    room: int = 3,
    dtype: mx.Dtype = mx.float32,
) -> tuple:
    """Queries, and keys and values whose buffers have other numbers behind them."""
    num, num_kv, dim = heads
    rng = np.random.default_rng(1000 * width + length)
    q = mx.array(rng.standard_normal((1, num, width, dim), np.float32)).astype(dtype)
    k, v = (
        QuantizedTokens.of(
            mx.array(rng.standard_normal((1, num_kv, length + room, dim), np.float32)).astype(dtype), bits
        )
        for _ in range(2)
    )
    return q, k.first(length), v.first(length)


def check(got: mx.array, q: mx.array, k: QuantizedTokens, v: QuantizedTokens, sees: np.ndarray) -> None:
    keys, values = k.unpacked(), v.unpacked()
    off = np.abs(np.asarray(got) - exact(q, keys, values, SCALE, sees))
    assert (off <= of_attention(q, keys, values, SCALE, sees)).all()


def causal(width: int, length: int) -> np.ndarray:
    return np.tri(width, length, length - width, dtype=np.bool_)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 2, 128), (3, 1, 256), (2, 1, 512)], ids=str)
@pytest.mark.parametrize(("width", "length"), [(1, 1), (1, 50), (4, 4), (5, 40), (17, 300), (70, 90)])
def test_causal(packed: bool, bits: int, heads: tuple[int, int, int], width: int, length: int) -> None:
    q, k, v = draw(width, length, heads, bits)
    check(attend(q, k, v, SCALE), q, k, v, causal(width, length))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    packed=st.booleans(), bits=st.sampled_from([4, 8]), width=st.integers(1, 9), before=st.integers(0, 60), seed=st.integers(0, 99)
)  # fmt: skip
def test_any_mask(packed: bool, bits: int, width: int, before: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, packed)
        q, k, v = draw(width, before + width, (4, 2, 64), bits)
        sees = np.random.default_rng(seed).random((width, before + width)) < 0.5
        sees[:, 0] = True
        check(attend(q, k, v, SCALE, mx.array(sees)), q, k, v, sees)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("tail", [1, 3, 8])
def test_a_tail(packed: bool, bits: int, tail: int) -> None:
    """Keys in two parts, both quantized, and as a block drafter has them, the second as it was computed."""
    q, k, v = draw(tail, 40 + tail, (6, 2, 64), bits, room=0)
    sees = causal(tail, 40 + tail)
    parts = [x.first(40) for x in (k, v)]
    rest = [QuantizedTokens(*(p[:, :, 40:] for p in x.parts), tail) for x in (k, v)]
    mask = None if tail == 1 else mx.array(sees)
    check(attend_tailed(q, *parts, *rest, SCALE, mask), q, k, v, sees)
    check(attend_tailed(q, *parts, *(x.unpacked() for x in rest), SCALE, mask), q, k, v, sees)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_the_bytes_it_takes_are_bounded(dtype: mx.Dtype, bits: int) -> None:
    """Measured around one call, many queries and few."""
    heads = Heads(4, 2, 128, dtype)
    for width in (1, 40, 200):
        q, k, v = draw(width, 3000, (4, 2, 128), bits, dtype=dtype)
        mx.eval(q, k.codes, v.codes, k.scales, v.scales, k.biases, v.biases)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(attend(q, k, v, SCALE))
        taken = mx.get_peak_memory() - before
        assert taken <= score_bytes(heads, width, 3000, bits) + 4 * q.nbytes + (64 << 10)


def test_what_a_token_is_made_of() -> None:
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 7, 128), np.float32)).astype(dtype)
        for bits in (8, 4):
            made = QuantizedTokens.of(x, bits)
            assert (made.bits, made.shape) == (bits, x.shape)
            assert made.nbytes == 2 * 7 * token_bytes(128, dtype, bits)
            assert made.first(3).nbytes == 2 * 3 * token_bytes(128, dtype, bits)
            assert made.unpacked().dtype == dtype
            step = (mx.max(x) - mx.min(x)).astype(mx.float32).item() / (2**bits - 1)
            rounding = 0.02 if dtype == mx.bfloat16 else 0.003
            # MLX moves the scale so that 0 has a code, which costs the other end up to half a step more
            assert mx.abs((made.unpacked() - x).astype(mx.float32)).max().item() <= step + 4 * rounding
        assert token_bytes(128, dtype, 16) == 128 * dtype.size
