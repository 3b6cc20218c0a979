"""Estimates the memory that a model needs, and compares it with what the machine gives. Knows bytes; knows no files and no terminal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxspec.config import EngineConfig, SpecConfig
from mlxspec.errors import ModelError
from mlxspec.models.registry import architecture
from mlxspec.models.runnable import Runnable
from mlxspec.models.sizes import bytes_of
from mlxspec.models.vision.base import Vision
from mlxspec.models.vision.blueprint import blueprint
from mlxspec.platform import device
from mlxspec.platform.memory import floats_fit, machine_memory

DEFAULT_CONTEXT = 8192
_CHUNK_ON_GPU, _CHUNK_ON_CPU = 2048, 512  # tokens


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """An upper estimate of the memory of a running model, in bytes. weights, drafter_weights: of the model and its drafters. state,
    drafter_state: keys, values and recurrent states of `rows` rows of `context` tokens. machine: the memory that this machine gives
    to MLX. vision: the vision tower, where `weights` does not include it; reading: what the tower takes while it reads an image of
    1024 x 1024 pixels. a_token: bytes that one token of one row adds to `state`. Activations of the text model are not counted: they
    are small."""

    context: int
    rows: int
    weights: int
    drafter_weights: int
    state: int
    drafter_state: int
    machine: int
    vision: int = 0
    reading: int = 0
    a_token: int = 0

    @property
    def total(self) -> int:
        weights = self.weights + self.vision + self.drafter_weights
        return weights + self.state + self.drafter_state + self.reading

    @property
    def fits(self) -> bool:
        return self.total <= self.machine


def state_bytes(module: Any, context: int, rows: int, kv_bits: int = EngineConfig.kv_bits) -> int:
    """Return the bytes of the caches of `rows` rows of `context` tokens. module: a model or drafter with `make_cache`. kv_bits: as in
    EngineConfig."""
    verify = SpecConfig().ngram_m + 1  # the widest forward whose tokens may be taken back
    cache = module.make_cache(0, kv_bits=kv_bits)
    return rows * int(cache.bytes_for(context, prefill=chunk_of(EngineConfig()), verify=verify))


def token_bytes(module: Any, kv_bits: int = EngineConfig.kv_bits) -> int:
    """Return the bytes of the keys and values of one token, in the layers that attend to the whole context. module: a model with
    `make_cache`."""
    return int(module.make_cache(0, kv_bits=kv_bits).snapshot_bytes()[0])


def chunk_of(config: EngineConfig) -> int:
    """Return the most prompt tokens that one forward reads. The default is larger on a GPU: each expert of a mixture gets a small part
    of the tokens, and an M5's fused attention needs 1,024 queries or more."""
    return config.prefill_chunk or (_CHUNK_ON_GPU if device.has_gpu() else _CHUNK_ON_CPU)


def expected(
    runs: Runnable,
    file_bytes: int,
    context: int | None = None,
    rows: int = 1,
    *,
    unpacked: bool = False,
) -> MemoryEstimate:
    """Return the memory of a model that is not on this disk yet, estimated from its config.json and the bytes of its weights. context:
    None for DEFAULT_CONTEXT. unpacked: whether the weights are in a format that loading unpacks to floats. Raises ModelError for a
    wrong config.json."""
    config = dict(runs.config)
    quantized = bool(config.get("quantization") or config.get("quantization_config"))
    if runs.by_mlx_lm:
        from mlxspec.models.adapted.loading import blank  # slow to import

        model: Any = blank(config)
        plan, unpacks = None, False  # quantized matrices stay as stored
    else:
        kind = architecture(config)
        parsed = kind.parse(config)
        model = kind.build(parsed)
        plan = _vision_plan(config, parsed.hidden_size)
        if device.has_gpu():
            for module in (model, *([] if plan is None else [plan.tower])):
                module.set_dtype(mx.bfloat16)
        unpacks = floats_fit(bytes_of(model))
    # without a GPU floats become float32
    as_floats = unpacked or (not device.has_gpu() and (not quantized or unpacks))
    context = min(context or DEFAULT_CONTEXT, model.max_context)
    return MemoryEstimate(
        context=context,
        rows=rows,
        weights=bytes_of(model) if as_floats else file_bytes,
        drafter_weights=0,
        state=state_bytes(model, context, rows),
        drafter_state=0,
        machine=machine_memory(),
        vision=bytes_of(plan.tower) if as_floats and plan is not None else 0,
        reading=0 if plan is None else reading_bytes(plan),
        a_token=token_bytes(model),
    )


def with_drafter(model: MemoryEstimate, drafter: Any) -> MemoryEstimate:
    """Return the memory of a model together with a drafter. model: the memory of the model alone; drafter: the drafter's module, whose
    arrays need not be evaluated."""
    bits, has_cache = SpecConfig.draft_kv_bits, hasattr(drafter, "make_cache")
    state = state_bytes(drafter, model.context, model.rows, bits) if has_cache else 0
    return replace(model, drafter_weights=bytes_of(drafter), drafter_state=state)


def reading_bytes(vision: Vision) -> int:
    """Return the bytes that a vision tower takes while it reads an image of 1024 x 1024 pixels."""
    tower: Any = vision.tower
    return int(tower.scratch_bytes(vision.preprocessor.tokens_of(1024, 1024)))


def _vision_plan(config: dict[str, Any], hidden_size: int) -> Vision | None:
    """Return the vision tower that config.json describes, without weights; None where it describes none that can be used. hidden_size:
    of the text model."""
    try:
        return blueprint(config, {}, hidden_size)[0]
    except ModelError:
        return None
