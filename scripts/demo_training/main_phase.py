"""The main phase of a member: trunk and head from nothing, by micro-batches; restartable, with one process or two.

Knows the schedule (short copies, mix, long rows) in micro-batches of 2,048 tokens, never in seconds. A step is a number of
micro-batches that the schedule sets, computed by one process after the other or by two processes at once: the run is the same.
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

from .batches import CURRICULUM, LONG, MIX, Data, Sampler
from .gemma_network import GemmaModel
from .network import LanguageModel

MICRO_TOKENS = 2048
Network = LanguageModel | GemmaModel


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Where the phases lie, in steps of `micro_per_step` times MICRO_TOKENS tokens."""

    total: int = 4500
    micro_per_step: int = 2
    curriculum: int = 300
    long_share: float = 0.1
    decay_from: float = 0.65
    rate: float = 3e-3
    mtp_weight: float = 0.3
    embed_scale: float = 4.0  # of the rate, for the embedding
    seed: int = 11

    def phase(self, step: int) -> tuple[str, int]:
        """Mixture name and row length at `step`."""
        if step < self.curriculum:
            return "curriculum", 256
        if step < round(self.total * (1 - self.long_share)):
            return "mix", 512
        return ("long", 2048) if step % 4 == 0 else ("long", 1024)

    def factor(self, step: int) -> float:
        """Learning rate relative to its peak: warm-up, constant, linear to 2 %."""
        warm = min(1.0, (step + 1) / 60)
        start = self.total * self.decay_from
        return warm * (1.0 if step < start else max(0.02, (self.total - step) / (self.total - start)))


def loss_of(
    model: Network, ids: torch.Tensor, weights: torch.Tensor, mtp_weight: float
) -> tuple[torch.Tensor, float]:
    """Weighted cross-entropy of the next token, plus `mtp_weight` times that of the token after it."""
    length = ids.shape[1] - 2
    hidden = model.model(ids[:, :length])
    losses = []
    for shift, h in ((1, hidden), (2, None)):
        if h is None:
            if not mtp_weight or model.mtp is None:
                break
            h = model.mtp(model.model.embed_tokens(ids[:, 1 : 1 + length]), hidden)
        targets, w = (
            ids[:, shift : shift + length].reshape(-1),
            weights[:, shift : shift + length].reshape(-1),
        )
        logits = model.lm_head(h).float().view(-1, model.s.vocab)
        each = F.cross_entropy(logits, targets, reduction="none")
        losses.append((each * w).sum() / w.sum().clamp(min=1.0))
    total = losses[0] if len(losses) == 1 else losses[0] + mtp_weight * losses[1]
    return total, losses[0].item()


@torch.no_grad()
def accuracy(model: Network, kind, rows: int, max_length: int = 512) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Teacher-forced token accuracy on first answers, and the share of answers entirely right."""
    right = total = whole = num = 0
    for i in range(len(kind)):
        ids, start = kind.row(i)
        if len(ids) > max_length:
            continue
        end = start + int(np.argmax(ids[start:] == 2)) + 1
        padded = np.zeros((4, max_length), np.int64)
        padded[0, : len(ids)] = ids
        group = torch.from_numpy(padded)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            guess = model.lm_head(model.model(group))[0].float().argmax(-1).numpy()
        good = guess[start - 1 : end - 1] == ids[start:end]
        right, total, whole, num = right + good.sum(), total + len(good), whole + good.all(), num + 1
        if num >= rows:
            break
    return float(right / total), float(whole / num)


def _report(model: Network, data: Data, rows: int) -> str:
    parts = []
    for kind in ("copy", "rename", "rename_function", "docstring", "explain"):
        token, whole = accuracy(model, data.held[kind], rows)
        parts.append(f"{kind} {token:.3f}/{whole:.2f}")
    token, whole = accuracy(model, data.train["known"], rows * 2)
    parts.append(f"known {token:.3f}/{whole:.2f}")
    raw = torch.from_numpy(data.held_raw[5000 : 5000 + 4 * 513].astype(np.int64).reshape(4, 513))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model.lm_head(model.model(raw[:, :512])).float()
    parts.append(
        f"raw {F.cross_entropy(logits.reshape(-1, model.s.vocab), raw[:, 1:].reshape(-1)).item():.3f}"
    )
    return " ".join(parts)


def all_reduce(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Sum the gradients of all processes."""
    used = [p for p in parameters if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in used])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    at = 0
    for p in used:
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))  # type: ignore[union-attr]
        at += p.numel()


def train(
    path: Path,
    make: Callable[[], Network],
    schedule: Schedule,
    *,
    world: int = 1,
    rank: int = 0,
    save_seconds: float = 120,
    report_seconds: float = 300,
) -> None:
    """Run or resume the main phase of the network that `make` gives; writes the checkpoint `path` (model, optimiser, step)."""
    per_step = schedule.micro_per_step
    if per_step % world:
        raise ValueError(f"{per_step} micro-batches a step cannot be shared by {world} processes")
    torch.set_num_threads(1)
    torch.manual_seed(schedule.seed)
    folder = path.parent
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", world_size=world, rank=rank
        )
    data = Data(folder)
    model = make()
    embedding = model.model.embed_tokens.weight
    parameters = list(model.parameters())
    others = [p for p in parameters if p is not embedding]
    groups = [{"params": [embedding], "scale": schedule.embed_scale}, {"params": others, "scale": 1.0}]
    optimizer = torch.optim.AdamW(groups, lr=schedule.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    first, before = 0, 0.0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, before = saved["step"], saved["seconds"]
    model.compile_layers()
    mixtures = {"curriculum": CURRICULUM, "mix": MIX, "long": LONG}
    samplers: dict[tuple[str, int], Sampler] = {}
    began = last_save = last_report = time.time()
    average, seconds = None, []
    for step in range(first, schedule.total):
        tick = time.time()
        phase = schedule.phase(step)
        if phase not in samplers:
            samplers[phase] = Sampler(data, mixtures[phase[0]], phase[1])
        optimizer.zero_grad()
        for micro in range(rank, per_step, world):
            number = step * per_step + micro
            ids, weights = samplers[phase].batch(schedule.seed, number, MICRO_TOKENS // phase[1])
            mtp_weight = schedule.mtp_weight if step % 2 else 0.0
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, value = loss_of(model, torch.from_numpy(ids), torch.from_numpy(weights), mtp_weight)
            (loss / per_step).backward()
            average = value if average is None else 0.98 * average + 0.02 * value
        if world > 1:
            all_reduce(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate * schedule.factor(step) * group["scale"]
        optimizer.step()
        seconds.append(time.time() - tick)
        if rank == 0 and ((step + 1) % 25 == 0 or step < 3):
            rate = MICRO_TOKENS * per_step / float(np.median(seconds[-25:]))
            print(
                f"step {step + 1} {phase[0]}/{phase[1]} loss {average:.3f} {rate:.0f} tok/s t {time.time() - began:.0f}",
                flush=True,
            )
        done = step + 1 == schedule.total
        if rank == 0 and (done or time.time() - last_save > save_seconds):
            last_save = time.time()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            state["seconds"] = before + time.time() - began
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        if rank == 0 and (done or time.time() - last_report > report_seconds):
            last_report = time.time()
            print(f"  held out at {step + 1}: {_report(model, data, 40 if done else 12)}", flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
