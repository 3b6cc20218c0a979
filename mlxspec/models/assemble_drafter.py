"""Builds the modules of drafters that lie in a folder of their own: MTP heads, and the kinds of drafter_folders.py.

Each is assembled lazily, for a target that is assembled already: what does not fit is refused before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.errors import ModelError
from mlxspec.loading.qwen_weights import head_of
from mlxspec.loading.weights import Weights
from mlxspec.models.assemble import HOW_TO_GET_A_HEAD, Assembled
from mlxspec.models.drafter_folders import FOLDERS
from mlxspec.models.fill import fill, foreign_format, is_packed, quantize_floats, unpacked_dtype
from mlxspec.models.folder import Kind, kind_by
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import Trunk, architecture


def assemble_head_lazily(
    read: Callable[[], Weights],
    target: Assembled,
    dtype: mx.Dtype | None = None,
    *,
    draft_bits: int = 16,
) -> Qwen35Mtp:
    """Return an MTP head for `target` from another folder: one with a head alone, or the original model's. Its weights are not evaluated.
    read: returns the folder's tensors. draft_bits: bits to which a float head of a quantized target is quantized. Raises ModelError."""
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
    """Return an MTP head with these tensors, for the model that config.json describes, without loading that model. head: tensors under
    mlxspec's names; no value is read. Raises ModelError where they do not fit."""
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
    """Return a drafter's module for `target` from its folder, not evaluated. kind: a kind of drafter_folders.py. draft_bits: bits to which
    a float drafter of a quantized target is quantized, for kinds that allow it. is_fused: whether its projections are joined, so that it is
    ready to run. Raises ModelError, also where the drafter is for another target."""
    folder = FOLDERS.get(kind)
    if folder is None:
        raise ModelError(f"There is no module here for drafters of the kind {kind}.")
    given = read()
    made, weights = folder.build(config, given, target)
    dtype = unpacked_dtype(given, dtype)
    if folder.keeps_bfloat16 and dtype is not None and dtype == mx.float16:
        dtype = mx.bfloat16
    own_is_packed = fill(made, weights, dtype, f"The {made.title}", foreign_format(config))
    if folder.is_quantized and is_packed(target) and not own_is_packed:
        quantize_floats(made, draft_bits)
    if is_fused:
        made.fuse()
    return made


def assemble_alone(config: Mapping[str, Any], read: Callable[[], Weights]) -> tuple[nn.Module, Weights]:
    """Return a drafter without loading its target, whose sizes are read from the drafter's config: the module, neither filled nor fused,
    and the folder's tensors under its names. Raises ModelError where the drafter cannot be loaded or needs its target."""
    given = read()
    folder = FOLDERS.get(kind_by(given, config))
    if folder is None or folder.alone is None:
        raise ModelError("This drafter can be built for its target only.")
    target = folder.alone(config, given)
    (filled, weights), (empty, _) = (folder.build(config, given, target) for _ in range(2))
    fill(filled, weights, None, f"The {filled.title}", foreign_format(config))
    return empty, weights
