"""How many registers each variant of each kernel needs, by clang's intermediate code. A GPU of Apple's gives a thread 128."""

from __future__ import annotations

from typing import Any

import checks_kv
import checks_qmv
import emulator
import mlx.core as mx
import numpy as np
import pytest
import registers
from checks_conv import SHAPE, draw_weights, num_columns
from checks_conv import draw as draw_inputs
from checks_gdn import Shape, ints, layout
from planting import catches

from mlxspec.kernels import conv_qkv, gdn_prefill, gdn_round, kv_attend, launch, qmm_few, qmv_rows
from mlxspec.kernels.flat import FlatRows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(registers.missing() is not None, reason=str(registers.missing())),
    pytest.mark.skipif(emulator.front_end.missing() is not None, reason=str(emulator.front_end.missing())),
]
MOST = 96  # the rest of 128 is for addresses and bounds, which are not counted
FORMATS: dict[str, dict[str, Any]] = {
    "4bit": {"bits": 4},
    "8bit": {"bits": 8},
    **{mode: {"mode": mode} for mode in ("mxfp4", "nvfp4", "mxfp8")},
}


class _Recorder(emulator.metal_kernel):
    """A kernel that keeps its source in `texts` and computes nothing."""

    texts: list[str]

    def __call__(self, *, inputs: Any, output_shapes: Any, output_dtypes: Any, **call: Any) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        shapes = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
        self.texts.append(self.metal_source(arrays, **shapes, **call))
        return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources of the kernels that the test launches, none of which runs."""
    found: list[str] = []
    monkeypatch.setattr(_Recorder, "texts", found, raising=False)
    return found


def counted(texts: list[str]) -> list[float]:
    assert texts
    return [registers.most_live(text) for text in texts]


def test_a_number_that_is_held_is_counted() -> None:
    """Each of 120 numbers is loaded before the first is used, and none can be loaded again after the store."""
    source = """
    [[kernel]] void held(device float* x [[buffer(0)]], uint at [[thread_position_in_grid]]) {
      float number[120];
      _Pragma("clang loop unroll(full)")
      for (int i = 0; i < 120; ++i) { number[i] = x[i * 32 + at]; }
      float product = 1.0f;
      x[at] = product;
      _Pragma("clang loop unroll(full)")
      for (int i = 0; i < 120; ++i) { product *= number[i] + product; }
      x[at] = product;
    }
    """
    found = registers.most_live(source)
    assert 120 <= found <= 122
    assert registers.most_live(source.replace("float number[120]", "half number[120]")) <= 62


@catches(
    "a thread of 8 rows holds the sums of 4 outputs",
    "mlxspec.kernels.qmv_rows:_ROWS_OF_4",
    lambda right: qmv_rows.MAX_ROWS,
    case="[qmv_rows-4bit",
)
@catches(
    "more rows of float32 than fit into registers are offered",
    "mlxspec.kernels.quantized_weight:ProductKernel.supports",
    lambda right: lambda self, num_rows, weight, dtype: True,
    case="[qmm_few-4bit-mlx.core.float32",
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("of", [qmv_rows.KERNEL, qmm_few.KERNEL], ids=lambda kernel: kernel.name)
def test_products(of: Any, how: dict[str, Any], dtype: mx.Dtype, texts: list[str]) -> None:
    with launch.using(_Recorder):
        for num_rows in of.rows:
            x, weight = checks_qmv.draw(num_rows, 64, 512, dtype=dtype, **how)
            if of.supports(num_rows, weight, dtype):
                of.run(x, weight)
    found = counted(texts)
    assert max(found) <= MOST, found


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", kv_attend.DIMS)
def test_attention(dim: int, bits: int, dtype: mx.Dtype, texts: list[str]) -> None:
    with launch.using(_Recorder):
        for tile in kv_attend._ROWS:
            given = checks_kv.draw(1, 64, heads=tile, kv=1, dim=dim, bits=bits, dtype=dtype)
            kv_attend.kv_attend_metal(*given, 0.1)
    found = counted(texts)
    assert max(found) <= MOST, found


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 160, 192, 256])
def test_gated_delta_net(dim: int, dtype: mx.Dtype, texts: list[str]) -> None:
    rng, shape = np.random.default_rng(0), Shape(key_dim=dim, value_dim=dim, dtype=dtype)
    t, state = shape.tokens(rng, (3,)), shape.state(rng, 1)
    with launch.using(_Recorder):
        if gdn_prefill.supports(t.inputs.q.dtype, dim, dim):
            gdn_prefill.gdn_prefill_metal(t.inputs, state, FlatRows((3,)))
        one = gdn_round.gdn_round_metal(t.inputs, state, t.rows, None)
        gdn_round.gdn_round_metal(t.inputs, state, t.rows, gdn_round.Replay(one.tape, t.rows, ints([2])))
        gdn_round.gdn_advance_metal(t.inputs, state, t.rows)
    found = counted(texts)
    assert max(found) <= MOST, found


def test_convolution(texts: list[str]) -> None:
    rng = np.random.default_rng(0)
    weights = draw_weights(rng, SHAPE, mx.bfloat16)
    projected = draw_inputs(rng, 3, num_columns(SHAPE), dtype=mx.bfloat16)
    window = draw_inputs(rng, 1, 3, SHAPE.conv_size, dtype=mx.bfloat16)
    with launch.using(_Recorder):
        conv_qkv.conv_qkv_metal(projected, window, weights, SHAPE, layout(3), None)
    found = counted(texts)
    assert max(found) <= MOST, found
