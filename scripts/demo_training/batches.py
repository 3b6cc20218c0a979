"""Batches of packed token rows, a pure function of (data set, mixture, batch number): restarts see the same data.

Knows kinds, shares and loss weights; not models. A row holds whole conversations, often separated by an end-of-document
token, and its tail is filled with raw code, so an answer is never cut off from its question.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

# Shares by tokens. Prompts count 0.2 in the loss, those of the short copies (random text) nothing.
CURRICULUM = {
    "copy": 0.38,
    "short_rename": 0.32,
    "rename_function": 0.04,
    "docstring": 0.02,
    "known": 0.08,
    "raw": 0.16,
}
MIX = {
    "rename": 0.155, "rename_function": 0.10, "literal": 0.045, "docstring": 0.075, "explain": 0.065, "continue": 0.05,
    "turns": 0.04, "known": 0.19, "other_docs": 0.01, "refusal": 0.04, "invented": 0.004, "greeting": 0.008,
    "copy": 0.035, "short_rename": 0.05, "raw": 0.133,
}  # fmt: skip
LONG = dict(MIX, turns=0.12, known=0.21, rename=0.14, copy=0.02, short_rename=0.03)
PROMPT_WEIGHT = {"copy": 0.0, "short_rename": 0.0}
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful coding assistant.", "Be brief.", "You help with Python.",
    "You are an assistant that answers questions about Python.", "Answer in one sentence.", "You edit code.",
    "You are mlxspec's demo model.", "Follow the user's instructions.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kind:
    """All rows of one kind: flat ids (uint16), offsets (num_rows + 1), index of each row's first answer token."""

    ids: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, i: int) -> tuple[np.ndarray, int]:
        return self.ids[self.offsets[i] : self.offsets[i + 1]].astype(np.int64), int(self.starts[i])


class Data:
    """The tokenized data set in memory."""

    def __init__(self, folder: Path) -> None:
        arrays = np.load(folder / "tokens.npz")
        names = sorted({key.rsplit("/", 1)[0] for key in arrays if not key.startswith("raw/")})
        kinds = {n: Kind(**{f: arrays[f"{n}/{f}"] for f in ("ids", "offsets", "starts")}) for n in names}
        self.train = {n.removeprefix("train/"): k for n, k in kinds.items() if n.startswith("train/")}
        self.held = {n.removeprefix("held/"): k for n, k in kinds.items() if n.startswith("held/")}
        self.library, self.tests = arrays["raw/train/library"], arrays["raw/train/tests"]
        self.held_raw = arrays["raw/held/raw"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        render = "<|im_start|>system\n{}<|im_end|>\n"
        self.systems = [np.array(self.tokenizer.encode(render.format(t)).ids) for t in SYSTEM_PROMPTS]

    def raw(self, rng: np.random.Generator, length: int) -> np.ndarray:
        source = self.library if rng.random() < 0.7 else self.tests
        at = int(rng.integers(0, len(source) - length))
        return source[at : at + length].astype(np.int64)


class Sampler:
    """Draws rows of one mixture at one length."""

    def __init__(self, data: Data, mixture: dict[str, float], length: int) -> None:
        self.data, self.length = data, length
        self.kinds = [k for k in mixture if k != "raw"]
        means = [np.minimum(np.diff(data.train[k].offsets), length).mean() for k in self.kinds]
        weights = np.array([mixture[k] for k in self.kinds]) / np.array(means)
        self.probabilities = weights / weights.sum()
        self.raw_share = mixture["raw"] / sum(mixture.values()) * 0.7  # tails of rows are the rest

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """One row of `length + 2` ids and the loss weight of each token as a target."""
        size = self.length + 2
        if rng.random() < self.raw_share:
            ids = self.data.raw(rng, size)
            return ids, np.where(ids == 0, 0.0, 1.0)
        ids = np.zeros(size, np.int64)
        weights = np.zeros(size)
        used = misses = 0
        if rng.random() < 0.08:
            system = self.data.systems[int(rng.integers(len(self.data.systems)))]
            ids[: len(system)], used = system, len(system)
        while size - used > 24 and misses < 6:
            kind = self.kinds[int(rng.choice(len(self.kinds), p=self.probabilities))]
            rows = self.data.train[kind]
            one, start = rows.row(int(rng.integers(len(rows))))
            if used + len(one) > size:
                misses += 1
                continue
            ids[used : used + len(one)] = one
            weights[used + start : used + len(one)] = 1.0
            weights[used : used + start] = PROMPT_WEIGHT.get(kind, 0.2)
            used += len(one) + int(rng.random() < 0.6)  # the id between is 0, <|endoftext|>
        if used + 1 < size:
            used += int(ids[used - 1] != 0)
            ids[used:] = self.data.raw(rng, size - used)
            weights[used:] = np.where(ids[used:] == 0, 0.0, 1.0)
        return ids, weights

    def batch(self, seed: int, number: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Micro-batch `number` of the run: ids and weights (rows, length + 2)."""
        rng = np.random.default_rng([seed, number])
        pairs = [self.row(rng) for _ in range(rows)]
        return np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs]).astype(np.float32)
