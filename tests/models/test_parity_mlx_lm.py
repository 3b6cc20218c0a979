"""Our Qwen3.5 against mlx-lm's, over every dialect of checkpoint: logits of a prefill and of 20 cached steps, hiddens and taps."""

from __future__ import annotations

import inspect
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
import tiny
from compare import array, assert_same_logits, load_ours, stepwise, stepwise_mlx_lm, to_numpy, tokens_of
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from zoo import Zoo

from mlxspec.kernels.flat import FlatRows
from mlxspec.platform import device, memory

NUM_STEPS = 20
FLOAT = [(shape, dialect) for shape in tiny.SHAPES for dialect in ("hub", "text", "mlx")]
QUANTIZED = [
    ("tied", "mlx-8bit-32"),
    ("untied", "mlx-4bit-64"),  # 96 attention channels: o_proj stays float
    ("untied", "mlx-mixed"),
    ("grouped", "mlx-4bit-64"),
    ("moe", "mlx-4bit-32"),
    *(pytest.param("tied", f"mlx-{bits}bit", marks=pytest.mark.slow) for bits in (2, 5)),
    *(("tied", f"mlx-{bits}bit") for bits in (3, 6)),
]
MICROSCALING = [
    ("tied", "mlx-mxfp4"),
    ("tied", "mlx-mxfp8"),
    ("tied", "mlx-nvfp4"),
    ("moe", "mlx-nvfp4"),
]
TOKENS = tokens_of(5, 37 + NUM_STEPS, tiny.VOCAB)


@cache
def theirs(zoo: Zoo, shape: str, dialect: str = "hub") -> np.ndarray:
    """mlx-lm's logits of TOKENS."""
    return stepwise_mlx_lm(zoo.mlx_lm(shape, dialect), TOKENS, NUM_STEPS)


@pytest.mark.parametrize(("shape", "dialect"), [*FLOAT, ("moe", "text-unfused")])
def test_float_checkpoints(zoo: Zoo, shape: str, dialect: str) -> None:
    reference = theirs(zoo, shape)  # from the hub's folder: mlx-lm refuses text-only ones
    ours = stepwise(zoo.ours(shape, dialect).model, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{shape}, {dialect}")


@pytest.mark.parametrize(("shape", "dialect"), [*QUANTIZED, *MICROSCALING])
def test_quantized_checkpoints(zoo: Zoo, shape: str, dialect: str) -> None:
    """As they are loaded here: on a CPU their values are unpacked to float32 once."""
    reference = theirs(zoo, shape, dialect)
    assert_same_logits(
        stepwise(zoo.ours(shape, dialect).model, TOKENS, NUM_STEPS), reference, f"{shape}, {dialect}"
    )


@pytest.mark.parametrize(("shape", "dialect"), QUANTIZED)
def test_quantized_matmuls(zoo: Zoo, shape: str, dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed weights in our own modules, fused where formats agree: the path of GPUs and of models too large to unpack."""
    monkeypatch.setattr(memory, "UNPACKED_AT_MOST", 0)
    packed = load_ours(zoo.folder(shape, dialect)).model
    assert any(x.dtype == mx.uint32 for _, x in tree_flatten(packed.parameters()))
    tokens = TOKENS[:24]
    reference = stepwise_mlx_lm(zoo.mlx_lm(shape, dialect), tokens, 4)
    assert_same_logits(stepwise(packed, tokens, 4), reference, f"{shape}, {dialect}, packed")


@pytest.mark.parametrize(("shape", "dialect"), MICROSCALING)
def test_packed_microscaling(zoo: Zoo, shape: str, dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of these formats are bytes and MLX unpacks them to bfloat16, so that is what packed ones compute in: too coarse to compare
    logits of a random model, but caches must not take the bytes for their dtype."""
    monkeypatch.setattr(memory, "UNPACKED_AT_MOST", 0)
    monkeypatch.setattr(device, "compile_enabled", lambda: False)
    model = load_ours(zoo.folder(shape, dialect)).model
    assert model.dtype == mx.bfloat16
    assert np.isfinite(stepwise(model, TOKENS[:12], 4)).all()


@pytest.mark.skipif(
    "global_scale" not in inspect.signature(quantize_model).parameters, reason="needs a newer mlx-lm"
)
@pytest.mark.parametrize("most", [memory.UNPACKED_AT_MOST, 0])
def test_experts_with_a_scale_each(zoo: Zoo, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's `--global-scale`. MLX multiplies with these on a GPU only, so mlx-lm says nothing here; values come out as they went in."""
    monkeypatch.setattr(memory, "UNPACKED_AT_MOST", most)
    found = load_ours(zoo.folder("moe", "mlx-nvfp4-scaled")).model
    expected = dict(tree_flatten(zoo.ours("moe", "mlx").model.parameters()))
    experts = [(k, v) for k, v in tree_flatten(found.parameters()) if "switch_mlp" in k]
    assert len(experts) == 3 * 4
    for name, value in experts:
        off = mx.abs(value - expected[name]).mean() / mx.abs(expected[name]).mean()
        assert 0.01 < off < 0.12, name  # 4 bits in groups of 16
    assert np.isfinite(stepwise(found, TOKENS[:12], 4)).all()


@pytest.mark.parametrize("shape", ["tied", "moe"])
def test_chunks_of_a_prompt(zoo: Zoo, shape: str) -> None:
    """A prompt in uneven chunks, some through the chunked form and some step by step, equals the prompt in one piece."""
    model = zoo.ours(shape).model
    cache, found = model.make_cache(1), []
    for start, end in ((0, 19), (19, 20), (20, 33), (33, len(TOKENS))):
        found.append(
            model.forward(array(TOKENS[start:end]), FlatRows((end - start,)), cache, certain=True).logits
        )
        cache.commit()
    reference = stepwise_mlx_lm(zoo.mlx_lm(shape), TOKENS, 0)
    assert_same_logits(to_numpy(found), reference, f"{shape}, chunks")


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_hidden_and_taps(zoo: Zoo, shape: str) -> None:
    """`hidden` is what the language-model head sees, a tap the residual stream behind its layer, in whatever order taps are asked for."""
    model, theirs = zoo.ours(shape).model, zoo.mlx_lm(shape)
    tokens = TOKENS[:21]
    wanted = (3, 0, 2, 1, 2)
    out = model.forward(
        array(tokens), FlatRows((len(tokens),)), model.make_cache(1), certain=True, taps=wanted
    )
    residual, seen = theirs.model.embed_tokens(array(tokens)[None]), {}
    for i, layer in enumerate(theirs.model.layers):
        residual = layer(residual, mask=None if layer.is_linear else "causal")
        seen[i] = residual[0]
    assert set(out.taps) == set(wanted)
    for i in wanted:
        np.testing.assert_allclose(to_numpy([out.taps[i]]), to_numpy([seen[i]]), atol=1e-4)
    np.testing.assert_allclose(to_numpy([out.hidden]), to_numpy([theirs.model.norm(residual)[0]]), atol=1e-4)
    np.testing.assert_allclose(to_numpy([model.head(out.hidden)]), to_numpy([out.logits]), atol=1e-5)
