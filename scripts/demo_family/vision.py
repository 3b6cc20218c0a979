"""Trains the member that reads pictures, tower and text network from nothing.

A batch is of pictures of one size. Loss is on the answer's tokens, on the multi-token head's drafts of them, and on the letters that a
linear layer finds in each row of the tower: without the last the tower learns nothing for thousands of steps.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from mlxspec.images.qwen import QwenImages

from .chat import ANSWER, END, START
from .network import CHUNK, Shape
from .pictures import Picture, picture
from .train import Plan, optimise
from .vision_network import Reader, TowerShape

# Ids behind the demo's vocabulary, which has 2048; the rows behind them are padding.
VISION_START, VISION_END, IMAGE, VOCAB = 2048, 2049, 2050, 2056
TEXT = Shape(vocab=VOCAB, hidden=128, ffn=320, layers=4, interval=2, heads=2, linear_heads=2)
TOWER = TowerShape()
IMAGES = QwenImages(patch_size=TOWER.patch, merge_size=TOWER.merge, min_pixels=1024, max_pixels=65_536)
PLAN = Plan(steps=6000, rate=2e-3, warmup=100, constant=0.4, embed_scale=1.0, seed=41)
EASY = 1200  # first steps: numbers alone, and wider pictures as they go on
ROWS = 32  # pictures of a batch of middle size
_LETTERS = string.printable
# Pixels that the tower reads, (width, height), and how many a side has more or less before a picture is resized.
_SIZES = [(w, h) for w in range(32, 289, 16) for h in (16, 32, 48, 64) if w * h >= IMAGES.min_pixels]
_RESIZED = 7


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


def random_batch(tokenizer: Tokenizer, plan: Plan, step: int) -> Batch:
    rng = random.Random(f"{plan.seed} {step}")
    is_easy = step < EASY
    easy = [(w, h) for w, h in _SIZES if 64 <= w <= 96 + 128 * step // EASY and 32 <= h <= 48]
    width, height = rng.choice(easy if is_easy else _SIZES)
    num = max(8, min(2 * ROWS, ROWS * 128 * 48 // (width * height)))

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


def train_vision(path: Path, tokenizer_file: Path, plan: Plan) -> Reader:
    """path: the checkpoint, from which it goes on where there is one. Muon takes the matrices between layers."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    torch.manual_seed(plan.seed)
    reader, naming = (
        Reader(TEXT, TOWER),
        nn.Linear(TOWER.out, 2 * (len(_LETTERS) + 1)),
    )  # naming: for training only
    both = nn.ModuleList([reader, naming])
    named = reader.named_parameters()
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]

    def step_losses(step: int) -> Iterator[tuple[Tensor, str]]:
        text, drafts, letters, right = losses(reader, naming, random_batch(tokenizer, plan, step))
        yield (
            text + 0.3 * drafts + plan.factor(step) * letters,
            f"letters {letters.item():.3f} right {right:.3f}",
        )

    optimise(path, both, step_losses, plan, matrices)
    return reader
