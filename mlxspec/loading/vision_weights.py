"""Renames tensors of vision towers to the names of our modules: raw Hugging Face folders and MLX conversions.

Hugging Face stores the patch projection as a convolution (out, channel, ..., row, column); conversions to MLX move the channel to the end.
Ours is a matrix over (channel, ..., row, column): the shape tells which it is. Everything else has one layout.
"""

from __future__ import annotations

import re

import mlx.core as mx

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.loading.weights import Weights

_QWEN = re.compile(r"(?:model\.)?(?:visual|vision_tower)\.")
_SIGLIP = re.compile(r"(?:model\.)?vision_tower\.(?:vision_model\.)?|(?:model\.)?(?=multi_modal_projector\.)")
_GEMMA4 = re.compile(r"(?:model\.)?vision_tower\.|(?:model\.)?(?=embed_vision\.)")
_BLOCKS = re.compile(r"(?:model\.)?(?:vision_embedder\.|embed_vision\.(?=patch_|pos_)|(?=embed_vision\.))")
_RANGES = (".input_max", ".input_min", ".output_max", ".output_min")
_FLOAT32 = ("std_bias", "std_scale")
_UNUSED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "position_ids")


def qwen_tower(weights: Weights, kernel: tuple[int, ...]) -> Weights:
    """All tensors of a folder to the tower's. kernel: (channels, frames, rows, columns) of a patch."""
    named = _named(weights, _QWEN)
    return _flat(named, "patch_embed.proj.weight", kernel)


def siglip_tower(weights: Weights, kernel: tuple[int, ...]) -> Weights:
    """Gemma 3's, with its projector. kernel: (channels, rows, columns) of a patch. The projector's norm is zero-centred in every dialect,
    and becomes a factor."""
    named = _flat(_named(weights, _SIGLIP), "embeddings.patch_embedding.weight", kernel)
    norm = "multi_modal_projector.mm_soft_emb_norm.weight"
    return named | {k: v.astype(mx.float32) + 1.0 for k, v in named.items() if k == norm}


def gemma4_tower(weights: Weights, *, clips: bool) -> Weights:
    """clips: ranges of activations are used, else they are left out."""
    named = _named(weights, _GEMMA4)
    return named if clips else {k: v for k, v in named.items() if not k.endswith(_RANGES)}


def joined_blocks(weights: Weights) -> Weights:
    """Return the tensors of Gemma 4 without a tower. Transformers 5 saves the projection one level deeper than published checkpoints have
    it."""
    named = _named(weights, _BLOCKS)
    return {k.replace("embed_vision.multimodal_embedder.", "embed_vision."): v for k, v in named.items()}


def in_dtype(weights: Weights, dtype: mx.Dtype) -> Weights:
    """All floats but those of quantized matrices, which go with their format, and those that shift and scale pooled rows in float32."""
    return {
        k: v.astype(dtype)
        if mx.issubdtype(v.dtype, mx.floating) and not k.endswith((".scales", ".biases", *_FLOAT32))
        else v
        for k, v in weights.items()
    }


def _named(weights: Weights, prefix: re.Pattern[str]) -> Weights:
    named: Weights = {}
    for given, value in weights.items():
        found = prefix.match(given)
        if found is None or given.endswith(_UNUSED):
            continue
        name = given[found.end() :]
        if name in named:
            raise ModelError(f"The folder has two tensors for one place: {printable(given)} and another.")
        named[name] = value
    return named


def _flat(weights: Weights, name: str, kernel: tuple[int, ...]) -> Weights:
    """The patch projection as a matrix. Raises ModelError for a shape that fits neither layout."""
    value = weights.get(name)
    if value is None or value.ndim == 2:
        return weights
    if value.shape[1:] == kernel:
        turned = value
    elif value.shape[1:] == (*kernel[1:], kernel[0]):
        turned = mx.moveaxis(value, -1, 1)
    else:
        raise ModelError(
            f"{printable(name)} has shape {value.shape}, which is no projection of patches of {kernel}."
        )
    return weights | {name: turned.reshape(len(value), -1)}
