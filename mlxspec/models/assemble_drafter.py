"""Builds the modules of drafters that lie in a folder of their own: an MTP head, a Gemma 4 assistant, an EAGLE-3 or a block drafter.

Each is assembled lazily, for a target that is assembled already: what does not fit is refused before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxspec.errors import ModelError
from mlxspec.loading.qwen_weights import head_of
from mlxspec.loading.weights import Weights
from mlxspec.models.assemble import HOW_TO_GET_A_HEAD, Assembled
from mlxspec.models.dflash import DFlash, sanitize_dflash
from mlxspec.models.dflash_config import DFlashConfig
from mlxspec.models.drafter_module import sanitize_drafter
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head, is_eagle3
from mlxspec.models.fill import fill, foreign_format, is_packed, quantize_floats, unpacked_dtype
from mlxspec.models.folder import Kind
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma4_assistant import AssistantConfig, Gemma4Assistant, sanitize_assistant
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import Trunk, architecture
from mlxspec.models.shard import is_divided

NO_ASSISTANT = "A Gemma 4 assistant cannot draft for a model that is divided among ranks: it reads keys and values of all heads."


def assemble_head_lazily(
    read: Callable[[], Weights],
    target: Assembled,
    dtype: mx.Dtype | None = None,
    *,
    draft_bits: int = 16,
) -> Qwen35Mtp:
    """An MTP head out of another folder than its target's: one of its own, or the original model's. Its weights are not read yet.
    draft_bits: as SpecConfig has it. Raises ModelError."""
    if not isinstance(target.model, Qwen35) or not isinstance(target.config, Qwen35Config):
        raise ModelError("An MTP head of Qwen3.5 drafts for Qwen3.5 models only.")
    if target.config.unsupported_head is not None:
        raise ModelError(
            f"There is no drafting with this model's MTP head: {target.config.unsupported_head}."
        )
    weights = read()
    dtype = unpacked_dtype(weights, dtype)
    head = head_of(weights, target.qk_norms)
    if not head:
        raise ModelError(f"The draft model's folder holds no MTP head either; {HOW_TO_GET_A_HEAD}.")
    mtp = Qwen35Mtp(target.config, target.model)
    head_is_packed = bool(fill(mtp, head, dtype, "The MTP head"))
    if is_packed(target.model) and not head_is_packed:
        quantize_floats(mtp, draft_bits)
    mtp.fuse()
    return mtp


def head_alone(config: Mapping[str, Any], head: Weights) -> nn.Module:
    """Return the MTP head that these tensors, under our names, are of the model that config.json describes. Reads no value. Raises
    ModelError where they are none of it."""
    kind = architecture(config)
    if kind.head is None:
        raise ModelError("Models of this family have no MTP head.")
    parsed = kind.parse(config)
    module = kind.head(parsed, kind.build(parsed))
    fill(module, head, None, "The MTP head")
    return module


def assemble_drafter(
    kind: Kind,
    config: Mapping[str, Any],
    read: Callable[[], Weights],
    target: Trunk,
    dtype: mx.Dtype | None = None,
    *,
    draft_bits: int = 16,
    is_fused: bool = True,
) -> Any:
    """A drafter of the kinds "assistant", "eagle3" and "dflash" for `target`: a Gemma4Assistant, an Eagle3Head, a DFlash. Not evaluated.
    draft_bits: as SpecConfig has it, for block drafters. is_fused: ready to run. Raises ModelError, also if it is for another model."""
    given = read()
    made, weights = _module(kind, config, given, target)
    dtype = unpacked_dtype(given, dtype)
    if kind == "dflash" and dtype is not None and dtype == mx.float16:
        dtype = mx.bfloat16
    own_is_packed = fill(made, weights, dtype, f"The {made.title}", foreign_format(config))
    if kind == "dflash" and is_packed(target) and not own_is_packed:
        quantize_floats(made, draft_bits)
    if is_fused:
        made.fuse()
    return made


def _module(kind: Kind, config: Mapping[str, Any], given: Weights, target: Any) -> tuple[Any, Weights]:
    """The drafter's module, not filled, and the folder's tensors under its names. Raises ModelError."""
    if kind == "assistant":
        if not isinstance(target, Gemma):
            raise ModelError("A Gemma 4 assistant drafts for Gemma 4 models only.")
        if is_divided(target):
            raise ModelError(NO_ASSISTANT)
        return Gemma4Assistant(AssistantConfig.from_dict(config), target), sanitize_assistant(given)
    if kind == "eagle3":
        weights = sanitize_drafter(given)
        return Eagle3Head(Eagle3Config.from_dict(config), target, weights), weights
    if kind != "dflash":
        raise ModelError(f"There is no module here for drafters of the kind {kind}.")
    weights = sanitize_dflash(given)
    return DFlash(DFlashConfig.from_dict(config, weights.keys()), target), weights


class _AbsentTarget(NamedTuple):
    """The sizes of a target that drafters read when they are built. config: has its softcap."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    config: Any


def assemble_alone(config: Mapping[str, Any], read: Callable[[], Weights]) -> tuple[nn.Module, Weights]:
    """An EAGLE-3 or block drafter without its target, which is taken to be the one that it was made for: the module, not filled and not
    fused, and the folder's tensors under its names. Raises ModelError where `assemble_drafter` would."""
    given = read()
    kind: Kind = "eagle3" if is_eagle3(given, config) else "dflash"
    if kind == "eagle3":
        eagle = Eagle3Config.from_dict(config)
        target = _AbsentTarget(
            eagle.target_size, eagle.text.vocab_size, 1 + max(eagle.layers, default=63), config=eagle
        )
    else:
        block = DFlashConfig.from_dict(config, sanitize_dflash(given).keys())
        num_layers = block.num_target_layers or 1 + max(block.layer_ids)
        target = _AbsentTarget(block.text.hidden_size, block.text.vocab_size, num_layers, config=block)
    (filled, weights), (empty, _) = (_module(kind, config, given, target) for _ in range(2))
    fill(filled, weights, None, f"The {filled.title}", foreign_format(config))
    return empty, weights
