"""The training loop of every phase, the trunks' phase (target and Gemma member), and the draft model's.

A phase gives `optimise` a function that yields the losses of a step, each of one micro-batch. The loop adds gradients up, clips them, sets
the rates by the plan, and keeps a checkpoint from which the same command goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from .dataset import CURRICULUM, LONG, MIX, Data, Sampler
from .gemma import GemmaModel
from .network import DRAFT, TARGET, LanguageModel

SAVE_SECONDS = 120
Network = LanguageModel | GemmaModel
Losses = Callable[[int], Iterable[tuple[Tensor, str]]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. rate: the highest; it rises for `warmup` steps, stays until `constant` of all steps, then falls to 2 %. compiled: let
    PyTorch compile layers, which takes a minute at the start."""

    steps: int
    rate: float
    warmup: int = 30
    constant: float = 0.3
    length: int = 256  # of a row
    curriculum: int = 0  # first steps: short copies and renames
    micro: int = 1  # micro-batches a step
    tokens: int = 2048  # of a micro-batch
    embed_scale: float = 4.0  # of the rate, for the embedding
    weight_decay: float = 0.01
    seed: int = 23
    compiled: bool = True

    def factor(self, step: int) -> float:
        """Of the rate."""
        start = self.steps * self.constant
        falling = (self.steps - step) / max(1.0, self.steps - start)
        return min(1.0, (step + 1) / self.warmup) * (1.0 if step < start else max(0.02, falling))

    def smoke(self) -> Plan:
        """Two small steps of the same run, nothing compiled."""
        return replace(self, steps=2, curriculum=min(1, self.curriculum), tokens=512, compiled=False)


MAIN = Plan(steps=4500, rate=3e-3, warmup=60, constant=0.65, curriculum=300, micro=2, seed=11)
# Small steps for a small model; its embedding is its head too.
GEMMA_MAIN = replace(MAIN, steps=5000, micro=1, curriculum=400, embed_scale=1.0)
DISTIL = Plan(steps=4500, rate=3e-3, curriculum=200, weight_decay=0.0)


def compile_layers(plan: Plan, *models: nn.Module) -> None:
    """Each layer on its own: layers of a kind share one graph, so this costs a minute, not ten."""
    torch._dynamo.config.recompile_limit = 64  # graphs: one a kind of layer and row length
    for layer in (m for model in models for m in model.modules() if type(m).__name__.endswith("Layer")):
        if plan.compiled:
            layer.compile(dynamic=False)


def optimise(
    path: Path, module: nn.Module, losses: Losses, plan: Plan, matrices: Sequence[nn.Parameter] = ()
) -> None:
    """Train `module` (parameters that require gradients) for the plan's steps, or go on from the checkpoint `path`. matrices: those that
    Muon takes, at the step size that AdamW would take; AdamW takes all others."""
    taken = {id(p) for p in matrices}
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad and id(p) not in taken]
    embedding = [p for n, p in named if n.endswith("embed_tokens.weight")]
    others = [p for n, p in named if not n.endswith("embed_tokens.weight")]
    groups: list[dict[str, Any]] = [{"params": others, "scale": 1.0}]
    groups += [{"params": embedding, "scale": plan.embed_scale}] if embedding else []
    shared: dict[str, Any] = {"lr": plan.rate, "weight_decay": plan.weight_decay}
    optimizers: list[Any] = [torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True, **shared)]
    if matrices:
        muon: Any = [{"params": list(matrices), "scale": 1.0}]
        optimizers.append(torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw", **shared))
    every = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    first, before = 0, 0.0
    if path.exists():
        saved = torch.load(path)
        module.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first, before = saved["step"], saved["seconds"]
    began = last = time.time()
    for step in range(first, plan.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss, said in losses(step):
            (loss / plan.micro).backward()
            note = f"loss {loss.item():.3f} {said}"
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.rate * plan.factor(step) * group["scale"]
            optimizer.step()
        is_last = step + 1 == plan.steps
        if is_last or (step + 1) % 50 == 0:
            seconds = (time.time() - began) / (step + 1 - first)
            print(f"{path.stem} step {step + 1} of {plan.steps}: {note}, {seconds:.2f} s a step", flush=True)
        if is_last or time.time() - last > SAVE_SECONDS:
            last = time.time()
            state = {
                "model": module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step + 1,
                "seconds": before + time.time() - began,
            }
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)


# ---- a trunk from nothing


def phase(plan: Plan, step: int) -> tuple[str, int]:
    """Mixture and row length at `step` of a trunk: short copies, the mix, and in the last tenth long rows."""
    if step < plan.curriculum:
        return "curriculum", 256
    if step < round(plan.steps * 0.9):
        return "mix", 512
    return "long", 2048 if step % 4 == 0 else 1024


def next_tokens_loss(model: Network, ids: Tensor, weights: Tensor, mtp_weight: float) -> Tensor:
    """Weighted cross-entropy of the next token, plus `mtp_weight` times that of the token after it. ids, weights (B, length + 2)."""
    length = ids.shape[1] - 2
    hidden = model.model(ids[:, :length])
    total = torch.zeros(())
    for shift, share in ((1, 1.0), (2, mtp_weight)):
        if shift == 2:
            if not share or model.mtp is None:
                break
            hidden = model.mtp(model.model.embed_tokens(ids[:, 1 : 1 + length]), hidden)
        logits, wanted = model.lm_head(hidden).float().flatten(0, 1), ids[:, shift : shift + length].flatten()
        each = F.cross_entropy(logits, wanted, reduction="none")
        w = weights[:, shift : shift + length].flatten()
        total = total + share * (each * w).sum() / w.sum().clamp(min=1.0)
    return total


def train_trunk(path: Path, model: Network, plan: Plan) -> None:
    """Trunk and head from nothing, on the data set beside `path`. The MTP head learns in every second step."""
    data, samplers = Data(path.parent), dict[tuple[str, int], Sampler]()
    mixtures = {"curriculum": CURRICULUM, "mix": MIX, "long": LONG}
    compile_layers(plan, model)

    def losses(step: int) -> Iterator[tuple[Tensor, str]]:
        name, length = phase(plan, step)
        sampler = samplers.setdefault((name, length), Sampler(data, mixtures[name], length))
        for micro in range(plan.micro):
            ids, weights = sampler.batch(plan.seed, step * plan.micro + micro, plan.tokens // length)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                share = 0.3 if step % 2 else 0.0
                yield next_tokens_loss(model, torch.from_numpy(ids), torch.from_numpy(weights), share), name

    optimise(path, model, losses, plan)


# ---- what the phases on a finished target share


class Rows:
    """Rows of ids (rows, length + 32) by step, for phases that learn from the target: the mixture, and beside it rows sampled from it."""

    def __init__(self, data: Data, plan: Plan, sampled: np.ndarray | None = None) -> None:
        self.plan, self.sampled, self.width = plan, sampled, plan.length + 32
        self.early = Sampler(data, CURRICULUM, self.width - 2)
        self.late = Sampler(data, dict(MIX, raw=0.35), self.width - 2)  # drafting is hardest on plain code

    def batch(self, step: int) -> Tensor:
        rows = self.plan.tokens // self.plan.length
        if step < self.plan.curriculum:
            return torch.from_numpy(self.early.batch(self.plan.seed, step, rows)[0])
        ids, _ = self.late.batch(self.plan.seed, step, rows)
        if self.sampled is not None:
            rng = np.random.default_rng([self.plan.seed, step, 1])
            ids[: rows // 2] = self.sampled[rng.integers(0, len(self.sampled), rows // 2), : self.width]
        return torch.from_numpy(ids)


def load_target(work: Path) -> LanguageModel:
    """The target as trained so far, frozen, with its MTP head as it was tuned, where it was."""
    model = LanguageModel(TARGET)
    model.load_state_dict(torch.load(work / "main.pt")["model"])
    if (work / "mtp.safetensors").exists() and model.mtp is not None:
        tuned = load_file(work / "mtp.safetensors")
        head = {n.removeprefix("head."): v for n, v in tuned.items() if n.startswith("head.")}
        model.mtp.load_state_dict({n: v - 1 if v.ndim == 1 else v for n, v in head.items()})  # norms: 1 + w
    return model.requires_grad_(False).eval()


def soft_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy with the distribution of the logits `wanted`, both (..., V)."""
    return F.cross_entropy(logits.float().flatten(0, -2), wanted.float().softmax(-1).flatten(0, -2))


def agreement(a: Tensor, b: Tensor) -> float:
    """Share of positions whose likeliest token is the same."""
    return float((a.argmax(-1) == b.argmax(-1)).float().mean())


def distil_draft(work: Path, plan: Plan, sampled: np.ndarray | None) -> None:
    """Train the draft model on the target's distributions, half of it over text sampled from the target."""
    target, rows = load_target(work), Rows(Data(work), plan, sampled)
    torch.manual_seed(plan.seed)
    draft = LanguageModel(DRAFT)
    compile_layers(plan, target, draft)

    def losses(step: int) -> Iterator[tuple[Tensor, str]]:
        ids = rows.batch(step)
        seen, after = ids[:, : plan.length], ids[:, 1 : plan.length + 1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = target.lm_head(target.model(seen))
            logits = draft.lm_head(draft.model(seen))
            hard = F.cross_entropy(logits.float().flatten(0, 1), after.flatten())
            yield 0.8 * soft_loss(logits, wanted) + 0.2 * hard, f"agree {agreement(logits, wanted):.3f}"

    optimise(work / "draft.pt", draft, losses, plan)
