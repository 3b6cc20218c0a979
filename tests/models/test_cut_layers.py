"""Layers cut at their attention: what lies before and behind it is what the layer itself computes, and nothing else is in the graph."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapted_zoo import ARCHITECTURES, BY_ROWS, model_of, module_of
from metal_graph import nodes
from mlx_lm.models.cache import KVCache
from planting import catches

from mlxspec.kernels.flat import FlatRows
from mlxspec.models import cut_layers
from mlxspec.models.adapted.calls import LayerCall
from mlxspec.models.cut_layers import piece_before, piece_behind, scale_of
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma_config import GemmaConfig, LayerShape, RotaryShape
from mlxspec.models.seams import SeamError, attending_by_row
from mlxspec.models.segments import Segments
from mlxspec.platform import device

NUM = 3
WIDTHS = {"plain step": (1, 1, 1), "verify": (2, 1)}


def call(layer: Any, x: mx.array, cut: Any) -> mx.array:
    return layer(x, None, cut)


def attention(asked: cut_layers.AttentionInputs, scale: float) -> mx.array:
    """Each token sees itself alone, as a row of mlx-lm's batch does whose cache is empty."""
    return mx.fast.scaled_dot_product_attention(asked.queries, asked.keys, asked.values, scale=scale)


def without_sum(right: Any) -> Any:
    """The residual stream is lost at the cut."""
    return lambda call, layer, x, *more: right(call, layer, mx.zeros_like(x), *more)


@catches("what comes before attention is forgotten", "mlxspec.models.cut_layers:behind", without_sum)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_cut_layers_are_the_layers(name: str, widths: tuple[int, ...]) -> None:
    layers = module_of(name).model.layers
    x, offset = mx.random.normal((NUM, 1, 32), key=mx.random.key(1)), mx.zeros(NUM, mx.int32)
    run, found = Segments(layers).begin(FlatRows(widths)), x
    with attending_by_row():
        for i, layer in enumerate(layers):
            run.add(i, piece_before(call), offset)
            found, asked = run.through(found)
            attended = attention(asked, scale_of(call, layer, found, offset))
            run.add(i, piece_behind(call), attended, offset)
        found, _ = run.through(found)
    for layer in layers:
        x = layer(x, None, KVCache())
    assert mx.abs(found - x).max() <= 1e-5 * mx.abs(x).max()


def test_neither_side_computes_the_other() -> None:
    (layer, *_) = module_of("llama").model.layers
    x, offset = mx.random.normal((NUM, 1, 32), key=mx.random.key(1)), mx.zeros(NUM, mx.int32)
    mx.eval(layer.parameters(), x, offset)
    with attending_by_row():
        asked = cut_layers.before(call, layer, x, offset)
        attended = mx.zeros_like(asked.queries)
        mx.eval(attended)
        out = cut_layers.behind(call, layer, x, attended, offset)
    assert nodes([asked.queries, asked.keys, asked.values])["Matmul"] == 3
    assert nodes([out])["Matmul"] == 4  # of what attention found, and of the MLP


# Their layers are given arrays beside a mask and a cache, give several, or are not called one after the other.
UNCUT = {"mistral3", "gemma3n", "iquestloopcoder", "gemma4_text", "hunyuan", "talkie", "gptj"}
FEW = ("llama", "gpt_oss", "gptj")


@catches(
    "whatever else a layer is given is taken for a mask",
    "mlxspec.models.adapted.calls:_PLAIN",
    lambda right: (*right, mx.array, tuple, list),
    case="mistral3",
)
@pytest.mark.parametrize(
    "name",
    [
        n if n in (*FEW, "mistral3") else pytest.param(n, marks=pytest.mark.slow)
        for n in ARCHITECTURES
        if n not in BY_ROWS
    ],
)
def test_modules_are_cut_where_their_code_allows_it(name: str) -> None:
    """Cut or whole, the logits are the same."""
    model = model_of(name)
    if model.seams is None:
        return
    assert (model.cut is None) == (name in UNCUT)
    if model.cut is None:
        return
    tokens, rows, logits = mx.arange(9) * 7 % 90, FlatRows((6, 1, 2)), []
    for cut in (model.cut, None):
        model.cut = cut
        out = model.forward(tokens, rows, model.make_cache(3), taps=(1,))
        logits.append(mx.concatenate([out.logits, out.taps[1]], axis=1))
    assert mx.abs(logits[0] - logits[1]).max() <= 1e-5 * mx.abs(logits[1]).max()


def test_calls_with_other_constants_are_not_one_graph() -> None:
    """Layers of one form are compiled once for all equal calls."""
    one, other = (LayerCall(args=(None, turns), kwargs=(), place=0) for turns in (True, False))
    assert one != other
    assert one == LayerCall(args=(None, True), kwargs=(), place=3, scale=0.5)


def test_a_layer_that_does_not_attend_cannot_be_cut() -> None:
    with pytest.raises(SeamError, match="does not attend"):
        cut_layers.before(lambda _, x, __: x, None, mx.zeros((1, 1, 4)), mx.zeros(1, mx.int32))


@catches(
    "layers that turn otherwise are taken for one form",
    "mlxspec.models.forms:_marked",
    lambda right: lambda name, value: "" if name == "_periods" else right(name, value),
)
def test_layers_that_turn_otherwise_are_not_of_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify compiles one function for all layers of a form."""
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    turns = [RotaryShape(head_dim=16, theta=theta, num_pairs=8) for theta in (1e1, 1e6)]
    layers = tuple(
        LayerShape(window=None, head_dim=16, num_kv_heads=1, rotary=turn, intermediate_size=32)
        for turn in turns
    )
    config = GemmaConfig(
        vocab_size=50,
        hidden_size=32,
        layers=layers,
        num_heads=2,
        scale=0.25,
        embed_scale=1.0,
        rms_eps=1e-6,
        max_context=64,
        tied=True,
    )
    model = Gemma(config)
    model.fuse()
    tokens = mx.arange(6, dtype=mx.int32)
    together = model.forward(tokens, FlatRows((6,)), model.make_cache(1)).logits
    cache, steps = model.make_cache(1), []
    for i in range(6):
        steps.append(model.forward(tokens[i : i + 1], FlatRows((1,)), cache).logits)
        cache.commit()
    np.testing.assert_allclose(np.asarray(together), np.asarray(mx.concatenate(steps)), atol=1e-5)
