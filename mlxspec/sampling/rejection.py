"""Speculative sampling by rejection (Leviathan et al. 2023; Chen et al. 2023), many positions at once.

A drafted token x ~ q is accepted with probability min(1, p(x) / q(x)). Otherwise a token is drawn from the rest, max(p - q, 0) over its
sum. The result is distributed as p. A token drawn from the rest is never x, because there p(x) < q(x). So a draft is accepted exactly if
the choice equals it. Uniforms must be fresh for every position, and independent of the noise of the draft and of the rest.
"""

from __future__ import annotations

import mlx.core as mx


def reject(
    target: mx.array, draft: mx.array | None, drafted: mx.array, uniform: mx.array, noise: mx.array
) -> mx.array:
    """The target's choices (N,) int32: `drafted` where it is accepted, else a token of the rest.

    target (N, V): scores p is the softmax of. draft (N, V): the same of q; None for q all at the drafted token. drafted (N,) ids,
    uniform (N,) in [0, 1), noise (N, V) Gumbel.
    """
    return _compiled(target, draft, drafted, uniform, noise)


def _reject(
    target: mx.array, draft: mx.array | None, drafted: mx.array, uniform: mx.array, noise: mx.array
) -> mx.array:
    p = mx.softmax(target, axis=-1, precise=True)
    column = drafted[:, None]
    at = mx.arange(target.shape[1])[None] == column
    p_x = mx.take_along_axis(p, column, axis=-1)[:, 0]
    if draft is None:
        q_x, rest = mx.ones_like(p_x), mx.where(at, 0.0, p)
    else:
        q = mx.softmax(draft, axis=-1, precise=True)
        q_x = mx.take_along_axis(q, column, axis=-1)[:, 0]
        rest = mx.maximum(p - q, 0.0)
    is_accepted = uniform * q_x < p_x
    # rounding may leave nothing where p and q are equal: then any of p will do
    rest = mx.where(mx.max(rest, axis=-1, keepdims=True) > 0, rest, p)
    other = mx.argmax(mx.log(rest) + noise, axis=-1)
    return mx.where(is_accepted, drafted, other).astype(mx.int32)


_compiled = mx.compile(_reject)
