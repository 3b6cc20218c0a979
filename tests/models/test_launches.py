"""How many kernels a layer's mixer, Gated DeltaNet or attention, launches in a decode step on Metal: counted in the graph, beside mlx-lm's.

Nothing runs on a GPU: kernels are stubs that record one primitive each, and the graph that MLX built is read, not evaluated. Counted is the
mixer alone (no MLP, no residual), weights quantized alike, in the way each engine runs it: ours inside `mx.compile`, mlx-lm's as it is.
A primitive that MLX's Metal backend does without a kernel (a view) does not count.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxspec.cache.rollback import Committed, RecurrentState
from mlxspec.kernels import launch
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_ops import Tape
from mlxspec.kernels.gdn_round import RowLayout
from mlxspec.models.layers import Rotary
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_layers import GatedDeltaNet, Qwen35Attention, RoundLayout

VIEWS = {
    *("Slice", "Reshape", "ExpandDims", "Squeeze", "Split", "Broadcast", "Transpose", "Flatten", "Unflatten"),
    "StopGradient",
}
compiled = pytest.mark.skipif(
    "MLX_DISABLE_COMPILE" in os.environ, reason="counts compiled kernels: test_compiled.py runs it"
)
MOST, MOST_OF_ATTENTION = 6, 7
HIDDEN, KEY_HEADS, VALUE_HEADS, DIM = 512, 16, 48, 128  # heads of the 27B, behind a narrower residual stream


@pytest.fixture
def config() -> Qwen35Config:
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": DIM,
        "linear_value_head_dim": DIM,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "max_position_embeddings": 128,
    }
    return Qwen35Config.from_dict(sizes)


def stub(**_: Any) -> Callable[..., list[mx.array]]:
    """A kernel of which only the launch is left: one primitive that needs all inputs and gives all outputs."""

    def call(*, inputs: Sequence[Any], output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        blanks = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        mx.eval(blanks)
        return mx.depends(blanks, [x for x in inputs if isinstance(x, mx.array)])

    return call


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """Our launchers launch, as if every self-check had passed."""
    used = {
        name: launch.KernelReport(name=name, in_use=True, reason="a stub")
        for name in ("gdn_round", "conv_qkv")
    }
    monkeypatch.setattr(launch, "_reports", used)
    monkeypatch.setattr(mx.fast, "rms_norm", rms_norm)
    with launch.using(stub):
        yield


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """MLX's norm as it is on a GPU, one kernel for operands of one dtype; on a CPU MLX spells it out."""
    operands = [x] if weight is None else [x, weight]
    dtype = mx.result_type(*operands)
    needed = [operand.astype(dtype) for operand in operands]
    return stub()(inputs=needed, output_shapes=[x.shape], output_dtypes=[dtype])[0]


def quantized(module: nn.Module) -> nn.Module:
    module.set_dtype(mx.bfloat16)
    nn.quantize(module, group_size=64, bits=4)
    mx.eval(module.parameters())
    return module.eval()


def launches(outputs: Sequence[mx.array], folder: Any) -> Counter[str]:
    """Primitives of the graph behind `outputs` that Metal needs a kernel for."""
    file = folder / "graph.dot"
    mx.export_to_dot(str(file), *outputs)
    names = re.findall(r'\[label ="(\w+)", shape=rectangle\]', file.read_text())
    return Counter(name for name in names if name not in VIEWS)


def ours(config: Qwen35Config, *, certain: bool) -> list[mx.array]:
    """One row that decodes, its last token kept; as the model runs it, compiled."""
    mixer = GatedDeltaNet(config)
    quantized(mixer)
    mixer.fuse()
    mx.eval(mixer.parameters())
    rows = FlatRows((1,))
    x = mx.ones((1, HIDDEN), mx.bfloat16)
    window = mx.ones((1, 3, config.conv_dim), mx.bfloat16)
    state = mx.ones((1, VALUE_HEADS, DIM, DIM))
    projected = mx.ones((1, config.conv_dim + config.value_dim + 2 * VALUE_HEADS), mx.bfloat16)
    held = (
        mx.ones((1, KEY_HEADS, DIM), mx.bfloat16),
        mx.ones((1, VALUE_HEADS, DIM)),
        mx.ones((1, VALUE_HEADS)),
    )
    committed = Committed.of(rows, [1])
    here = RowLayout.of(rows)
    mx.eval(
        x,
        window,
        state,
        projected,
        held,
        committed.num_committed,
        committed.rows.starts,
        here.starts,
    )

    def step(x: mx.array, window: mx.array, state: mx.array, projected: mx.array, *held: mx.array) -> Any:
        past = RecurrentState(state, window, projected, Tape(*held))
        y, future = mixer(x, past, RoundLayout(rows, certain, here, committed))
        return [
            y,
            *(a for a in (future.state, future.window, future.inputs) if a is not None),
            *(future.tape or ()),
        ]

    return list(mx.compile(step)(x, window, state, projected, *held))


def theirs(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """mlx-lm's mixer with its own cache, one token behind others."""
    gated_delta = pytest.importorskip("mlx_lm.models.gated_delta")
    from mlx_lm.models import qwen3_5
    from mlx_lm.models.cache import ArraysCache

    arguments = {
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_num_key_heads": KEY_HEADS,
        "linear_key_head_dim": DIM,
        "linear_value_head_dim": DIM,
        "linear_conv_kernel_dim": 4,
        "head_dim": 64,
    }
    mixer = quantized(qwen3_5.GatedDeltaNet(qwen3_5.TextModelArgs.from_dict(arguments)))
    cache = ArraysCache(size=2)
    x = mx.ones((1, 1, HIDDEN), mx.bfloat16)
    cache[0] = mx.ones((1, 3, 2 * KEY_HEADS * DIM + VALUE_HEADS * DIM), mx.bfloat16)
    cache[1] = mx.ones((1, VALUE_HEADS, DIM, DIM))
    mx.eval(x, cache[0], cache[1])

    def kernel(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, _: Any
    ) -> Any:
        shapes, dtypes = [v.shape, state.shape], [q.dtype, state.dtype]
        return stub()(inputs=[q, k, v, g, beta, state], output_shapes=shapes, output_dtypes=dtypes)

    monkeypatch.setattr(gated_delta, "gated_delta_ops", kernel)  # it is what runs instead without Metal
    return [mixer(x, cache=cache), cache[0], cache[1]]


@compiled
@pytest.mark.parametrize("certain", [False, True], ids=["verify", "certain"])
def test_the_mixer_launches_at_most_six_kernels(config, with_kernels, monkeypatch, tmp_path, certain):
    own = launches(ours(config, certain=certain), tmp_path)
    other = launches(theirs(monkeypatch), tmp_path)
    print(f"\nlaunches of a Gated DeltaNet mixer in a decode step: {own.total()} {dict(own)}")
    print(f"mlx-lm's: {other.total()} {dict(other)}")
    assert own["Depends"] == 3  # convolution, recurrence, norm
    assert own["QuantizedMatmul"] == 2
    assert own.total() <= MOST
    assert own.total() < other.total()


def our_attention(config: Qwen35Config) -> list[mx.array]:
    """One token: what is around the core, with queries in the core's place. What it writes and attends is the same for both."""
    mixer = Qwen35Attention(config)
    quantized(mixer)
    mixer.fuse()
    mx.eval(mixer.parameters())
    x, cos = mx.ones((1, HIDDEN), mx.bfloat16), mx.ones((1, 1, config.head_dim))
    mx.eval(x, cos)

    def step(x: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, ...]:
        q, k, v, gate = mixer.project(x, cos, sin)
        return mixer.finish(mx.depends(q.reshape(1, -1), [k, v]), gate), k, v

    return list(mx.compile(step)(x, cos, cos))


def their_attention(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    from mlx_lm.models import qwen3_next
    from mlx_lm.models.qwen3_5 import Attention as Theirs
    from mlx_lm.models.qwen3_5 import TextModelArgs

    arguments = {
        "model_type": "qwen3_5_text", "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": 24, "rms_norm_eps": 1e-6, "vocab_size": 32, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 128, "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip

    def rope(x: mx.array, *_: Any, **__: Any) -> mx.array:
        return stub()(inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype])[0]

    def core(queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
        return mx.depends(queries, [keys, values])

    monkeypatch.setattr(mx.fast, "rope", rope)
    monkeypatch.setattr(qwen3_next, "scaled_dot_product_attention", core)
    mixer = quantized(Theirs(TextModelArgs.from_dict(arguments)))
    x = mx.ones((1, 1, HIDDEN), mx.bfloat16)
    mx.eval(x)
    return [mixer(x)]


@compiled
def test_attention_launches_few_kernels_around_its_core(config, with_kernels, monkeypatch, tmp_path):
    pytest.importorskip("mlx_lm.models.qwen3_next")
    sizes = replace(config, num_heads=24, num_kv_heads=4, head_dim=256, rope_dims=64)
    own = launches(our_attention(sizes), tmp_path)
    other = launches(their_attention(monkeypatch), tmp_path)
    print(f"\nlaunches around the core of attention in a decode step: {own.total()} {dict(own)}")
    print(f"mlx-lm's: {other.total()} {dict(other)}")
    # without the core; a concatenation copies each of two parts by itself
    assert own.total() - 1 + own["Concatenate"] <= MOST_OF_ATTENTION
    assert own.total() < other.total()


@compiled
def test_positions_take_three_kernels(tmp_path):
    angles = Rotary.of_first(64, 1e7, 256).table(mx.array([3, 4, 5], mx.int32))
    assert launches(angles, tmp_path).total() == 3
