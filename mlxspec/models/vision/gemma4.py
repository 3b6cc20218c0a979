"""Vision of Gemma 4: a tower with two-axis rotary attention, pooled to one token for each block of patches; or, in models without a tower,
a projection of whole blocks.

Parameter names are those of the checkpoints behind `vision_tower.` or `vision_embedder.`, and `embed_vision.`.
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
from mlxspec.models.config_values import Keys, Values, flag, number, read, size
from mlxspec.models.layers import Parts
from mlxspec.models.vision.parts import (
    attend,
    axial,
    axial_frequencies,
    gelu_tanh,
    layer_bytes,
    layer_norm,
    turned,
    turns,
)

_KEYS = Keys(
    only={"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)},
)
_LAYER_NORM_EPS = 1e-5  # of models without a tower; not in their config


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig:
    """The shape of Gemma 4's vision tower. patch_size: pixels of a patch's side. pool: patches of the side of a block, which becomes one
    token. places: rows of the table of positions, for each axis. clips: whether inputs and outputs of linear layers are clipped to stored
    ranges. standardizes: whether pooled rows are shifted and scaled by stored vectors. out_size: the text model's hidden size."""

    num_layers: int = size("num_hidden_layers")
    hidden_size: int = size()
    intermediate_size: int = size()
    num_heads: int = size("num_attention_heads")
    num_kv_heads: int
    head_dim: int
    patch_size: int = size("patch_size", 16)
    pool: int = size("pooling_kernel_size", 3)
    places: int = size("position_embedding_size", 10240)
    eps: float = number("rms_norm_eps", 1e-6)
    theta: float
    clips: bool = flag("use_clipped_linears")
    standardizes: bool = flag("standardize")
    out_size: int

    @classmethod
    def from_dict(cls, vision: Mapping[str, Any], out_size: int) -> Gemma4VisionConfig:
        """Return the shape from the `vision_config` of a config.json. out_size: the text model's hidden size. Raises ModelError."""
        get = Values(vision, _KEYS)
        heads = get.size("num_attention_heads")
        made = read(
            cls,
            get,
            num_kv_heads=get.size("num_key_value_heads", heads),
            head_dim=get.size("head_dim", get.size("hidden_size") // heads),
            theta=axial(get).number("rope_theta", 100.0),
            out_size=out_size,
        )
        if made.num_heads % made.num_kv_heads or made.head_dim % 4:
            raise ModelError(
                f"vision_config in config.json: {made.num_heads} heads of {made.head_dim} numbers over {made.num_kv_heads} cannot be used."
            )
        return made


class Gemma4VisionTower(nn.Module):
    """The VisionTower of Gemma 4, for images that `Gemma4Images` prepared."""

    def __init__(self, c: Gemma4VisionConfig) -> None:
        super().__init__()
        self._c = c
        self._frequencies = axial_frequencies(c.head_dim, c.theta)
        self.patch_embedder = _PatchEmbedder(c)
        self.encoder = Parts(layers=[_Layer(c) for _ in range(c.num_layers)])
        if c.standardizes:
            self.std_bias, self.std_scale = mx.zeros(c.hidden_size), mx.ones(c.hidden_size)
        self.embed_vision = _Embedder(c.hidden_size, c.out_size, c.eps)

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """Return the rows (tokens, out_size) of an image."""
        _, rows, columns = prepared.grid
        down, across = np.divmod(np.arange(rows * columns), columns)
        x = self.patch_embedder(prepared.pixels, across, down)
        # a head's first half turns by the column, its second by the row
        at = np.stack([across, down], axis=1).astype(np.float32)
        cos, sin = turns((at[:, :, None] * self._frequencies)[:, None])
        for layer in self.encoder.layers:
            x = layer(x, cos, sin)
        pooled = self._pooled(x, rows, columns)
        if self._c.standardizes:
            pooled = (pooled - self.std_bias.astype(mx.float32)) * self.std_scale.astype(mx.float32)
        return self.embed_vision(pooled.astype(x.dtype))

    def scratch_bytes(self, tokens: int) -> int:
        c, itemsize = self._c, self.patch_embedder.position_embedding_table.itemsize
        num, numbers = tokens * c.pool**2, 3 * c.patch_size**2
        return layer_bytes(num, c, itemsize) + num * (3 * 4 + itemsize) * numbers + 8 * num * c.head_dim

    def _pooled(self, x: mx.array, rows: int, columns: int) -> mx.array:
        """Return the averages over blocks of patches (tokens, hidden size), scaled and in float32, as they exceed float16. x (patches,
        hidden size): patches row by row."""
        pool, size = self._c.pool, self._c.hidden_size
        blocks = x.astype(mx.float32).reshape(rows // pool, pool, columns // pool, pool, size)
        means = blocks.mean(axis=(1, 3)).reshape(-1, size).astype(x.dtype)
        return means.astype(mx.float32) * size**0.5


class _PatchEmbedder(nn.Module):
    def __init__(self, c: Gemma4VisionConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(3 * c.patch_size**2, c.hidden_size, bias=False)
        self.position_embedding_table = mx.zeros((2, c.places, c.hidden_size))

    def __call__(self, pixels: np.ndarray, across: np.ndarray, down: np.ndarray) -> mx.array:
        """Return the embeddings (patches, hidden size) of patches. pixels (patches, 3 * patch_size^2): values from 0 to 1. across, down
        (patches,): the column and the row of each patch."""
        table = self.position_embedding_table
        x = self.input_proj((2 * (mx.array(pixels) - 0.5)).astype(table.dtype))
        return x + (table[0][mx.array(across)] + table[1][mx.array(down)])


class _Layer(nn.Module):
    def __init__(self, c: Gemma4VisionConfig) -> None:
        super().__init__()
        self._eps = c.eps
        self.input_layernorm = nn.RMSNorm(c.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size)
        self.pre_feedforward_layernorm = nn.RMSNorm(c.hidden_size)
        self.post_feedforward_layernorm = nn.RMSNorm(c.hidden_size)
        self.self_attn = _Attention(c)
        self.mlp = _Mlp(c)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        def normed(y: mx.array, norm: nn.RMSNorm) -> mx.array:
            return mx.fast.rms_norm(y, norm.weight, self._eps)

        attended = self.self_attn(normed(x, self.input_layernorm), cos, sin)
        x = x + normed(attended, self.post_attention_layernorm)
        return x + normed(
            self.mlp(normed(x, self.pre_feedforward_layernorm)), self.post_feedforward_layernorm
        )


class _Attention(nn.Module):
    def __init__(self, c: Gemma4VisionConfig) -> None:
        super().__init__()
        self._c = c
        wide, narrow = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = _Linear(c.hidden_size, wide, clips=c.clips)
        self.k_proj = _Linear(c.hidden_size, narrow, clips=c.clips)
        self.v_proj = _Linear(c.hidden_size, narrow, clips=c.clips)
        self.o_proj = _Linear(wide, c.hidden_size, clips=c.clips)
        self.q_norm = nn.RMSNorm(c.head_dim)
        self.k_norm = nn.RMSNorm(c.head_dim)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        c = self._c

        def heads(linear: _Linear, weight: mx.array | None) -> mx.array:
            return mx.fast.rms_norm(linear(x).reshape(len(x), -1, c.head_dim), weight, c.eps)

        def on_axes(y: mx.array) -> mx.array:
            return turned(y.reshape(*y.shape[:2], 2, -1), cos, sin).reshape(y.shape)

        q, k = heads(self.q_proj, self.q_norm.weight), heads(self.k_proj, self.k_norm.weight)
        return self.o_proj(attend(on_axes(q), on_axes(k), heads(self.v_proj, None), 1.0))


class _Mlp(nn.Module):
    def __init__(self, c: Gemma4VisionConfig) -> None:
        super().__init__()
        self.gate_proj = _Linear(c.hidden_size, c.intermediate_size, clips=c.clips)
        self.up_proj = _Linear(c.hidden_size, c.intermediate_size, clips=c.clips)
        self.down_proj = _Linear(c.intermediate_size, c.hidden_size, clips=c.clips)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(gelu_tanh(self.gate_proj(x)) * self.up_proj(x))


class _Linear(nn.Module):
    """A linear layer without a bias. With `clips`, its inputs and outputs are clipped to stored ranges."""

    def __init__(self, size: int, out: int, *, clips: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out, bias=False)
        if clips:
            self.input_min, self.output_min = mx.array(-np.inf), mx.array(-np.inf)
            self.input_max, self.output_max = mx.array(np.inf), mx.array(np.inf)

    def __call__(self, x: mx.array) -> mx.array:
        if "input_min" not in self:
            return self.linear(x)
        x = mx.clip(x, self.input_min.astype(x.dtype), self.input_max.astype(x.dtype))
        y = self.linear(x)
        return mx.clip(y, self.output_min.astype(y.dtype), self.output_max.astype(y.dtype))


class _Embedder(nn.Module):
    """The projection to the text model: an RMS norm without a weight, then a linear layer."""

    def __init__(self, size: int, out: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.embedding_projection = nn.Linear(size, out, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.embedding_projection(mx.fast.rms_norm(x, None, self._eps))


@dataclass(frozen=True, kw_only=True)
class JoinedBlocksConfig:
    """The shape of the image embedding of Gemma 4 models without a vision tower. side: pixels of a block's side. places: rows of the table
    of positions, for each axis. out_size: the text model's hidden size."""

    side: int
    embed_size: int = size("mm_embed_dim")
    places: int = size("mm_posemb_size", 1120)
    eps: float = number("rms_norm_eps", 1e-6)
    out_size: int

    @classmethod
    def from_dict(cls, vision: Mapping[str, Any], out_size: int) -> JoinedBlocksConfig:
        """Return the shape from the `vision_config` of a config.json. out_size: the text model's hidden size. Raises ModelError."""
        get = Values(vision)
        side = get.size("patch_size", 16) * get.size("pooling_kernel_size", 3)
        return read(cls, get, side=side, out_size=out_size)


class JoinedBlocks(nn.Module):
    """The image embedding of Gemma 4 models without a vision tower, with the interface of VisionTower. It takes images that `Gemma4Images`
    prepared with `joins_blocks`."""

    def __init__(self, c: JoinedBlocksConfig) -> None:
        super().__init__()
        self.patch_ln1 = nn.LayerNorm(3 * c.side**2, eps=_LAYER_NORM_EPS)
        self.patch_dense = nn.Linear(3 * c.side**2, c.embed_size)
        self.patch_ln2 = nn.LayerNorm(c.embed_size, eps=_LAYER_NORM_EPS)
        self.pos_embedding = mx.zeros((c.places, 2, c.embed_size))
        self.pos_norm = nn.LayerNorm(c.embed_size, eps=_LAYER_NORM_EPS)
        self.embed_vision = _Embedder(c.embed_size, c.out_size, c.eps)

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """Return the rows (tokens, out_size) of an image."""
        _, rows, columns = prepared.grid
        down, across = np.divmod(np.arange(rows * columns), columns)
        table = self.pos_embedding
        x = layer_norm(mx.array(prepared.pixels).astype(table.dtype), self.patch_ln1)
        x = layer_norm(self.patch_dense(x), self.patch_ln2)
        x = x + (table[mx.array(across), 0] + table[mx.array(down), 1])
        return self.embed_vision(layer_norm(x, self.pos_norm))

    def scratch_bytes(self, tokens: int) -> int:
        itemsize = self.pos_embedding.itemsize
        numbers, size = len(self.patch_ln1.weight), len(self.patch_ln2.weight)
        return tokens * (4 * numbers + itemsize * (4 * numbers + 6 * size))
