"""How far two right computations of the same numbers may lie apart: from the dtype and from how many terms are summed, on any machine.

Which order a BLAS adds in, and whether it fuses products with sums, depends on the CPU: no bound may come from what one machine gave.
The rule is Higham's and Mary's (A New Approach to Probabilistic Rounding Error Analysis, 2019): where the errors of n additions are
independent with mean 0, a sum is off by no more than LAMBDA * sqrt(n) * u times the sum of the terms' magnitudes, in any order, but with
a probability of 2 * n * exp(-LAMBDA ** 2 / 2): 3e-10 for 10,000 terms.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

LAMBDA = 8.0
# half the distance from 1 to the next number: the largest relative error of one rounding
UNITS = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


def of_sum(num_terms: int, dtype: mx.Dtype = mx.float32) -> float:
    """Largest error of a sum of `num_terms` products, in units of the sum of their magnitudes. For a chain of sums of which each reads the
    one before without making its error larger, num_terms is that of all of them."""
    return float(LAMBDA * np.sqrt(num_terms) * UNITS[dtype])


def of_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, sees: np.ndarray) -> np.ndarray:
    """Largest error of float32 attention, (1, H, w, D). q (1, H, w, D), k and v (1, Hkv, L, D), sees (w, L) bool.

    Scores are sums of D terms. An error of a score is a relative one of its weight, and of the total; so is what exp makes of rounding its
    argument. Weighing sums L terms, and so does the total.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.where(sees, scale * (q @ k.swapaxes(-1, -2)), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    magnitudes = scale * (np.abs(q) @ np.abs(k).swapaxes(-1, -2))
    shift = np.where(sees, magnitudes, 0).max(-1, keepdims=True)
    of_score = of_sum(q.shape[-1]) * shift
    of_weight = 2 * (of_score + 4 * UNITS[mx.float32] * (1 + shift)) + 2 * of_sum(k.shape[2])
    return of_weight * (weights @ np.abs(v))


def of_model(num_layers: int, width: int) -> float:
    """Largest error of a float32 model's logits or states, in units of the largest of them. A layer is four sums of up to `width` terms in
    a row (projection in, mixing or gating, projection out, and a norm); norms keep activations near 1, so that errors of layers add up as
    those of terms do."""
    return of_sum(4 * num_layers * width)


def of_code(bits: int, num_tokens: int, group: int = 64) -> float:
    """Largest change of attention over `num_tokens` tokens, in units of its size, where a last bit puts one number of a key or a value
    on the other side of the border between two codes of `bits` bits; 0 for 16, where nothing is coded.

    The number moves by one step, the range of its group over 2^bits - 1. Of n normal numbers the range is about 2 sqrt(2 ln n) deviations,
    and the length of the group sqrt(n) of them. The output moves by that share times the weight of the token, which is 1 / num_tokens on
    average and taken to be no more than LAMBDA times that. Few numbers lie so near to a border that rounding decides: one a text or so.
    """
    if bits >= 16:
        return 0.0
    step = 2 * np.sqrt(2 * np.log(group) / group) / (2**bits - 1)
    return float(step * min(1.0, LAMBDA / num_tokens))
