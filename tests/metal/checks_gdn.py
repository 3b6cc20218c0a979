"""Data for the gated delta kernels and the comparisons that must hold for each of them; used by their tests and by the planted faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import reference

from mlxspec.kernels import gdn_prefill
from mlxspec.kernels import gdn_round as kernel
from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import GdnRoundResult, Replay, RowLayout

TOLERANCE = 2e-6  # of the largest value: float32 accumulation against float64


class Tokens(NamedTuple):
    """One forward's inputs on the flat axis, and where its rows lie."""

    inputs: GdnInputs
    rows: RowLayout

    def part(self, begin: int, end: int) -> Tokens:
        """These tokens as the only row."""
        return Tokens(GdnInputs(*(x[begin:end] for x in self.inputs)), layout(end - begin))


def layout(*widths: int) -> RowLayout:
    return RowLayout.of(FlatRows(widths))


def ints(values: Sequence[int]) -> mx.array:
    return mx.array(np.asarray(values, np.int32))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Heads and head dims of one case."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    dtype: mx.Dtype = mx.float32
    likeness: float = 0.0  # how much all keys share: 0 nothing, large: nearly the same key again and again
    decay: float = 0.3  # mean of -log_g

    def tokens(self, rng: np.random.Generator, widths: Sequence[int]) -> Tokens:
        n = sum(widths)

        def unit(heads: int) -> mx.array:
            x = rng.standard_normal((n, heads, self.key_dim)) + self.likeness * rng.standard_normal(
                self.key_dim
            )
            return mx.array((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)).astype(
                self.dtype
            )

        v = mx.array(rng.standard_normal((n, self.value_heads, self.value_dim)).astype(np.float32)).astype(
            self.dtype
        )
        log_g = mx.array(-rng.exponential(self.decay, (n, self.value_heads)).astype(np.float32))
        beta = mx.array(rng.uniform(0.05, 0.98, (n, self.value_heads)).astype(np.float32))
        return Tokens(GdnInputs(unit(self.key_heads), unit(self.key_heads), v, log_g, beta), layout(*widths))

    def state(self, rng: np.random.Generator, *leading: int) -> mx.array:
        shape = (*leading, self.value_heads, self.value_dim, self.key_dim)
        return mx.array((0.3 * rng.standard_normal(shape)).astype(np.float32))


def numpy_of(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def reference_rows(t: Tokens, states: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """gated_delta of each row, from its own state."""
    starts, arrays = np.array(t.rows.starts), [numpy_of(x) for x in t.inputs]
    return [
        reference.gated_delta(*(x[a:b] for x in arrays), states[i])
        for i, (a, b) in enumerate(zip(starts[:-1], starts[1:], strict=True))
    ]


def assert_close(got: mx.array, wanted: np.ndarray, what: str, tolerance: float = TOLERANCE) -> None:
    found = numpy_of(got)
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, wanted {wanted.shape}"
    error = np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-3)
    assert error <= tolerance, (
        f"{what}: error {error:.2e} of the largest value, allowed {tolerance:.0e}"
    )  # NaN fails too


def same_bits(a: mx.array, b: mx.array) -> bool:
    a, b = (x.view(mx.uint32 if x.dtype.size == 4 else mx.uint16) for x in (a, b))
    return a.shape == b.shape and bool(mx.all(a == b).item())


def check_two_rounds(
    shape: Shape,
    first: Sequence[int],
    kept: Sequence[int],
    second: Sequence[int],
    seed: int = 0,
    extra: int = 0,
) -> GdnRoundResult:
    """Run `first` widths, keep `kept` of each row, run `second`, once with a tape and once as certain: all against float64. `extra`: tokens
    for which the first tape has room and that do not exist."""
    rng = np.random.default_rng(seed)
    t1, t2, state = shape.tokens(rng, first), shape.tokens(rng, second), shape.state(rng, len(first))
    k, log_g = (mx.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)) for x in (t1.inputs.k, t1.inputs.log_g))
    one = kernel.gdn_round_metal(t1.inputs._replace(k=k, log_g=log_g), state, t1.rows)
    rows1, num = reference_rows(t1, numpy_of(state)), sum(first)
    assert len(one.tape.delta) == num + extra
    assert not numpy_of(one.tape.delta)[num:].any(), "room in the tape is not zero"
    assert same_bits(one.state, state), "a forward with nothing deferred changed the state"
    assert_close(one.y, np.concatenate([y for y, _, _ in rows1]), "y of the first round")
    assert_close(one.tape.delta[:num], np.concatenate([d for _, d, _ in rows1]), "delta of the first round")
    last = Replay(one.tape, t1.rows, ints(kept))
    begun = np.stack([states[n] for (_, _, states), n in zip(rows1, kept, strict=True)])
    two = kernel.gdn_round_metal(t2.inputs, one.state, t2.rows, last)
    assert same_bits(kernel.gdn_flush_metal(one.state, last), two.state), (
        "a flush is not bitwise the replay of a round"
    )
    rows2 = reference_rows(t2, begun)
    assert_close(two.state, begun, "the replayed state")
    assert_close(two.y, np.concatenate([y for y, _, _ in rows2]), "y of the second round")
    assert_close(two.tape.delta, np.concatenate([d for _, d, _ in rows2]), "delta of the second round")
    y, after = kernel.gdn_advance_metal(t2.inputs, one.state, t2.rows, last)
    assert same_bits(y, two.y), "y of certain tokens is not bitwise y of a round"
    assert_close(after, np.stack([states[-1] for _, _, states in rows2]), "the state after certain")
    return two


def check_replay_bits(shape: Shape, width: int, seed: int = 0) -> None:
    """For every kept count the replayed state is bit for bit the state the forward went through, and a round continued from there is bit
    for bit what one uninterrupted forward gives."""
    rng = np.random.default_rng(seed)
    t, state = shape.tokens(rng, [width]), shape.state(rng, 1)
    one = kernel.gdn_round_metal(t.inputs, state, t.rows)
    other = shape.tokens(rng, [1])
    for kept in range(width + 1):
        last = Replay(one.tape, t.rows, ints([kept]))
        replayed = kernel.gdn_round_metal(other.inputs, one.state, other.rows, last).state
        passed = state
        if kept:
            first = t.part(0, kept)
            _, passed = kernel.gdn_advance_metal(first.inputs, state, first.rows)
        assert same_bits(replayed, passed), f"replay of {kept} tokens is not bitwise the forward"
        if kept < width:
            rest = t.part(kept, width)
            after = kernel.gdn_round_metal(rest.inputs, one.state, rest.rows, last)
            assert same_bits(after.y, one.y[kept:]), (
                f"y after a rollback to {kept} tokens is not bitwise the forward's"
            )


def check_prefill(shape: Shape, widths: Sequence[int], seed: int = 0, tolerance: float = 1e-5) -> None:
    """All tokens stand: y and the last states against float64."""
    rng = np.random.default_rng(seed)
    t, state = shape.tokens(rng, widths), shape.state(rng, len(widths))
    y, after = gdn_prefill.gdn_prefill_metal(t.inputs, state, FlatRows(tuple(widths)))
    rows = reference_rows(t, numpy_of(state))
    assert_close(y, np.concatenate([y for y, _, _ in rows]), "y", tolerance)
    assert_close(
        after, np.stack([states[-1] for _, _, states in rows]), "the state after all tokens", tolerance
    )
