"""The vision tower of Qwen3.5 in PyTorch, and a text network that reads its rows, for training tiny models on a CPU.

Parameter names are the HF ones: the tower's behind `visual.`, the text network's as in network.py. Knows whole sequences only. A batch is
of pictures of one size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .network import Attention, LanguageModel, Shape, rotate

FRAMES = 2  # a still picture is repeated


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """Sizes; places: of a side of the square table of positions; out: the text network's hidden size."""

    depth: int = 3
    hidden: int = 96
    ffn: int = 256
    heads: int = 2
    patch: int = 8
    merge: int = 2
    places: int = 24
    out: int = 128
    theta: float = 10_000.0


class Tower(nn.Module):
    def __init__(self, s: TowerShape) -> None:
        super().__init__()
        self.s = s
        block = FRAMES, s.patch, s.patch
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv3d(3, s.hidden, block, block)})
        self.pos_embed = nn.Embedding(s.places**2, s.hidden)
        nn.init.normal_(self.pos_embed.weight, std=0.3)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.depth))
        self.merger = Merger(s)

    def forward(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """pixels (B, rows * columns, 3 * patch^2), patches of a merge block behind each other -> (B, tokens, out)"""
        s = self.s
        order = block_order(rows, columns, s.merge)
        weight = self.patch_embed["proj"].weight.sum(2).reshape(s.hidden, -1)
        x = pixels @ weight.T + self.patch_embed["proj"].bias
        table = self.pos_embed.weight.reshape(s.places, -1)
        tall = (_stretch(rows, s.places) @ table).reshape(rows, s.places, -1)
        grid = (_stretch(columns, s.places) @ tall).reshape(rows * columns, -1)
        x = x + grid[order]
        half = s.hidden // s.heads // 2
        rates = s.theta ** (-torch.arange(0, half, 2).float() / half)
        at = torch.stack([order // columns, order % columns], 1).float()
        angles = (at[:, :, None] * rates).flatten(1)
        angles = torch.cat([angles, angles], -1)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.merger(x)


class Block(nn.Module):
    def __init__(self, s: TowerShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(s.hidden, eps=1e-6), nn.LayerNorm(s.hidden, eps=1e-6)
        self.attn = PatchAttention(s)
        inner, outer = nn.Linear(s.hidden, s.ffn), nn.Linear(s.ffn, s.hidden)
        self.mlp = nn.ModuleDict({"linear_fc1": inner, "linear_fc2": outer})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        inner = F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        return x + self.mlp["linear_fc2"](inner)


class PatchAttention(nn.Module):
    def __init__(self, s: TowerShape) -> None:
        super().__init__()
        self.heads = s.heads
        self.qkv, self.proj = nn.Linear(s.hidden, 3 * s.hidden), nn.Linear(s.hidden, s.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, num, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, num, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.proj(out.transpose(1, 2).reshape(batch, num, -1))


class Merger(nn.Module):
    def __init__(self, s: TowerShape) -> None:
        super().__init__()
        self.wide = s.hidden * s.merge**2
        self.norm = nn.LayerNorm(s.hidden, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(self.wide, self.wide), nn.Linear(self.wide, s.out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).reshape(len(x), -1, self.wide)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Turned(Attention):
    """Attention whose positions have three axes: `angles` (1, T, rotary dims) are set before a forward."""

    angles: Tensor

    def angles_of(self, length: int, device: torch.device) -> Tensor:
        return self.angles


class Reader(nn.Module):
    """A text network with a tower."""

    def __init__(self, text: Shape, tower: TowerShape) -> None:
        super().__init__()
        self.text, self.visual = LanguageModel(text), Tower(tower)
        for module in self.text.modules():
            if isinstance(module, Attention):
                module.__class__ = Turned

    def hidden(self, ids: Tensor, image: Tensor, places: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """ids (B, T); image (B, tokens, H): rows for the columns `places` (tokens,); positions (T, 3) -> (embeddings, hiddens), both
        (B, T, H)."""
        self.turn(positions)
        embedded = self.text.model.embed_tokens(ids).index_copy(1, places, image)
        x = embedded
        for layer in self.text.model.layers:
            x = layer(x)
        return embedded, self.text.model.norm(x)

    def drafts(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Hiddens (B, T - 1, H) of the multi-token head's first step: cell t has embedding t + 1 and hidden t, and predicts token t + 2."""
        assert self.text.mtp is not None
        for module in self.text.mtp.modules():
            if isinstance(module, Turned):
                module.angles = module.angles[:, : hidden.shape[1] - 1]
        return self.text.mtp(embedded[:, 1:], hidden[:, :-1])

    def turn(self, positions: Tensor) -> None:
        """Set the angles of every attention layer. positions (T, 3)."""
        s = self.text.s
        dims = int(s.head_dim * s.rotary_fraction)
        rates = s.rope_theta ** (-torch.arange(0, dims, 2).float() / dims)
        angles = positions[:, 0:1].float() * rates
        third = len(rates) // 3
        for axis in (1, 2):
            taken = slice(axis, 3 * third, 3)
            angles[:, taken] = positions[:, axis : axis + 1].float() * rates[taken]
        angles = torch.cat([angles, angles], -1)[None]
        for module in self.text.modules():
            if isinstance(module, Turned):
                module.angles = angles


def block_order(rows: int, columns: int, merge: int) -> Tensor:
    """(rows * columns,): which patch, counted row by row, stands where."""
    grid = torch.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    return grid.permute(0, 2, 1, 3).flatten()


def _stretch(num: int, side: int) -> Tensor:
    """(num, side): interpolates between `side` points, corners on corners."""
    at = torch.arange(num).float() * (side - 1) / max(num - 1, 1)
    return (1 - (at[:, None] - torch.arange(side).float()).abs()).clamp(min=0)
