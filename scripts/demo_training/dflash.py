"""The demo family's DFlash2 drafter in PyTorch: its network, its training on the frozen target, its config.json, and its figures.

It learns the target's distribution at each position of a block, given only what stands before the block: blocks of BLOCK tokens begin at
random positions of each row, and all blocks of a row see the row's context cells up to their beginning. The selector, which knows the token
before, learns what follows it in the text. Knows full sequences only: no cache, no generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from .batches import Data
from .dflash_start import begin_with
from .export import read_member
from .network import TARGET, FeedForward, LanguageModel, Shape, rotate
from .streams import LAYERS, Norm, begin_small, read_folder, streams_of
from .tuning import Plan, _optimise, _Source

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
        inside = (
            (q.view(split) @ own_k.view(split).transpose(-1, -2)).float().view(batch, s.heads, num, BLOCK)
        )
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
        self.kernel_projection = nn.Linear(
            s.hidden, 2 * s.conv_kernel * (s.hidden // s.conv_group), bias=False
        )

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


def tune_dflash(folder: Path, target_folder: Path, plan: Plan, *, world: int = 1, rank: int = 0) -> None:
    """Train it, and write `dflash.pt`. target_folder: the shipped target. world, rank: of processes that each take rows of their own."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    data = Data(folder)
    target = read_member(target_folder, TARGET)
    assert isinstance(target, LanguageModel)
    source = _Source(data, plan, None)

    def drawn(number: int) -> tuple[Tensor, Tensor]:
        """Rows, and where blocks of them begin."""
        ids = source.batch(number)
        rng = np.random.default_rng([plan.seed, number, 2])
        places = np.stack([rng.choice(plan.length - 4, BLOCKS, replace=False) for _ in ids])
        return ids, torch.from_numpy(np.sort(places)) + 4

    drafter = DFlash(BLOCK_SHAPE)
    texts = [drawn(plan.steps * world + i) for i in range(3)]
    begin_with(drafter, target, *(torch.cat(part) for part in zip(*texts, strict=True)), BLOCK, MASK)  # type: ignore[arg-type]
    target.compile_layers()
    forward = torch.compile(drafter.forward, dynamic=False)
    decay = DECAY ** torch.arange(BLOCK - 1)

    def loss_at(step: int) -> tuple[Tensor, str]:
        ids, starts = drawn(step * world + rank)
        places = _behind(starts)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                streams, hidden = streams_of(target, ids)
                wanted = target.lm_head(_at(hidden, places))
            drafted = forward(target.model.embed_tokens, streams, ids.gather(1, starts), starts)
            before = ids.gather(1, places).view(drafted.shape[:-1])
            alone = target.lm_head(drafted).float().flatten(0, -2)
            logits = alone + drafter.candidate_selector(drafted, before).float().flatten(0, -2)
        told = logits.log_softmax(-1)
        soft = wanted.float().softmax(-1).flatten(0, -2)
        each = -(soft * (told + ALONE * alone.log_softmax(-1))).sum(-1).view(-1, BLOCK - 1)
        with torch.no_grad():
            text = ids.gather(1, places + 1).view(-1, 1)
            stands = told.gather(1, text).view(-1, BLOCK - 1).exp().cumprod(-1)
            weights = FLOOR * decay + torch.cat([torch.ones_like(stands[:, :1]), stands[:, :-1]], -1)
            same = (logits.argmax(-1) == soft.argmax(-1)).view(-1, BLOCK - 1).float()
            length = 1 + float(same.cumprod(-1).sum(-1).mean())
        note = " ".join(f"{float(x):.3f}" for x in same.mean(0)[[0, 1, 2, BLOCK - 2]])
        return (each * weights).sum() / weights.sum(), f"{note} run {length:.3f}"

    inner = [p for n, p in drafter.named_parameters() if p.ndim == 2 and "codebook" not in n]
    known = {id(p) for p in inner}
    groups = [{"params": [p for p in drafter.parameters() if id(p) not in known], "scale": 1.0}]
    _optimise(folder / "dflash.pt", drafter, groups, plan, loss_at, inner, world, rank)


def config() -> dict[str, object]:
    """config.json, as DFlash drafters are published."""
    s = BLOCK_SHAPE
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": s.rope_theta,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "num_target_layers": TARGET.layers,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": list(LAYERS),
            "conv_kernel_size": s.conv_kernel,
            "conv_group_size": s.conv_group,
            "selector_rank": s.rank,
            "selector_top_k": s.top_k,
        },
        "dtype": "bfloat16",
    }


def read_dflash(folder: Path) -> DFlash:
    """The exported weights back in the training network, float32, frozen."""
    drafter = DFlash(BLOCK_SHAPE)
    drafter.load_state_dict(read_folder(folder))
    return drafter.requires_grad_(False).eval()


def picked(target: LanguageModel, drafter: DFlash, drafted: Tensor, firsts: Tensor) -> Tensor:
    """The draft of each block, from left to right: hiddens (B, blocks, BLOCK - 1, hidden), newest known tokens (B, blocks) -> ids
    (B, blocks, BLOCK - 1)."""
    before, found = firsts, []
    for j in range(BLOCK - 1):
        logits, ids = target.lm_head(drafted[:, :, j]).topk(drafter.s.top_k)
        scores = logits + drafter.candidate_selector(drafted[:, :, j], before).gather(-1, ids)
        before = ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
        found.append(before)
    return torch.stack(found, -1)


def agreement(target: LanguageModel, drafter: DFlash, ids: Tensor, skip: int = 32) -> dict[str, object]:
    """Figures over rows of ids (B, T), T a multiple of 32, with a block at every position from `skip` on. A drafted token is accepted where
    it is the target's likeliest. Depth j is conditional on the tokens below j being those of the text: the drafter is not told the text, so
    there is no other way to compare it with the target behind the same tokens. tokens_per_round: 1 and the products of those shares."""
    accepted, seen = torch.zeros(BLOCK - 1), torch.zeros(BLOCK - 1)
    for rows in ids.split(4):
        streams, hidden = streams_of(target, rows)
        best = target.lm_head(hidden).argmax(-1)
        starts = torch.arange(skip, rows.shape[1] - BLOCK).expand(len(rows), -1)
        drafted = drafter(target.model.embed_tokens, streams, rows.gather(1, starts), starts)
        tokens = picked(target, drafter, drafted, rows.gather(1, starts))
        places = _behind(starts)
        wanted = best.gather(1, places).view(tokens.shape)
        text = rows.gather(1, places + 1).view(tokens.shape)
        follows = torch.cumprod((tokens == text).long(), -1)
        stands = torch.cat([torch.ones_like(follows[..., :1]), follows[..., :-1]], -1).bool()
        seen += stands.flatten(0, 1).sum(0)
        accepted += (stands & (tokens == wanted)).flatten(0, 1).sum(0)
    share = accepted / seen.clamp(min=1)
    return {
        "dflash_accepted_at_depth": [round(float(x), 4) for x in share],
        "dflash_tokens_per_round": round(1 + float(share.cumprod(0).sum()), 3),
        "blocks": int(seen[0]),
    }
