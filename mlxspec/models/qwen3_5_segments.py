"""Runs the layers of Qwen3.5: compiles what lies between two attention cores, with the recurrent states that it takes and gives.

The core of an attention layer depends on the length of every row, so it is not compiled. What lies between two cores depends on widths
only: the rest of one attention layer, the Gated DeltaNet layers behind it, the beginning of the next attention layer. Such a stretch is a
*segment*. It is compiled whole for plain steps and layer by layer for verifies (runners.py). The mathematics is in qwen3_5.py; this file
knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.rollback import STEPS_AT_MOST, Committed, RecurrentState, capacity
from mlxspec.kernels import conv_qkv, gdn_round
from mlxspec.kernels.conv_ops import GdnShape
from mlxspec.kernels.flat import FlatRows, RaggedIndex
from mlxspec.kernels.gdn_ops import Tape
from mlxspec.kernels.gdn_round import RowLayout
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_layers import RoundLayout
from mlxspec.models.runners import Runners
from mlxspec.platform import device

# kernels that Metal launches, for `device.start`: of a layer but for the core of attention, and of that
_OF_A_LAYER, _OF_A_CORE = 14, 4


class LayerPieces(NamedTuple):
    """The pure functions of arrays that layers are made of; the first argument is the layer's module. linear: (layer, x, state, layout) ->
    (x, state). before: (layer, x, cos, sin) -> queries, keys, values, gate. after: (layer, x, attended, gate) -> x."""

    linear: Callable[..., Any]
    before: Callable[..., Any]
    after: Callable[..., Any]


class Segment:
    """A stretch of layers without an attention core in it. Indices into the decoder layers.

    tail: the attention layer whose core has just run, None for the first stretch; linear: Gated DeltaNet layers; head: the attention layer
    whose core comes next, None for the last stretch.
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

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that end in this segment."""
        return (*(() if self.tail is None else (self.tail,)), *self.linear)


class Segments:
    """The segments of one model, and what was compiled of them."""

    def __init__(
        self, config: Qwen35Config, layers: Sequence[Any], pieces: LayerPieces, beside: dict[str, mx.array]
    ) -> None:
        """beside: as `Runners` has it."""
        self._config, self._layers, self._pieces = config, layers, pieces
        self._segments = Segment.cut(config.is_linear)
        self.runners = Runners(layers, beside)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def by_kernels(self, dtype: mx.Dtype) -> bool:
        """Whether Gated DeltaNet layers are kernel launches from the projection to the recurrence, the replay of the last forward among
        them. Their graph then depends on few numbers."""
        c = self._config
        shape = GdnShape(c.num_k_heads, c.num_v_heads, c.k_head_dim, c.v_head_dim)
        return conv_qkv.on_kernel(dtype, shape, c.conv_kernel) and gdn_round.on_kernel(
            dtype, c.k_head_dim, c.v_head_dim
        )

    def begin(
        self, rows: FlatRows, cache: ModelCache, dtype: mx.Dtype, *, certain: bool, taps: Sequence[int]
    ) -> SegmentRun:
        """One forward over the rows of a cache whose transaction has begun. certain, taps: as `Model.forward` has them."""
        return SegmentRun(self, rows, cache, dtype, certain=certain, taps=tuple(sorted(set(taps))))


class SegmentRun:
    """One forward. taps: what was asked for of the layers that have run, layer index -> (N, H)."""

    def __init__(
        self,
        owner: Segments,
        rows: FlatRows,
        cache: ModelCache,
        dtype: mx.Dtype,
        *,
        certain: bool,
        taps: tuple[int, ...],
    ) -> None:
        self._runners, self._layers, self._pieces = owner.runners, owner._layers, owner._pieces
        self._rows, self._cache, self._certain, self._wanted = rows, cache, certain, taps
        self._num_cold = owner.runners.num_cold
        self.taps: dict[int, mx.array] = {}
        self._by_kernels = owner.by_kernels(dtype)
        self._layout = _pack_layout(rows, cache, indexed=not self._by_kernels)
        self._deferred = max((_num_deferred(segment, cache) for segment in owner), default=0)
        # wide ragged prompts are read row by row, so their graph depends on every single width
        self._repeats = rows.is_uniform or not certain or rows.max_width <= STEPS_AT_MOST
        # what of the rows shapes each piece: around attention nothing but the number of tokens does
        num_tokens = rows.num_tokens
        self._shapes: dict[str, Hashable] = dict.fromkeys(("after", "before"), num_tokens)
        self._room = None
        if self._by_kernels:
            self._room = capacity(num_tokens)
            is_few = rows.max_width <= STEPS_AT_MOST
            segments = conv_qkv.num_segments(rows.max_width)
            self._shapes["linear"] = num_tokens, rows.num_rows, segments, is_few

    @property
    def is_warm(self) -> bool:
        """Whether nothing was compiled in this forward."""
        return self._runners.num_cold == self._num_cold

    def __call__(
        self,
        segment: Segment,
        x: mx.array,
        attended: mx.array | None,
        gate: mx.array | None,
        turns: tuple[mx.array, mx.array],
    ) -> tuple[mx.array, tuple[mx.array | None, ...]]:
        """x (N, H) and what the core of the segment's first attention layer gave -> x, and queries, keys, values and gate of its next one;
        nothing behind the last segment."""
        past = [_pack_state(self._cache.recurrent(i).current) for i in segment.linear]
        run, num_launches = self._way(segment)
        x, out, future, tapped = run(x, attended, gate, *turns, past, self._layout)
        device.start(x, num_launches=num_launches)
        for i, state in zip(segment.linear, future, strict=True):
            self._cache.recurrent(i).append(_unpack_state(state))
        self.taps |= dict(zip([i for i in self._wanted if i in segment.layers], tapped, strict=True))
        return x, out

    def started(self, attended: mx.array) -> mx.array:
        """What the core of an attention layer gave; the device may begin on it."""
        device.start(attended, num_launches=_OF_A_CORE)
        return attended

    def _way(self, segment: Segment) -> tuple[Callable[..., Any], int]:
        """How a segment runs, and about how many kernels it launches that were not reported to the device while it was built."""
        num_layers = len(segment.linear) + 1
        if self._rows.max_width == 1 and not self._deferred:  # a plain step has one shape
            whole = partial(_run, self._alone, segment, self._wanted)
            key = segment.layers, segment.head, self._certain, self._wanted
            return self._runners.get(key, whole, self._rows, deferred=0), _OF_A_LAYER * num_layers
        if self._repeats:
            return partial(_run, self._shared, segment, self._wanted), _OF_A_LAYER
        return partial(_run, self._alone, segment, self._wanted), _OF_A_LAYER * num_layers

    def _piece(self, name: str) -> Callable[..., Any]:
        return self._linear if name == "linear" else getattr(self._pieces, name)  # type: ignore[no-any-return]

    def _linear(self, layer: Any, x: mx.array, past: Sequence[mx.array], packed: dict[str, Any]) -> Any:
        layout = _unpack_layout(self._rows, self._certain, packed, self._room)
        x, state = self._pieces.linear(layer, x, _unpack_state(past), layout)
        return x, _pack_state(state)

    def _alone(self, name: str, i: int, *arrays: Any) -> Any:
        """A piece of layer i as it is."""
        return self._piece(name)(self._layers[i], *arrays)

    def _shared(self, name: str, i: int, *arrays: Any) -> Any:
        """A piece of layer i, compiled once for all layers of its form."""
        is_linear = name == "linear"
        run = self._runners.of_layer(
            (name, self._certain) if is_linear else name,
            i,
            self._piece(name),
            self._rows,
            deferred=self._deferred if is_linear else 0,
            shape=self._shapes.get(name),
        )
        out = run(*arrays)
        if is_linear:
            device.start(out[0], num_launches=_OF_A_LAYER)  # it need not wait for the next layers to be built
        return out


def _run(apply, segment, taps, x, attended, gate, cos, sin, past, layout):  # type: ignore[no-untyped-def]
    """A segment, as a function of arrays. apply: (name of a piece, number of the layer, arrays)."""
    out, tapped, future = (), [], []

    def tap(i: int) -> None:
        if i in taps:
            tapped.append(x)

    if segment.tail is not None:
        x = apply("after", segment.tail, x, attended, gate)
        tap(segment.tail)
    for i, state in zip(segment.linear, past, strict=True):
        x, state = apply("linear", i, x, state, layout)
        future.append(state)
        tap(i)
    if segment.head is not None:
        out = apply("before", segment.head, x, cos, sin)
    return x, out, future, tapped


def _num_deferred(segment: Segment, cache: ModelCache) -> int:
    """Tokens of the last forward whose inputs its recurrent layers still hold."""
    held = [cache.recurrent(i).current.inputs for i in segment.linear[:1]]
    return 0 if cache.deferred is None else max([1, *(x.shape[0] for x in held if x is not None)])


# Compiled functions take and give plain lists and tuples of arrays; these translate.


def _pack_state(s: RecurrentState) -> list[mx.array]:
    return [s.state, s.window] if s.inputs is None else [s.state, s.window, s.inputs, *(s.tape or ())]


def _unpack_state(packed: Sequence[mx.array]) -> RecurrentState:
    state, window, *rest = packed
    return RecurrentState(state, window, rest[0], Tape(*rest[1:])) if rest else RecurrentState(state, window)


def _pack_layout(rows: FlatRows, cache: ModelCache, *, indexed: bool) -> dict[str, Any]:
    """indexed: whether anything but kernels looks at rows."""
    packed: dict[str, Any] = {"starts": rows.starts_array}
    if indexed and rows.index is not None:
        packed["index"] = tuple(rows.index)
    committed = cache.deferred
    if committed is not None:
        packed |= {"num_committed": committed.num_committed, "last_starts": committed.rows.starts}
        if indexed and committed.rows.index is not None:
            packed["last_index"] = tuple(committed.rows.index)
    return packed


def _unpack_layout(rows: FlatRows, certain: bool, packed: dict[str, Any], room: int | None) -> RoundLayout:
    def layout(starts: str, index: str) -> RowLayout:
        found = RaggedIndex(*packed[index]) if index in packed else None
        return RowLayout(packed[starts], found, rows.max_width)

    committed = None
    if "num_committed" in packed:
        committed = Committed(layout("last_starts", "last_index"), packed["num_committed"])
    return RoundLayout(rows, certain, layout("starts", "index"), committed, room)
