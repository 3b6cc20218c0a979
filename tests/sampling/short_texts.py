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
from mlxspec.sampling.acceptance import DraftOutline, Limits, submit_for_match, submit_for_rejection
from mlxspec.sampling.noise import NoiseStream, gumbel, uniform
from mlxspec.sampling.rejection import reject
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler, spread
from mlxspec.sampling.scores import DraftedBefore
from mlxspec.sampling.truncate import confidence
from tests.drafted import drafted
from tests.sampling.test_sampler import probabilities

VOCAB, LENGTH, START, STRIDE = 16, 3, 0, 64


class Fault(Enum):
    """Mistakes, each of which makes rejection inexact."""

    ONE_UNIFORM = "one uniform a round for all of its positions"
    OWN_PROBABILITY = "a draft ends before a drafted token that is itself improbable"
    TRIMMED = "forbidden tokens are taken off the draft beforehand"
    SHORT_DROPPED = "drafts that came out short are dropped"
    SHARED_NOISE = "drafts are drawn with the target's own noise"
    ONE_COIN = "whether XTC happens is drawn with the uniforms of acceptance"
    WHOLE_SCORES = "drafts are held against the distribution over all tokens, though only some could be drawn"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of decoding. listed: tokens that the model may propose, () for all. ngram: rows whose last token is even get two certain
    tokens, others ask the model: a chain."""

    rule: str = "rejection"
    depth: int = 2
    params: dict = field(default_factory=dict)
    p_min: float = 0.0
    n_min: int = 0
    grammar: bool = False
    listed: tuple[int, ...] = ()
    ngram: bool = False
    drafts_by: str = "independent"
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
        row = RowSampler(params_of(setting), [START], VOCAB, drafts_by=setting.drafts_by, keeps_drafts=True)
        self.sampler, self.row = BatchSampler([row], VOCAB), row
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
        tokens, scores, own, lengths = self._propose(rows)
        alive = np.arange(len(rows))  # places in `rows` whose drafts have all stood
        start = self.length[rows].copy()
        for i in range(self.setting.depth + 1):
            if not len(alive):
                break
            here = rows[alive]
            positions = (here * STRIDE + self.length[here]).tolist()
            chosen = self._choose(here, positions, i, alive, tokens, scores, own, lengths, start)
            self.text[here, np.minimum(self.length[here], LENGTH + 7)] = chosen
            self.length[here] += 1
            drafted = lengths[alive] > i
            stood = drafted & (chosen == tokens[alive, min(i, self.setting.depth - 1)])
            self.num_drafted += int(drafted.sum())
            self.num_stood += int(stood.sum())
            alive = alive[stood]

    def _choose(self, here, positions, i, alive, tokens, scores, own, lengths, start) -> np.ndarray:
        last, counts = self._last(here), self._counts(here)
        masks = [self.allowed[t] for t in last] if self.setting.grammar else None
        zeros = [0] * len(here)
        p = self.sampler.scores(self.target[mx.array(last)], zeros, counts, masks, positions=positions)
        chosen = np.asarray(self.sampler.choose(p, zeros, positions))
        drafted = np.flatnonzero(lengths[alive] > i)
        if self.setting.rule == "match" or not len(drafted):
            return chosen
        some, chosen = alive[drafted], chosen.copy()
        seeds = [self.row.seed] * len(drafted)
        places = [positions[n] for n in drafted]
        fresh = places
        if self.setting.fault is Fault.ONE_UNIFORM:
            fresh = (here[drafted] * STRIDE + start[some]).tolist()
        at = mx.array(tokens[some, i].astype(np.int32))
        # certain drafts as logits, so that both kinds go in one call
        q = np.where(own[some][:, None], np.asarray(scores[i])[some], -np.inf)
        q[~own[some], tokens[some, i][~own[some]]] = 0.0
        decided = reject(
            p[mx.array(drafted)],
            mx.array(q),
            at,
            uniform(
                seeds, fresh, NoiseStream.XTC if self.setting.fault is Fault.ONE_COIN else NoiseStream.ACCEPT
            ),
            gumbel(seeds, places, VOCAB),
        )
        chosen[drafted] = np.asarray(decided)
        return chosen

    def _propose(self, rows: np.ndarray) -> tuple[np.ndarray, list, np.ndarray, np.ndarray]:
        """tokens (R, depth), scores of each depth, which rows' drafts a model drew, and how many tokens are submitted."""
        s, depth = self.setting, self.setting.depth
        last, counts = self._last(rows), self._counts(rows)
        own = np.ones(len(rows), bool)
        tokens = np.zeros((len(rows), depth), np.int64)
        scores, tops, chances = [], [], []
        way = (
            NoiseStream.TARGET
            if s.drafts_by == "shared" or s.fault is Fault.SHARED_NOISE
            else NoiseStream.DRAFT
        )
        before = last
        zeros, listed = [0] * len(rows), mx.array(np.asarray(s.listed, np.int32))
        for i in range(depth):
            logits = self.draft[mx.array(before)]
            positions = (rows * STRIDE + self.length[rows] + i).tolist()
            if s.listed:
                of_some = logits[:, listed]
                drawn, q, _ = self.sampler.draft(of_some, zeros, positions, listed)
                if s.fault is Fault.WHOLE_SCORES:
                    q = self.sampler.scores(logits, zeros, positions=positions)
                logits = spread(of_some, listed, VOCAB)
                q = logits if q is None else q
                tops.append(np.asarray(confidence(of_some)))
            else:
                q = self.sampler.scores(logits, zeros, counts, positions=positions)
                argmax = s.drafts_by == "argmax"
                drawn = (
                    mx.argmax(q, axis=-1)
                    if argmax
                    else self.sampler.choose(q, zeros, positions, [way] * len(rows))
                )
                tops.append(np.asarray(confidence(logits)))
            before = np.asarray(drawn)
            tokens[:, i] = before
            scores.append(q)
            chances.append(
                np.exp(np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))[
                    np.arange(len(rows)), before
                ]
            )
        lengths = self._submit(
            tokens, np.stack(chances if s.fault is Fault.OWN_PROBABILITY else tops, 1), last
        )
        if s.drafts_by == "argmax":
            own[:] = False
        if s.ngram:
            certain = np.flatnonzero(last % 2 == 0)
            num = min(2, depth)
            tokens[certain, :num] = self.world.ngram[last[certain], :num]
            own[certain], lengths[certain] = False, num
        return tokens, scores, own, lengths

    def _submit(self, tokens: np.ndarray, tops: np.ndarray, last: np.ndarray) -> np.ndarray:
        s = self.setting
        limits, depth = Limits(p_min=s.p_min, n_min=s.n_min), s.depth

        @cache
        def length(known: tuple[float, ...], valid: int) -> int:
            outline = DraftOutline(length=depth, tops=known)
            if s.rule == "match":
                return submit_for_match(outline, limits, lambda n: min(n, valid)).length
            found = submit_for_rejection(outline, Limits(p_min=s.p_min)).length
            if s.fault is Fault.TRIMMED:
                found = min(found, valid)
            return 0 if s.fault is Fault.SHORT_DROPPED and found < 2 else found

        valid = np.full(len(tokens), depth)
        if s.grammar and (s.rule == "match" or s.fault is Fault.TRIMMED):
            before = last
            for i in range(depth):
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
