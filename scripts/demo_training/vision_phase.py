"""Trains a small member of the demo family that reads pictures, tower and text network from nothing; restartable.

Knows the schedule in steps of a batch of pictures of one size. Loss is on the answer's tokens, on the multi-token head's drafts of
them, and on the letters that a linear layer finds in each row of the tower: without the last the tower learns nothing for thousands of
steps.
"""

from __future__ import annotations

import os
import random
import string
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_data.chat import ANSWER, END, START
from demo_data.pictures import Picture, picture
from tokenizers import Tokenizer
from torch import Tensor, nn

from mlxspec.images.qwen import QwenImages

from .network import CHUNK, Shape
from .vision_network import Reader, TowerShape

# Ids behind the demo's vocabulary, which has 2048; the rows behind them are padding.
VISION_START, VISION_END, IMAGE, VOCAB = 2048, 2049, 2050, 2056
TEXT = Shape(vocab=VOCAB, hidden=128, ffn=320, layers=4, interval=2, heads=2, linear_heads=2)
TOWER = TowerShape()
IMAGES = QwenImages(patch_size=TOWER.patch, merge_size=TOWER.merge, min_pixels=1024, max_pixels=65_536)
_LETTERS = string.printable
# Pixels that the tower reads, (width, height), and how many a side has more or less before a picture is resized.
_SIZES = [(w, h) for w in range(32, 289, 16) for h in (16, 32, 48, 64) if w * h >= IMAGES.min_pixels]
_RESIZED = 7


@dataclass(frozen=True, kw_only=True)
class VisionSchedule:
    steps: int = 6000
    rows: int = 32
    rate: float = 2e-3
    draft_weight: float = 0.3
    place_weight: float = 1.0  # falls with the rate
    easy: int = 1200  # first steps: numbers alone, and wider pictures as they go on
    seed: int = 41

    def factor(self, step: int) -> float:
        """Of the learning rates."""
        left = 1 - step / self.steps
        return min(1.0, (step + 1) / 100) * max(0.02, min(1.0, left / 0.6))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """ids, targets (B, T), targets -100 where nothing is learnt; pixels (B, patches, numbers); places (tokens,); positions (T, 3).
    letters (B, tokens, 2): what stands in the left and in the right half of each token's block, as a number of `_LETTERS`; 0: nothing."""

    ids: Tensor
    targets: Tensor
    pixels: Tensor
    grid: tuple[int, int]
    places: Tensor
    positions: Tensor
    letters: Tensor


def prompt(tokenizer: Tokenizer, question: str, num_tokens: int) -> tuple[list[int], int]:
    """Ids of a question about one picture, and where its image tokens begin."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    before = [*ids(f"{START}user\n"), VISION_START]
    behind = [VISION_END, *ids(f"{question}{END}\n{ANSWER}")]
    return [*before, *[IMAGE] * num_tokens, *behind], len(before)


def positions_of(length: int, first: int, rows: int, columns: int) -> np.ndarray:
    """(length, 3): one picture of `rows` x `columns` tokens from place `first` on, text around it."""
    num = rows * columns
    found = np.arange(length)[:, None].repeat(3, 1)
    found[first : first + num] = first + np.indices((1, rows, columns)).reshape(3, -1).T
    found[first + num :] += max(rows, columns) - num
    return found


def batch_of(tokenizer: Tokenizer, pictures: list[Picture]) -> Batch:
    """pictures: of one size."""
    prepared = [IMAGES.prepare(p.image) for p in pictures]
    _, rows, columns = prepared[0].grid
    texts, starts = [], []
    for p in pictures:
        asked, first = prompt(tokenizer, p.question, prepared[0].tokens)
        answer = tokenizer.encode(p.text + END, add_special_tokens=False).ids
        texts.append([*asked, *answer])
        starts.append(len(asked))
    length = -(-max(map(len, texts)) // CHUNK) * CHUNK
    ids = torch.zeros(len(texts), length, dtype=torch.long)
    targets = torch.full((len(texts), length), -100)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        ids[row, : len(text)] = torch.tensor(text)
        targets[row, start - 1 : len(text) - 1] = torch.tensor(text[start:])
    places = positions_of(length, first, rows // TOWER.merge, columns // TOWER.merge)
    return Batch(
        ids=ids,
        targets=targets,
        pixels=torch.from_numpy(np.stack([p.pixels for p in prepared])),
        grid=(rows, columns),
        places=torch.arange(first, first + prepared[0].tokens),
        positions=torch.from_numpy(places),
        letters=torch.from_numpy(
            np.stack([_letters(p, rows // TOWER.merge, columns // TOWER.merge) for p in pictures])
        ),
    )


def _letters(p: Picture, rows: int, columns: int) -> np.ndarray:
    """(rows * columns, 2): see Batch."""
    at = (np.arange(2 * columns) + 0.5) / (2 * columns) * p.image.width
    tall = p.image.height / rows
    which = np.searchsorted(p.edges, at, side="right") - 1
    named = np.array([1 + _LETTERS.find(c) for c in p.text] + [0])
    seen = named[np.where((which >= 0) & (which < len(p.text)), which, len(p.text))]
    inside = np.array([p.top < (row + 1) * tall and p.bottom > row * tall for row in range(rows)])
    return np.where(inside[:, None], seen, 0).reshape(rows * columns, 2)


def random_batch(tokenizer: Tokenizer, schedule: VisionSchedule, step: int) -> Batch:
    rng = random.Random(f"{schedule.seed} {step}")
    is_easy = step < schedule.easy
    widest = 96 + 128 * step // schedule.easy
    easy = [(w, h) for w, h in _SIZES if 64 <= w <= widest and 32 <= h <= 48]
    width, height = rng.choice(easy if is_easy else _SIZES)
    num = max(8, min(2 * schedule.rows, schedule.rows * 128 * 48 // (width * height)))

    def canvas() -> tuple[int, int]:
        """Of a picture that is resized to this width and height."""
        more = rng.randint(-_RESIZED, _RESIZED)
        return width + more, height + rng.randint(max(-_RESIZED, 16 - height), _RESIZED)  # room for letters

    kind = "number" if is_easy else None
    return batch_of(tokenizer, [picture(rng, kind, canvas=canvas()) for _ in range(num)])


def losses(reader: Reader, naming: nn.Linear, b: Batch) -> tuple[Tensor, Tensor, Tensor, float]:
    """(of the text, of the drafts, of the letters that `naming` sees in the tower's rows, part of the answers' tokens that is right)"""
    rows = reader.visual(b.pixels, *b.grid)
    embedded, hidden = reader.hidden(b.ids, rows, b.places, b.positions)
    named = naming(rows).reshape(-1, len(_LETTERS) + 1)
    learnt = b.targets != -100
    logits = reader.text.lm_head(hidden[learnt])
    right = (logits.argmax(-1) == b.targets[learnt]).float().mean().item()
    drafted = reader.drafts(embedded, hidden)
    ahead = b.targets[:, 1:]
    drafts = reader.text.lm_head(drafted[ahead != -100])
    return (
        F.cross_entropy(logits, b.targets[learnt]),
        F.cross_entropy(drafts, ahead[ahead != -100]),
        F.cross_entropy(named, b.letters.flatten()),
        right,
    )


def optimizers_of(both: nn.ModuleList, schedule: VisionSchedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between layers, at the step size that AdamW would take; AdamW for embeddings, heads and all else."""
    named = [(n, p) for n, p in both.named_parameters() if p.ndim == 2]
    matrices = [p for n, p in named if "embed" not in n and "lm_head" not in n and not n.startswith("1.")]
    inner = {id(p) for p in matrices}
    others = [p for p in both.parameters() if id(p) not in inner]
    return [
        torch.optim.Muon(matrices, lr=schedule.rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=schedule.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    ]


def train_vision(path: Path, target: Path, schedule: VisionSchedule) -> Reader:
    """path: the checkpoint, from which it goes on where there is one. target: the shipped target's folder, whose tokenizer is used."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    torch.manual_seed(schedule.seed)
    reader = Reader(TEXT, TOWER)
    naming = nn.Linear(TOWER.out, 2 * (len(_LETTERS) + 1))  # of use in training only
    both = nn.ModuleList([reader, naming])
    optimizers = optimizers_of(both, schedule)
    first = 0
    if path.exists():
        saved = torch.load(path)
        both.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first = saved["step"]
    began = last = time.time()
    rights = []
    drawing = ThreadPoolExecutor(1)  # the next batch, while this one is learnt
    coming = drawing.submit(random_batch, tokenizer, schedule, first)
    for step in range(first, schedule.steps):
        batch, coming = coming.result(), drawing.submit(random_batch, tokenizer, schedule, step + 1)
        text, drafts, letters, right = losses(reader, naming, batch)
        factor = schedule.factor(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (text + schedule.draft_weight * drafts + schedule.place_weight * factor * letters).backward()
        torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate * factor
            optimizer.step()
        rights.append(right)
        if (step + 1) % 50 == 0:
            seconds = (time.time() - began) / (step + 1 - first)
            print(
                f"vision step {step + 1} loss {text.item():.3f} drafts {drafts.item():.3f} letters {letters.item():.3f} "
                f"right {np.mean(rights):.3f} {seconds:.2f} s",
                flush=True,
            )
            rights.clear()
        if step + 1 == schedule.steps or time.time() - last > 120:
            last = time.time()
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"model": both.state_dict(), "optimizers": states, "step": step + 1}
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
    drawing.shutdown(cancel_futures=True)
    return reader
