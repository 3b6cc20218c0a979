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
    """Bytes, at most. state: keys, values and recurrent states of `rows` rows of `context` tokens, the model's and its drafters'.
    machine: what this one gives to MLX. vision: weights of the vision tower, where `weights` does not include them; reading: what the
    tower takes while it reads an image of 1024 x 1024 pixels. a_token: what each token of a row adds to `state`: keys and values in layers
    that attend to the whole context. Activations of the text model come on top: they are small beside the rest."""

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
    """Return the bytes of the caches of a model, or of a head: anything with `make_cache`. kv_bits: as in EngineConfig."""
    verify = SpecConfig().ngram_m + 1  # the widest forward whose tokens may be taken back
    cache = module.make_cache(0, kv_bits=kv_bits)
    return rows * int(cache.bytes_for(context, prefill=chunk_of(EngineConfig()), verify=verify))


def token_bytes(module: Any, kv_bits: int = EngineConfig.kv_bits) -> int:
    """Return the bytes of the keys and values of one token, in layers that attend to the whole context."""
    return int(module.make_cache(0, kv_bits=kv_bits).snapshot_bytes()[0])


def chunk_of(config: EngineConfig) -> int:
    """Tokens of prompts that are read at once. A GPU needs many: each of a mixture's experts gets a small part of them, and an M5's fused
    attention takes 1,024 queries and more."""
    return config.prefill_chunk or (_CHUNK_ON_GPU if device.has_gpu() else _CHUNK_ON_CPU)


def expected(
    runs: Runnable,
    file_bytes: int,
    context: int | None = None,
    rows: int = 1,
    *,
    unpacked: bool = False,
) -> MemoryEstimate:
    """The memory of a model that is not here yet, by its config.json and the bytes of its weights. unpacked: they are in a format that
    loading unpacks. Raises ModelError for a config.json that is wrong."""
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
    """Return the memory of a model and a drafter, which is assembled and need not be evaluated."""
    bits, has_cache = SpecConfig.draft_kv_bits, hasattr(drafter, "make_cache")
    state = state_bytes(drafter, model.context, model.rows, bits) if has_cache else 0
    return replace(model, drafter_weights=bytes_of(drafter), drafter_state=state)


def reading_bytes(vision: Vision) -> int:
    """Return the bytes that a vision tower takes while it reads an image of 1024 x 1024 pixels."""
    tower: Any = vision.tower
    return int(tower.scratch_bytes(vision.preprocessor.tokens_of(1024, 1024)))


def _vision_plan(config: dict[str, Any], hidden_size: int) -> Vision | None:
    """None where config.json describes no vision tower that can be used."""
    try:
        return blueprint(config, {}, hidden_size)[0]
    except ModelError:
        return None
