"""What the kernels should compute, in float64 numpy, one row, head and token at a time: slow, short, and shared with nothing."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def gated_delta(
    q: Array, k: Array, v: Array, log_g: Array, beta: Array, state: Array
) -> tuple[Array, Array, Array]:
    """One row: q, k (T, Hk, Dk), v (T, Hv, Dv), log_g, beta (T, Hv), state (Hv, Dv, Dk).

    Returns y (T, Hv, Dv), delta (T, Hv, Dv) and the states (T + 1, Hv, Dv, Dk) before the first token and after each."""
    groups = v.shape[1] // k.shape[1]
    y, delta, states = np.zeros(v.shape), np.zeros(v.shape), [state.astype(np.float64)]
    for t in range(len(q)):
        s = states[-1].copy()
        for h in range(v.shape[1]):
            key, query = k[t, h // groups].astype(np.float64), q[t, h // groups].astype(np.float64)
            s[h] *= np.exp(np.float64(log_g[t, h]))
            delta[t, h] = beta[t, h] * (v[t, h] - s[h] @ key)
            s[h] += np.outer(delta[t, h], key)
            y[t, h] = s[h] @ query
        states.append(s)
    return y, delta, np.stack(states)


def conv_inputs(
    before: Array,
    projected: Array,
    weight: Array,
    neg_a: Array,
    dt_bias: Array,
    shape: tuple[int, int, int, int],
) -> tuple[Array, Array, Array, Array, Array]:
    """One row: the 3 inputs before it (3, C), projected (T, columns q | k | v | z | b | a), weight (4, C), shape (Hk, Hv, Dk, Dv).

    Returns q, k (T, Hk, Dk), v (T, Hv, Dv), log_g, beta (T, Hv)."""
    key_heads, value_heads, key_dim, value_dim = shape
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels, num = 2 * keys + values, len(projected)
    x = np.concatenate([before, projected[:, :channels]]).astype(np.float64)
    mixed = sum((x[i : i + num] * weight[i].astype(np.float64) for i in range(4)), np.zeros((num, channels)))
    mixed = mixed / (1 + np.exp(-mixed))
    q, k = (
        mixed[:, :keys].reshape(num, key_heads, key_dim),
        mixed[:, keys : 2 * keys].reshape(num, key_heads, key_dim),
    )
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    b, a = projected[:, -2 * value_heads : -value_heads], projected[:, -value_heads:].astype(np.float64)
    log_g = neg_a * np.logaddexp(a + dt_bias, 0)
    v = mixed[:, 2 * keys :].reshape(num, value_heads, value_dim)
    return q / np.sqrt(key_dim), k, v, log_g, 1 / (1 + np.exp(-b.astype(np.float64)))
