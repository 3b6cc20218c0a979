"""The vision tower of Gemma 3: SigLIP without its pooling head, then an average over blocks of patches, a norm and a projection.

Parameter names are those of the checkpoints behind `vision_tower.vision_model.`, and `multi_modal_projector.`; the patch projection is a
matrix, the projector's norm weight a factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.errors import ModelError
from mlxspec.images.prepared import PreparedImage
from mlxspec.models.config_values import Keys, Values, number, read, size
from mlxspec.models.layers import Parts
from mlxspec.models.vision.parts import attend, gelu_tanh, layer_bytes, layer_norm

_KEYS = Keys(
    only={
        "hidden_act": ("gelu_pytorch_tanh",),
        "num_channels": (3,),
        "vision_use_head": (False,),
    },
)


@dataclass(frozen=True, kw_only=True)
class SiglipConfig:
    """The shape of Gemma 3's vision tower. image_size, patch_size: pixels of a side. tokens: tokens of an image. out_size: the text model's
    hidden size."""

    num_layers: int = size("num_hidden_layers")
    hidden_size: int = size()
    intermediate_size: int = size()
    num_heads: int = size("num_attention_heads")
    image_size: int = size()
    patch_size: int = size()
    eps: float = number("layer_norm_eps", 1e-6)
    tokens: int
    out_size: int

    @classmethod
    def from_dict(cls, vision: Mapping[str, Any], tokens: int, out_size: int) -> SiglipConfig:
        """Return the shape from the `vision_config` of a config.json. tokens: tokens of an image. out_size: the text model's hidden size.
        Raises ModelError."""
        made = read(cls, Values(vision, _KEYS), tokens=tokens, out_size=out_size)
        if made.hidden_size % made.num_heads:
            raise ModelError(
                f"vision_config in config.json: cannot divide hidden_size by num_attention_heads ({made.hidden_size} by {made.num_heads})."
            )
        if made.side_tokens**2 != tokens or made.side % made.side_tokens:
            raise ModelError(
                f"config.json: {made.side} x {made.side} patches of an image make no {tokens} tokens (mm_tokens_per_image)."
            )
        return made

    @property
    def side(self) -> int:
        """Return the number of patches of an image's side."""
        return self.image_size // self.patch_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def side_tokens(self) -> int:
        return int(self.tokens**0.5)


class SiglipTower(nn.Module):
    """The VisionTower of Gemma 3, for images that `Gemma3Images` prepared."""

    def __init__(self, c: SiglipConfig) -> None:
        super().__init__()
        self._c = c
        self.embeddings = Parts(
            patch_embedding=nn.Linear(3 * c.patch_size**2, c.hidden_size),
            position_embedding=nn.Embedding(c.side**2, c.hidden_size),
        )
        self.encoder = Parts(layers=[_Layer(c) for _ in range(c.num_layers)])
        self.post_layernorm = nn.LayerNorm(c.hidden_size, eps=c.eps)
        self.multi_modal_projector = _Projector(c)

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """Return the rows (tokens, out_size) of an image."""
        weight = self.embeddings.patch_embedding.weight
        x = self.embeddings.patch_embedding(mx.array(prepared.pixels).astype(weight.dtype))
        x = x + self.embeddings.position_embedding(mx.arange(len(x)))
        for layer in self.encoder.layers:
            x = layer(x)
        return self.multi_modal_projector(layer_norm(x, self.post_layernorm))

    def scratch_bytes(self, tokens: int) -> int:
        c, itemsize = self._c, self.embeddings.patch_embedding.weight.itemsize
        num, numbers = c.side**2, 3 * c.patch_size**2
        return layer_bytes(num, c, itemsize) + num * (4 + itemsize) * numbers


class _Layer(nn.Module):
    def __init__(self, c: SiglipConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(c.hidden_size, eps=c.eps)
        self.layer_norm2 = nn.LayerNorm(c.hidden_size, eps=c.eps)
        self.self_attn = _Attention(c)
        self.mlp = Parts(
            fc1=nn.Linear(c.hidden_size, c.intermediate_size),
            fc2=nn.Linear(c.intermediate_size, c.hidden_size),
        )

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.self_attn(layer_norm(x, self.layer_norm1))
        return x + self.mlp.fc2(gelu_tanh(self.mlp.fc1(layer_norm(x, self.layer_norm2))))


class _Attention(nn.Module):
    def __init__(self, c: SiglipConfig) -> None:
        super().__init__()
        self._num_heads = c.num_heads
        self.q_proj = nn.Linear(c.hidden_size, c.hidden_size)
        self.k_proj = nn.Linear(c.hidden_size, c.hidden_size)
        self.v_proj = nn.Linear(c.hidden_size, c.hidden_size)
        self.out_proj = nn.Linear(c.hidden_size, c.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        q, k, v = (
            project(x).reshape(len(x), self._num_heads, -1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attend(q, k, v, q.shape[-1] ** -0.5))


class _Projector(nn.Module):
    def __init__(self, c: SiglipConfig) -> None:
        super().__init__()
        self._c = c
        self.mm_input_projection_weight = mx.zeros((c.hidden_size, c.out_size))
        self.mm_soft_emb_norm = nn.RMSNorm(c.hidden_size, eps=c.eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the averages over blocks of patches, normed and projected to (tokens, out_size). x (patches, hidden size): patches row by
        row."""
        side, step = self._c.side_tokens, self._c.side // self._c.side_tokens
        blocks = x.astype(mx.float32).reshape(side, step, side, step, -1)
        pooled = blocks.mean(axis=(1, 3)).reshape(side * side, -1).astype(x.dtype)
        return (
            mx.fast.rms_norm(pooled, self.mm_soft_emb_norm.weight, self._c.eps)
            @ self.mm_input_projection_weight
        )
