"""The demo family's DFlash2 drafter in PyTorch: its network, and its training on the frozen target.

It learns the target's distribution at each position of a block, given only what stands before the block: blocks of BLOCK tokens begin at
random positions of each row, and all blocks of a row see the row's context cells up to their beginning. The selector, which knows the token
before, learns what follows it in the text. The shipped one began close to the MTP head (docs/demo.md). Knows full sequences only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from .dataset import Data
from .heads import LAYERS, Norm, begin_small, streams_of
from .network import TARGET, FeedForward, LanguageModel, Shape, rotate
from .train import Plan, Rows, compile_layers, optimise

PLAN = Plan(steps=3000, rate=2e-3, weight_decay=0.0)
BLOCK = 8  # tokens of a block: the newest known one, and the drafted ones
BLOCKS = 32  # that are trained in each row
MASK = 127  # a token that stands in no text of the data set
# Weight of a position's loss: how likely the text's tokens before it are drafted, and a floor that falls by DECAY from one to the next.
FLOOR, DECAY = 0.15, 0.85
ALONE = 0.2  # weight of the loss without the selector, which needs the right tokens among its candidates


@dataclass(frozen=True, kw_only=True)
class BlockShape(Shape):
    """`layers` of attention that is rotated whole. Every head has keys and values of its own: what a mask knows of the text comes through
    values alone."""

    layers: int = 4
    ffn: int = 288
    kv_heads: int = TARGET.heads
    rotary_fraction: float = 1.0
    mtp: bool = False
    conv_kernel: int = 2
    conv_group: int = 64
    rank: int = 20
    top_k: int = 16


BLOCK_SHAPE = BlockShape()


class Mixer(nn.Module):
    """Attention with norms of heads, whose keys and values are made of context cells and of the block."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(s.head_dim), Norm(s.head_dim)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, N, heads, D) -> (B, heads, N, D), rotated by positions (B, N)."""
        s = self.s
        rates = s.rope_theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angles = positions[:, None, :, None].float() * rates
        angles = torch.cat([angles, angles], -1)
        return rotate(x.transpose(1, 2), angles.cos().to(x.dtype), angles.sin().to(x.dtype))

    def _keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        s, share = self.s, self.s.heads // self.s.kv_heads
        shape = (*x.shape[:2], s.kv_heads, s.head_dim)
        k = self._turned(self.k_norm(self.k_proj(x).view(shape)), positions)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        return k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)

    def forward(self, x: Tensor, cells: Tensor, starts: Tensor) -> Tensor:
        """x (B, blocks * BLOCK, hidden): normed blocks; cells (B, T, hidden); starts (B, blocks): the position of each block's first
        token, which sees the cells before it."""
        s, (batch, num, _), length = self.s, x.shape, cells.shape[1]
        places = (starts[:, :, None] + torch.arange(BLOCK)).reshape(batch, num)
        q = self._turned(self.q_norm(self.q_proj(x).view(batch, num, s.heads, s.head_dim)), places)
        own_k, own_v = self._keys(x, places)
        k, v = self._keys(cells, torch.arange(length).expand(batch, length))
        split = (batch, s.heads, num // BLOCK, BLOCK, s.head_dim)
        seen = torch.arange(length) < starts.repeat_interleave(BLOCK, 1)[:, None, :, None]
        before = (q @ k.transpose(-1, -2)).float().masked_fill(~seen, -1e9)
        inside = (q.view(split) @ own_k.view(split).transpose(-1, -2)).float().view(batch, s.heads, num, -1)
        weights = torch.softmax(torch.cat([before, inside], -1) * s.head_dim**-0.5, -1).to(q.dtype)
        out = weights[..., :length] @ v
        own = weights[..., length:].view(*split[:-1], BLOCK) @ own_v.view(split)
        out = out + own.reshape(out.shape)
        return self.o_proj(out.transpose(1, 2).reshape(batch, num, -1))  # type: ignore[no-any-return]


class BlockConv(nn.Module):
    """Causal convolutions along a block, before a sublayer and behind it. They begin by changing nothing."""

    def __init__(self, s: BlockShape) -> None:
        super().__init__()
        self.s = s
        self.base_kernel = nn.Parameter(torch.zeros(2, s.conv_kernel, s.hidden))
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
        num_taps = 2 * s.conv_kernel * (s.hidden // s.conv_group)
        self.kernel_projection = nn.Linear(s.hidden, num_taps, bias=False)

    def taps(self, x: Tensor) -> Tensor:
        """x (B, N, hidden), the input of the first -> (B, N, 2, kernel, hidden)"""
        s = self.s
        found = self.kernel_projection(x).view(*x.shape[:2], 2, s.conv_kernel, s.hidden // s.conv_group)
        return self.base_kernel + found.repeat_interleave(s.conv_group, -1)

    def forward(self, which: int, x: Tensor, taps: Tensor) -> Tensor:
        """which: 0 before, 1 behind. x (B, N, hidden), N a multiple of BLOCK"""
        blocks = x.view(x.shape[0], -1, BLOCK, x.shape[-1])
        out = taps[:, :, which, 0] * x
        for t in range(1, self.s.conv_kernel):
            seen = torch.nn.functional.pad(blocks[:, :, :-t], (0, 0, t, 0)).view(x.shape)
            out = out + taps[:, :, which, t] * seen
        return out


class BlockLayer(nn.Module):
    def __init__(self, s: BlockShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Mixer(s), FeedForward(s)
        self.attention_conv, self.mlp_conv = BlockConv(s), BlockConv(s)
        self.input_layernorm, self.post_attention_layernorm = Norm(s.hidden), Norm(s.hidden)

    def forward(self, x: Tensor, cells: Tensor, starts: Tensor) -> Tensor:
        seen = self.input_layernorm(x)
        taps = self.attention_conv.taps(seen)
        mixed = self.self_attn(self.attention_conv(0, seen, taps), cells, starts)
        x = x + self.attention_conv(1, mixed, taps)
        seen = self.post_attention_layernorm(x)
        taps = self.mlp_conv.taps(seen)
        return x + self.mlp_conv(1, self.mlp(self.mlp_conv(0, seen, taps)), taps)  # type: ignore[no-any-return]


class Selector(nn.Module):
    """How well a token follows the one before it at a place."""

    def __init__(self, s: BlockShape) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(s.vocab, s.rank))
        self.successor_codebook = nn.Parameter(torch.empty(s.vocab, s.rank))
        self.hidden_projection = nn.Linear(s.hidden, s.rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """hidden (..., hidden), before (...) -> scores of all tokens (..., vocab)"""
        wanted = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return wanted @ self.successor_codebook.T  # type: ignore[no-any-return]


class DFlash(nn.Module):
    """Embedding and language-model head are the target's."""

    def __init__(self, s: BlockShape) -> None:
        super().__init__()
        self.s = s
        self.fc = nn.Linear(len(LAYERS) * s.hidden, s.hidden, bias=False)
        self.hidden_norm = Norm(s.hidden)
        self.layers = nn.ModuleList([BlockLayer(s) for _ in range(s.layers)])
        self.norm = Norm(s.hidden)
        self.candidate_selector = Selector(s)
        begin_small(self)
        nn.init.zeros_(self.candidate_selector.successor_codebook)
        nn.init.normal_(self.candidate_selector.predecessor_codebook)
        for layer in self.layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                nn.init.zeros_(conv.kernel_projection.weight)

    def forward(self, embed: nn.Embedding, streams: Tensor, firsts: Tensor, starts: Tensor) -> Tensor:
        """Hiddens (B, blocks, BLOCK - 1, hidden) of the drafted positions. streams (B, T, layers * hidden); firsts (B, blocks): ids of the
        newest known tokens; starts (B, blocks): their positions."""
        batch, blocks = firsts.shape
        ids = torch.full((batch, blocks, BLOCK), MASK)
        ids[:, :, 0] = firsts
        cells = self.hidden_norm(self.fc(streams))
        x = embed(ids.view(batch, -1)).to(cells.dtype)
        for layer in self.layers:
            x = layer(x, cells, starts)
        return self.norm(x).view(batch, blocks, BLOCK, -1)[:, :, 1:]  # type: ignore[no-any-return]


def _behind(starts: Tensor) -> Tensor:
    """starts (B, blocks) -> (B, blocks * (BLOCK - 1)): the positions whose output predicts each drafted token."""
    return (starts[:, :, None] + torch.arange(BLOCK - 1)).reshape(len(starts), -1)


def _at(x: Tensor, places: Tensor) -> Tensor:
    """x (B, T, D), places (B, N) -> (B, N, D)"""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def tune_dflash(work: Path, target: LanguageModel, plan: Plan) -> None:
    """Train it on the frozen target, and write `dflash.pt`."""
    torch.manual_seed(plan.seed)
    drafter, rows = DFlash(BLOCK_SHAPE), Rows(Data(work), plan)
    decay = DECAY ** torch.arange(BLOCK - 1)
    compile_layers(plan, target.model, drafter)

    def losses(step: int) -> Iterator[tuple[Tensor, str]]:
        ids = rows.batch(step)
        rng = np.random.default_rng([plan.seed, step, 2])
        begins = np.stack([rng.choice(plan.length - 4, BLOCKS, replace=False) for _ in ids])
        starts = torch.from_numpy(np.sort(begins)) + 4
        places = _behind(starts)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                streams, hidden = streams_of(target, ids)
                wanted = target.lm_head(_at(hidden, places))
            drafted = drafter(target.model.embed_tokens, streams, ids.gather(1, starts), starts)
            before = ids.gather(1, places).view(drafted.shape[:-1])
            alone = target.lm_head(drafted).float().flatten(0, -2)
            logits = alone + drafter.candidate_selector(drafted, before).float().flatten(0, -2)
        told = logits.log_softmax(-1)
        soft = wanted.float().softmax(-1).flatten(0, -2)
        each = -(soft * (told + ALONE * alone.log_softmax(-1))).sum(-1).view(-1, BLOCK - 1)
        with torch.no_grad():
            text = ids.gather(1, places + 1).view(-1, 1)
            reached = told.gather(1, text).view(-1, BLOCK - 1).exp().cumprod(-1)
            weights = FLOOR * decay + torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], -1)
            same = (logits.argmax(-1) == soft.argmax(-1)).view(-1, BLOCK - 1).float()
            length = 1 + float(same.cumprod(-1).sum(-1).mean())
        yield (each * weights).sum() / weights.sum(), f"tokens a round {length:.3f}"

    named = drafter.named_parameters()
    matrices = [p for name, p in named if p.ndim == 2 and "codebook" not in name]
    optimise(work / "dflash.pt", drafter, losses, plan, matrices)
