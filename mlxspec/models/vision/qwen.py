"""The vision tower of Qwen3.5, 3.6 and 3.8: patches with interpolated learned positions, rotary attention of all to all, and a merger that
makes one token of each block of 2 x 2 patches.

Parameter names are those of the checkpoints behind `model.visual.`; the patch projection is a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.errors import ModelError
from mlxspec.images.prepared import PreparedImage
from mlxspec.models.config_values import Keys, Values, read, size
from mlxspec.models.vision.parts import (
    attend,
    axial,
    axial_frequencies,
    block_order,
    gelu_erf,
    gelu_tanh,
    layer_bytes,
    layer_norm,
    turned,
    turns,
)

_EPS = 1e-6
_KEYS = Keys(
    only={
        "hidden_act": ("gelu_pytorch_tanh",),
        "in_channels": (3,),
        "deepstack_visual_indexes": ([],),
    },
)


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig:
    """The shape of Qwen's vision tower. patch_size: pixels of a patch's side. frames: images of one patch (a still image is repeated).
    merge: patches of the side of a block, which becomes one token. places: side of the square table of positions. out_size: the text
    model's hidden size."""

    depth: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_heads: int = size()
    out_size: int = size("out_hidden_size")
    patch_size: int = size("patch_size", 16)
    frames: int = size("temporal_patch_size", 2)
    merge: int = size("spatial_merge_size", 2)
    places: int
    theta: float

    @classmethod
    def from_dict(cls, vision: Mapping[str, Any]) -> QwenVisionConfig:
        """Return the config of `vision_config`. Raises ModelError."""
        get = Values(vision, _KEYS)
        places, theta = get.size("num_position_embeddings", 2304), axial(get).number("rope_theta", 1e4)
        made = read(cls, get, places=int(places**0.5), theta=theta)
        if made.hidden_size % made.num_heads or made.head_dim % 4:
            raise ModelError(
                f"vision_config in config.json: {made.num_heads} heads of {made.hidden_size} numbers cannot be rotated on two axes."
            )
        if made.places**2 != places:
            raise ModelError("vision_config in config.json: num_position_embeddings is no square.")
        return made

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class QwenVisionTower(nn.Module):
    """The VisionTower of Qwen3.5, for images that `QwenImages` prepared."""

    def __init__(self, c: QwenVisionConfig) -> None:
        super().__init__()
        self._c = c
        self._frequencies = axial_frequencies(c.head_dim, c.theta)
        self.patch_embed = _PatchEmbedding(c)
        self.pos_embed = nn.Embedding(c.places**2, c.hidden_size)
        self.blocks = [_Block(c) for _ in range(c.depth)]
        self.merger = _Merger(c)

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """Return the rows (tokens, out_size) of an image."""
        _, rows, columns = prepared.grid
        order = block_order(rows, columns, self._c.merge)
        x = self.patch_embed(prepared.pixels)
        x = x + self._positions(rows, columns, order).astype(x.dtype)
        at = np.stack([order // columns, order % columns], axis=1).astype(np.float32)
        angles = (at[:, :, None] * self._frequencies).reshape(len(order), 1, -1)
        cos, sin = turns(angles)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.merger(x)

    def scratch_bytes(self, tokens: int) -> int:
        c, itemsize = self._c, self.pos_embed.weight.itemsize
        num = tokens * c.merge**2
        numbers = 3 * c.patch_size**2
        read = num * (4 * numbers + itemsize * (1 + 2 * c.frames) * numbers)
        table = 4 * c.hidden_size * (2 * c.places**2 + 4 * num)
        return layer_bytes(num, c, itemsize) + read + table + 8 * num * c.head_dim

    def _positions(self, rows: int, columns: int, order: np.ndarray) -> mx.array:
        """Return the position embeddings (patches, hidden size) float32 in the order `order`: the square table interpolated to the grid of
        patches, so that corners match corners."""
        side = self._c.places
        table = self.pos_embed(mx.arange(side * side)).astype(mx.float32).reshape(side, -1)
        tall = (_stretch(rows, side) @ table).reshape(rows, side, -1)
        grid = _stretch(columns, side) @ tall  # (rows, columns, hidden size)
        return grid.reshape(rows * columns, -1)[mx.array(order)]


class _PatchEmbedding(nn.Module):
    def __init__(self, c: QwenVisionConfig) -> None:
        super().__init__()
        self._frames = c.frames
        self.proj = nn.Linear(3 * c.frames * c.patch_size**2, c.hidden_size)

    def __call__(self, pixels: np.ndarray) -> mx.array:
        """Return the embeddings (patches, hidden size) of patches. pixels (patches, 3 * patch_size^2): one frame, of which every other
        frame is a copy."""
        one = mx.array(pixels).astype(self.proj.weight.dtype).reshape(len(pixels), 3, 1, -1)
        every = mx.broadcast_to(one, (len(pixels), 3, self._frames, one.shape[-1]))
        return self.proj(every.reshape(len(pixels), -1))


class _Block(nn.Module):
    def __init__(self, c: QwenVisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.hidden_size, eps=_EPS)
        self.norm2 = nn.LayerNorm(c.hidden_size, eps=_EPS)
        self.attn = _Attention(c)
        self.mlp = _Mlp(c.hidden_size, c.intermediate_size, c.hidden_size)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        x = x + self.attn(layer_norm(x, self.norm1), cos, sin)
        return x + self.mlp.linear_fc2(gelu_tanh(self.mlp.linear_fc1(layer_norm(x, self.norm2))))


class _Attention(nn.Module):
    def __init__(self, c: QwenVisionConfig) -> None:
        super().__init__()
        self._c = c
        self.qkv = nn.Linear(c.hidden_size, 3 * c.hidden_size)
        self.proj = nn.Linear(c.hidden_size, c.hidden_size)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        c = self._c
        parts = self.qkv(x).reshape(len(x), 3, c.num_heads, c.head_dim)
        q, k, v = (parts[:, i] for i in range(3))
        return self.proj(attend(turned(q, cos, sin), turned(k, cos, sin), v, c.head_dim**-0.5))


class _Mlp(nn.Module):
    def __init__(self, size: int, inner: int, out: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(size, inner)
        self.linear_fc2 = nn.Linear(inner, out)


class _Merger(_Mlp):
    def __init__(self, c: QwenVisionConfig) -> None:
        wide = c.hidden_size * c.merge**2
        super().__init__(wide, wide, c.out_size)
        self.norm = nn.LayerNorm(c.hidden_size, eps=_EPS)

    def __call__(self, x: mx.array) -> mx.array:
        """Return one row for each block, (blocks, out_size). x (patches, hidden size): the patches of a block follow each other."""
        wide = self.linear_fc1.weight.shape[0]
        x = layer_norm(x, self.norm).reshape(-1, wide)
        return self.linear_fc2(gelu_erf(self.linear_fc1(x)))


def _stretch(num: int, side: int) -> mx.array:
    """Return weights (num, side) float32 that interpolate `num` points linearly between `side` points. The first points match, and the last
    points match."""
    at = np.arange(num, dtype=np.float32) * np.float32(side - 1) / np.float32(max(num - 1, 1))
    near = np.abs(at[:, None] - np.arange(side, dtype=np.float32))
    return mx.array(np.maximum(1 - near, 0).astype(np.float32))
