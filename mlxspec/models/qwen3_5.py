"""Qwen3.5 / 3.6 / 3.8 and Qwen3-Next text models, Gated DeltaNet layers with a full-attention layer now and then; and plain Qwen3, which
has attention only.

Parameter names are those that mlx-lm writes, so its conversions load as they are. Knows its layers and how they meet the caches; knows no
files, no sampling, no drafting.

Between attention cores the forward is a chain of pure functions of arrays, the segments: the tail of one attention layer, the Gated
DeltaNet layers behind it, the head of the next attention layer. A segment depends on widths only, so it is compiled, whole for plain
steps and layer by layer for verifies (runners.py); an attention core depends on every row's length, so it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.places import Places
from mlxspec.cache.quantized import PLAIN, attention_cache
from mlxspec.cache.recurrent import RecurrentLayerCache
from mlxspec.cache.rollback import STEPS_AT_MOST, TAPE, RecurrentState, Rollback, Stood, TapeRollback
from mlxspec.kernels import conv_qkv, gdn_round
from mlxspec.kernels.attention import Heads
from mlxspec.kernels.conv_ops import GdnShape
from mlxspec.kernels.flat import FlatRows, RaggedIndex
from mlxspec.kernels.gdn_round import RowLayout
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.layers import Rotary, rms_norm
from mlxspec.models.qwen3_5_config import Qwen35Config, interleaved_axes
from mlxspec.models.qwen3_5_layers import Qwen35DecoderLayer, RoundLayout
from mlxspec.models.runners import Runners
from mlxspec.models.text_model import TextModel
from mlxspec.platform import device

# kernels that Metal launches, for `device.start`: of a layer but for the core of attention, and of that
_OF_A_LAYER, _OF_A_CORE = 14, 4


class Segment:
    """A stretch of layers without an attention core in it. Indices into the decoder layers.

    tail: the attention layer whose core has just run; linear: Gated DeltaNet layers; head: the attention layer whose core comes next,
    None for the last stretch, behind which comes the final norm.
    """

    def __init__(self, tail: int | None, linear: tuple[int, ...], head: int | None) -> None:
        self.tail, self.linear, self.head = tail, linear, head

    @classmethod
    def cut(cls, is_linear: Sequence[bool]) -> list[Segment]:
        segments, tail, linear = [], None, []
        for i, lin in enumerate(is_linear):
            if lin:
                linear.append(i)
                continue
            segments.append(cls(tail, tuple(linear), i))
            tail, linear = i, []
        segments.append(cls(tail, tuple(linear), None))
        return segments


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
        self._segments = Segment.cut(config.is_linear)
        self._rotary = qwen_rotary(config)
        self._runners = Runners(self.language_model.model.layers)

    @property
    def attention_heads(self) -> tuple[Heads, ...]:
        c = self._config
        return (Heads(c.num_heads, c.num_kv_heads, c.head_dim, self.dtype),)

    def make_cache(self, num_rows: int, rollback: Rollback = TAPE, *, kv_bits: int = PLAIN) -> ModelCache:
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
            rollback,
            defers=self._by_kernels(rollback),
        )

    def _by_kernels(self, way: Rollback) -> bool:
        """Whether Gated DeltaNet layers are kernel launches from the projection to the recurrence, the replay of the last forward among
        them. Their graph then depends on few numbers."""
        c = self._config
        shape = GdnShape(c.num_k_heads, c.num_v_heads, c.k_head_dim, c.v_head_dim)
        return (
            isinstance(way, TapeRollback)
            and conv_qkv.on_kernel(self.dtype, shape, c.conv_kernel)
            and gdn_round.on_kernel(self.dtype, c.k_head_dim, c.v_head_dim)
        )

    def forward(
        self,
        tokens: mx.array,
        rows: FlatRows,
        cache: ModelCache,
        *,
        facts: bool = False,
        logits_at: LogitsAt = "all",
        taps: Sequence[int] = (),
        images: ImageInput | None = None,
    ) -> Output:
        places, num_cold = cache.begin(rows, facts=facts), self._runners.num_cold
        layers = self.language_model.model.layers
        cos, sin = self._rotary.table(turns_of(self._rotary, places, images))
        layout = _pack_layout(rows, cache, indexed=not self._by_kernels(cache.rollback))
        taps = tuple(sorted(set(taps)))  # in the order in which the layers run
        step, num_launches = self._step(rows, facts, taps, cache)
        x, attended, gate = self.embed(tokens), None, None
        if images is not None:
            x = images.placed(x)
        found: dict[int, mx.array] = {}
        for s, segment in enumerate(self._segments):
            past = [_pack_state(cache.recurrent(i).current) for i in segment.linear]
            x, out, future, tapped = step(s, x, attended, gate, cos, sin, past, layout)
            device.start(x, num_launches=num_launches(segment))
            for i, state in zip(segment.linear, future, strict=True):
                cache.recurrent(i).append(_unpack_state(state))
            found |= dict(zip([t for t in taps if t in _layers_of(segment)], tapped, strict=True))
            if segment.head is not None:
                q, k, v, gate = out
                core = layers[segment.head].self_attn.core
                attended = core(q, k, v, places, cache.attention(segment.head))
                device.start(attended, num_launches=_OF_A_CORE)
        hidden = self._runners.get("end", self._end, rows, shape=rows.num_tokens)(x)
        return Output(
            logits=self._logits(hidden, rows, logits_at),
            hidden=hidden,
            taps=found,
            is_warm=self._runners.num_cold == num_cold,
        )

    def _step(
        self, rows: FlatRows, facts: bool, taps: tuple[int, ...], cache: ModelCache
    ) -> tuple[Callable[..., Any], Callable[[Segment], int]]:
        """How segments run: (number of the segment, arrays) -> what `_run` returns; and about how many kernels a segment launches that were
        not reported to the device while it was built."""
        way = cache.rollback
        deferred = max((_num_deferred(segment, cache) for segment in self._segments), default=0)
        # wide ragged facts are prefilled row by row, so their graph depends on every single width
        repeats = rows.is_uniform or not facts or rows.max_width <= STEPS_AT_MOST
        key, num_tokens = (facts, way), rows.num_tokens
        # what of the rows shapes each piece: around attention and behind it nothing but the number of tokens does
        shapes: dict[str, Hashable] = dict.fromkeys(("tail", "head"), num_tokens)
        room = None
        if self._by_kernels(way):
            room = way.room(num_tokens)
            is_few = rows.max_width <= STEPS_AT_MOST
            shapes["linear"] = num_tokens, rows.num_rows, conv_qkv.num_segments(rows.max_width), is_few

        def linear(layer, x, past, packed):  # type: ignore[no-untyped-def]
            layout = _unpack_layout(rows, facts, way, packed, room)
            mixed, state = layer.linear_attn(layer.enter(x), _unpack_state(past), layout)
            return layer.leave(x, mixed), _pack_state(state)

        def apply(name: str, i: int, *arrays: Any) -> Any:
            return pieces[name](self.language_model.model.layers[i], *arrays)

        def shared(name: str, i: int, *arrays: Any) -> Any:
            whole, last = ((name, key), deferred) if name == "linear" else (name, 0)
            run = self._runners.of_layer(whole, i, pieces[name], rows, deferred=last, shape=shapes.get(name))
            out = run(*arrays)
            if name == "linear":
                device.start(
                    out[0], num_launches=_OF_A_LAYER
                )  # it need not wait for the next layers to be built
            return out

        def whole(s: int, *arrays: Any) -> Any:
            run = partial(self._run, apply, self._segments[s], taps)
            return self._runners.get((s, key, taps), run, rows, deferred=deferred)(*arrays)

        pieces = {"tail": _tail, "linear": linear, "head": _head}
        if rows.max_width == 1 and not deferred:
            return whole, lambda segment: _OF_A_LAYER * (len(segment.linear) + 1)
        run = shared if repeats else apply
        by_layer = partial(self._by_layer, run, taps)
        return by_layer, lambda segment: _OF_A_LAYER * (1 if repeats else len(segment.linear) + 1)

    def _by_layer(self, apply: Callable[..., Any], taps: tuple[int, ...], s: int, *arrays: Any) -> Any:
        return self._run(apply, self._segments[s], taps, *arrays)

    def _run(self, apply, segment, taps, x, attended, gate, cos, sin, past, layout):  # type: ignore[no-untyped-def]
        """A segment. apply: (name of a piece of a layer, number of the layer, arrays)."""
        out, tapped, future = (), [], []

        def tap(i: int) -> None:
            if i in taps:
                tapped.append(x)

        if segment.tail is not None:
            x = apply("tail", segment.tail, x, attended, gate)
            tap(segment.tail)
        for i, state in zip(segment.linear, past, strict=True):
            x, state = apply("linear", i, x, state, layout)
            future.append(state)
            tap(i)
        if segment.head is not None:
            out = apply("head", segment.head, x, cos, sin)
        return x, out, future, tapped

    def _end(self, x: mx.array) -> mx.array:
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


def _tail(layer: Qwen35DecoderLayer, x: mx.array, attended: mx.array, gate: mx.array | None) -> mx.array:
    return layer.leave(x, layer.self_attn.finish(attended, gate))


def _head(
    layer: Qwen35DecoderLayer, x: mx.array, cos: mx.array, sin: mx.array
) -> tuple[mx.array | None, ...]:
    return layer.self_attn.project(layer.enter(x), cos, sin)  # type: ignore[no-any-return]


def _num_deferred(segment: Segment, cache: ModelCache) -> int:
    """Tokens of the last forward whose inputs its recurrent layers still hold."""
    held = [cache.recurrent(i).current.inputs for i in segment.linear[:1]]
    return 0 if cache.stood is None else max([1, *(x.shape[0] for x in held if x is not None)])


def _layers_of(segment: Segment) -> tuple[int, ...]:
    return (*(() if segment.tail is None else (segment.tail,)), *segment.linear)


# Compiled functions take and give plain lists and tuples of arrays; these translate.


def _pack_state(s: RecurrentState) -> list[mx.array]:
    return [s.state, s.window] if s.inputs is None else [s.state, s.window, s.inputs, *s.held]


def _unpack_state(packed: Sequence[mx.array]) -> RecurrentState:
    state, window, *rest = packed
    return RecurrentState(state, window, rest[0], tuple(rest[1:])) if rest else RecurrentState(state, window)


def _pack_layout(rows: FlatRows, cache: ModelCache, *, indexed: bool) -> dict[str, Any]:
    """indexed: whether anything but kernels looks at rows."""
    packed: dict[str, Any] = {"starts": rows.starts_array}
    if indexed and rows.index is not None:
        packed["index"] = rows.index.arrays
    stood = cache.stood
    if stood is not None:
        packed |= {"kept": stood.kept, "dropped": stood.dropped, "last_starts": stood.rows.starts}
        if indexed and stood.rows.index is not None:
            packed["last_index"] = stood.rows.index.arrays
    return packed


def _unpack_layout(
    rows: FlatRows, facts: bool, rollback: Rollback, packed: dict[str, Any], room: int | None
) -> RoundLayout:
    def layout(starts: str, index: str) -> RowLayout:
        found = RaggedIndex.of(packed[index]) if index in packed else None
        return RowLayout(packed[starts], found, rows.max_width)

    stood = None
    if "kept" in packed:
        stood = Stood(layout("last_starts", "last_index"), packed["kept"], packed["dropped"])
    return RoundLayout(rows, facts, rollback, layout("starts", "index"), stood, room)
