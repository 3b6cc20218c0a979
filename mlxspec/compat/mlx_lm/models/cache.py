"""mlx-lm's prompt caches on our prefix store.

A prompt cache is the list of tokens that a conversation has come to. What was computed for them is in the engine's prefix store, by these
tokens; what the store has let go of is read again. So a cache takes no memory of its own, can be cut back to any length, also with
recurrent layers, and can be copied at no cost. A saved file holds the tokens and the states that the store had for them, so that a later
process need not read them again.

Knows tokens, the store and one kind of file; knows no generation.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxspec.cache.model_cache import Snapshot
from mlxspec.engine.prefix_store import TARGET
from mlxspec.errors import ConfigError, ModelError, StorageError
from mlxspec.loading.safetensors import check_header

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

# what a layer keeps for each token, in the order of the cache's parts
_PLAIN = ("keys", "values")
_PACKED = tuple(f"{of}.{part}" for part in ("codes", "scales", "biases") for of in _PLAIN)
_FORMAT = "mlxspec prompt cache 1"


class PromptCache:
    """In the place of mlx-lm's caches of layers, one for all of them. Attributes: tokens (of prompts and answers, in order)."""

    def __init__(self, tokens: Sequence[int] = (), saved: SavedStates | None = None) -> None:
        self.tokens = list(tokens)
        self._saved = saved
        self._writer: object | None = None  # the run that extends it
        self._used_by: tuple[weakref.ref[Engine], str] | None = None

    @property
    def offset(self) -> int:
        """How many tokens."""
        return len(self.tokens)

    def size(self) -> int:
        """How many tokens."""
        return len(self.tokens)

    def empty(self) -> bool:
        """Whether there are no tokens yet."""
        return not self.tokens

    @property
    def nbytes(self) -> int:
        """Bytes beside the engine's own: those of a file that no model has taken over yet."""
        return 0 if self._saved is None else self._saved.nbytes

    def is_trimmable(self) -> bool:
        """Always: what was computed for a shorter text is in the store, or is read again."""
        return True

    def trim(self, num_tokens: int) -> int:
        """Forget the last `num_tokens` tokens; returns how many there were to forget."""
        num = min(max(num_tokens, 0), len(self.tokens))
        if num:
            self._writer = None
        del self.tokens[len(self.tokens) - num :]
        return num

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptCache:
        twin = PromptCache(self.tokens, self._saved)
        twin._used_by = self._used_by
        return twin

    def prepare(self, engine: Engine, fingerprint: str) -> None:
        """Called before the first token behind these is computed. fingerprint: of the engine's model. Raises ConfigError for a file of
        another model."""
        if self._saved is not None:
            self._saved.hand_over(engine, fingerprint)
            self._saved = None
        self._used_by = weakref.ref(engine), fingerprint

    def lend(self, writer: object) -> None:
        """A run may extend this cache from now on, until it is cut or lent to another run."""
        self._writer = writer

    def extend(self, writer: object, tokens: Sequence[int]) -> None:
        """Append what a run has read or given. Nothing is appended where the cache is lent to it no more: its text is another."""
        if self._writer is writer:
            self.tokens += tokens

    def states(self) -> tuple[str, dict[str, mx.array], dict[str, Any]]:
        """Fingerprint, arrays and their description, for a file: what the store has for the longest beginning of the tokens."""
        if self._saved is not None:
            return self._saved.fingerprint, dict(self._saved.arrays), self._saved.layout
        engine, fingerprint = (None, "") if self._used_by is None else (self._used_by[0](), self._used_by[1])
        hit = None if engine is None else engine.prefix.store.find(self.tokens)
        if hit is None:
            return "", {}, {}
        arrays, parts = {"hidden": hit.hidden}, {}
        for index, (name, snapshot) in enumerate(hit.parts.items()):
            if snapshot.length != hit.length:
                continue  # a drafter's that begins anew
            layers = [
                [mx.concatenate(x, axis=2) for x in zip(*kv, strict=True)]
                for kv in zip(*snapshot.segments, strict=True)
            ]
            for i, kept in enumerate(layers):
                arrays |= {f"{index}.tokens.{i}.{n}": x for n, x in zip(_names(len(kept)), kept, strict=True)}
            for i, point in enumerate(snapshot.point):
                arrays |= {f"{index}.point.{i}.{j}": x for j, x in enumerate(point)}
            parts[name] = {"index": index, "layers": len(layers), "points": [len(p) for p in snapshot.point]}
        return fingerprint, arrays, {"length": hit.length, "parts": parts}


class SavedStates:
    """States out of a file, until a model takes them over. Attributes: fingerprint, arrays, layout."""

    def __init__(
        self, fingerprint: str, arrays: dict[str, mx.array], layout: dict[str, Any], tokens: Sequence[int]
    ) -> None:
        """Raises ConfigError where the layout does not describe the arrays."""
        self.fingerprint, self.arrays, self.layout = fingerprint, arrays, layout
        self._tokens = list(tokens)
        try:
            self._parts = self._read() if layout else {}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError("The prompt cache's file does not hold what it says.") from error

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays.values())

    def _read(self) -> dict[str, Snapshot]:
        length = self.layout["length"]
        if type(length) is not int or not 0 < length <= len(self._tokens):
            raise ValueError("a length beyond the tokens")
        found = {}
        for name, part in self.layout["parts"].items():
            index = part["index"]
            names = [f"{index}.tokens.{i}" for i in range(part["layers"])]
            segment = [self._kept(n) for n in names]
            point = [
                tuple(self.arrays[f"{index}.point.{i}.{j}"] for j in range(num))
                for i, num in enumerate(part["points"])
            ]
            if any(x.ndim != 4 or x.shape[2] != length for kv in segment for x in kv):
                raise ValueError("keys and values of another number of tokens")
            found[name] = Snapshot(length, [segment], point)
        if found[TARGET].length != length or self.arrays["hidden"].ndim != 2:
            raise ValueError("no state of the target")
        return found

    def _kept(self, name: str) -> tuple[mx.array, ...]:
        """Keys and values of a layer, or what stands for them in few bits."""
        num = len(_PACKED) if f"{name}.{_PACKED[0]}" in self.arrays else len(_PLAIN)
        return tuple(self.arrays[f"{name}.{n}"] for n in _names(num))

    def hand_over(self, engine: Engine, fingerprint: str) -> None:
        """Put the states into the engine's prefix store. Raises ConfigError where another model made them."""
        if not self.layout:
            return
        if self.fingerprint != fingerprint:
            raise ConfigError(
                "This prompt cache was saved with another model, or one loaded otherwise; read the prompt again with a new cache."
            )
        known = {TARGET, *engine.chain.drafters}
        parts = {name: snapshot for name, snapshot in self._parts.items() if name in known}
        empty = (
            engine.model.make_cache(1, kv_bits=engine.config.kv_bits).snapshot(0).arrays
        )  # in the order of layers, with no token
        given = parts[TARGET].arrays
        if len(empty) != len(given) or not all(map(_fits, empty, given)):
            raise ConfigError("The prompt cache's file does not fit this model.")
        engine.prefix.store.put(self._tokens[: self.layout["length"]], parts, self.arrays["hidden"])


def _names(num: int) -> tuple[str, ...]:
    """Of the arrays that a layer keeps for each token."""
    return _PLAIN if num == len(_PLAIN) else _PACKED


def _fits(empty: mx.array, given: mx.array) -> bool:
    """Whether an array may stand where a text without tokens has `empty`: of the same dtype and shape but for axes of tokens."""
    same = all(e in (0, g) for e, g in zip(empty.shape, given.shape, strict=False))
    return bool(empty.dtype == given.dtype and empty.ndim == given.ndim and same)


def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[PromptCache]:
    """An empty cache for `prompt_cache=`. Raises ConfigError for max_kv_size: no cache here forgets the middle of a text."""
    if max_kv_size is not None:
        raise ConfigError("max_kv_size: mlxspec does not do a cache that forgets the middle of a text.")
    return checked(model.make_cache())


def can_trim_prompt_cache(cache: list[PromptCache]) -> bool:
    """Whether it can be cut back; every one can."""
    return all(c.is_trimmable() for c in checked(cache))


def trim_prompt_cache(cache: list[PromptCache], num_tokens: int) -> int:
    """Cut the last `num_tokens` tokens off, in place; returns how many there were to cut."""
    trimmed = [c.trim(num_tokens) for c in checked(cache)]
    return trimmed[0] if trimmed else 0


def save_prompt_cache(
    file_name: str | os.PathLike[str], cache: list[PromptCache], metadata: dict[str, str] | None = None
) -> None:
    """Write the tokens, and what was computed for them, to a .safetensors file, which is there whole or not at all.

    metadata: strings to keep beside. Raises ConfigError, StorageError.
    """
    given = metadata or {}
    if any(not isinstance(x, str) for item in given.items() for x in item):
        raise ConfigError("The metadata of a prompt cache maps strings to strings.")
    first = checked(cache)[0]
    fingerprint, arrays, layout = first.states()
    if first.tokens:
        arrays["tokens"] = mx.array(first.tokens, mx.int32)
    told = {"format": _FORMAT, "fingerprint": fingerprint, "layout": json.dumps(layout)}
    told["metadata"] = json.dumps(given)
    path = _path(file_name)
    draft = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem[:64]}.", suffix=".safetensors", dir=path.parent)
        os.close(handle)
        draft = Path(name)
        mx.save_safetensors(name, arrays or {"tokens": mx.zeros((0,), mx.int32)}, metadata=told)
        draft.replace(path)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or "the disk is full or cannot be written to"
        raise StorageError(f"{path} could not be written: {why}.") from error
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


def load_prompt_cache(file_name: str | os.PathLike[str], return_metadata: bool = False) -> Any:
    """What `save_prompt_cache` wrote: the cache, and with return_metadata the strings kept beside. Raises ConfigError, ModelError."""
    path = _path(file_name)
    if not path.is_file():
        raise ConfigError(f"There is no prompt cache {path}.")
    check_header(path)
    try:
        arrays, told = mx.load(str(path), return_metadata=True)
        if told.get("format") != _FORMAT:
            raise ConfigError(
                f"{path} is no prompt cache that mlxspec wrote; those of mlx-lm cannot be read."
            )
        layout, metadata = json.loads(told["layout"]), json.loads(told["metadata"])
        tokens = arrays.pop("tokens").tolist()
    except (RuntimeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as a prompt cache.") from error
    if not isinstance(layout, dict) or not all(type(t) is int for t in tokens):
        raise ModelError(f"{path} cannot be read as a prompt cache.")
    cache = [PromptCache(tokens, SavedStates(told["fingerprint"], arrays, layout, tokens))]
    return (cache, metadata) if return_metadata else cache


def checked(cache: Any) -> list[PromptCache]:
    """Raises ConfigError for what `make_prompt_cache` did not make."""
    if not isinstance(cache, list) or not cache or not all(isinstance(c, PromptCache) for c in cache):
        raise ConfigError("A prompt cache comes from mlxspec.compat.mlx_lm.models.cache.make_prompt_cache.")
    return cache


def _path(file_name: str | os.PathLike[str]) -> Path:
    """As mlx-lm: the suffix may be left out."""
    path = Path(file_name).expanduser()
    return path if path.suffix == ".safetensors" else path.with_name(f"{path.name}.safetensors")
