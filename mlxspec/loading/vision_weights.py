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
    """Return the tensors of a Qwen vision tower under mlxspec's names. weights: all tensors of the folder; kernel: (channels, frames,
    rows, columns) of a patch."""
    named = _named(weights, _QWEN)
    return _flat(named, "patch_embed.proj.weight", kernel)


def siglip_tower(weights: Weights, kernel: tuple[int, ...]) -> Weights:
    """Return the tensors of Gemma 3's vision tower and projector under mlxspec's names. weights: all tensors of the folder; kernel:
    (channels, rows, columns) of a patch. The projector's norm, which is zero-centred in every folder, becomes a factor."""
    named = _flat(_named(weights, _SIGLIP), "embeddings.patch_embedding.weight", kernel)
    norm = "multi_modal_projector.mm_soft_emb_norm.weight"
    return named | {k: v.astype(mx.float32) + 1.0 for k, v in named.items() if k == norm}


def gemma4_tower(weights: Weights, *, clips: bool) -> Weights:
    """Return the tensors of Gemma 4's vision tower and projection under mlxspec's names. weights: all tensors of the folder. clips:
    whether the tower clips activations; otherwise their ranges are left out."""
    named = _named(weights, _GEMMA4)
    return named if clips else {k: v for k, v in named.items() if not k.endswith(_RANGES)}


def joined_blocks(weights: Weights) -> Weights:
    """Return the image tensors of a Gemma 4 that has no tower, under mlxspec's names. Transformers 5 nests the projection one level
    deeper than published checkpoints do; both are read."""
    named = _named(weights, _BLOCKS)
    return {k.replace("embed_vision.multimodal_embedder.", "embed_vision."): v for k, v in named.items()}


def in_dtype(weights: Weights, dtype: mx.Dtype) -> Weights:
    """Return the tensors with floats cast to `dtype`, except scales and biases of quantized matrices and the float32 tensors that shift
    and scale pooled rows."""
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
    """Return the tensors with the patch projection `name` as a matrix (out, product of kernel). Raises ModelError where its shape is
    that of neither layout."""
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
