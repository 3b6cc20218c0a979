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
    """An error for code of a module that works only in a forward of one row. It is an AttributeError, as such code uses `hasattr` to find
    out what a cache can do."""


class KeysForm(NamedTuple):
    """The form of one layer's keys and values: numbers of heads, sizes of heads, dtype, and how many keys a query sees (None for all)."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None


class Seen:
    """A placeholder for a mask. The keys that a token sees are determined later, row by row. window: the window that the module requested,
    None for all keys."""

    def __init__(self, window: int | None) -> None:
        self.window = window

    def __getattr__(self, name: str) -> Any:
        raise SeamError(f"it computes with masks ({name})")


class Held:
    """A placeholder for the keys or the values of a layer in all rows. attend: returns the attention's output (N, Hq, 1, Dv) for queries
    (N, Hq, 1, D), scale, mask and sinks. dtype: of the keys."""

    def __init__(
        self, attend: Callable[[mx.array, float, Any, mx.array | None], mx.array], dtype: mx.Dtype
    ) -> None:
        self.attend, self.dtype = attend, dtype

    def astype(self, dtype: mx.Dtype) -> Held:
        """Return the same keys or values under another dtype, without a copy: attention converts them to the dtype of the queries."""
        return Held(self.attend, dtype)

    def __getattr__(self, name: str) -> Any:
        raise SeamError(f"it computes with keys or values itself ({name})")


class Sight(NamedTuple):
    """The tokens that a forward's tokens see in addition to those before them. windowed, full: for each row ranges of its tokens that all
    see each other, in layers with a window and in layers without one; empty for none. both_ways: as in `attend_rows`."""

    windowed: Sequence[tuple[range, ...]] = ()
    full: Sequence[tuple[range, ...]] = ()
    both_ways: bool = False


BEFORE = Sight()


class StandInCache:
    """A placeholder for a layer's cache in a call of mlx-lm's modules over the flat token axis. offset (N,) int32: each token's
    position."""

    offset: mx.array
    held: Held | None = None  # what was written in this forward

    def __getattr__(self, name: str) -> Any:
        raise SeamError(f"it asks its caches for {name}")

    def keys_and_values(self) -> tuple[Held, Held]:
        """Return placeholders for the keys and values written in this forward, also for later layers that share them."""
        if self.held is None:
            raise SeamError("it asks its caches for keys that no layer has written")
        return self.held, self.held

    def make_mask(self, _: int, *, window_size: int | None = None, **__: Any) -> Seen:
        return Seen(window_size)


class FlatLayer(StandInCache):
    """A placeholder for a layer's cache that writes keys and values into mlxspec's cache of the layer."""

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
        """Write keys and values (N, Hkv, 1, ·) after each row's committed tokens, and return the placeholders that attention takes in their
        place."""
        if self._cache is None or self._form is None:
            raise RuntimeError("a layer without keys was given some")
        keys, values = (x.reshape(1, x.shape[0], x.shape[1], x.shape[3]) for x in (keys, values))
        views = self._cache.append(keys, values, self._places)
        self.held = Held(partial(self._attend, views), keys.dtype)
        return self.keys_and_values()

    def _attend(
        self, views: Sequence[View], queries: mx.array, scale: float, _: Any, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention's output (N, Hq, 1, Dv) for queries (N, Hq, 1, D), row by row."""
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
    """Attend row by row with queries (N, Hq, 1, D) to the rows' views, and return the output (N, Hq, 1, Dv). window: how many keys a query
    sees, None for all. sinks: as in `attend_rows`."""
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
    """A placeholder for a layer's cache that records how a module uses it. most: the most tokens that mlx-lm's cache keeps, None for
    all."""

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
        """Return the form of the recorded keys and values; None where the layer has none of its own. Raises SeamError where layers that
        share them use different windows or numbers of heads."""
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
    """The caches of a module whose rows share a forward. forms: one for each of mlx-lm's caches, None for a cache that is never written."""

    forms: Sequence[KeysForm | None]

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """Return an empty cache of `num_rows` rows. kv_bits: as in models.base.Model. Raises CacheError where heads cannot be kept in this
        number of bits."""
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
        """Return the placeholders with which the module is called in place of mlx-lm's caches. places: as `cache.begin` returned them for
        this forward."""
        offset = places.positions
        if places.shifts is not None:
            offset = places.turns.reshape(-1).astype(mx.int32)
        own: Iterator[Any] = iter(cache.layers)
        return [
            FlatLayer(None if form is None else next(own), form, places, offset, sight) for form in self.forms
        ]

    @property
    def attention_heads(self) -> Sequence[Heads]:
        """Return the shapes of the attention heads of layers that attend to the whole context."""
        found = (
            Heads(f.num_heads, f.num_kv_heads, f.key_dim, f.dtype)
            for f in self.forms
            if f and f.window is None
        )
        return tuple(dict.fromkeys(found))


def blank_layers(num: int) -> list[Any]:
    """Return `num` placeholders for caches, with which a module can be called as far as its first layer."""
    return [_Probe(None) for _ in range(num)]


def find_seams(caches: Sequence[Any], run: Callable[[mx.array, list[Any]], Any]) -> Seams:
    """Run a module lazily with recording placeholders, and return the forms of its caches. caches: mlx-lm's caches of one row. run: runs
    the module over tokens and caches. Raises SeamError, whose text is the reason, in half a sentence, why rows cannot share a forward."""
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
    """The number of `attending_by_row` blocks that are open, and MLX's own attention function."""

    num: int = 0
    by_mlx: Any = field(default=None)


_entered = _Entered()


@contextmanager
def attending_by_row() -> Iterator[None]:
    """Let MLX's attention function accept `Held` as keys in the `with` block. With arrays it does the same as before, in every thread."""
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
