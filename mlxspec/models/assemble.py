"""Puts a folder's arrays into a module tree: target and, where the folder holds one, the MTP head.

Knows how loading and models fit together; knows no tokenizer and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec import device
from mlxspec.errors import ModelError
from mlxspec.loading.weights import (
    Weights,
    cast,
    dequantize,
    format_of,
    missing_and_extra,
    our_name,
    shown,
)
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma4_assistant import AssistantConfig, Gemma4Assistant, sanitize_assistant
from mlxspec.models.registry import Config, Head, Trunk, architecture

_DEQUANTIZE_AT_MOST = (
    6 << 30
)  # float32 bytes: quantized matmul on a CPU is slow at any width, but memory is not endless


class Assembled(NamedTuple):
    model: Trunk
    config: Config
    mtp: Head | None


def assemble(
    config: Mapping[str, Any], read: Callable[[], Weights], dtype: mx.Dtype | None = None
) -> Assembled:
    """Build, read, fill, fuse and evaluate. The config is judged before `read` is called.

    `dtype` None: as stored on a GPU, float32 on a CPU. Raises ModelError; nothing is half-loaded.
    """
    made = assemble_lazily(config, read, dtype)
    for module in (made.model, made.mtp):
        if module is not None:
            mx.eval(module.parameters())
    return made


def assemble_lazily(
    config: Mapping[str, Any], read: Callable[[], Weights], dtype: mx.Dtype | None = None
) -> Assembled:
    """All of `assemble` but the last step: whether a folder can be loaded and how large it becomes is known without its weights, as long
    as `read` is lazy too."""
    kind = architecture(config)
    parsed = kind.parse(config)
    model = kind.build(parsed)
    trunk, head = kind.sanitize(read(), parsed)
    quantization = {our_name(path): how for path, how in _quantization(config).items()}
    dtype = _dtype_or_default(dtype)
    _fill(model, trunk, quantization, dtype, "The model")
    mtp = None
    if head and kind.head is not None:
        mtp = kind.head(parsed, model)
        _fill(mtp, head, quantization, dtype, "The MTP head")
    for module in (model, mtp):
        if module is not None:
            module.fuse()
    return Assembled(model, parsed, mtp)


def assemble_assistant(
    config: Mapping[str, Any], read: Callable[[], Weights], target: Trunk, dtype: mx.Dtype | None = None
) -> Gemma4Assistant:
    """The same for a Gemma 4 assistant, which drafts for `target`. Raises ModelError, also if it is for another model."""
    if not isinstance(target, Gemma):
        raise ModelError("A Gemma 4 assistant drafts for Gemma 4 models only.")
    assistant = Gemma4Assistant(AssistantConfig.from_dict(config), target)
    _fill(
        assistant,
        sanitize_assistant(read()),
        _quantization(config),
        _dtype_or_default(dtype),
        "The assistant",
    )
    assistant.fuse()
    mx.eval(assistant.parameters())
    return assistant


def _quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get("quantization") or config.get("quantization_config") or {}
    if not isinstance(found, Mapping):
        raise ModelError("quantization in config.json is not an object.")
    return {str(path): how for path, how in found.items()}


def _dtype_or_default(dtype: mx.Dtype | None) -> mx.Dtype | None:
    return mx.float32 if dtype is None and device.backend() == "cpu" else dtype


def _fill(
    module: nn.Module, weights: Weights, quantization: Mapping[str, Any], dtype: mx.Dtype | None, what: str
) -> None:
    quantized = any(k.endswith(".scales") for k in weights)
    if (
        quantized
        and device.backend() == "cpu"
        and 8 * sum(v.nbytes for v in weights.values()) <= _DEQUANTIZE_AT_MOST
    ):
        weights, quantized = dequantize(weights, quantization, dtype or mx.float32), False
    if quantized:
        _quantize_like(module, weights, quantization, what)
    weights = cast(weights, dtype)
    expected = dict(tree_flatten(module.parameters()))
    difference = missing_and_extra(expected, weights)
    if difference:
        raise ModelError(f"{what} cannot be loaded: {difference}.")
    for name, value in weights.items():
        place = expected[name]
        if value.shape != place.shape:
            raise ModelError(
                f"{what} cannot be loaded: {name} has shape {value.shape}, expected {place.shape}."
            )
        floats = mx.issubdtype(value.dtype, mx.floating) and mx.issubdtype(place.dtype, mx.floating)
        if not floats and value.dtype != place.dtype:
            raise ModelError(
                f"{what} cannot be loaded: {name} holds {_dtype(value)}, expected {_dtype(place)}."
            )
    module.load_weights(list(weights.items()), strict=True)
    module.eval()


def _quantize_like(module: nn.Module, weights: Weights, quantization: Mapping[str, Any], what: str) -> None:
    """Quantize those submodules that `weights` has scales for; their values are replaced afterwards."""

    def format_or_not(path: str, m: nn.Module) -> dict[str, Any] | bool:
        return hasattr(m, "to_quantized") and f"{path}.scales" in weights and format_of(path, quantization)

    try:
        nn.quantize(module, class_predicate=format_or_not)
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"{what} cannot be loaded: its quantization in config.json does not fit it ({shown(error)})."
        ) from error


def _dtype(x: mx.array) -> str:
    return str(x.dtype).removeprefix("mlx.core.")
