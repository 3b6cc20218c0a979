"""The demo family's EAGLE-3 drafter in PyTorch: its network, its training on the frozen target, its config.json, and its figures.

It begins close to the target's MTP head, and is trained as that head is: three recursive steps that learn the target's distribution, here
over the tokens that the drafter has rows for. Parameter names and config.json are those of the speculators library. Knows full sequences
only: no cache, no generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import Data
from .export import read_member
from .network import TARGET, FeedForward, LanguageModel, Shape, attend_to_chain, rotate
from .streams import LAYERS, Norm, begin_small, read_folder, streams_of
from .tuning import DEPTH, DEPTH_WEIGHTS, Plan, _optimise, _Source, shifted

ROWS = 1408  # of the target's 2,048 tokens: the most frequent ones
CARRIED = (
    6  # heads that begin by carrying a cell's own embedding (the first half) and hidden (the second half)
)
FOCUS = 3.0  # scale of those heads' queries and keys: a cell's score for itself is about 8 * FOCUS**2


@dataclass(frozen=True, kw_only=True)
class EagleShape(Shape):
    """`rows` of the language-model head. A cell's token enters the residual stream through values alone: those of CARRIED heads are as wide
    as the embedding and the hidden together. The other heads are as many as the MTP head has."""

    heads: int = CARRIED + TARGET.heads
    kv_heads: int = CARRIED + TARGET.heads
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

    def begin_with(self, target: LanguageModel, ids: Tensor) -> None:
        """Begin close to the target's MTP head. The first CARRIED heads attend to their own cell and carry its embedding and its hidden to
        where that head has them; the others are its attention, with means in place of its gate and of the norms of its heads. ids (B, T): a
        text that gives the means."""
        mtp, layer, s = target.mtp, self.layers[0], self.s
        assert mtp is not None
        theirs, size, half = mtp.layers[0].self_attn, s.hidden, CARRIED // 2 * s.head_dim
        assert half == size
        with torch.no_grad():
            streams, hidden = streams_of(target, ids)
            mixed = mtp.mix(target.model.embed_tokens(ids), shifted(hidden))
            own = mtp.layers[0].input_layernorm(mixed)
            q, k = theirs.q_proj(own).view(*ids.shape, -1, 2 * s.head_dim), theirs.k_proj(own)
            q, gate = q.chunk(2, -1)
            scale, out_norm = _rms(mtp.layers[0](mixed)), 1 + mtp.norm.weight
            self.fc.weight.mul_(0.02)
            last = scale / _rms(streams[..., -size:]) * (1 + target.model.norm.weight) / out_norm
            self.fc.weight[:, -size:] += last.diag()
            # a cell's normed embedding and hidden (2H,) -> what the head mixes of them (H,)
            mix = mtp.fc.weight * torch.cat(
                [1 + mtp.pre_fc_norm_embedding.weight, (1 + mtp.pre_fc_norm_hidden.weight) * out_norm]
            )
            seen = (1 + mtp.layers[0].input_layernorm.weight)[:, None] * mix / _rms(mixed)
            attn = layer.self_attn
            queries = theirs.q_proj.weight.view(TARGET.heads, 2, s.head_dim, size)[:, 0] @ seen
            queries = queries / _rms(q, (0, 1, 3))[:, None, None] * (1 + theirs.q_norm.weight)[:, None]
            keys = theirs.k_proj.weight @ seen / _rms(k) * (1 + theirs.k_norm.weight)[:, None]
            rows = attn.k_proj.weight[: 2 * half].normal_(std=FOCUS * size**-0.5)
            rows[:half, size:] = 0.0
            attn.q_proj.weight.copy_(torch.cat([rows, queries.flatten(0, 1)]))
            attn.k_proj.weight[2 * half :] = keys.repeat(TARGET.heads, 1)
            attn.v_proj.weight[: 2 * half] = torch.eye(2 * size)
            attn.v_proj.weight[2 * half :] = (theirs.v_proj.weight @ seen).repeat(TARGET.heads, 1)
            attn.o_proj.weight[:, : 2 * half] = mix
            attn.o_proj.weight[:, half : 2 * half] -= scale * torch.eye(size)
            attn.o_proj.weight[:, 2 * half :] = theirs.o_proj.weight * gate.sigmoid().mean((0, 1)).flatten()
            layer.mlp.load_state_dict(mtp.layers[0].mlp.state_dict())
            layer.post_attention_layernorm.weight.copy_(1 + mtp.layers[0].post_attention_layernorm.weight)
            self.norm.weight.copy_(out_norm)
            self.lm_head.weight.copy_(target.lm_head.weight[self.ids])

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
            q, k, v = layer.self_attn.project(
                torch.cat([e.to(hidden.dtype), layer.hidden_norm(hidden)], -1), j - 1
            )
            seen.append((k, v))
            x = hidden + layer.self_attn.join(attend_to_chain(q, seen))
            hidden = x + layer.mlp(layer.post_attention_layernorm(x))
            outputs.append(hidden)
        return outputs


def _rms(x: Tensor, over: tuple[int, ...] | None = None) -> Tensor:
    """Root of the mean square, of all or of what the other axes tell apart."""
    return x.pow(2).mean(over).sqrt()


def frequent(data: Data, num: int, vocab: int) -> Tensor:
    """The most frequent ids of the training data, ascending; those that end texts and turns among them."""
    counts = np.zeros(vocab, np.int64)
    for kind in data.train.values():
        counts += np.bincount(kind.ids, minlength=vocab)[:vocab]
    counts += np.bincount(data.library, minlength=vocab)[:vocab]
    counts[:3] = counts.max() + 1
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:num]))


def tune_eagle3(folder: Path, target_folder: Path, plan: Plan) -> None:
    """Train it, and write `eagle3.pt`. target_folder: the shipped target."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    data = Data(folder)
    target = read_member(target_folder, TARGET)
    assert isinstance(target, LanguageModel)
    head = Eagle3(EAGLE, frequent(data, ROWS, TARGET.vocab))
    source = _Source(data, plan, None)
    head.begin_with(target, source.batch(0))
    target.compile_layers()
    recurse = torch.compile(head.recurse, dynamic=False)
    ids_of_rows = head.ids

    def loss_at(step: int) -> tuple[torch.Tensor, str]:
        ids = source.batch(step)
        length = plan.length
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                streams, hidden = streams_of(target, ids)
                wanted = target.lm_head(hidden)
            cells = shifted(streams)[:, :length]
            total = torch.zeros(())
            notes = []
            for j, hidden_j in enumerate(recurse(target.model.embed_tokens, cells, ids, DEPTH)):
                logits, every = head.logits(hidden_j), wanted[:, j : j + length]
                soft = every[..., ids_of_rows].float().softmax(-1)
                flat = logits.float().reshape(-1, ROWS)
                total = total + DEPTH_WEIGHTS[j] * F.cross_entropy(flat, soft.reshape(-1, ROWS))
                same = ids_of_rows[logits.argmax(-1)] == every.argmax(-1)
                notes.append(f"{float(same.float().mean()):.3f}")
        return total, " ".join(notes)

    groups = [{"params": list(head.parameters()), "scale": 1.0}]
    _optimise(folder / "eagle3.pt", head, groups, plan, loss_at)


def config() -> dict[str, object]:
    """config.json, in the dialect of the speculators library."""
    s = EAGLE
    layer = {
        "model_type": "llama",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": s.rope_theta,
        "partial_rotary_factor": s.rotary_fraction,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 2048,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": s.rows,
        "target_hidden_size": TARGET.hidden,
        # counts the layers that have run, as all lists do that do not begin with 1
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in LAYERS],
        "norm_before_residual": False,
        "transformer_layer_config": layer,
        "dtype": "bfloat16",
    }


def read_eagle3(folder: Path) -> Eagle3:
    """The exported weights back in the training network, float32, frozen."""
    state = read_folder(folder)
    head = Eagle3(EAGLE, state["d2t"] + torch.arange(ROWS))
    head.load_state_dict(state)
    return head.requires_grad_(False).eval()


def agreement(target: LanguageModel, head: Eagle3, ids: Tensor, skip: int = 32) -> dict[str, object]:
    """Figures over rows of ids (B, T), as demo_eval has them of the MTP head. Depth j is conditional on depths below j having agreed.
    covered: the share of positions whose token the drafter has a row for."""
    parts: list[Sequence[Tensor]] = []
    for rows in ids.split(8):
        length = rows.shape[1] - 32
        streams, hidden = streams_of(target, rows)
        best = target.lm_head(hidden).argmax(-1)
        drafted = head.recurse(target.model.embed_tokens, shifted(streams)[:, :length], rows, 3)
        same = [head.ids[head.logits(h).argmax(-1)] == best[:, j : j + length] for j, h in enumerate(drafted)]
        parts.append([*same, torch.isin(best[:, :length], head.ids)])
    one, two, three, covered = (torch.cat(part)[:, skip:] for part in zip(*parts, strict=True))
    both = one & two
    share = [one.float().mean(), both.float().sum() / one.sum(), (both & three).float().sum() / both.sum()]
    rounds = 1 + one.float().mean() + both.float().mean() + (both & three).float().mean()
    return {
        "eagle3_accepted_at_depth": [round(float(x), 4) for x in share],
        "eagle3_tokens_per_round_depth_3": round(float(rounds), 3),
        "covered": round(float(covered.float().mean()), 4),
        "positions": int(one.numel()),
    }
