"""Qwen3.5 / 3.6 / 3.8 and Qwen3-Next text models, Gated DeltaNet layers with a full-attention layer now and then; and plain Qwen3, which
has attention only.

Parameter names are those that mlx-lm writes, so its conversions load as they are. Knows its layers and how they meet the caches; knows no
files, no sampling, no drafting. The parts of a layer are in qwen3_5_layers.py; how stretches of layers are compiled is in
qwen3_5_segments.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.places import Places
from mlxspec.cache.quantized import PLAIN, attention_cache
from mlxspec.cache.recurrent import RecurrentLayerCache
from mlxspec.cache.rollback import RecurrentState
from mlxspec.kernels.attention import Heads
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.layers import Rotary, rms_norm
from mlxspec.models.qwen3_5_config import Qwen35Config, interleaved_axes
from mlxspec.models.qwen3_5_layers import Qwen35DecoderLayer, RoundLayout
from mlxspec.models.qwen3_5_segments import LayerPieces, Segments
from mlxspec.models.text_model import TextModel

# --- a layer: x (N, H) is the residual stream of the tokens of all rows


def linear_layer(
    layer: Qwen35DecoderLayer, x: mx.array, state: RecurrentState, layout: RoundLayout
) -> tuple[mx.array, RecurrentState]:
    """A Gated DeltaNet layer: the residual stream behind it, and what the cache is to hold."""
    mixed, state = layer.linear_attn(layer.normed(x), state, layout)
    return with_mlp(layer, x + mixed), state


def before_attention(
    layer: Qwen35DecoderLayer, x: mx.array, cos: mx.array, sin: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """Queries, keys, values and output gate of an attention layer, see `Qwen35Attention.project`."""
    return layer.self_attn.project(layer.normed(x), cos, sin)  # type: ignore[no-any-return]


def after_attention(
    layer: Qwen35DecoderLayer, x: mx.array, attended: mx.array, gate: mx.array | None
) -> mx.array:
    """The residual stream behind an attention layer. attended, gate: (N, Hq * D)."""
    return with_mlp(layer, x + layer.self_attn.finish(attended, gate))


def with_mlp(layer: Qwen35DecoderLayer, x: mx.array) -> mx.array:
    """The second half of every layer."""
    return x + layer.mlp(layer.normed_again(x))


# --- the model


class Qwen35TextStack(nn.Module):
    """Embedding, layers, final norm: parameters only."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = [Qwen35DecoderLayer(c, linear=lin) for lin in c.is_linear]
        self.norm = nn.RMSNorm(c.hidden_size)


class Qwen35(TextModel):
    """The model; see models.base.Model for the contract of `forward`."""

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__(Qwen35TextStack(config), config)
        self._config = config
        self._rotary = qwen_rotary(config)
        pieces = LayerPieces(linear=linear_layer, before=before_attention, after=after_attention)
        self._segments = Segments(config, self.language_model.model.layers, pieces, self.gate.held)

    @property
    def attention_heads(self) -> tuple[Heads, ...]:
        c = self._config
        return (Heads(c.num_heads, c.num_kv_heads, c.head_dim, self.dtype),)

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        c, dtype = self._config, self.dtype
        return ModelCache(
            [
                RecurrentLayerCache(
                    c.num_v_heads, c.v_head_dim, c.k_head_dim, c.conv_dim, c.conv_kernel, dtype, num_rows
                )
                if lin
                else attention_cache(c.num_kv_heads, c.head_dim, dtype, num_rows, kv_bits)
                for lin in c.is_linear
            ],
            num_rows,
            defers=self._segments.by_kernels(dtype),
        )

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
        places = cache.begin(rows, certain=certain)
        self.gate.open(cache.scales, rows)
        run = self._segments.begin(rows, cache, self.dtype, certain=certain, taps=taps)
        turns = self._rotary.table(turns_of(self._rotary, places, images))  # cosines and sines
        x = self.embed(tokens)
        if images is not None:
            x = images.placed(x)
        attended = gate = None
        for segment in self._segments:
            # after_attention of one layer, linear_layer of some, before_attention of the next
            x, inputs = run(segment, x, attended, gate, turns)
            if segment.head is not None:
                queries, keys, values, gate = inputs
                attention = self.language_model.model.layers[segment.head].self_attn
                attended = attention.core(queries, keys, values, places, cache.attention(segment.head))
                attended = run.started(attended)
        hidden = self._segments.runners.get("end", self._final_norm, rows, shape=rows.num_tokens)(x)
        logits = self._logits(hidden, rows, logits_at)
        return Output(logits=logits, hidden=hidden, taps=run.taps, is_warm=run.is_warm)

    def _final_norm(self, x: mx.array) -> mx.array:
        return rms_norm(x, self.language_model.model.norm.weight, self._config.rms_eps)


def qwen_rotary(c: Qwen35Config) -> Rotary:
    """Of the model's attention layers and of its MTP head's."""
    axes = interleaved_axes(c.rope_dims // 2, c.rope_sections)
    return Rotary.of_first(c.rope_dims, c.rope_theta, c.head_dim, c.rope_scaling, axes)


def turns_of(rotary: Rotary, places: Places, images: ImageInput | None) -> mx.array:
    """What `Rotary.table` takes of a forward's tokens."""
    if images is None or images.positions is None:
        return places.turns
    return rotary.spread(images.positions)
