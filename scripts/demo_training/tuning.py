"""The two later phases: the MTP head for three recursive steps on a frozen trunk, and the draft model by distillation.

Knows a finished `main.pt`; both learn from the target's own distributions. Schedules are in steps of 2,048 tokens, and both
resume from their checkpoints (`mtp.pt`, `draft.pt`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from .batches import CURRICULUM, MIX, Data, Sampler
from .generate import sample_rows
from .main_phase import all_reduce
from .network import DRAFT, TARGET, LanguageModel

DEPTH = 3
DEPTH_WEIGHTS = (1.0, 0.8, 0.7)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One tuning run. `curriculum` steps of short copies come first; `samples` rows of the target's own text are mixed in."""

    steps: int
    rate: float
    length: int = 256
    curriculum: int = 0
    samples: int = 0
    constant: float = 0.3
    seed: int = 23

    def factor(self, step: int) -> float:
        warm = min(1.0, (step + 1) / 30)
        start = self.steps * self.constant
        return warm * (1.0 if step < start else max(0.02, (self.steps - step) / (self.steps - start)))


def load_target(folder: Path, *, tuned: bool) -> LanguageModel:
    """The target as trained so far, frozen; with `tuned`, its MTP head from `mtp.pt`."""
    model = LanguageModel(TARGET)
    model.load_state_dict(torch.load(folder / "main.pt")["model"])
    if tuned and (folder / "mtp.pt").exists():
        model.mtp.load_state_dict(torch.load(folder / "mtp.pt")["model"])  # type: ignore[union-attr]
    model.requires_grad_(False)
    return model.eval()


def shifted(hidden: torch.Tensor) -> torch.Tensor:
    """The hidden before each token, zeros before the first: what an MTP cell is made of."""
    return F.pad(hidden[:, :-1], (0, 0, 1, 0))


def _soft_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    vocab = logits.shape[-1]
    return F.cross_entropy(logits.float().reshape(-1, vocab), target.float().softmax(-1).reshape(-1, vocab))


def _optimise(
    path: Path,
    module: torch.nn.Module,
    groups: list[dict],
    plan: Plan,
    loss_at: Callable[[int], tuple[torch.Tensor, str]],
    matrices: Sequence[torch.nn.Parameter] = (),
    world: int = 1,
    rank: int = 0,
) -> None:  # type: ignore[type-arg]
    """groups: AdamW's, each with a scale of its rate. matrices: those that Muon takes, at the step size that AdamW would take. world, rank:
    of processes whose gradients are averaged; the first of them writes the checkpoint."""
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{path.parent}/rendezvous", world_size=world, rank=rank
        )
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    ]
    if matrices:
        named = [{"params": list(matrices), "scale": 1.0}]
        optimizers.append(
            torch.optim.Muon(named, lr=plan.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        )
    every = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    first, before, tokens = 0, 0.0, 0
    if path.exists():
        saved = torch.load(path)
        module.load_state_dict(saved["model"])
        for optimizer, found in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(found)
        first, before = saved["step"], saved["seconds"]
        tokens = saved.get("tokens", first * 2048)
    began = last_save = time.time()
    for step in range(first, plan.steps):
        loss, note = loss_at(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss / world).backward()
        if world > 1:
            all_reduce(every)
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.rate * plan.factor(step) * group["scale"]
            optimizer.step()
        if rank == 0 and ((step + 1) % 50 == 0 or step == 2):
            rate = (step + 1 - first) * 2048 * world / (time.time() - began)
            print(
                f"{path.stem} step {step + 1} loss {loss.item():.3f} agree {note} {rate:.0f} tok/s",
                flush=True,
            )
        if rank == 0 and (step + 1 == plan.steps or time.time() - last_save > 120):
            last_save = time.time()
            state = {
                "model": module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step + 1,
                "seconds": before + time.time() - began,
                "tokens": tokens + (step + 1 - first) * 2048 * world,
            }
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _agree(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.argmax(-1) == b.argmax(-1)).float().mean())


class _Source:
    """Rows for tuning: the mixture, and beside it rows sampled from the target."""

    def __init__(self, data: Data, plan: Plan, sampled: np.ndarray | None) -> None:
        self.plan, self.sampled = plan, sampled
        self.width = plan.length + 32
        self.early = Sampler(data, CURRICULUM, self.width - 2)
        self.late = Sampler(data, dict(MIX, raw=0.35), self.width - 2)  # drafting is hardest on plain code

    def batch(self, step: int) -> torch.Tensor:
        """ids (rows, length + 32)"""
        rows = 2048 // self.plan.length
        if step < self.plan.curriculum:
            return torch.from_numpy(self.early.batch(self.plan.seed, step, rows)[0])
        ids, _ = self.late.batch(self.plan.seed, step, rows)
        if self.sampled is not None:
            rng = np.random.default_rng([self.plan.seed, step, 1])
            chosen = rng.integers(0, len(self.sampled), rows // 2)
            ids[: rows // 2] = self.sampled[chosen, : self.width]
        return torch.from_numpy(ids)


def tune_mtp(folder: Path, plan: Plan) -> None:
    """Teach the MTP head to predict the trunk's distribution at depths 1 to 3, fed with its own output."""
    torch.set_num_threads(1)
    data = Data(folder)
    model = load_target(folder, tuned=False)
    head = model.mtp
    assert head is not None
    head.requires_grad_(True)
    model.compile_layers()
    recurse = torch.compile(head.recurse, dynamic=False)
    source = _Source(data, plan, None)

    def loss_at(step: int) -> tuple[torch.Tensor, str]:
        ids = source.batch(step)
        length = plan.length
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                hidden = model.model(ids)
                wanted = model.lm_head(hidden)
            cells = shifted(hidden)[:, :length]
            drafted = recurse(model.model.embed_tokens, cells, ids, DEPTH)
            total = torch.zeros(())
            notes = []
            for j, hidden_j in enumerate(drafted):
                logits, target = model.lm_head(hidden_j), wanted[:, j : j + length]
                total = total + DEPTH_WEIGHTS[j] * _soft_loss(logits, target)
                notes.append(f"{_agree(logits, target):.3f}")
        return total, " ".join(notes)

    groups = [{"params": list(head.parameters()), "scale": 1.0}]
    _optimise(folder / "mtp.pt", head, groups, plan, loss_at)


def distil_draft(folder: Path, plan: Plan) -> None:
    """Train the draft model on the target's distributions, partly over text sampled from the target."""
    torch.set_num_threads(1)
    data = Data(folder)
    model = load_target(folder, tuned=True)
    sampled = None
    if plan.samples:
        path = folder / "samples.npy"
        if not path.exists():
            np.save(path, sample_rows(model, data, plan.samples, plan.length + 32))
        sampled = np.load(path)
    model.compile_layers()
    torch.manual_seed(plan.seed)
    draft = LanguageModel(DRAFT)
    draft.compile_layers()
    source = _Source(data, plan, sampled)

    def loss_at(step: int) -> tuple[torch.Tensor, str]:
        ids = source.batch(step)
        length = plan.length
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = model.lm_head(model.model(ids[:, :length]))
            logits = draft.lm_head(draft.model(ids[:, :length]))
            hard = F.cross_entropy(
                logits.float().reshape(-1, TARGET.vocab), ids[:, 1 : length + 1].reshape(-1)
            )
            loss = 0.8 * _soft_loss(logits, wanted) + 0.2 * hard
        return loss, f"{_agree(logits, wanted):.3f}"

    embedding = draft.model.embed_tokens.weight
    others = [p for p in draft.parameters() if p is not embedding]
    groups = [{"params": [embedding], "scale": 4.0}, {"params": others, "scale": 1.0}]
    _optimise(folder / "draft.pt", draft, groups, plan, loss_at)
