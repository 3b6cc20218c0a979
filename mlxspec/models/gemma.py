"""Gemma text models of both generations: attention in every layer, in most of them behind a sliding window.

Parameter names are those that mlx-lm writes, behind `language_model.`. Knows its layers and how they meet the caches; knows no files, no
sampling, no drafting.

As in other models the forward is a chain of pure functions of arrays between attention cores: the rest of one layer and the head of the
next, compiled where shapes repeat. They know nothing of rows, so only the number of tokens matters to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.cache.attention import AttentionLayerCache, View
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN, attention_cache
from mlxspec.cache.windowed import WindowedLayerCache
from mlxspec.kernels.attention import Heads
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.gemma_layers import GemmaDecoderLayer, GemmaRotary
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.layers import FusedLinear, rms_norm
from mlxspec.models.row_attention import attend_rows
from mlxspec.models.runners import Runners
from mlxspec.models.text_model import TextModel
from mlxspec.platform import device

_OF_A_LAYER = 25  # kernels that Metal launches, for `device.start`


class GemmaTextStack(nn.Module):
    """Embeddings, layers, final norm: parameters only."""

    def __init__(self, c: GemmaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = [GemmaDecoderLayer(c, shape) for shape in c.layers]
        self.norm = nn.RMSNorm(c.hidden_size)
        if c.per_layer_size:
            width = len(c.layers) * c.per_layer_size
            self.embed_tokens_per_layer = nn.Embedding(c.per_layer_vocab, width)
            self.per_layer_model_projection = nn.Linear(c.hidden_size, width, bias=False)
            self.per_layer_projection_norm = nn.RMSNorm(c.per_layer_size)


class Gemma(TextModel):
    """The model; see models.base.Model for the contract of `forward`."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__(GemmaTextStack(config), config)
        self.config = config
        self._rotaries = {shape.rotary: GemmaRotary(shape.rotary) for shape in config.layers}
        self._runners = Runners(self.language_model.model.layers, self.gate.held)

    def fuse(self) -> None:
        """Join projections of the same input, after loading. Call once."""
        super().fuse()
        stack = self.language_model.model
        if "per_layer_model_projection" in stack:
            stack.per_layer_model_projection = FusedLinear([stack.per_layer_model_projection])

    @property
    def reads_both_ways(self) -> bool:
        """Whether the tokens of a forward see each other, so that it makes vectors of whole texts and no answers."""
        return self.config.reads_both_ways

    @property
    def attention_heads(self) -> tuple[Heads, ...]:
        shapes = [shape for shape in self.config.layers if shape.window is None]
        found = (
            Heads(self.config.num_heads, shape.num_kv_heads, shape.head_dim, self.dtype) for shape in shapes
        )
        return tuple(dict.fromkeys(found))

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """One layer cache for each layer that has keys and values of its own, in order. kv_bits: of layers without a window."""
        layers: list[AttentionLayerCache] = []
        for shape in self.config.layers:
            heads = shape.num_kv_heads, shape.head_dim
            if shape.source is not None:
                continue
            if shape.window is None:
                layers.append(attention_cache(*heads, self.dtype, num_rows, kv_bits))
            else:
                layers.append(WindowedLayerCache(*heads, shape.window, self.dtype, num_rows))
        return ModelCache(layers, num_rows)

    def embed(self, tokens: mx.array) -> mx.array:
        """(N,) int32 -> (N, H), scaled as the first layer and a drafter's input want it."""
        x = super().embed(tokens)
        return x * mx.array(self.config.embed_scale, x.dtype)

    def capped(self, logits: mx.array) -> mx.array:
        cap = self.config.softcap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def forward(
        self,
        tokens: mx.array,
        rows: FlatRows,
        cache: ModelCache,
        *,
        certain: bool = False,
        logits_at: LogitsAt = "all",
        taps: Sequence[int] = (),
        images: ImageInput | None = None,
    ) -> Output:
        places, num_cold = cache.begin(rows, certain=certain), self._runners.num_cold
        self.gate.open(cache.scales, rows)
        angles = {shape: rotary.table(places.turns) for shape, rotary in self._rotaries.items()}
        c = self.config
        prepare = self._runners.get("prepare", self._prepare, rows)
        embedded = self.embed(tokens)
        if images is not None:
            embedded = images.placed(embedded)
        x, own_inputs = prepare(embedded, self._embed_per_layer(tokens))
        attended, found = None, {}
        whole = [(range(w),) for w in rows.widths] if c.reads_both_ways and certain else ()
        views: dict[int, Sequence[View]] = {}
        for i, shape in enumerate(c.layers):
            x, projected = self._between(i, rows, x, attended, _at(own_inputs, i - 1), *angles[shape.rotary])
            if i - 1 in taps:
                found[i - 1] = x
            source = shape.source
            if source is None:
                layer = cache.attention(len(views))
                views[i] = layer.append(projected[1], projected[2], places)
                source = i
            blocks = whole if images is None else images.blocks_in(is_windowed=shape.window is not None)
            attended = attend_rows(
                projected[0], views[source], rows, c.scale, shape.window, blocks, both_ways=bool(whole)
            )
            device.start(attended, num_launches=_OF_A_LAYER)
        last = len(c.layers) - 1
        x, hidden = self._between(last + 1, rows, x, attended, _at(own_inputs, last))
        if last in taps:
            found[last] = x
        return Output(
            logits=self._logits(hidden, rows, logits_at),
            hidden=hidden,
            taps=found,
            is_warm=self._runners.num_cold == num_cold,
        )

    def _embed_per_layer(self, tokens: mx.array) -> mx.array | None:
        """(N,) -> (N, L * P)"""
        if not self.config.per_layer_size:
            return None
        x = self.language_model.model.embed_tokens_per_layer(tokens)
        return x * mx.array(self.config.per_layer_size**0.5, x.dtype)

    def _between(
        self, i: int, rows: FlatRows, x: mx.array, attended: mx.array | None, *arrays: Any
    ) -> tuple[mx.array, Any]:
        """What lies before the attention of layer i, or behind the last one; compiled as a whole for plain steps, and for verifies, which
        come in many shapes, layer by layer."""
        if rows.max_width == 1:
            return self._runners.get(i, partial(self._segment, i), rows)(x, attended, *arrays)  # type: ignore[no-any-return]

        def apply(run: Callable[..., Any], layer: int, *arrays: Any) -> Any:
            return self._runners.of_layer(run.__name__, layer, run, rows)(*arrays)

        return self._segment(i, x, attended, *arrays, apply=apply)

    def _prepare(self, x: mx.array, embedded: mx.array | None) -> tuple[mx.array, list[mx.array] | None]:
        """The residual stream (N, H), and each layer's own input (N, P): its share of the token's second embedding and of the first."""
        if embedded is None:
            return x, None
        c, stack = self.config, self.language_model.model
        projected = stack.per_layer_model_projection(x) * mx.array(c.hidden_size**-0.5, x.dtype)
        projected = projected.reshape(x.shape[0], -1, c.per_layer_size)
        projected = rms_norm(projected, stack.per_layer_projection_norm.weight, c.rms_eps)
        inputs = (projected + embedded.reshape(projected.shape)) * mx.array(2.0**-0.5, x.dtype)
        return x, [inputs[:, i] for i in range(len(c.layers))]

    def _segment(
        self,
        i: int,
        x: mx.array,
        attended: mx.array | None,
        own_input: mx.array | None,
        *angles: mx.array,
        apply: Callable[..., Any] | None = None,
    ) -> tuple[mx.array, Any]:
        """The residual stream behind layer i - 1, and layer i's projections or, behind the last, the final norm's output. apply: (piece of
        a layer, number of the layer, arrays)."""
        stack = self.language_model.model
        apply = apply or (lambda run, layer, *arrays: run(stack.layers[layer], *arrays))
        if attended is not None:
            x = apply(_leave, i - 1, x, attended, own_input)
        if i == len(stack.layers):
            return x, rms_norm(x, stack.norm.weight, self.config.rms_eps)
        return x, apply(_project, i, x, *angles)


def _leave(layer: Any, x: mx.array, attended: mx.array, own_input: mx.array | None) -> mx.array:
    return layer.leave(x, attended, own_input)  # type: ignore[no-any-return]


def _project(layer: Any, x: mx.array, *angles: mx.array) -> tuple[mx.array, ...]:
    return layer.self_attn.project(layer.enter(x), *angles)  # type: ignore[no-any-return]


def _at(values: Sequence[mx.array] | None, i: int) -> mx.array | None:
    return None if values is None or i < 0 else values[i]
