"""The demo target taken to a context of 8,192 tokens: edits of one function of a whole pasted file, trained on top of the shipped weights.

Rotary positions stay as they are: behind 8,192 tokens the shipped target loses 0.13 nats against a short text, and does not break down;
finding and copying a function across thousands of tokens has to be learned. A row is a file, and several edits of its functions in turn;
between them come rows of the family's mixture, so that the rest is kept. The MTP head learns the target's distribution at the answers.
Restartable.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from demo_data.chat import START, render
from demo_data.corpus import functions, read_library
from demo_data.edits import identifiers
from demo_data.long_edits import FORMS, KINDS, Statement, file_of, statements, turn
from tokenizers import Tokenizer
from torch import Tensor

from .batches import LONG, Data, Sampler
from .export import read_member
from .main_phase import all_reduce
from .network import CHUNK, TARGET, LanguageModel

CONTEXT = 8192
PROMPT_WEIGHT = 0.05


@dataclass(frozen=True, kw_only=True)
class LongPlan:
    steps: int
    rate: float = 6e-4
    shortest: int = 500  # tokens of a file
    longest: int = 5000
    turns: int = 8  # edits of one file, at most
    kept: float = 0.2  # share of the rows that are of the family's mixture
    rows: int = 2  # of a step
    mtp_weight: float = 0.5
    seed: int = 29

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10) * min(1.0, max(0.02, (self.steps - step) / (0.7 * self.steps)))


def pieces_of_files(work: Path) -> tuple[dict[str, list[list[Statement]]], list[str]]:
    """By side, `training` and `held`, the statements of each file that has functions to edit; and names for renames. Kept in `work`."""
    path = work / "statements.json"
    if not path.exists():
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))

        def count(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False).ids)

        files = read_library()
        found: dict[str, list[list[dict]]] = {"training": [], "held": []}  # type: ignore[type-arg]
        for file in files:
            pieces = statements(file, count)
            if any(piece.function for piece in pieces):
                found["held" if file.held else "training"].append([asdict(p) for p in pieces])
        names = identifiers([f for f in functions(files) if not f.held])
        path.write_text(json.dumps({**found, "names": names}))
    read = json.loads(path.read_text())
    sides = {
        side: [[Statement(**p) for p in pieces] for pieces in read[side]] for side in ("training", "held")
    }
    return sides, read["names"]


class _Rows:
    """Rows of ids and of weights, by step."""

    def __init__(self, work: Path, plan: LongPlan) -> None:
        self.plan = plan
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        sides, self.names = pieces_of_files(work)
        self.files = sides["training"]
        self.mixture = Sampler(Data(work), LONG, 2046)

    def _long(self, rnd: random.Random) -> tuple[list[int], list[float]]:
        plan = self.plan
        while True:
            tokens = int(plan.shortest * (plan.longest / plan.shortest) ** rnd.random())
            file = file_of(rnd.choice(self.files), tokens, rnd)
            if file is None:
                continue
            ids: list[int] = []
            weights: list[float] = []
            done = 0
            for _ in range(3 * plan.turns):
                made = turn(rnd.choice(KINDS), file, self.names, rnd, FORMS)
                if made is None or done == plan.turns:
                    continue
                asked = made.question(file if done == 0 else None)
                both = render(("user", asked), ("assistant", made.answer))
                cut = both.rindex(f"{START}assistant\n") + len(f"{START}assistant\n")
                parts = [
                    self.tokenizer.encode(t, add_special_tokens=False).ids for t in (both[:cut], both[cut:])
                ]
                if len(ids) + len(parts[0]) + len(parts[1]) > CONTEXT:
                    break
                ids += parts[0] + parts[1]
                weights += [PROMPT_WEIGHT] * len(parts[0]) + [1.0] * len(parts[1])
                done += 1
            if done:
                return ids, weights

    def row(self, step: int, number: int) -> tuple[Tensor, Tensor]:
        """ids (T,), T a multiple of CHUNK; weight of each token as a target."""
        rnd = random.Random(f"{self.plan.seed} {step} {number}")
        if rnd.random() < self.plan.kept:
            ids, weights = (x[0] for x in self.mixture.batch(self.plan.seed, step * 8 + number, 1))
            return torch.from_numpy(ids), torch.from_numpy(weights)
        found, given = self._long(rnd)
        more = -len(found) % CHUNK
        return torch.tensor(found + [0] * more), torch.tensor(given + [0.0] * more)


def _losses(model: LanguageModel, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """(of the text, of the head's first drafts, part of the weighted tokens that is right, part of those drafts that agrees)"""
    assert model.mtp is not None
    hidden = model.model(ids[None])
    places = (weights[1:] > 0).nonzero()[:, 0]  # whose next token has a weight
    given = weights[1:][places]
    logits = model.lm_head(hidden[0, places]).float()
    each = F.cross_entropy(logits, ids[1:][places], reduction="none")
    text = (each * given).sum() / given.sum()
    inner = hidden.detach()
    # the cell of token p holds the hidden before it
    drafted = model.mtp(model.model.embed_tokens(ids[None, 1:]).detach(), inner[:, :-1])
    known = places[places >= 1]
    told = model.lm_head(drafted[0, known - 1]).float()
    soft = logits[places >= 1].detach().softmax(-1)
    wants = given[places >= 1]
    drafts = (F.cross_entropy(told, soft, reduction="none") * wants).sum() / wants.sum()
    answers = given == 1
    right = float((logits.argmax(-1) == ids[1:][places])[answers].float().mean())
    same = float((told.argmax(-1) == soft.argmax(-1))[answers[places >= 1]].float().mean())
    return text, drafts, right, same


def tune_long(
    work: Path, target_folder: Path, plan: LongPlan, *, world: int = 1, rank: int = 0
) -> LanguageModel:
    """Train on, from `long.pt` where there is one, else from the shipped target; write `long.pt`. world, rank: of processes that share the
    rows of a step."""
    if plan.rows % world:
        raise ValueError(f"{plan.rows} rows a step cannot be shared by {world} processes")
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", world_size=world, rank=rank)
    torch.set_num_threads(1)
    path = work / "long.pt"
    model = read_member(target_folder, TARGET)
    assert isinstance(model, LanguageModel)
    model.requires_grad_(True)
    rows = _Rows(work, plan)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    first, before = 0, 0.0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, before = saved["step"], saved["seconds"]
    began = last = time.time()
    notes: list[tuple[float, ...]] = []
    tokens = 0
    for step in range(first, plan.steps):
        optimizer.zero_grad()
        for number in range(rank, plan.rows, world):
            ids, weights = rows.row(step, number)
            tokens += len(ids)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                text, drafts, right, same = _losses(model, ids, weights)
            ((text + plan.mtp_weight * drafts) / plan.rows).backward()
            notes.append((text.item(), drafts.item(), right, same))
        if world > 1:
            all_reduce(list(model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * plan.factor(step)
        optimizer.step()
        if rank == 0 and (step + 1) % 10 == 0:
            mean = " ".join(f"{x:.3f}" for x in np.mean(notes, 0))
            speed = tokens / (time.time() - began)
            print(f"long step {step + 1} loss, drafts, right, agree {mean} {speed:.0f} tok/s", flush=True)
            notes.clear()
        if rank == 0 and (step + 1 == plan.steps or time.time() - last > 120):
            last = time.time()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            state["seconds"] = before + time.time() - began
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return model.requires_grad_(False).eval()
