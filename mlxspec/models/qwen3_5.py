"""Qwen3.5 / 3.6 / 3.8 and Qwen3-Next text models, Gated DeltaNet layers with a full-attention layer now and then; and plain Qwen3, which
has attention only.

Parameter names are those that mlx-lm writes, so its conversions load as they are. Knows its layers and how they meet the caches; knows no
files, no sampling, no drafting. The parts of a layer are in qwen3_5_layers.py; how layers are compiled is in segments.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.places import Places
from mlxspec.cache.quantized import PLAIN, attention_cache
from mlxspec.cache.recurrent import RecurrentLayerCache
from mlxspec.cache.rollback import STEPS_AT_MOST, Committed, RecurrentState, capacity
from mlxspec.kernels import conv_qkv, gdn_round
from mlxspec.kernels.attention import Heads
from mlxspec.kernels.conv_ops import GdnShape
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import RowLayout
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.layers import Rotary, rms_norm
from mlxspec.models.qwen3_5_config import Qwen35Config, interleaved_axes
from mlxspec.models.qwen3_5_layers import (
    GatedDeltaNet,
    Qwen35Attention,
    Qwen35DecoderLayer,
    RoundLayout,
)
from mlxspec.models.segments import LayerPiece, Segments
from mlxspec.models.text_model import TextModel, text_stack
from mlxspec.platform import device

# kernels that Metal launches, of a layer but for the core of attention and of that
_OF_A_LAYER, _OF_A_CORE = 14, 4
_BEFORE = LayerPiece("before", lambda layer, x, *turns: (x, layer.before_attention(x, *turns)))
_AFTER = LayerPiece(
    "after", lambda layer, x, *given: (layer.after_attention(x, *given), None), num_launches=_OF_A_LAYER
)


class Qwen35(TextModel):
    """A Qwen3, Qwen3-Next or Qwen3.5 text model, with the interface of models.base.Model."""

    def __init__(self, config: Qwen35Config) -> None:
        mixers = [GatedDeltaNet(config) if lin else Qwen35Attention(config) for lin in config.is_linear]
        layers = [Qwen35DecoderLayer(config, mixer) for mixer in mixers]
        super().__init__(text_stack(config, layers), config)
        self._config = config
        self._rotary = qwen_rotary(config)
        self._segments = Segments(self.language_model.model.layers, self.gate.held)

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
            defers=self._by_kernels,
        )

    @property
    def _by_kernels(self) -> bool:
        """Return whether Gated DeltaNet layers run by mlxspec's kernels from the convolution to the recurrence, including the replay of the
        last forward. The graph of a forward then depends on few numbers."""
        c, dtype = self._config, self.dtype
        shape = GdnShape(c.num_k_heads, c.num_v_heads, c.k_head_dim, c.v_head_dim)
        return conv_qkv.on_kernel(dtype, shape, c.conv_kernel) and gdn_round.on_kernel(
            dtype, c.k_head_dim, c.v_head_dim
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
        # wide ragged prompts are read row by row, so their graph depends on every single width
        repeats = rows.is_uniform or not certain or rows.max_width <= STEPS_AT_MOST
        run = self._segments.begin(rows, taps, repeats=repeats)
        linear, shared = self._linear(rows, cache, certain=certain)
        turns = self._rotary.table(turns_of(self._rotary, places, images))  # cosines and sines
        x = self.embed(tokens)
        if images is not None:
            x = images.placed(x)
        for i, layer in enumerate(self.language_model.model.layers):
            if self._config.is_linear[i]:
                held = cache.recurrent(i)
                run.add(i, linear, held.current, *shared, keep=held.append)
                continue
            run.add(i, _BEFORE, *turns)
            x, (queries, keys, values, gate) = run.through(x)
            at_end = logits_at == "end" and i + 1 == self.num_layers
            own = cache.attention(i)
            attended = layer.self_attn.core(queries, keys, values, places, own, at_end=at_end)
            device.start(attended, num_launches=_OF_A_CORE)
            after = _AFTER
            if at_end:
                x, gate = (None if y is None else rows.last(y) for y in (x, gate))
                after = _AFTER._replace(shape=(logits_at, len(rows.active)))
            run.add(i, after, attended, gate)
        x, _ = run.through(x)
        if logits_at == "end" and len(x) == rows.num_tokens:
            x = rows.last(x)
        hidden = self._segments.runners.get("end", self._final_norm, rows, shape=len(x))(x)
        logits = self._logits(hidden, rows, logits_at)
        return Output(logits=logits, hidden=hidden, taps=run.taps, is_warm=run.is_warm)

    def _linear(
        self, rows: FlatRows, cache: ModelCache, *, certain: bool
    ) -> tuple[LayerPiece, tuple[Any, Any]]:
        """Return the piece that runs one Gated DeltaNet layer in this forward, and the two arguments that all of these layers take in
        addition to their states: the arrays of this forward's rows, and those of the last forward's rows with its committed counts (None
        where nothing is deferred)."""
        by_kernels, last, width = self._by_kernels, cache.deferred, rows.max_width
        room, shape, deferred = None, rows.shape, 0
        if by_kernels:
            room = capacity(rows.num_tokens)
            few = width <= STEPS_AT_MOST
            shape = rows.num_tokens, rows.num_rows, conv_qkv.num_segments(width), few
        # nothing but the twins of kernels looks at an index
        here = rows.starts_array, None if by_kernels else rows.index
        then = None
        if last is not None and any(self._config.is_linear):
            then = last.rows.starts, None if by_kernels else last.rows.index, last.num_committed
            inputs = cache.recurrent(self._config.is_linear.index(True)).current.inputs
            deferred = 1 if inputs is None else inputs.shape[0]  # tokens whose inputs come along

        def run(layer: Any, x: mx.array, past: RecurrentState, here: Any, then: Any) -> Any:
            layout = RoundLayout(rows, certain, RowLayout(here[0], here[1], width), room=room)
            if then is not None:
                committed = Committed(RowLayout(then[0], then[1], width), then[2])
                layout = layout._replace(committed=committed)
            mixed, state = layer.linear_attn(layer.normed(x), past, layout)
            return layer.with_mlp(x + mixed), state

        key = "linear", certain, deferred
        return LayerPiece(key, run, shape, deferred > 0, _OF_A_LAYER), (here, then)

    def _final_norm(self, x: mx.array) -> mx.array:
        return rms_norm(x, self.language_model.model.norm.weight, self._config.rms_eps)


def qwen_rotary(c: Qwen35Config) -> Rotary:
    """Return the rotary positions of the model's attention layers, which its MTP head uses too."""
    axes = interleaved_axes(c.rope_dims // 2, c.rope_sections)
    return Rotary.of_first(c.rope_dims, c.rope_theta, c.head_dim, c.rope_scaling, axes)


def turns_of(rotary: Rotary, places: Places, images: ImageInput | None) -> mx.array:
    """Return the rotary positions of a forward's tokens in the form that `Rotary.table` takes: those of `places`, or those of `images`
    where images give positions on three axes."""
    if images is None or images.positions is None:
        return places.turns
    return rotary.spread(images.positions)
