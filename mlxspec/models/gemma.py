"""Gemma text models of both generations: attention in every layer, in most of them behind a sliding window.

Layers are mlx-lm's (gemma_layers.py); how they meet the caches, what images put in the place of embeddings and what later layers read of
earlier ones is here. Parameter names are those that mlx-lm writes, behind `language_model.`. Knows no files, no sampling, no drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN
from mlxspec.kernels.attention import Heads
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.cut_layers import piece_before, piece_behind
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.layers import FusedLinear, rms_norm
from mlxspec.models.seams import BEFORE, KeysForm, Seams, Sight, attending_by_row
from mlxspec.models.segments import Segments
from mlxspec.models.text_model import TextModel, text_stack


class Gemma(TextModel):
    """A Gemma 3 or Gemma 4 text model, with the interface of models.base.Model."""

    def __init__(self, config: GemmaConfig) -> None:
        from mlxspec.models.gemma_layers import call_layer, decoder_layer  # slow to import

        c, stack = config, text_stack(config, [decoder_layer(config, shape) for shape in config.layers])
        if c.per_layer_size:
            width = len(c.layers) * c.per_layer_size
            stack.embed_tokens_per_layer = nn.Embedding(c.per_layer_vocab, width)
            stack.per_layer_model_projection = nn.Linear(c.hidden_size, width, bias=False)
            stack.per_layer_projection_norm = nn.RMSNorm(c.per_layer_size)
        super().__init__(stack, config)
        self.config = config
        self._segments = Segments(self.language_model.model.layers, self.gate.held)
        self._before, self._behind = piece_before(call_layer), piece_behind(call_layer)

    def fuse(self) -> None:
        """Join projections of the same input, after loading. Call this once."""
        from mlxspec.models.gemma_layers import fuse_layer  # slow to import

        stack = self.language_model.model
        for layer, shape in zip(stack.layers, self.config.layers, strict=True):
            fuse_layer(layer, self.config, shape, self.dtype)
        self._fuse_head()
        if "per_layer_model_projection" in stack:
            stack.per_layer_model_projection = FusedLinear([stack.per_layer_model_projection])

    @property
    def reads_both_ways(self) -> bool:
        """Return whether each token also sees later tokens. Such a model makes embeddings of whole texts and generates none."""
        return self.config.reads_both_ways

    @property
    def seams(self) -> Seams:
        """Return the forms of the caches: one for each layer that has its own keys and values, in order."""
        c = self.config
        sizes = (
            (s.num_kv_heads, s.head_dim, s.head_dim, self.dtype, s.window)
            for s in c.layers
            if s.source is None
        )
        return Seams(forms=[KeysForm(c.num_heads, *size) for size in sizes])

    @property
    def attention_heads(self) -> Sequence[Heads]:
        return self.seams.attention_heads

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """Return an empty cache of `num_rows` rows. kv_bits: bits of keys and values in layers without a window."""
        return self.seams.make_cache(num_rows, kv_bits=kv_bits)

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (N, H) of tokens (N,) int32, multiplied by the model's factor: the input of the first layer and of
        drafters."""
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
        places, c, stack = cache.begin(rows, certain=certain), self.config, self.language_model.model
        self.gate.open(cache.scales, rows)
        x = self.embed(tokens)
        sight = BEFORE
        if images is not None:
            x = images.placed(x)
            sight = Sight(images.blocks_in(is_windowed=True), images.blocks_in(is_windowed=False))
        elif c.reads_both_ways and certain:
            whole = [(range(w),) for w in rows.widths]
            sight = Sight(whole, whole, both_ways=True)
        own_inputs = self._inputs_of_layers(tokens, x)
        run = self._segments.begin(rows, taps)
        caches = self.seams.layers(cache, places, sight)
        offset, own = caches[0].offset, iter(caches)
        x, kept = x[:, None], dict[int, Any]()
        with attending_by_row():
            for i, shape in enumerate(c.layers):
                run.add(i, self._before, offset)
                x, asked = run.through(x)
                if asked.keys is not None:
                    kept[i], _ = next(own).update_and_fetch(asked.keys, asked.values)
                held = kept[i if shape.source is None else shape.source]
                attended = held.attend(asked.queries, c.scale, None, None)
                run.add(i, self._behind, attended, offset, own_inputs[i])
            x, _ = run.through(x)
        x = rows.last(x) if logits_at == "end" else x
        hidden = rms_norm(x[:, 0], stack.norm.weight, c.rms_eps)
        return Output(
            logits=self._logits(hidden, rows, logits_at),
            hidden=hidden,
            taps={i: stream[:, 0] for i, stream in run.taps.items()},
            is_warm=run.is_warm,
        )

    def _inputs_of_layers(self, tokens: mx.array, x: mx.array) -> list[mx.array | None]:
        """Return the additional input (N, 1, P) of each layer, or None for each layer where the model has no such inputs. An input is the
        layer's share of a second embedding of the tokens and of a projection of their embeddings x (N, H)."""
        c, stack = self.config, self.language_model.model
        if not c.per_layer_size:
            return [None] * len(c.layers)
        embedded = stack.embed_tokens_per_layer(tokens)
        embedded = embedded * mx.array(c.per_layer_size**0.5, x.dtype)
        projected = stack.per_layer_model_projection(x) * mx.array(c.hidden_size**-0.5, x.dtype)
        projected = projected.reshape(x.shape[0], -1, c.per_layer_size)
        projected = rms_norm(projected, stack.per_layer_projection_norm.weight, c.rms_eps)
        inputs = (projected + embedded.reshape(projected.shape)) * mx.array(2.0**-0.5, x.dtype)
        return [inputs[:, i : i + 1] for i in range(len(c.layers))]
