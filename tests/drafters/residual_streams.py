"""The plain twin of the layers hook: a text through a model's layers one after another, nothing compiled and nothing cut into segments."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import RowLayout
from mlxspec.models.gemma import Gemma
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_layers import RoundLayout
from mlxspec.platform.host import numbers


def streams(model: Qwen35 | Gemma, tokens: Sequence[int]) -> list[np.ndarray]:
    """(len(tokens), H) float32 behind each layer, in order."""
    found = (_qwen if isinstance(model, Qwen35) else _gemma)(model, mx.array(list(tokens), mx.int32))
    return [numbers(x.astype(mx.float32)) for x in found]


def shown(model: Qwen35 | Gemma, tokens: Sequence[int], layers: Sequence[int]) -> np.ndarray:
    """(len(tokens), len(layers) * H): what a drafter with these needs is given with the tokens, zeros with the first."""
    every = streams(model, tokens)
    joined = np.concatenate([every[i] for i in layers], axis=1)
    return np.concatenate([np.zeros_like(joined[:1]), joined[:-1]])


def _qwen(model: Qwen35, tokens: mx.array) -> list[mx.array]:
    rows, cache = FlatRows((len(tokens),)), model.make_cache(1)
    places = cache.begin(rows, certain=True)
    cos, sin = model._rotary.table(places.turns)
    layout = RoundLayout(rows, True, RowLayout.of(rows))
    x, found = model.embed(tokens), []
    for i, layer in enumerate(model.language_model.model.layers):
        entered = layer.normed(x)
        if cache.layers[i].is_recurrent:
            mixed, _ = layer.linear_attn(entered, cache.recurrent(i).current, layout)
        else:
            q, k, v, gate = layer.self_attn.project(entered, cos, sin)
            mixed = layer.self_attn.finish(layer.self_attn.core(q, k, v, places, cache.attention(i)), gate)
        x = layer.with_mlp(x + mixed)
        found.append(x)
    return found


def _gemma(model: Gemma, tokens: mx.array) -> list[mx.array]:
    """Over mlx-lm's own caches and masks."""
    embedded = model.embed(tokens)
    own_inputs = model._inputs_of_layers(tokens, embedded)
    distance = mx.arange(len(tokens))[:, None] - mx.arange(len(tokens))[None]
    x, found, kept = embedded[None], [], {}
    for i, (layer, shape) in enumerate(
        zip(model.language_model.model.layers, model.config.layers, strict=True)
    ):
        mask = (distance >= 0) & (distance < (shape.window or len(tokens)))
        cache = KVCache() if shape.source is None else None
        if model.config.generation == 3:
            x = layer(x, mask, cache)
        else:
            more = None if own_inputs[i] is None else own_inputs[i].swapaxes(0, 1)
            keys, offset = (None, None) if cache is not None else kept[shape.source]
            x, *kept[i] = layer(x, mask, cache, per_layer_input=more, shared_kv=keys, offset=offset)
        found.append(x[0])
    return found
