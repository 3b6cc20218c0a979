"""The choice of the next token from logits, for many positions of many requests at once.

Order: repetition, presence and frequency penalties, logit bias, temperature, top-k, top-p, min-p, then argmax of logits + keyed
Gumbel noise. A position's result depends on its own logits, request and history alone, never on what else is in the batch;
parameters that a row does not use are neutral for it, bit for bit. Knows nothing of drafts beyond "these tokens stand before that
position".
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.sampling.noise import gumbel

_COLDEST = 1e-6  # as good as greedy; float32 logits over much less would be infinite


class RowSampler:
    """One request's parameters, seed and token counts.

    `observe` is told of every token of the answer, in order; the prompt is given at the start.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        """Raises ConfigError for a logit bias on a token the model does not have."""
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.is_greedy = params.temperature == 0.0
        self.is_plain = not params.has_penalties and not params.logit_bias
        self._vocab_size = vocab_size
        self.prompt_seen: mx.array | None = None
        self.counts: mx.array | None = None
        self.bias: mx.array | None = None
        if params.has_penalties:
            self.prompt_seen = mx.array(np.bincount(list(prompt), minlength=vocab_size)[:vocab_size] > 0)
            self.counts = mx.zeros((vocab_size,), mx.float32)
        if params.logit_bias:
            if max(params.logit_bias) >= vocab_size:
                raise ConfigError(
                    f"logit_bias names token {max(params.logit_bias)}, but the model has {vocab_size}."
                )
            bias = np.zeros(vocab_size, np.float32)
            bias[list(params.logit_bias)] = list(params.logit_bias.values())
            self.bias = mx.array(bias)

    def observe(self, tokens: Sequence[int]) -> None:
        """These tokens of the answer are final."""
        if self.counts is not None and tokens:
            self.counts = self.counts + mx.array(
                np.bincount(list(tokens), minlength=self._vocab_size).astype(np.float32)
            )


class BatchSampler:
    """Samples for positions of several rows in one go."""

    def __init__(self, rows: Sequence[RowSampler], vocab_size: int) -> None:
        self.rows = list(rows)
        self.vocab_size = vocab_size

    def sample(
        self,
        logits: mx.array,
        owners: Sequence[int],
        positions: Sequence[int],
        drafts: mx.array | None = None,
    ) -> mx.array:
        """Tokens (N,) for logits (N, V), lazily.

        owners: index into rows of each position. positions: where in its row each sampled token will stand. drafts (N, V): how often each
        token stands between the row's final tokens and this position; None for nowhere.
        """
        used = [self.rows[o] for o in owners]
        if all(r.is_greedy and r.is_plain for r in used):
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logits = logits.astype(mx.float32)
        if not all(r.is_plain for r in used):
            logits = _penalize(logits, used, drafts)
        if all(r.is_greedy for r in used):
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logits = _truncate(_temper(logits, used), used)
        noise = gumbel([r.seed for r in used], positions, self.vocab_size)
        if any(r.is_greedy for r in used):
            noise = mx.where(_column([r.is_greedy for r in used]), 0.0, noise)
        return mx.argmax(logits + noise, axis=-1).astype(mx.int32)

    @property
    def needs_drafts(self) -> bool:
        """Whether `sample` wants to know what drafts stand before a position."""
        return any(r.counts is not None for r in self.rows)


def confidence(logits: mx.array) -> mx.array:
    """(N, V) -> (N,): the probability of the most likely token."""
    return mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))


def _column(values: Sequence[float] | Sequence[bool]) -> mx.array:
    return mx.array(list(values))[:, None]


def _penalize(logits: mx.array, rows: Sequence[RowSampler], drafts: mx.array | None) -> mx.array:
    vocab = logits.shape[1]
    if any(r.counts is not None for r in rows):
        zero, nothing = mx.zeros((vocab,)), mx.zeros((vocab,), mx.bool_)
        counts = mx.stack([zero if r.counts is None else r.counts for r in rows])
        counts = counts if drafts is None else counts + drafts
        seen = mx.stack([nothing if r.prompt_seen is None else r.prompt_seen for r in rows]) | (counts > 0)
        repetition = _column([r.params.repetition_penalty for r in rows])
        penalized = mx.where(logits > 0, logits / repetition, logits * repetition)
        logits = mx.where(seen, penalized, logits)
        presence = _column([float(r.params.presence_penalty) for r in rows])
        frequency = _column([float(r.params.frequency_penalty) for r in rows])
        logits = logits - presence * (counts > 0) - frequency * counts
    if any(r.bias is not None for r in rows):
        none = mx.zeros((vocab,))
        logits = logits + mx.stack([none if r.bias is None else r.bias for r in rows])
    return logits


def _temper(logits: mx.array, rows: Sequence[RowSampler]) -> mx.array:
    return logits / _column(
        [1.0 if r.is_greedy else max(float(r.params.temperature), _COLDEST) for r in rows]
    )


def _truncate(logits: mx.array, rows: Sequence[RowSampler]) -> mx.array:
    """Everything below the largest of the three thresholds becomes impossible. Ties at a threshold all stay."""
    params = [r.params for r in rows]
    vocab = logits.shape[1]
    floors = []
    if any(p.top_k or p.top_p < 1.0 for p in params):
        ranked = -mx.sort(-logits, axis=-1)
        last = _column([min(p.top_k or vocab, vocab) - 1 for p in params])
        floors.append(mx.take_along_axis(ranked, last, axis=-1))
        if any(p.top_p < 1.0 for p in params):
            inside = mx.where(mx.arange(vocab)[None] <= last, ranked, -mx.inf)
            probs = mx.softmax(inside, axis=-1, precise=True)
            before = mx.cumsum(probs, axis=-1) - probs
            # the most likely token always stays; a top_p of 1 must not lose the tail to rounding
            limit = _column([p.top_p if p.top_p < 1.0 else 2.0 for p in params])
            kept = mx.where(before < limit, ranked, mx.inf)
            floors.append(mx.min(kept, axis=-1, keepdims=True))
    if any(p.min_p > 0.0 for p in params):
        logs = _column([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params])
        floors.append(mx.max(logits, axis=-1, keepdims=True) + logs)
    for floor in floors:
        logits = mx.where(logits < floor, -mx.inf, logits)
    return logits
