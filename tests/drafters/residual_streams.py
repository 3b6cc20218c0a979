"""The plain twin of the layers hook: a text through a model's layers one after another, nothing compiled and nothing cut into segments."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.gemma import Gemma
from mlxspec.models.qwen3_5 import Qwen35, with_mlp
from mlxspec.models.qwen3_5_segments import _pack_layout, _unpack_layout
from mlxspec.models.row_attention import attend_rows
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
    layout = _unpack_layout(rows, True, _pack_layout(rows, cache, indexed=True), None)
    x, found = model.embed(tokens), []
    for i, layer in enumerate(model.language_model.model.layers):
        entered = layer.normed(x)
        if cache.layers[i].is_recurrent:
            mixed, _ = layer.linear_attn(entered, cache.recurrent(i).current, layout)
        else:
            q, k, v, gate = layer.self_attn.project(entered, cos, sin)
            mixed = layer.self_attn.finish(layer.self_attn.core(q, k, v, places, cache.attention(i)), gate)
        x = with_mlp(layer, x + mixed)
        found.append(x)
    return found


def _gemma(model: Gemma, tokens: mx.array) -> list[mx.array]:
    rows, cache, c = FlatRows((len(tokens),)), model.make_cache(1), model.config
    places = cache.begin(rows, certain=True)
    x, own_inputs = model._prepare(model.embed(tokens), model._embed_per_layer(tokens))
    found, views = [], {}
    for i, (layer, shape) in enumerate(zip(model.language_model.model.layers, c.layers, strict=True)):
        cos, sin = model._rotaries[shape.rotary].table(places.turns)
        projected = layer.self_attn.project(layer.enter(x), cos, sin)
        if shape.source is None:
            views[i] = cache.attention(len(views)).append(projected[1], projected[2], places)
        seen = views[i if shape.source is None else shape.source]
        attended = attend_rows(projected[0], seen, rows, c.scale, shape.window)
        x = layer.leave(x, attended, None if own_inputs is None else own_inputs[i])
        found.append(x)
    return found
