"""Penalties, and filters that make tokens impossible by the shape of a position's distribution, beside top-k, top-p and min-p. Pure
functions of scores (N, V) float32, with -inf for what is impossible already. Each position by itself; equal scores stay or go together; one
token always stays.

Top-n-sigma: Tang et al. 2024, "Top-nσ: Not All Logits Are You Need". Typical-p: Meister et al. 2023, "Locally Typical Sampling". XTC
("exclude top choices"): as llama.cpp has it. Sums are in float32, so a token at the very edge of typical-p may stay on one device and go on
another.
"""

from __future__ import annotations

import mlx.core as mx


def penalized(
    logits: mx.array,
    seen: mx.array,
    counts: mx.array,
    repetition: mx.array | float,
    presence: mx.array | float,
    frequency: mx.array | float,
) -> mx.array:
    """Return logits (N, V) with penalties: `repetition` for tokens in `seen` (bool), `presence` and `frequency` for tokens in `counts`.
    seen and counts: (N or 1, V). Rates: (N or 1, 1), or one number."""
    logits = mx.where(seen, mx.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - presence * (counts > 0) - frequency * counts


def top_n_sigma(logits: mx.array, sigmas: mx.array) -> mx.array:
    """Return logits (N, V) with -inf for those more than `sigmas` (N, 1) standard deviations below the highest. The deviation is that of
    the position's finite logits. An infinite sigma keeps all."""
    finite = mx.isfinite(logits)
    num = mx.sum(finite, axis=-1, keepdims=True)
    mean = mx.sum(mx.where(finite, logits, 0.0), axis=-1, keepdims=True) / num
    spread = mx.where(finite, logits - mean, 0.0)
    deviation = mx.sqrt(mx.sum(spread * spread, axis=-1, keepdims=True) / num)
    floor = mx.max(logits, axis=-1, keepdims=True) - mx.where(mx.isinf(sigmas), mx.inf, sigmas * deviation)
    return mx.where(logits < floor, -mx.inf, logits)


def typical(scores: mx.array, shares: mx.array) -> mx.array:
    """Return scores (N, V) with -inf for all but the tokens whose surprise is nearest to the entropy, up to a share (N, 1) of the
    probability. A share of 1 keeps all."""
    logs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    probabilities = mx.exp(logs)
    is_possible = probabilities > 0
    entropy = -mx.sum(mx.where(is_possible, probabilities * logs, 0.0), axis=-1, keepdims=True)
    distance = mx.where(is_possible, mx.abs(logs + entropy), mx.inf)
    order = mx.argsort(distance, axis=-1)
    mass, ranked = (mx.take_along_axis(x, order, axis=-1) for x in (probabilities, distance))
    before = mx.cumsum(mass, axis=-1, inclusive=False)
    # a share below the smallest float32 is 0 here: the first token stays all the same
    stays = ((before < shares) | (before <= 0.0)) & (ranked < mx.inf)
    farthest = mx.max(mx.where(stays, ranked, -mx.inf), axis=-1, keepdims=True)
    return mx.where((distance > farthest) & (shares < 1.0), -mx.inf, scores)


def xtc(scores: mx.array, thresholds: mx.array, happens: mx.array) -> mx.array:
    """Return scores (N, V) with -inf for tokens of at least the threshold's probability (N, 1), except the least likely of them, where
    `happens` (N, 1) bool is True."""
    probabilities = mx.softmax(scores, axis=-1)
    is_top = (probabilities >= thresholds) & (probabilities > 0)
    least = mx.min(mx.where(is_top, probabilities, mx.inf), axis=-1, keepdims=True)
    return mx.where(is_top & (probabilities > least) & happens, -mx.inf, scores)
