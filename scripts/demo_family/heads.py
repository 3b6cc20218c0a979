"""Drafters that read the target: what they share (streams behind its layers, a plain norm, folders), and the MTP head's tuning.

Parameter names and config.json are those that others publish such drafters with.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from .dataset import Data
from .network import LanguageModel
from .train import Plan, Rows, agreement, compile_layers, load_target, optimise, soft_loss

LAYERS = (1, 3, 5)  # of the target, 0-based: the residual streams behind them
DEPTH_WEIGHTS = (1.0, 0.8, 0.7)  # of the losses of recursive steps
MTP = Plan(steps=1400, rate=1.5e-3, weight_decay=0.0)


class Norm(nn.Module):
    """RMS norm with a plain weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


def streams_of(target: LanguageModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids (B, T) -> the residual streams behind LAYERS (B, T, layers * H), and the final hidden (B, T, H)."""
    x, found = target.model.embed_tokens(ids), []
    for i, layer in enumerate(target.model.layers):
        x = layer(x)
        if i in LAYERS:
            found.append(x)
    return torch.cat(found, -1), target.model.norm(x)


def shifted(hidden: Tensor) -> Tensor:
    """The hidden before each token, zeros before the first: what a recursive head's cell is made of. (B, T, H)"""
    return F.pad(hidden[:, :-1], (0, 0, 1, 0))


def begin_small(module: nn.Module) -> None:
    """Initial values of matrices; layers begin by changing nothing."""
    for name, p in module.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(p)
        elif p.ndim == 2:
            nn.init.normal_(p, std=0.6 * p.shape[1] ** -0.5)


def write_drafter(checkpoint: Path, out: Path, config: Path) -> None:
    """Write `out` from a training checkpoint: matrices in bfloat16, norms in float32, integers as they are; config: the config.json."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in torch.load(checkpoint)["model"].items():
        kept = value.float() if value.ndim == 1 else value.bfloat16()
        tensors[name] = (kept if value.is_floating_point() else value).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    if config.parent != out:
        shutil.copy(config, out / "config.json")


def tune_mtp(work: Path, plan: Plan) -> None:
    """Teach the target's MTP head the trunk's distribution at depths 1 to 3, fed with its own output."""
    target = load_target(work)
    head = target.mtp
    assert head is not None
    head.requires_grad_(True)
    rows = Rows(Data(work), plan)
    compile_layers(plan, target.model)

    def losses(step: int) -> Iterator[tuple[Tensor, str]]:
        ids, length = rows.batch(step), plan.length
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                hidden = target.model(ids)
                wanted = target.lm_head(hidden)
            total, notes = torch.zeros(()), ["agree"]
            drafted = head.recurse(
                target.model.embed_tokens, shifted(hidden)[:, :length], ids, len(DEPTH_WEIGHTS)
            )
            for j, (weight, h) in enumerate(zip(DEPTH_WEIGHTS, drafted, strict=True)):
                logits, behind = target.lm_head(h), wanted[:, j : j + length]
                total = total + weight * soft_loss(logits, behind)
                notes.append(f"{agreement(logits, behind):.3f}")
        yield total, " ".join(notes)

    optimise(work / "mtp.pt", head, losses, plan)
