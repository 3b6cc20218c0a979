"""Qwen3.5 models of real depth and tiny widths in 4 bits, ours and mlx-lm's, one behind the other in any length of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import mlx.nn as nn

from mlxspec.cache.attention import AttentionLayerCache
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.recurrent import RecurrentLayerCache
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_ops import Tape
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from tests.models.metal_graph import blank, fresh

KV_HEADS, HEAD_DIM, GDN_DIM = 1, 64, 32


def sizes(num_layers: int, hidden: int = 64) -> dict[str, Any]:
    """For both, all matrices `hidden` wide: every fourth layer is full attention, as in all published models."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": num_layers,
        "layer_types": kinds,
        "full_attention_interval": 4,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": hidden // GDN_DIM,
        "linear_num_value_heads": hidden // GDN_DIM,
        "linear_key_head_dim": GDN_DIM,
        "linear_value_head_dim": GDN_DIM,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1 << 17,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    }


def packed(module: nn.Module) -> nn.Module:
    """bfloat16 and 4 bits, as conversions are."""
    module.set_dtype(mx.bfloat16)
    nn.quantize(module, group_size=32, bits=4)
    mx.eval(module.parameters())
    return module.eval()


def ours(num_layers: int, hidden: int = 64) -> Qwen35:
    config = {k: v for k, v in sizes(num_layers, hidden).items() if k != "full_attention_interval"}
    model = Qwen35(Qwen35Config.from_dict(config))
    packed(model)
    model.fuse()
    mx.eval(model.parameters())
    return model


def theirs(num_layers: int) -> Any:
    from mlx_lm.models.qwen3_5 import TextModel, TextModelArgs

    return packed(TextModel(TextModelArgs.from_dict(sizes(num_layers))))


def filled(model: Qwen35, length: int, num_rows: int = 1) -> ModelCache:
    """A cache whose rows have read `length` tokens; nothing is deferred."""
    cache = model.make_cache(num_rows)
    cache.lengths = [length] * num_rows
    for layer in cache.layers:
        if isinstance(layer, AttentionLayerCache):
            heads, dim = layer.shape
            room = (1, heads, length + 256, dim)
            layer.keys[:] = [fresh(room, layer.dtype) for _ in range(num_rows)]
            layer.values[:] = [fresh(room, layer.dtype) for _ in range(num_rows)]
    cut(cache)
    return cache


def cut(cache: ModelCache) -> None:
    """Forget how the cache's arrays were made, as though all of it had run."""
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayerCache):
            state = layer.current
            tape = None if state.tape is None else Tape(*(blank(x.shape, x.dtype) for x in state.tape))
            inputs = None if state.inputs is None else blank(state.inputs.shape, state.inputs.dtype)
            layer.current = type(state)(
                blank(state.state.shape, state.state.dtype),
                blank(state.window.shape, state.window.dtype),
                inputs,
                tape,
            )
        else:
            layer.keys[:] = [fresh(x.shape, x.dtype) for x in layer.keys]
            layer.values[:] = [fresh(x.shape, x.dtype) for x in layer.values]
    committed = cache.deferred
    if committed is not None:
        mx.eval(committed.num_committed, committed.rows.starts)


def filled_like_mlx_lm(model: Any, length: int) -> list[Any]:
    """mlx-lm's caches behind as many tokens."""
    caches = model.make_cache()
    heads = model.args.linear_num_value_heads
    conv = 3 * heads * GDN_DIM
    for layer, cache in zip(model.layers, caches, strict=True):
        if layer.is_linear:
            cache[0] = blank((1, 3, conv), mx.bfloat16)
            cache[1] = blank((1, heads, GDN_DIM, GDN_DIM), mx.float32)
        else:
            room = (1, KV_HEADS, (length // 256 + 1) * 256, HEAD_DIM)
            cache.keys, cache.values, cache.offset = (
                fresh(room, mx.bfloat16),
                fresh(room, mx.bfloat16),
                length,
            )
    return caches


def forward(
    model: Qwen35, cache: ModelCache, widths: Sequence[int], *, certain: bool = False
) -> tuple[mx.array, list[mx.array]]:
    """Logits, and all that the forward leaves behind; the transaction stays open."""
    rows = FlatRows(tuple(widths))
    tokens = blank((rows.num_tokens,), mx.int32)
    mx.eval(rows.starts_array)
    out = model.forward(tokens, rows, cache, certain=certain)
    assert out.logits is not None
    return out.logits, cache.arrays
