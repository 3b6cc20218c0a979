"""The demo family's EAGLE-3 drafter in PyTorch: its network, and its training on the frozen target.

It is trained as the MTP head is: three recursive steps that learn the target's distribution, here over the tokens that it has rows for.
The shipped one began close to the MTP head (docs/demo.md); from random weights it needs more steps. Parameter names are those of the
speculators library. Knows full sequences only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from .dataset import Data
from .heads import DEPTH_WEIGHTS, LAYERS, Norm, begin_small, shifted, streams_of
from .network import TARGET, FeedForward, LanguageModel, Shape, attend_to_chain, rotate
from .train import Plan, Rows, compile_layers, optimise, soft_loss

PLAN = Plan(steps=3000, rate=1e-3, weight_decay=0.0)
ROWS = 1408  # of the target's 2,048 tokens: the most frequent ones


@dataclass(frozen=True, kw_only=True)
class EagleShape(Shape):
    """`rows` of the language-model head. A cell's token enters the residual stream through values alone, so every head has its own, and
    six heads more than the target's carry embedding and hidden."""

    heads: int = 6 + TARGET.heads
    kv_heads: int = 6 + TARGET.heads
    rows: int = ROWS
    mtp: bool = False


EAGLE = EagleShape()


class Mixer(nn.Module):
    """Causal attention without norms of heads, over the embedding beside the hidden."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(2 * s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def project(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys and values (B, H, T, D); position of the first token is `offset`."""
        batch, length, _ = x.shape
        s = self.s
        q, k, v = (
            part(x).view(batch, length, -1, s.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        dims = int(s.head_dim * s.rotary_fraction)
        rates = s.rope_theta ** (-torch.arange(0, dims, 2).float() / dims)
        angles = torch.arange(offset, offset + length).float()[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        share = s.heads // s.kv_heads
        return (
            rotate(q, cos, sin),
            rotate(k, cos, sin).repeat_interleave(share, 1),
            v.repeat_interleave(share, 1),
        )

    def join(self, out: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, hidden)"""
        batch, _, length, _ = out.shape
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class EagleLayer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Mixer(s), FeedForward(s)
        self.input_layernorm, self.hidden_norm = Norm(s.hidden), Norm(s.hidden)
        self.post_attention_layernorm = Norm(s.hidden)


class Eagle3(nn.Module):
    """ids: the target's tokens of the head's rows, ascending. The embedding is the target's."""

    def __init__(self, s: EagleShape, ids: Tensor) -> None:
        super().__init__()
        self.s = s
        self.fc = nn.Linear(len(LAYERS) * s.hidden, s.hidden, bias=False)
        self.layers = nn.ModuleList([EagleLayer(s)])
        self.norm = Norm(s.hidden)
        self.lm_head = nn.Linear(s.hidden, s.rows, bias=False)
        self.register_buffer("d2t", ids - torch.arange(s.rows))
        begin_small(self)

    @property
    def ids(self) -> Tensor:
        """(rows,)"""
        return self.d2t + torch.arange(self.s.rows)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]

    def recurse(self, embed: nn.Embedding, streams: Tensor, ids: Tensor, steps: int) -> list[Tensor]:
        """Hiddens of `steps` recursive steps at every cell, as the MTP head's `recurse` has them: streams (B, T, layers * H) come shifted
        by one, ids (B, >= T + steps - 1); each step but the first takes the output of the one before, not normed."""
        length = streams.shape[1]
        layer: EagleLayer = self.layers[0]  # type: ignore[assignment]
        hidden = self.fc(streams)
        outputs: list[Tensor] = []
        seen: list[tuple[Tensor, Tensor]] = []
        for j in range(1, steps + 1):
            e = layer.input_layernorm(embed(ids[:, j - 1 : j - 1 + length]))
            both = torch.cat([e.to(hidden.dtype), layer.hidden_norm(hidden)], -1)
            q, k, v = layer.self_attn.project(both, j - 1)
            seen.append((k, v))
            x = hidden + layer.self_attn.join(attend_to_chain(q, seen))
            hidden = x + layer.mlp(layer.post_attention_layernorm(x))
            outputs.append(hidden)
        return outputs


def frequent(data: Data, num: int, vocab: int) -> Tensor:
    """The most frequent ids of the training data, ascending; those that end texts and turns among them."""
    counts = np.zeros(vocab, np.int64)
    for kind in data.train.values():
        counts += np.bincount(kind.ids, minlength=vocab)[:vocab]
    counts += np.bincount(data.library, minlength=vocab)[:vocab]
    counts[:3] = counts.max() + 1
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:num]))


def tune_eagle3(work: Path, target: LanguageModel, plan: Plan) -> None:
    """Train it on the frozen target, and write `eagle3.pt`."""
    torch.manual_seed(plan.seed)
    data = Data(work)
    head, rows = Eagle3(EAGLE, frequent(data, ROWS, TARGET.vocab)), Rows(data, plan)
    known, embed = head.ids, target.model.embed_tokens
    compile_layers(plan, target.model)

    def losses(step: int) -> Iterator[tuple[Tensor, str]]:
        ids, length = rows.batch(step), plan.length
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                streams, hidden = streams_of(target, ids)
                wanted = target.lm_head(hidden)
            total, notes = torch.zeros(()), ["agree"]
            drafted = head.recurse(embed, shifted(streams)[:, :length], ids, len(DEPTH_WEIGHTS))
            for j, (weight, h) in enumerate(zip(DEPTH_WEIGHTS, drafted, strict=True)):
                logits, behind = head.logits(h), wanted[:, j : j + length]
                total = total + weight * soft_loss(logits, behind[..., known])
                same = known[logits.argmax(-1)] == behind.argmax(-1)
                notes.append(f"{float(same.float().mean()):.3f}")
        yield total, " ".join(notes)

    optimise(work / "eagle3.pt", head, losses, plan)
