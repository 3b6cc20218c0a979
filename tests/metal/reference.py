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
