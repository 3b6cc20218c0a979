"""A folder's preprocessing settings, as Transformers writes them, to a preprocessor of ours.

They lie under `image_processor` in processor_config.json, else in preprocessor_config.json. Settings of videos lie beside them and are
not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxspec.errors import ConfigError, ModelError
from mlxspec.images.gemma import Gemma3Images, Gemma4Images
from mlxspec.images.qwen import QwenImages
from mlxspec.loading.tokenizer import read_json
from mlxspec.models.config_values import Keys, Values, mapping, short

FILE = "preprocessor_config.json"
_BICUBIC, _BILINEAR = 3, 2  # Pillow's numbers
# What Transformers' processor of Qwen takes where a file names none.
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_STEPS = {"do_resize": (True,), "do_rescale": (True,), "do_convert_rgb": (True,), "do_pad": (False,)}


def image_settings(folder: Path) -> Mapping[str, Any]:
    """Return the image preprocessing settings of a folder. Raises ModelError where it has none."""
    nested = mapping(read_json(folder / "processor_config.json"), "image_processor")
    if nested:
        return nested
    if not (folder / FILE).is_file():
        raise ModelError(
            f"There is no {FILE} in {folder}, which tells how images are prepared; fetch it from the original repository."
        )
    return read_json(folder / FILE)


def qwen_images(settings: Mapping[str, Any], patch_size: int, merge_size: int) -> QwenImages:
    """Return Qwen's preprocessor with a folder's settings. patch_size, merge_size: those of the vision tower. Raises ModelError, also where
    the settings are for another tower."""
    get = _checked(settings, {"do_normalize": (True,), "resample": (_BICUBIC,)})
    size = get.part("size", Keys())
    _same(get, "patch_size", patch_size)
    _same(get, "merge_size", merge_size)
    area = 28 * 28
    made = QwenImages(
        patch_size=patch_size,
        merge_size=merge_size,
        min_pixels=get.size("min_pixels", size.size("shortest_edge", 4 * area)),
        max_pixels=get.size("max_pixels", size.size("longest_edge", 1280 * area)),
        scale=get.number("rescale_factor", 1 / 255),
        mean=_three(settings, "image_mean", _CLIP_MEAN),
        std=_three(settings, "image_std", _CLIP_STD),
    )
    if made.max_pixels < made.side**2:
        raise ModelError(f"{FILE}: at most {made.max_pixels} pixels are too few for one token.")
    return made


def gemma3_images(settings: Mapping[str, Any], image_size: int, patch_size: int, tokens: int) -> Gemma3Images:
    """Return Gemma 3's preprocessor with a folder's settings. image_size, patch_size, tokens (of an image): those of the vision tower.
    Raises ModelError."""
    only = {
        "do_normalize": (True,),
        "resample": (_BILINEAR,),
        "do_pan_and_scan": (False,),
        "image_seq_length": (tokens,),
    }
    get = _checked(settings, only)
    size = get.part("size", Keys())
    for side in ("height", "width"):
        _same(size, side, image_size)
    return Gemma3Images(
        image_size=image_size,
        patch_size=patch_size,
        tokens=tokens,
        scale=get.number("rescale_factor", 1 / 255),
        mean=_three(settings, "image_mean"),
        std=_three(settings, "image_std"),
    )


def gemma4_images(
    settings: Mapping[str, Any], patch_size: int, pool: int, places: int, *, joins_blocks: bool
) -> Gemma4Images:
    """Return Gemma 4's preprocessor with a folder's settings. pool: patches of a block's side. places: positions of the tower's table for
    each axis. joins_blocks: as in Gemma4Images. Raises ModelError."""
    get = _checked(settings, {"do_normalize": (False,), "resample": (_BICUBIC,)})
    _same(get, "patch_size", patch_size)
    _same(get, "pooling_kernel_size", pool)
    try:
        made = Gemma4Images(
            patch_size=patch_size,
            pool=pool,
            max_tokens=get.size("max_soft_tokens", 280),
            scale=get.number("rescale_factor", 1 / 255),
            joins_blocks=joins_blocks,
        )
    except ConfigError as error:
        raise ModelError(f"{FILE}: {error}") from error
    if made.max_tokens * (1 if joins_blocks else pool) > places:
        raise ModelError(
            f"An image of {made.max_tokens} tokens in a row needs more positions than the {places} of vision_config in config.json."
        )
    return made


def _checked(settings: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> Values:
    return Values(settings, Keys(only={**_STEPS, **only}), FILE)


def _same(get: Values, key: str, expected: int) -> None:
    """Check that the settings' value of `key`, where they have it, equals the vision tower's. Raises ModelError."""
    if get.size(key, expected) != expected:
        raise ModelError(
            f"{FILE}: {key} is {short(get.raw[key])}, but vision_config in config.json makes it {expected}."
        )


def _three(
    settings: Mapping[str, Any], key: str, default: tuple[float, float, float] = (0.5, 0.5, 0.5)
) -> tuple[float, float, float]:
    """Return the three numbers under `key`, one for each channel, or `default` where the key is absent. Raises ModelError for any other
    value."""
    values = settings.get(key)
    if values is None:
        return default
    fine = isinstance(values, list) and len(values) == 3
    if not fine or not all(type(v) in (int, float) and (key != "image_std" or v > 0) for v in values):
        raise ModelError(f"{FILE}: {key} is {short(values)}, which is not one number for each of 3 channels.")
    return (float(values[0]), float(values[1]), float(values[2]))
