"""The gated delta rule over a few tokens in few operations, as suits a CPU, and the trail by which rows roll back.

Rows are taken in groups of like widths (`RowGroups`). In a group of few tokens these go one by one, as in plain decoding and with its
bits, and the trail is the states that were passed. In a wider one all go at once: token by token they would take five of MLX's operations
each, of a few microseconds whatever they compute. What each token writes, delta, depends on those before it,
    delta_i = beta_i (v_i - g_1..g_i S k_i) - sum_j<i beta_i (k_j . k_i) g_j+1..g_i delta_j,
which is one triangular system a head (the WY form of Yang et al. 2024, see gdn_ops, of a single chunk); the trail is what was written.
Shapes as in gdn_ops; inside, heads come first and tokens last. Does not know which tokens are accepted; the caller says how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.flat import RaggedIndex, RowGroups
from mlxspec.kernels.gdn_ops import each_group, per_value_head, pick_rows, run_steps
from mlxspec.platform import device

# bytes of the states that a row passes in one layer: where they take more, all tokens go at once
_PASSED_AT_MOST = 8 << 20
_HELD = 3  # arrays in the trail of a group that went at once


class Trail(NamedTuple):
    """y (N, Hv, Dv) float32; held: of one group behind the other what brings its rows back."""

    y: mx.array
    held: tuple[mx.array, ...]


def passes(width: int, state_bytes: int, one_by_one: int) -> bool:
    """Whether tokens of rows so wide, with states of so many bytes, go one by one; `one_by_one` is the widest row that may."""
    return width == 1 or (width <= one_by_one and width * state_bytes <= _PASSED_AT_MOST)


def trail_bytes(width: int, state: Sequence[int], one_by_one: int) -> int:
    """The most that a row's trail takes in a layer of state (Hv, Dv, Dk), for up to `width` tokens."""
    num_heads, v_dim, k_dim = state
    size = 4 * num_heads * v_dim * k_dim
    passed = max(w for w in range(1, width + 1) if passes(w, size, one_by_one))
    return max(passed * size, 4 * num_heads * width * (v_dim + k_dim + width + 1))


def few_round(inputs: GdnInputs, state: mx.array, index: RaggedIndex | None, one_by_one: int) -> Trail:
    """Tokens of which any prefix of each row may stand."""
    ys: list[mx.array] = []
    held: list[mx.array] = []
    for ran in _each_ran(inputs, state, index, one_by_one):
        ys.append(ran.y)
        held += ran.trail
    return Trail(_join_tokens(ys, index), tuple(held))


def few_facts(
    inputs: GdnInputs, state: mx.array, index: RaggedIndex | None, one_by_one: int
) -> tuple[mx.array, mx.array]:
    """Tokens that all stand: y (N, Hv, Dv) float32 and the state (B, Hv, Dv, Dk) behind them."""
    ys, ends = [], []
    for ran in _each_ran(inputs, state, index, one_by_one):
        ys.append(ran.y)
        if ran.passes:
            end = ran.trail[-1].reshape(ran.state.shape)
        else:
            end = _back_written(ran.state, ran.trail, _array([ran.width] * ran.state.shape[0]))
        ends.append(end)
    return _join_tokens(ys, index), ends[0] if index is None else index.groups.join(ends)


class _Ran(NamedTuple):
    """A group."""

    state: mx.array
    width: int
    passes: bool
    y: mx.array
    trail: Sequence[mx.array]


def _each_ran(
    inputs: GdnInputs, state: mx.array, index: RaggedIndex | None, one_by_one: int
) -> Iterator[_Ran]:
    for group in each_group(inputs, state, index):
        own, width = group.state, group.decay.shape[1]
        fits = passes(width, _bytes_of(own), one_by_one)
        if fits:
            y, _, trail = run_steps(group)
        else:
            y, *trail = (_compiled_solved if device.compile_enabled() else _solved)(*group)
        yield _Ran(own, width, fits, y, trail)


def _join_tokens(ys: list[mx.array], index: RaggedIndex | None) -> mx.array:
    return ys[0] if index is None else index.join_tokens(ys)


def go_back(
    state: mx.array,
    held: Sequence[mx.array],
    num_committed: mx.array,
    groups: RowGroups | None,
    width: int,
    one_by_one: int,
) -> mx.array:
    """The state (B, Hv, Dv, Dk) behind the first num_committed (B,) int32 tokens of each row. groups: None where all rows have `width`."""
    if groups is None:
        return _back(state, held, num_committed, width, one_by_one)
    parts, widths = [], [tokens.shape[1] for tokens, *_ in groups.tokens]
    trails = _each_trail(held, widths, _bytes_of(state), one_by_one)
    for s, count, w, trail in zip(
        groups.split(state), groups.split(num_committed), widths, trails, strict=True
    ):
        parts.append(_back(s, trail, count, w, one_by_one))
    return groups.join(parts)


def go_back_known(
    state: mx.array,
    held: Sequence[mx.array],
    num_committed: Sequence[int],
    grouped: Sequence[tuple[list[int], int]],
    one_by_one: int,
) -> mx.array:
    """`go_back` where the host knows how many stand: a state that was passed takes no arithmetic. grouped: rows that ran together, and
    their width."""
    parts: list[mx.array] = []
    trails = _each_trail(held, [width for _, width in grouped], _bytes_of(state), one_by_one)
    for (rows, width), trail in zip(grouped, trails, strict=True):
        counts = [num_committed[r] for r in rows]
        if not passes(width, _bytes_of(state), one_by_one):
            own = state if len(rows) == len(num_committed) else state[_array(rows)]
            parts.append(_back(own, trail, _array(counts), width, one_by_one))
        elif len(set(counts)) == 1 and counts[0]:
            parts.append(trail[counts[0] - 1])
        else:
            parts += [
                trail[n - 1][i : i + 1] if n else state[r : r + 1]
                for i, (r, n) in enumerate(zip(rows, counts, strict=True))
            ]
    parts = [part.reshape(-1, *state.shape[1:]) for part in parts]
    joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    order = [r for rows, _ in grouped for r in rows]
    return joined if order == sorted(order) else joined[mx.array(np.argsort(order).astype(np.int32))]


def _bytes_of(state: mx.array) -> int:
    return state.nbytes // state.shape[0]


def _each_trail(
    held: Sequence[mx.array], widths: Sequence[int], state_bytes: int, one_by_one: int
) -> Iterator[Sequence[mx.array]]:
    place = 0
    for width in widths:
        end = place + (width if passes(width, state_bytes, one_by_one) else _HELD)
        yield held[place:end]
        place = end


def _back(
    state: mx.array, trail: Sequence[mx.array], num_committed: mx.array, width: int, one_by_one: int
) -> mx.array:
    """Of one group."""
    if passes(width, _bytes_of(state), one_by_one):
        return pick_rows(state, trail, num_committed)
    return _back_written(state, trail, num_committed)


def _back_written(state: mx.array, trail: Sequence[mx.array], num_committed: mx.array) -> mx.array:
    delta, keys, decays = trail
    return (_compiled_written if device.compile_enabled() else _written)(
        state, delta, keys, decays, num_committed
    )


def _array(x: Sequence[int]) -> mx.array:
    return mx.array(np.asarray(x, np.int32))


def _solved(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, ...]:
    """All W tokens of B rows at once, arguments as `run_steps` takes them: y (B W, Hv, Dv) and the trail: deltas (B, Hv, Dv, W), keys
    (B, Hv, W, Dk), and decays (B, Hv, W + 1, W), in row 0 from before the first token to behind token i, in row j + 1 from behind token j,
    0 where i comes before j. Decays are products in the order of the steps.
    """
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
    since, later = np.arange(width + 1)[:, None], np.arange(width)
    decays = _decays(decay.swapaxes(1, 2)[:, :, None], mx.array(later >= since), mx.array(later >= since - 1))
    begun, between = mx.split(decays, [1], axis=2)
    beta = heads_first(beta, tokens_last=True)
    coupling = mx.where(
        mx.array(later > later[:, None]), alike_k * between * beta, mx.array(np.eye(width, dtype=np.float32))
    )
    fresh = (heads_first(v, tokens_last=True) - seen_k * begun) * beta
    delta = fresh @ mx.linalg.tri_inv(coupling, upper=True)
    y = seen_q * begun + delta @ (alike_q * between)
    return y.transpose(0, 3, 1, 2).reshape(num_rows * width, num_heads, -1), delta, keys, decays


def _decays(decay: mx.array, counts: mx.array, reached: mx.array) -> mx.array:
    return mx.cumprod(mx.where(counts, decay, 1.0), axis=-1) * reached


def _written(
    state: mx.array, delta: mx.array, keys: mx.array, decays: mx.array, num_committed: mx.array
) -> mx.array:
    """The state behind the first num_committed (B,) tokens of what `_solved` ran. Those of rejected tokens may hold anything."""
    count = num_committed.reshape(-1, 1, 1, 1)
    until = mx.take_along_axis(decays, mx.maximum(count - 1, 0), axis=-1)  # (B, Hv, W + 1, 1)
    begun, since = mx.split(until.swapaxes(-1, -2), [1], axis=-1)
    stands = mx.array(np.arange(delta.shape[-1], dtype=np.int32)) < count
    written = mx.where(stands, delta * since, 0.0) @ keys
    return mx.where(count > 0, state * begun, state) + written


_compiled_solved, _compiled_written = mx.compile(_solved), mx.compile(_written)
