"""mlx-lm's own modules over the flat token axis: one forward reads the weights once for all rows, however wide each of them is.

A module is called with tokens (N, 1): to its code every token is a row of a batch of its own, at a position of its own. So norms,
projections, experts and rotary positions are mlx-lm's, for every architecture. Which tokens belong to one row matters at two places only,
and there we stand in:

    caches      `FlatLayer` writes keys and values into each row's buffer of ours, and hands the module `Held` in their place
    attention   MLX's function, given `Held`, attends row by row

Nothing is known of an architecture by its name. A module is run once lazily over caches that record what they are asked (`find_seams`):
code that looks into keys, makes masks of its own or keeps other states raises there, and says why such a model runs row by row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlxspec.cache.attention import AttentionLayerCache, View
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.places import Places
from mlxspec.cache.quantized import PLAIN, attention_cache
from mlxspec.cache.windowed import WindowedLayerCache
from mlxspec.kernels.attention import Heads
from mlxspec.models.row_attention import attend_rows
from mlxspec.platform import device

_OF_A_LAYER = 20  # kernels that Metal launches, for `device.start`
_TRIED = 3  # tokens of the lazy run


class SeamError(AttributeError):
    """The module's code wants what only a forward of one row has. An AttributeError, since code asks by `hasattr` what a cache can do."""


class KeysForm(NamedTuple):
    """Keys and values of one layer: head counts, head sizes, dtype, and how many keys a query sees, None for all."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None


class Seen:
    """Stands for a mask: what a token sees of its row is decided where rows are known. window: as the module asked."""

    def __init__(self, window: int | None) -> None:
        self.window = window

    def __getattr__(self, name: str) -> Any:
        raise SeamError(f"it computes with masks ({name})")


class Held:
    """Stands for the keys, and for the values, that a layer has: by row, what the row's tokens may see. attend: queries (N, Hq, 1, D),
    scale, mask and sinks -> (N, Hq, 1, Dv). dtype: of the keys."""

    def __init__(
        self, attend: Callable[[mx.array, float, Any, mx.array | None], mx.array], dtype: mx.Dtype
    ) -> None:
        self.attend, self.dtype = attend, dtype

    def astype(self, dtype: mx.Dtype) -> Held:
        """Queries that are wider than keys widen these; no copy of the keys is made."""
        return Held(self.attend, dtype)

    def __getattr__(self, name: str) -> Any:
        raise SeamError(f"it computes with keys or values itself ({name})")


class Sight(NamedTuple):
    """The tokens that tokens of a forward see in addition to those before them. windowed, full: by row, ranges of its tokens that all see
    each other, in layers with a window and in those without; empty for none. both_ways: as `attend_rows` has it."""

    windowed: Sequence[tuple[range, ...]] = ()
    full: Sequence[tuple[range, ...]] = ()
    both_ways: bool = False


BEFORE = Sight()


class StandInCache:
    """A placeholder for a layer's cache in a call of mlx-lm's modules over the flat axis. offset (N,) int32: each token's position."""

    offset: mx.array
    held: Held | None = None  # what was written in this forward

    def __getattr__(self, name: str) -> Any:
        raise SeamError(f"it asks its caches for {name}")

    def keys_and_values(self) -> tuple[Held, Held]:
        """Return what layers see that share the keys and values of an earlier one."""
        if self.held is None:
            raise SeamError("it asks its caches for keys that no layer has written")
        return self.held, self.held

    def make_mask(self, _: int, *, window_size: int | None = None, **__: Any) -> Seen:
        return Seen(window_size)


class FlatLayer(StandInCache):
    """Writes into a layer's cache of ours."""

    def __init__(
        self,
        cache: AttentionLayerCache | None,
        form: KeysForm | None,
        places: Places,
        offset: mx.array,
        sight: Sight,
    ) -> None:
        self._cache, self._form, self._places, self._sight = cache, form, places, sight
        self.offset = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Held, Held]:
        """keys, values (N, Hkv, 1, ·) are written behind each row's committed tokens."""
        if self._cache is None or self._form is None:
            raise RuntimeError("a layer without keys was given some")
        keys, values = (x.reshape(1, x.shape[0], x.shape[1], x.shape[3]) for x in (keys, values))
        views = self._cache.append(keys, values, self._places)
        self.held = Held(partial(self._attend, views), keys.dtype)
        return self.keys_and_values()

    def _attend(
        self, views: Sequence[View], queries: mx.array, scale: float, _: Any, sinks: mx.array | None
    ) -> mx.array:
        """queries (N, Hq, 1, D) -> (N, Hq, 1, Dv)"""
        window = None if self._form is None else self._form.window
        out = attended(queries, views, self._places, scale, window, sinks, self._sight)
        device.start(out, num_launches=_OF_A_LAYER)
        return out


def attended(
    queries: mx.array,
    views: Sequence[View],
    places: Places,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    sight: Sight,
) -> mx.array:
    """queries (N, Hq, 1, D) -> (N, Hq, 1, Dv)"""
    out = attend_rows(
        queries[:, :, 0],
        views,
        places.rows,
        scale,
        window,
        sight.full if window is None else sight.windowed,
        both_ways=sight.both_ways,
        places=None if window else places,  # lengths are exact where there is a window
        sinks=sinks,
    )
    return out.reshape(*queries.shape[:3], -1)


class _Probe(StandInCache):
    """Records what it is asked. most: of tokens that it keeps, None for all."""

    def __init__(self, most: int | None) -> None:
        self.offset = mx.arange(_TRIED)
        self._most = most
        self._keys: tuple[mx.array, mx.array] | None = None
        self._asked: set[tuple[int, int | None]] = set()  # heads of queries, and windows

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Held, Held]:
        if self._keys is not None:
            raise SeamError("it appends to one cache twice in a forward")
        self._keys = keys, values

        def attend(queries: mx.array, _: float, mask: Any, __: mx.array | None) -> mx.array:
            if mask is not None and not isinstance(mask, Seen):
                raise SeamError("it makes masks of its own")
            if queries.ndim != 4 or queries.shape[0] != _TRIED or queries.shape[2] != 1:
                raise SeamError("its queries are laid out in a way of their own")
            self._asked.add((queries.shape[1], None if mask is None else mask.window))
            return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)

        self.held = Held(attend, keys.dtype)
        return self.keys_and_values()

    def form(self) -> KeysForm | None:
        """The form of the layer's keys and values, None where it has none of its own. Raises SeamError where its layers do not agree."""
        if self._keys is None:
            return None
        keys, values = self._keys
        if len(self._asked) != 1 or keys.ndim != 4 or values.dtype != keys.dtype:
            raise SeamError("its layers share keys that they see in different ways")
        ((num_heads, window),) = self._asked
        window = min((n for n in (self._most, window) if n is not None), default=None)
        return KeysForm(num_heads, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, window)


@dataclass(frozen=True, kw_only=True)
class Seams:
    """The caches of a module to a forward over the flat axis: one form for each of mlx-lm's caches, None for one that it does not
    write to."""

    forms: Sequence[KeysForm | None]

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """Raises CacheError where heads cannot be kept in so many bits."""
        layers: list[AttentionLayerCache] = []
        for form in self.forms:
            if form is None:
                continue
            sizes = form.num_kv_heads, form.key_dim
            if form.window is None:
                layers.append(attention_cache(*sizes, form.dtype, num_rows, kv_bits, form.value_dim))
            else:
                layers.append(WindowedLayerCache(*sizes, form.window, form.dtype, num_rows, form.value_dim))
        return ModelCache(layers, num_rows)

    def layers(self, cache: ModelCache, places: Places, sight: Sight = BEFORE) -> list[FlatLayer]:
        """The caches to call the module with, in the forward that `places` was begun with."""
        offset = places.positions
        if places.shifts is not None:
            offset = places.turns.reshape(-1).astype(mx.int32)
        own: Iterator[Any] = iter(cache.layers)
        return [
            FlatLayer(None if form is None else next(own), form, places, offset, sight) for form in self.forms
        ]

    @property
    def attention_heads(self) -> Sequence[Heads]:
        """Heads of layers that attend to a whole context."""
        found = (
            Heads(f.num_heads, f.num_kv_heads, f.key_dim, f.dtype)
            for f in self.forms
            if f and f.window is None
        )
        return tuple(dict.fromkeys(found))


def blank_layers(num: int) -> list[Any]:
    """Caches that a module can be called with up to its first layer."""
    return [_Probe(None) for _ in range(num)]


def find_seams(caches: Sequence[Any], run: Callable[[mx.array, list[Any]], Any]) -> Seams:
    """caches: of one row, as mlx-lm makes them. run: the module over tokens and caches, lazily. Raises SeamError, whose text says in half a
    sentence why rows cannot share a forward."""
    probes = [_Probe(_most(cache)) for cache in caches]
    try:
        with attending_by_row():
            run(mx.zeros((_TRIED, 1), mx.int32), probes)
    except SeamError:
        raise
    except Exception as error:  # whatever the module's code does with what is no array
        raise SeamError("it computes with keys, values or positions of one row") from error
    forms = [probe.form() for probe in probes]
    if not any(forms):
        raise SeamError("it has no keys and values")
    return Seams(forms=forms)


def _most(cache: Any) -> int | None:
    from mlx_lm.models.cache import KVCache, RotatingKVCache  # slow to import

    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and not cache.keep:
        return int(cache.max_size)
    raise SeamError(f"its {type(cache).__name__} keeps other things than keys and values")


# --- MLX's attention, for the time in which modules of ours are called

_lock = threading.Lock()


@dataclass
class _Entered:
    """The number of forwards that are being built, and MLX's function."""

    num: int = 0
    by_mlx: Any = field(default=None)


_entered = _Entered()


@contextmanager
def attending_by_row() -> Iterator[None]:
    """Let MLX's attention, while it is open, take `Held` for keys. What it does with arrays stays as it is, for every thread."""
    with _lock:
        _entered.num += 1
        if _entered.num == 1:
            _entered.by_mlx = mx.fast.scaled_dot_product_attention
            mx.fast.scaled_dot_product_attention = _attend
    try:
        yield
    finally:
        with _lock:
            _entered.num -= 1
            if not _entered.num:
                mx.fast.scaled_dot_product_attention = _entered.by_mlx


def _attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    *,
    scale: float,
    mask: Any = None,
    sinks: Any = None,
    **more: Any,
) -> mx.array:
    if isinstance(keys, Held):
        return keys.attend(queries, scale, mask, sinks)
    out: mx.array = _entered.by_mlx(queries, keys, values, scale=scale, mask=mask, sinks=sinks, **more)
    return out
