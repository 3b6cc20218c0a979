"""Digests of the model, settings and device that computed a state of the prefix cache. States with equal digests are interchangeable.

The weights are digested as loaded: quantized, with adapters folded in. So a fine-tune with the same shapes has another digest, and so has
the same folder loaded in another dtype, or with another config.json. Device, MLX's version and `exact` count as well: their last bits
differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from importlib.metadata import version
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.cache.model_cache import ModelCache
from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Drafter
from mlxspec.models.base import Model
from mlxspec.platform import device, host


@runtime_checkable
class DescribesItself(Protocol):
    """A layer of a cache that describes the form of its states itself, so that states of another form get another digest."""

    @property
    def described(self) -> list[Any]: ...


FORMAT = "mlxspec prefix store 3"
_WORDS = 1 << 22  # of 32 bits that are summed at once
_AT_ONCE = 16  # of those sums that are evaluated together


def of_target(
    model: Model, config: EngineConfig, layers: Sequence[int] = (), tower: nn.Module | None = None
) -> str:
    """Return the digest of a target, 64 hexadecimal digits. Reads all weights once. layers: ids of the layers whose residual streams are
    kept in addition to the final hidden state. tower: the vision tower, None without one; states after image tokens depend on its
    weights."""
    report = device.report()
    return _digest(
        FORMAT,
        version("mlx"),
        report.backend,
        report.device,
        report.blas,
        [config.exact, config.prefill_chunk] if config.exact else [],
        list(layers),
        [model.vocab_size, model.hidden_size, str(model.dtype)],
        _layout(model.make_cache(0, kv_bits=config.kv_bits)),
        fingerprint(model),
        None if tower is None else fingerprint(tower),
    )


def of_drafter(target: str, drafter: Drafter) -> str | None:
    """Return the digest of a drafter, 64 hexadecimal digits; None where its states are not written to files. target: the digest of its
    target."""
    modules = drafter.modules
    if modules is None:
        return None
    bits = getattr(drafter, "kv_bits", EngineConfig.kv_bits)
    kept = [] if bits == EngineConfig.kv_bits else [bits]
    return _digest(target, drafter.name, type(drafter).__qualname__, [fingerprint(m) for m in modules], *kept)


def of_states(target: str, drafters: Sequence[str]) -> str:
    """Return the digest of the target and the drafters that compute a state together, 64 hexadecimal digits. target: the target's
    digest. drafters: digests of the drafters without whose parts a state is useless."""
    return _digest(target, sorted(drafters))


def fingerprint(module: Any) -> str:
    """Return the digest of a module's parameters and config. It covers names, dtypes, shapes and, by sums that depend on each bit's
    place, all values; the config matters because rotary positions and windows change states, not weights."""
    named = sorted(tree_flatten(module.parameters()))
    waiting: list[mx.array] = []
    found = hashlib.sha256("\n".join(_settings(module)).encode())
    for name, value in named:
        found.update(f"{name} {value.dtype} {value.shape}\n".encode())
        for total in _sums(value):
            waiting.append(total)
            if len(waiting) == _AT_ONCE:
                _take(found, waiting)
    _take(found, waiting)
    return found.hexdigest()


def _settings(module: Any) -> list[str]:
    """Return the frozen dataclasses among a module's own attributes (its configs), as text."""
    kept = (v for _, v in sorted(vars(module).items()) if is_dataclass(v) and not isinstance(v, type))
    return [repr(v) for v in kept if v.__dataclass_params__.frozen]  # type: ignore[attr-defined]


def _take(found: Any, waiting: list[mx.array]) -> None:
    if waiting:
        mx.eval(waiting)
        found.update(host.raw_bytes(mx.concatenate(waiting)))
        waiting.clear()


def _sums(value: mx.array) -> Iterator[mx.array]:
    """Yield two checksums, (2,) uint32, for each stretch of an array's bytes."""
    data = value.reshape(-1).view(mx.uint8)
    for begin in range(0, data.size, 4 * _WORDS):
        part = data[begin : begin + 4 * _WORDS]
        if part.size % 4:
            part = mx.concatenate([part, mx.zeros((-part.size % 4,), mx.uint8)])
        words = part.view(mx.uint32)
        places = 2 * mx.arange(words.size, dtype=mx.uint32) + 1
        mixed = words ^ (words >> 15)  # so that the highest bit counts by its place too
        yield mx.stack([mx.sum(words), mx.sum(mixed * places)])


def _layout(cache: ModelCache) -> list[Any]:
    described: list[Any] = []
    for layer in cache.layers:
        if isinstance(layer, DescribesItself):
            described.append(layer.described)
        elif layer.is_recurrent:
            described.append(
                [type(layer).__name__, [[list(x.shape[1:]), str(x.dtype)] for x in layer.arrays]]
            )
        else:
            window, bits = (getattr(layer, name, None) for name in ("window", "bits"))
            kept = [] if bits is None else [bits]
            described.append([type(layer).__name__, list(layer.shape), str(layer.dtype), window, *kept])  # type: ignore[union-attr]
    return described


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
