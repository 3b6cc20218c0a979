"""Speculative decoding of tens of thousands of short texts at once, with the product's own sampler, rules and noise.

The model is a table: what comes next depends on the token before (and, through penalties, on all of them). So the exact distribution of the
first LENGTH tokens can be written down, and drafting must not change it. `Fault` plants mistakes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import cache

import mlx.core as mx
import numpy as np

from mlxspec.config import SamplingParams
from mlxspec.sampling import bits
from mlxspec.sampling.acceptance import num_verified
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from mlxspec.sampling.scores import DraftedBefore
from tests.drafted import drafted
from tests.sampling.test_sampler import probabilities

VOCAB, LENGTH, START, STRIDE = 16, 3, 0, 64


class Fault(Enum):
    """Mistakes, each of which makes acceptance inexact."""

    ONE_NOISE = "one noise a round for all of its positions"
    LIKELY = "a draft is accepted where the target finds it half as likely as its likeliest token"
    ONE_COIN = "whether XTC happens is the same for all positions of a round"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of decoding. listed: tokens that the model may propose, () for all. ngram: rows whose last token is even get two tokens of a
    lookup, others ask the model: a chain."""

    depth: int = 2
    params: dict = field(default_factory=dict)
    p_min: float = 0.0
    n_min: int = 0
    grammar: bool = False
    listed: tuple[int, ...] = ()
    ngram: bool = False
    fault: Fault | None = None
    num_rows: int = 70_000
    seed: int = 5


class World:
    """The tables: logits of target and draft by the token before, and which tokens a grammar allows behind which."""

    def __init__(self, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.target = (rng.standard_normal((VOCAB, VOCAB)) * 1.3).astype(np.float32)
        self.draft = (self.target + rng.standard_normal((VOCAB, VOCAB)) * 1.1).astype(np.float32)
        self.allowed = rng.random((VOCAB, VOCAB)) < 0.6
        best = self.target.argmax(axis=1)
        self.ngram = np.stack([best, best[best]], axis=1)

    def expected(self, setting: Setting) -> np.ndarray:
        """(V,) * LENGTH probabilities."""
        params = params_of(setting)
        found = np.zeros((VOCAB,) * LENGTH)

        def walk(text: list[int], chance: float) -> None:
            last = text[-1] if text else START
            logits = self.target[last].astype(np.float64)
            if setting.grammar:
                logits = np.where(self.allowed[last], logits, -np.inf)
            p = probabilities(logits, params, [START], text) * chance
            if len(text) == LENGTH - 1:
                found[tuple(text)] = p
                return
            for token in np.flatnonzero(p):
                walk([*text, int(token)], p[token])

        walk([], 1.0)
        return found


def params_of(setting: Setting) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": setting.seed, **setting.params})


class Simulation:
    """Runs a setting; `run` gives (num_rows, LENGTH) tokens."""

    def __init__(self, world: World, setting: Setting) -> None:
        self.world, self.setting = world, setting
        row = RowSampler(params_of(setting), [START], VOCAB)
        self.sampler = BatchSampler([row], VOCAB)
        self.target, self.draft = mx.array(world.target), mx.array(world.draft)
        self.allowed = [bits.only(np.flatnonzero(a), VOCAB) for a in world.allowed]
        self.text = np.zeros((setting.num_rows, LENGTH + 8), np.int64)
        self.length = np.zeros(setting.num_rows, np.int64)
        self.num_drafted = self.num_stood = 0

    def run(self) -> np.ndarray:
        while len(rows := np.flatnonzero(self.length < LENGTH)):
            self._round(rows)
        return self.text[:, :LENGTH]

    def _round(self, rows: np.ndarray) -> None:
        tokens, lengths = self._propose(rows)
        alive = np.arange(len(rows))  # places in `rows` whose drafts have all been accepted
        start = self.length[rows].copy()
        for i in range(self.setting.depth + 1):
            if not len(alive):
                break
            here = rows[alive]
            drafted = lengths[alive] > i
            draft = tokens[alive, min(i, self.setting.depth - 1)]
            chosen = self._choose(here, start[alive], np.where(drafted, draft, -1))
            self.text[here, np.minimum(self.length[here], LENGTH + 7)] = chosen
            self.length[here] += 1
            stood = drafted & (chosen == draft)
            self.num_drafted += int(drafted.sum())
            self.num_stood += int(stood.sum())
            alive = alive[stood]

    def _choose(self, here: np.ndarray, start: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """What the target samples for these rows, whose round began at `start`. drafts: -1 where there is none."""
        fault, last, counts = self.setting.fault, self._last(here), self._counts(here)
        masks = [self.allowed[t] for t in last] if self.setting.grammar else None
        zeros = [0] * len(here)
        positions = (here * STRIDE + self.length[here]).tolist()
        first = (here * STRIDE + start).tolist()
        coins = first if fault is Fault.ONE_COIN else positions
        p = self.sampler.scores(self.target[mx.array(last)], zeros, coins, counts, masks)
        chosen = np.asarray(self.sampler.choose(p, zeros, first if fault is Fault.ONE_NOISE else positions))
        if fault is Fault.LIKELY:
            known, at = np.asarray(p), np.maximum(drafts, 0)
            likely = known[np.arange(len(here)), at] > known.max(axis=1) + math.log(0.5)
            chosen = np.where((drafts >= 0) & likely, drafts, chosen)
        return chosen

    def _propose(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens (R, depth), and how many of each row's are verified."""
        s, depth = self.setting, self.setting.depth
        last = before = self._last(rows)
        tokens = np.zeros((len(rows), depth), np.int64)
        tops = []
        zeros, listed = [0] * len(rows), mx.array(np.asarray(s.listed, np.int32)) if s.listed else None
        for i in range(depth):
            logits = self.draft[mx.array(before)]
            logits = logits if listed is None else logits[:, listed]
            positions = (rows * STRIDE + self.length[rows] + i).tolist()
            drawn, sure = self.sampler.draft(logits, zeros, positions, listed)
            tops.append(np.asarray(sure))
            before = tokens[:, i] = np.asarray(drawn)
        lengths = self._verified(tokens, np.stack(tops, 1), last)
        if s.ngram:
            certain = np.flatnonzero(last % 2 == 0)
            num = min(2, depth)
            tokens[certain, :num] = self.world.ngram[last[certain], :num]
            lengths[certain] = num
        return tokens, lengths

    def _verified(self, tokens: np.ndarray, tops: np.ndarray, last: np.ndarray) -> np.ndarray:
        s, depth = self.setting, self.setting.depth

        @cache
        def length(known: tuple[float, ...], valid: int) -> int:
            return num_verified(depth, known, p_min=s.p_min, n_min=s.n_min, valid=lambda n: min(n, valid))

        valid = np.full(len(tokens), depth)
        before = last
        for i in range(depth if s.grammar else 0):
            bad = ~self.world.allowed[before, tokens[:, i]] & (valid == depth)
            valid[bad] = i
            before = tokens[:, i]
        return np.asarray([length(tuple(t), v) for t, v in zip(tops.tolist(), valid.tolist(), strict=True)])

    def _last(self, rows: np.ndarray) -> np.ndarray:
        length = self.length[rows]
        return np.where(length > 0, self.text[rows, np.maximum(length - 1, 0)], START)

    def _counts(self, rows: np.ndarray) -> DraftedBefore | None:
        """Which tokens stand in the answers of R rows so far."""
        if not self.sampler.needs_drafts:
            return None
        counts = np.zeros((len(rows), VOCAB), np.float32)
        for i in range(int(self.length[rows].max(initial=0))):
            some = np.flatnonzero(self.length[rows] > i)
            np.add.at(counts, (some, self.text[rows[some], i]), 1.0)
        return drafted(counts)


def p_value(texts: np.ndarray, expected: np.ndarray) -> float:
    """Of the chi-square of texts against expected, cells of fewer than 5 taken together; 0 if something impossible came.

    By Wilson and Hilferty's cube root, which is good to a few per cent here.
    """
    size = len(texts)
    counts = np.bincount(np.ravel_multi_index(tuple(texts.T), expected.shape), minlength=expected.size)
    wanted = expected.reshape(-1) * size
    if counts[wanted == 0].any():
        return 0.0
    rare = wanted < 5
    pairs = [*zip(counts[~rare], wanted[~rare], strict=True), (counts[rare].sum(), wanted[rare].sum())]
    terms = [(c - w) ** 2 / w for c, w in pairs if w >= 1]
    free = len(terms) - 1
    z = ((sum(terms) / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return 0.5 * math.erfc(z / math.sqrt(2))
