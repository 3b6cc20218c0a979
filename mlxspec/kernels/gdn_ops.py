"""Gated delta rule in plain mx operations: the twin of every GDN kernel, and the path of CPU and CUDA.

Per head, with state S (Dv, Dk), decay g = exp(log_g), step size beta:
    delta = beta (v - g S k);   S = g S + delta k^T;   y = S q
What one forward did to the state is its tape (k, delta, log_g): applying a tape needs no weights and no reductions (`replay`).
Two forms of the same rule: steps, whose replay is bitwise the forward, for decode and verify; chunks (the WY form of Yang et al. 2024,
"Parallelizing Linear Transformers with the Delta Rule", with decay as in "Gated Delta Networks"), all matmuls, for prefill.
Shapes: q, k (N, Hk, Dk); v (N, Hv, Dv); log_g, beta (N, Hv) float32; state (B, Hv, Dv, Dk) float32. v-head h uses k-head h // (Hv / Hk).
The caller says how many tape entries are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.kernels.flat import RaggedIndex

CHUNK = 64  # tokens solved together in prefill
COMPILE_AT_MOST = 64  # tokens a row
_BLOCK = 16  # rows of the triangular inverse found by substitution


class Tape(NamedTuple):
    """A record of what a forward of M flat tokens did to B states. k (M, Hk, Dk) compute dtype, delta (M, Hv, Dv) float32, log_g (M, Hv)
    float32."""

    k: mx.array
    delta: mx.array
    log_g: mx.array


class Steps(NamedTuple):
    """The result of `steps`: y (N, Hv, Dv) float32, the state after all tokens, and their tape."""

    y: mx.array
    after: mx.array
    tape: Tape


def replay(state: mx.array, tape: Tape, num_committed: mx.array, index: RaggedIndex | None) -> mx.array:
    """Return the state after the first `num_committed[b]` (B,) tape entries of each row. The operations and their order are those of
    `steps`.

    index: of the tape's rows; None where they have one width.
    """
    k, delta, log_g = tape
    if index is None:
        log_g = log_g.reshape(state.shape[0], -1, log_g.shape[1])
    else:
        k, delta, log_g = (x[index.tokens] for x in tape)
    return _looped(_replay, log_g.shape[1])(state, k, delta, log_g, num_committed)  # type: ignore[no-any-return]


def replay_first(state: mx.array, tape: Tape, num: int) -> mx.array:
    """Return the state after the first `num` entries of every row, for rows of one width. Nothing has to be masked."""
    if num == 0:
        return state
    k, delta, log_g = (x.reshape(state.shape[0], -1, *x.shape[1:])[:, :num] for x in tape)
    return _looped(_replay, num)(state, k, delta, log_g)  # type: ignore[no-any-return]


def _replay(
    state: mx.array, k: mx.array, delta: mx.array, log_g: mx.array, num_committed: mx.array | None = None
) -> mx.array:
    """Return the state after tape entries of rows of one width. log_g (B, W, Hv); k and delta (B W, ...), or (B, W, ...). num_committed
    (B,): number of entries of each row, None for all."""
    num_rows, num_heads, v_dim, k_dim = state.shape
    k = per_value_head(k.astype(mx.float32), num_heads)
    width = log_g.shape[1]
    decay = mx.exp(log_g).reshape(num_rows, width, num_heads, 1, 1)
    delta = delta.reshape(num_rows, width, num_heads, v_dim, 1)
    if num_committed is not None:
        places = mx.array(np.arange(width, dtype=np.int32).reshape(1, width, 1, 1, 1))
        keep = places < num_committed.reshape(num_rows, 1, 1, 1, 1)
        decay, delta = mx.where(keep, decay, 1.0), mx.where(keep, delta, 0.0)
    k = k.reshape(num_rows, width, num_heads, 1, k_dim)
    s = state[:, None]
    for decay_t, delta_t, k_t in zip(*(_each_step(x, width, 1) for x in (decay, delta, k)), strict=True):
        s = s * decay_t + delta_t * k_t
    return s.reshape(state.shape)


class Padded(NamedTuple):
    """The inputs of B rows padded to W tokens: decay (B, W, Hv); q, k, v and beta flat (B W, ...) or (B, W, ...), float32. A padded
    place has a decay of 1 and a step size of 0, so it does not change the state."""

    q: mx.array
    k: mx.array
    v: mx.array
    decay: mx.array
    beta: mx.array


def padded(tokens: Sequence[mx.array], num_rows: int, index: RaggedIndex | None) -> Padded:
    """Pad q, k, v, log_g and beta of flat rows, given as `tokens` in this order, and return them. index None: rows have one width."""
    q, k, v, log_g, beta = tokens
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    # decay lies behind a reshape, so that it is never fused and has one form
    if index is None:
        return Padded(q, k, v, mx.exp(log_g.reshape(num_rows, -1, log_g.shape[1])), beta)
    valid = index.valid[..., None]
    decay, size = mx.where(valid, mx.exp(log_g[index.tokens]), 1.0), mx.where(valid, beta[index.tokens], 0.0)
    return Padded(q[index.tokens], k[index.tokens], v[index.tokens], decay, size)


def steps(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    state: mx.array,
    index: RaggedIndex | None = None,
) -> Steps:
    """Run the gated delta rule token by token from `state` (B, Hv, Dv, Dk), and return y, the state after all tokens, and the tape."""
    rows = padded((q, k, v, log_g, beta), state.shape[0], index)
    y, delta, after = _looped(_steps, rows.decay.shape[1])(*rows, state)
    if index is not None:
        y, delta = y[index.unpad], delta[index.unpad]
    return Steps(y, after, Tape(k, delta, log_g))


def _steps(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Return y and delta (B W, Hv, Dv) and the state after all tokens, for padded rows.

    Everything is laid out once as (B, W, Hv, rows, columns), or for one row without B, so that a step is two matmuls and two fused
    elementwise operations. One row's steps are cut along the axis of its tokens, and one token for each row needs no cutting: states
    then have no further axis.
    """
    num_rows, num_heads, v_dim, k_dim = state.shape
    width = decay.shape[1]
    q, k = per_value_head(q, num_heads), per_value_head(k, num_heads)
    axis = 0 if num_rows == 1 else 1
    head = (num_rows * width, num_heads) if 1 in (num_rows, width) else (num_rows, width, num_heads)
    shaped = (
        q.reshape(*head, k_dim, 1),
        k.reshape(*head, k_dim, 1),
        k.reshape(*head, 1, k_dim),
        v.reshape(*head, v_dim, 1),
        decay.reshape(*head, 1, 1),
        beta.reshape(*head, 1, 1),
    )
    s, ys, deltas = state if len(head) == 2 else state[:, None], [], []
    for q_t, k_t, k_row, v_t, decay_t, beta_t in zip(
        *(_each_step(x, width, axis) for x in shaped), strict=True
    ):
        delta = (v_t - (s @ k_t) * decay_t) * beta_t
        s = s * decay_t + delta * k_row
        ys.append(s @ q_t)
        deltas.append(delta)
    y, delta = (_join_steps(x, axis).reshape(num_rows * width, num_heads, v_dim) for x in (ys, deltas))
    return y, delta, s.reshape(state.shape)


_compiled_replay, _compiled_steps = mx.compile(_replay), mx.compile(_steps)


def _looped(run: Callable[..., Any], width: int) -> Callable[..., Any]:
    """Return `run`, or its compiled form where compiling pays for `width` tokens a row. All layers share the compiled form of a width.
    run: `_replay` or `_steps`, which loop over the tokens themselves."""
    if width > COMPILE_AT_MOST:
        return run
    if run is _replay:
        return _compiled_replay
    return run if width == 1 else _compiled_steps


def chunks(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Read a prompt of one row (B = 1), N tokens in chunks of CHUNK, and return y (N, Hv, Dv) float32 and the state after all tokens.

    Everything that does not depend on the state is computed for all chunks at once; only three matmuls in each chunk are sequential.
    """
    num_tokens, num_heads = v.shape[0], v.shape[1]
    size = min(CHUNK, -(-num_tokens // _BLOCK) * _BLOCK)
    num_chunks = -(-num_tokens // size)
    q, k, v, log_g, beta = (_cut(x.astype(mx.float32), num_chunks, size) for x in (q, k, v, log_g, beta))
    q, k = _group_heads(q, num_heads), _group_heads(k, num_heads)  # (H, n, C, Dk)
    beta = beta[..., None]
    place = np.arange(size)
    later = mx.array(place[:, None] > place)
    g = mx.exp(log_g)[..., None]  # (H, n, C, 1)
    # decay between token j and token i, each a product of its own: quotients of running products lose float32 where decays are strong
    between = mx.cumprod(mx.where(later, g, 1.0), axis=-2)  # (H, n, C, C)
    decay = between * mx.array(np.tri(size, dtype=np.float32))
    keys = k.swapaxes(-1, -2)
    grown = mx.cumprod(g, axis=-2)
    coupling = mx.where(later, ((k * beta) @ keys) * decay, 0.0)
    inverse = _unit_lower_inverse(coupling)
    fresh = inverse @ (v * beta)  # deltas if the chunk began with an empty state
    seen = inverse @ (k * beta * grown)
    scores = (q @ keys) * decay
    q = q * grown
    k_out = (k * between[..., -1, :, None]).swapaxes(-1, -2)
    carry = grown[..., -1:, :]
    memory = state[0].swapaxes(-1, -2)  # (H, Dk, Dv)
    ys = []
    for c in range(num_chunks):
        delta = fresh[:, c] - seen[:, c] @ memory
        ys.append(q[:, c] @ memory + scores[:, c] @ delta)
        memory = memory * carry[:, c] + k_out[:, c] @ delta
    y = mx.stack(ys, axis=1).reshape(num_heads, num_chunks * size, -1)
    return y.swapaxes(0, 1)[:num_tokens], memory.swapaxes(-1, -2)[None]


def per_value_head(x: mx.array, num_heads: int) -> mx.array:
    """Repeat x (..., Hk, Dk) so that each value head has its key head: (..., Hv, Dk). num_heads: Hv."""
    groups = num_heads // x.shape[-2]
    return x if groups == 1 else mx.repeat(x, groups, axis=-2)


def _each_step(x: mx.array, width: int, axis: int) -> list[mx.array]:
    """Split x, of size W on `axis`, into W arrays of size 1 on it. width: W."""
    return [x] if width == 1 else mx.split(x, width, axis=axis)


def _join_steps(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _cut(x: mx.array, num_chunks: int, size: int) -> mx.array:
    """Cut x (N, H, ...) into chunks (H, n, C, ...), padded with zeros: a token with beta 0, k 0 and log_g 0 changes nothing."""
    missing = num_chunks * size - x.shape[0]
    if missing:
        x = mx.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    x = x.reshape(num_chunks, size, *x.shape[1:])
    return mx.moveaxis(x, 2, 0)


def _group_heads(x: mx.array, num_heads: int) -> mx.array:
    groups = num_heads // x.shape[0]
    return x if groups == 1 else mx.repeat(x, groups, axis=0)


def _unit_lower_inverse(a: mx.array) -> mx.array:
    """Return (I + a)^-1 for strictly lower triangular a (..., C, C), C a multiple of 16.

    The inverse is found by substitution in blocks of 16, then block by block. (Squaring, the other matmul form, loses float32 precision
    when keys correlate.)
    """
    size = a.shape[-1]
    num_blocks = size // _BLOCK
    blocks = [a[..., i * _BLOCK : (i + 1) * _BLOCK, i * _BLOCK : (i + 1) * _BLOCK] for i in range(num_blocks)]
    diagonal = mx.stack(blocks, axis=-3)  # (..., nb, 16, 16)
    eye = mx.broadcast_to(mx.eye(_BLOCK), diagonal.shape)
    rows = [eye[..., :1, :]]
    for i in range(1, _BLOCK):
        known = rows[0] if i == 1 else mx.concatenate(rows, axis=-2)
        rows.append(eye[..., i : i + 1, :] - diagonal[..., i : i + 1, :i] @ known)
    inverse = mx.concatenate(rows, axis=-2)
    parts: list[mx.array] = []
    for i in range(num_blocks):
        own = inverse[..., i, :, :]
        left = i * _BLOCK
        right = mx.zeros((*a.shape[:-2], _BLOCK, size - left - _BLOCK))
        if i == 0:
            parts.append(mx.concatenate([own, right], axis=-1))
            continue
        above = mx.concatenate(parts, axis=-2)[..., :left]
        solved = -(own @ (a[..., left : left + _BLOCK, :left] @ above))
        parts.append(mx.concatenate([solved, own, right], axis=-1))
    return mx.concatenate(parts, axis=-2)
