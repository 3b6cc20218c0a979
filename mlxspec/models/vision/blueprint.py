"""Builds everything that a model has for images, but for the weights, from config.json and the preprocessing settings.

A lookup by model_type, as in the registry of text models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.images.prompt import ImagePrompt
from mlxspec.loading import vision_weights
from mlxspec.loading.weights import Weights
from mlxspec.models.config_values import Values, mapping
from mlxspec.models.vision.base import Bidirectional, Vision
from mlxspec.models.vision.gemma4 import (
    Gemma4VisionConfig,
    Gemma4VisionTower,
    JoinedBlocks,
    JoinedBlocksConfig,
)
from mlxspec.models.vision.qwen import QwenVisionConfig, QwenVisionTower
from mlxspec.models.vision.settings import gemma3_images, gemma4_images, qwen_images
from mlxspec.models.vision.siglip import SiglipConfig, SiglipTower

Sanitize = Callable[[Weights], Weights]  # all tensors of a folder to the tower's, under our names


def blueprint(
    config: Mapping[str, Any], settings: Mapping[str, Any], hidden_size: int
) -> tuple[Vision, Sanitize]:
    """Return all that a model needs for images, its tower without weights, and a function that picks and renames the tower's tensors from a
    folder's. settings: the preprocessing settings. hidden_size: of the text model. Raises ModelError where the model reads no images, or in
    a way that is not supported."""
    make = _FAMILIES.get(str(config.get("model_type")))
    vision = mapping(config, "vision_config")
    if make is None or not vision:
        raise ModelError("This model reads no images: its config.json describes no vision tower.")
    return make(config, vision, settings, hidden_size)


def may_see(config: Mapping[str, Any]) -> bool:
    """Return whether models of this model_type are published with a vision tower. The folder itself may lack it."""
    return config.get("model_type") in _FAMILIES


def _qwen(
    config: Mapping[str, Any], vision: Mapping[str, Any], settings: Mapping[str, Any], hidden_size: int
) -> tuple[Vision, Sanitize]:
    c = QwenVisionConfig.from_dict(vision)
    if c.out_size != hidden_size:
        raise ModelError(
            f"vision_config in config.json: out_hidden_size is {c.out_size}, but the text model's hidden_size is {hidden_size}."
        )
    image = _id(config, "image_token_id")
    kernel = (3, c.frames, c.patch_size, c.patch_size)
    made = Vision(
        tower=QwenVisionTower(c),
        preprocessor=qwen_images(settings, c.patch_size, c.merge),
        prompt=ImagePrompt(placeholder=image, image=image, lookup=image),
    )
    return made, lambda weights: vision_weights.qwen_tower(weights, kernel)


def _gemma3(
    config: Mapping[str, Any], vision: Mapping[str, Any], settings: Mapping[str, Any], hidden_size: int
) -> tuple[Vision, Sanitize]:
    c = SiglipConfig.from_dict(vision, Values(config).size("mm_tokens_per_image", 256), hidden_size)
    start = _id(config, "boi_token_index", "boi_token_id")
    kernel = (3, c.patch_size, c.patch_size)
    made = Vision(
        tower=SiglipTower(c),
        preprocessor=gemma3_images(settings, c.image_size, c.patch_size, c.tokens),
        prompt=ImagePrompt(
            placeholder=start,
            image=_id(config, "image_token_index", "image_token_id"),
            before=(start,),
            behind=(_id(config, "eoi_token_index", "eoi_token_id"),),
            lookup=0,
            frame=("\n\n", "\n\n"),
        ),
        bidirectional="all",
    )
    return made, lambda weights: vision_weights.siglip_tower(weights, kernel)


def _gemma4(
    config: Mapping[str, Any], vision: Mapping[str, Any], settings: Mapping[str, Any], hidden_size: int
) -> tuple[Vision, Sanitize]:
    c = Gemma4VisionConfig.from_dict(vision, hidden_size)
    made = Vision(
        tower=Gemma4VisionTower(c),
        preprocessor=gemma4_images(settings, c.patch_size, c.pool, c.places, joins_blocks=False),
        prompt=_gemma4_prompt(config),
        bidirectional=_gemma4_masks(config),
    )
    return made, lambda weights: vision_weights.gemma4_tower(weights, clips=c.clips)


def _gemma4_unified(
    config: Mapping[str, Any], vision: Mapping[str, Any], settings: Mapping[str, Any], hidden_size: int
) -> tuple[Vision, Sanitize]:
    c, get = JoinedBlocksConfig.from_dict(vision, hidden_size), Values(vision)
    patch, pool = get.size("patch_size", 16), get.size("pooling_kernel_size", 3)
    made = Vision(
        tower=JoinedBlocks(c),
        preprocessor=gemma4_images(settings, patch, pool, c.places, joins_blocks=True),
        prompt=_gemma4_prompt(config),
        bidirectional=_gemma4_masks(config),
    )
    return made, vision_weights.joined_blocks


def _gemma4_prompt(config: Mapping[str, Any]) -> ImagePrompt:
    image = _id(config, "image_token_id", "image_token_index")
    text = mapping(config, "text_config")
    return ImagePrompt(
        placeholder=image,
        image=image,
        before=(_id(config, "boi_token_id", "boi_token_index"),),
        behind=(_id(config, "eoi_token_id", "eoi_token_index"),),
        lookup=_id({"pad_token_id": 0, **{k: v for k, v in text.items() if v is not None}}, "pad_token_id"),
    )


def _gemma4_masks(config: Mapping[str, Any]) -> Bidirectional:
    return (
        "windowed"
        if mapping(config, "text_config").get("use_bidirectional_attention") == "vision"
        else "none"
    )


def _id(config: Mapping[str, Any], *names: str) -> int:
    """Return the token id under the first of these keys that config.json has. Raises ModelError where it has none."""
    for name in names:
        if config.get(name) is not None:
            return Values(config).size(name, 0)
    raise ModelError(f"config.json names no {names[0]}, without which images have no place in a prompt.")


_FAMILIES: dict[str, Callable[..., tuple[Vision, Sanitize]]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _qwen),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
}
