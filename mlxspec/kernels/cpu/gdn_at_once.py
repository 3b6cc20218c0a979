"""The gated delta rule over a few tokens at once: what a CPU runs in place of the steps of a verify.

Token by token a verify takes five of MLX's operations each, of a few microseconds whatever they compute. What each token writes, delta,
depends on the tokens before it,
    delta_i = beta_i (v_i - g_1..g_i S k_i) - sum_j<i beta_i (k_j . k_i) g_j+1..g_i delta_j,
which is one triangular system a head (the WY form of Yang et al. 2024, see gdn_ops, of a single chunk). The tape is that of `steps`, but
for the last float32 bits. Shapes as in gdn_ops; inside, heads come first and tokens last.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxspec.kernels import cpu, exactness
from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.flat import RaggedIndex
from mlxspec.kernels.gdn_ops import Tape, padded, per_value_head

BY_STEPS = 4  # tokens a row: up to so many, steps are as fast and have the bits of plain decoding


def takes(keys: mx.array, state: mx.array, index: RaggedIndex | None) -> bool:
    """Return whether the rows of a forward with these keys (N, Hk, Dk) are verified and replayed by this module."""
    width = keys.shape[0] // state.shape[0] if index is None else index.tokens.shape[1]
    return width > BY_STEPS and cpu.takes(keys.dtype) and not exactness.is_demanded


def verify(inputs: GdnInputs, state: mx.array, index: RaggedIndex | None) -> tuple[mx.array, mx.array, Tape]:
    """Run tokens that may be rejected, and return y (N, Hv, Dv) float32, the unchanged state, and the tape."""
    y, delta = _solved(*padded(inputs, state.shape[0], index), state)
    if index is not None:
        y, delta = y[index.unpad], delta[index.unpad]
    return y, state, Tape(inputs.k, delta, inputs.log_g)


def replayed(state: mx.array, tape: Tape, num_committed: mx.array, index: RaggedIndex | None) -> mx.array:
    """Return the state (B, Hv, Dv, Dk) after the first num_committed (B,) int32 entries of each row of a tape. index: the places of the
    rows' tokens on the tape's flat token axis; None where all rows have one width."""
    k, delta, log_g = tape
    if index is None:
        log_g = log_g.reshape(state.shape[0], -1, log_g.shape[1])
    else:
        k, delta, log_g = (x[index.tokens] for x in tape)
    return _written(state, k, delta, log_g, num_committed)


@mx.compile
def _solved(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return y and delta (B W, Hv, Dv) of padded rows. Decays are products in the order of the steps."""
    num_rows, num_heads = state.shape[:2]
    width = decay.shape[1]

    def heads_first(x: mx.array, *, tokens_last: bool) -> mx.array:
        x = x.reshape(num_rows, width, num_heads, -1)
        return x.transpose(0, 2, 3, 1) if tokens_last else x.swapaxes(1, 2)

    q, k = per_value_head(q, num_heads), per_value_head(k, num_heads)
    keys = heads_first(k, tokens_last=False)
    asked = mx.concatenate([heads_first(x, tokens_last=True) for x in (q, k)], axis=-1)  # (B, Hv, Dk, 2 W)
    seen_q, seen_k = mx.split(state @ asked, 2, axis=-1)  # (B, Hv, Dv, W)
    alike_q, alike_k = mx.split(keys @ asked, 2, axis=-1)  # (B, Hv, W, W): key j with query or key i
    # decays (B, Hv, W + 1, W): in row 0 from before the first token to behind token i, in row j + 1 from behind token j (0 for i < j)
    since, later = np.arange(width + 1)[:, None], np.arange(width)
    counted = mx.where(mx.array(later >= since), decay.swapaxes(1, 2)[:, :, None], 1.0)
    decays = mx.cumprod(counted, axis=-1) * mx.array(later >= since - 1)
    begun, between = mx.split(decays, [1], axis=2)
    beta = heads_first(beta, tokens_last=True)
    coupling = mx.where(
        mx.array(later > later[:, None]), alike_k * between * beta, mx.array(np.eye(width, dtype=np.float32))
    )
    fresh = (heads_first(v, tokens_last=True) - seen_k * begun) * beta
    delta = fresh @ mx.linalg.tri_inv(coupling, upper=True)
    y = seen_q * begun + delta @ (alike_q * between)
    flat = num_rows * width, num_heads, -1
    return y.transpose(0, 3, 1, 2).reshape(flat), delta.transpose(0, 3, 1, 2).reshape(flat)


@mx.compile
def _written(
    state: mx.array, k: mx.array, delta: mx.array, log_g: mx.array, num_committed: mx.array
) -> mx.array:
    """Compute `replayed` for padded rows; log_g (B, W, Hv). Entries of rejected tokens may have any value."""
    num_rows, num_heads, value_dim, key_dim = state.shape
    width = log_g.shape[1]
    stands = mx.array(np.arange(width, dtype=np.int32)[:, None]) < num_committed[:, None, None]
    # decays (B, W, Hv) from before each token to behind the last one that stands
    decays = mx.cumprod(mx.where(stands, mx.exp(log_g), 1.0), axis=1, reverse=True)
    since = mx.concatenate([decays[:, 1:], mx.ones_like(decays[:, :1])], axis=1)
    delta = delta.reshape(num_rows, width, num_heads, value_dim)
    written = mx.where(stands[..., None], delta * since[..., None], 0.0)
    keys = per_value_head(k, num_heads).reshape(num_rows, width, num_heads, key_dim)
    return state * decays[:, 0, :, None, None] + written.transpose(0, 2, 3, 1) @ keys.swapaxes(1, 2)
