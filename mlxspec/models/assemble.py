"""Builds a target model from a folder's config and arrays, with the MTP head and the vision tower where the folder holds them.

Knows how loading and models fit together; knows no tokenizer and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.loading.qwen_weights import QK_NORMS, TWO_HEADS, has_two
from mlxspec.loading.weights import Weights, is_of_a_tower, is_of_vision
from mlxspec.models.adapters import add_adapter, add_adapters
from mlxspec.models.fill import (
    STAYS_PACKED,
    evaluate,
    fill,
    foreign_format,
    is_packed,
    quantize_floats,
    unpacked_dtype,
    unpacked_notice,
)
from mlxspec.models.folder import ModelFolder
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.registry import Config, Head, Trunk, architecture
from mlxspec.models.runnable import Engine, judge
from mlxspec.models.shard import join, own_config, own_weights
from mlxspec.models.sizes import bytes_of
from mlxspec.models.stored_head import head_as_stored
from mlxspec.models.vision.base import Vision
from mlxspec.models.vision.blueprint import blueprint, may_see
from mlxspec.platform import device

HOW_TO_GET_A_HEAD = (
    "conversions by mlx-lm drop it; `mlxspec pull OWNER/NAME` fetches it from the original repository, `mlxspec convert FOLDER "
    "-o NEW --graft-mtp ORIGINAL` does so for a folder, or name a folder that holds it as the draft model"
)
WHOLE_WITH_ADAPTER = "An adapter cannot be used with a model that is divided among ranks."


class Assembled(NamedTuple):
    """A target model with all that was loaded for it. notices: sentences on what of the folder is not used. lacks_head: whether the model
    should have an MTP head that its folder does not contain. unsupported_head: why the MTP head cannot be run, None where it can. vision:
    what the model needs for images, its tower not evaluated; None where it reads no images, and no_images has the reason in one sentence.
    qk_norms: weights of query and key norms before layers were fused, by which the norms of a separate head are judged. made_by: the code
    that runs an AdaptedModel, such as "mlx-lm 0.32.2"; "" for mlxspec's own models. config: of an AdaptedModel its AdaptedConfig."""

    model: Trunk
    config: Config
    mtp: Head | None
    notices: tuple[str, ...] = ()
    lacks_head: bool = False
    unsupported_head: str | None = None
    vision: Vision | None = None
    no_images: str = "Images were not asked for when the model was loaded."
    qk_norms: Mapping[str, mx.array] = MappingProxyType({})
    made_by: str = ""


def assemble(
    config: Mapping[str, Any],
    read: Callable[[], Weights],
    dtype: mx.Dtype | None = None,
    *,
    group: mx.distributed.Group | None = None,
) -> Assembled:
    """Build a target model from its config, load and fuse its weights, evaluate them, and return the model. The config is checked before
    `read` is called.

    read: returns the folder's tensors. dtype None: as stored on a GPU, float32 elsewhere. group: as in `assemble_lazily`. Raises
    ModelError.
    """
    made = assemble_lazily(config, read, dtype, group=group)
    evaluate([m for m in (made.model, made.mtp) if m is not None])
    return made


def assemble_folder(
    folder: ModelFolder,
    dtype: mx.Dtype | None = None,
    *,
    engine: Engine = "auto",
    adapter: str | Path | Mapping[str, str] | None = None,
    draft_bits: int = 16,
    images: bool = False,
    group: mx.distributed.Group | None = None,
) -> Assembled:
    """Return the model of a folder with unevaluated weights, run by mlxspec's code or by mlx-lm's as `judge` decides for `engine`. images:
    whether the model is to read images. Other parameters are those of `assemble_lazily`. Raises ModelError."""
    config = folder.config()
    if judge(config, engine, kind="model").by_mlx_lm:
        return assemble_by_mlx_lm(folder, dtype, adapter=adapter, group=group)
    return assemble_lazily(
        config,
        folder.read,
        dtype,
        adapter=adapter,
        draft_bits=draft_bits,
        images=folder.image_settings if images else None,
        group=group,
    )


def assemble_by_mlx_lm(
    folder: ModelFolder,
    dtype: mx.Dtype | None = None,
    *,
    adapter: str | Path | Mapping[str, str] | None = None,
    group: mx.distributed.Group | None = None,
    max_context: int | None = None,
) -> Assembled:
    """Return the model of a folder, run by mlx-lm's code, with unevaluated weights. max_context: the most tokens of a row; None where it is
    unknown. Raises ModelError."""
    from mlxspec.models.adapted.loading import load_adapted  # slow to import

    if group is not None and adapter is not None:
        raise ModelError(WHOLE_WITH_ADAPTER)
    model: Any = load_adapted(folder, dtype, adapter, group=group, max_context=max_context)
    maker = model.config.made_by
    who, code = (maker, "mlx-lm's code") if maker != "mlxspec" else ("A module of mlxspec",) * 2
    notice = f"{who} runs this model: it reads no images and has no MTP head."
    return Assembled(
        model=model,
        config=model.config,
        mtp=None,
        notices=(
            notice,
            *model.notices,
            *([not_read(model.unread, "config.json")] if model.unread else []),
        ),
        unsupported_head=f"{code} runs this model, and leaves such heads out",
        no_images=f"{code} runs this model, and reads no images.",
        made_by=maker,
    )


def assemble_lazily(
    config: Mapping[str, Any],
    read: Callable[[], Weights],
    dtype: mx.Dtype | None = None,
    *,
    adapter: str | Path | Mapping[str, str] | None = None,
    draft_bits: int = 16,
    images: Callable[[], Mapping[str, Any]] | None = None,
    group: mx.distributed.Group | None = None,
) -> Assembled:
    """Build a target model as `assemble` does, but do not evaluate its weights, and return the model. Where `read` is lazy too, this shows
    whether a folder can be loaded and how large it becomes without reading its weights.

    adapter: a folder with LoRA layers for all rows, or several folders by name, of which each row of a cache chooses. draft_bits: bits to
    which a float MTP head of a quantized model is quantized. images: returns the preprocessing settings, where the model is to read images;
    an error in its vision part only makes it read none. group: the processes that run the model together, of which this one gets its part;
    each gets the whole MTP head. Raises ModelError.
    """
    kind = architecture(config)
    parsed = kind.parse(config)
    if group is not None and adapter is not None:
        raise ModelError(WHOLE_WITH_ADAPTER)
    if group is not None:
        own_config(parsed, group.size())  # refuses before anything is read
    weights, foreign = read(), foreign_format(config)
    dtype = unpacked_dtype(weights, dtype)
    parsed, head_notices = head_as_stored(parsed, weights)
    trunk, head = kind.sanitize(weights, parsed)
    if group is not None:
        trunk = own_weights(trunk, parsed, group)
    model = kind.build(parsed if group is None else own_config(parsed, group.size()))
    packed = fill(model, trunk, dtype, "The model", foreign)
    if isinstance(adapter, Mapping):
        add_adapters(model, adapter, model.gate)
    elif adapter is not None:
        add_adapter(model, adapter)
    mtp = None
    refused = parsed.unsupported_head if isinstance(parsed, Qwen35Config) else None
    if head and kind.head is not None and refused is None:
        mtp, refused = _head(kind.head(parsed, model), head, dtype, foreign)
        if mtp is not None and packed and not is_packed(mtp):
            quantize_floats(mtp, draft_bits)
    qk_norms = {name: value for name, value in tree_flatten(model.parameters()) if name.endswith(QK_NORMS)}
    for module in (model, mtp):
        if module is not None:
            module.fuse()
    if group is not None:
        join(model, group)
    vision, no_images = None, Assembled._field_defaults["no_images"]
    if images is not None:
        try:
            vision = _vision(config, images, weights, model)
        except ModelError as error:
            no_images = str(error)
    notices = [
        *getattr(weights, "notices", ()),
        *getattr(weights, "unread", ()),
        *head_notices,
        *unpacked_notice(weights, model.dtype),
        *_passed_over(weights, vision, no_images if images is not None else None),
    ]
    if packed and not device.has_gpu():
        notices.append(STAYS_PACKED)
    if head and refused is not None:
        notices.append(f"There is no drafting with this model's MTP head: {refused}.")
    if parsed.unread:
        notices.append(not_read(parsed.unread, "config.json"))
    lacks_head = (
        not head and refused is None and isinstance(parsed, Qwen35Config) and parsed.num_mtp_layers > 0
    )
    return Assembled(model, parsed, mtp, tuple(notices), lacks_head, refused, vision, no_images, qk_norms)


def _head(
    head: Head, weights: Weights, dtype: mx.Dtype | None, foreign: str | None
) -> tuple[Head | None, str | None]:
    """Put `weights` into the model's own MTP head. Return the head and None, or None and the reason why the head cannot be used: a damaged
    head does not stop the model. foreign: the name of an unsupported quantization, or None."""
    if has_two(weights):
        return None, f"its folder holds {TWO_HEADS}"
    try:
        fill(head, weights, dtype, "It", foreign)
    except ModelError as error:
        return None, str(error).removeprefix("It cannot be loaded: ").rstrip(".")
    return head, None


def _vision(
    config: Mapping[str, Any], settings: Callable[[], Mapping[str, Any]], weights: Weights, model: Trunk
) -> Vision:
    """Return what the model needs for images, with the tower's weights not evaluated. settings: returns the preprocessing settings. Raises
    ModelError where the model cannot read images."""
    if not any(map(is_of_vision, weights)):
        dropped = ", which conversions by mlx-lm drop" if may_see(config) else ""
        raise ModelError(f"This model reads no images: its folder holds no vision tower{dropped}.")
    vision, sanitize = blueprint(config, settings(), model.hidden_size)
    tower: Any = vision.tower
    dtype = mx.bfloat16 if getattr(weights, "is_narrowed", False) else model.dtype
    num = sum(v.size for _, v in tree_flatten(tower.parameters()))
    fill(tower, sanitize(weights), dtype, "The vision tower", foreign_format(config), whole=True)
    return replace(vision, parameters=num, nbytes=bytes_of(tower))


def _passed_over(weights: Weights, vision: Vision | None, no_images: str | None) -> list[str]:
    """Return notices on tensors of vision and sound towers that were not loaded. no_images: why requested images cannot be read, None where
    images were not requested."""
    if vision is not None:
        num = sum(is_of_a_tower(name) and not is_of_vision(name) for name in weights)
        return [f"Sound is not read: {num} tensors for it were passed over."] if num else []
    num = sum(map(is_of_a_tower, weights))
    if not num:
        return []
    why = f" {no_images}" if no_images else ""
    return [f"Only text is read: {num} tensors for images, video and sound were passed over.{why}"]


def not_read(keys: Sequence[str], where: str) -> str:
    """Return a notice on keys that nothing used, as they may request what is not implemented. where: the file with the keys."""
    names = ", ".join(map(printable, keys[:8]))
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return f"These keys of {where} are not known here and were not used: {names}{more}."
