"""The gated delta rule in plain mx against a float64 loop, its two forms against each other, replay against the forward bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_ops import CHUNK, Tape, chunks, replay, replay_first, steps
from tests.rounding import of_sum

HK, HV, DK, DV = 2, 4, 32, 16
# of all classes of rows that a recurrence takes apart
WIDTHS = st.lists(st.integers(0, 6) | st.sampled_from([1, 16, 17, 18, 35]), min_size=1, max_size=5).filter(
    any
)


class Tokens(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_g: np.ndarray
    beta: np.ndarray

    def arrays(self) -> list[mx.array]:
        return [mx.array(x.astype(np.float32)) for x in self]

    def part(self, start: int, end: int) -> Tokens:
        return Tokens(*(x[start:end] for x in self))


def draw(num: int, seed: int = 0, *, kind: str = "plain") -> Tokens:
    """Inputs as a layer makes them: keys of length 1, decays in (0, 1), step sizes in (0, 1); `kind` makes them hard."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((num, HK, DK)), rng.standard_normal((num, HK, DK))
    if "correlated" in kind:
        k = rng.standard_normal((1, HK, DK)) + 0.05 * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta = 1 - 1e-4 * rng.random((num, HV)) if "eager" in kind else rng.random((num, HV))
    log_g = -0.3 * rng.random((num, HV))
    if "keeping" in kind:
        log_g = -1e-5 * rng.random((num, HV))
    if "forgetting" in kind:
        log_g = -20.0 - 60.0 * rng.random((num, HV))
    if "mixed" in kind:
        log_g = np.where(rng.random((num, HV)) < 0.2, -80.0, -1e-4)
    return Tokens(q * DK**-0.5, k, rng.standard_normal((num, HV, DV)), log_g, beta)


def state_of(num_rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, HV, DV, DK)).astype(np.float32)


def loop(tokens: Tokens, state: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y (N, Hv, Dv), state (Hv, Dv, Dk) and deltas (N, Hv, Dv) in float64, one number at a time over tokens and heads."""
    s, ys, deltas = state.astype(np.float64).copy(), [], []
    for t in range(len(tokens.q)):
        y, delta = np.zeros((HV, DV)), np.zeros((HV, DV))
        for h in range(HV):
            q, k = tokens.q[t, h // (HV // HK)], tokens.k[t, h // (HV // HK)]
            decayed = np.exp(tokens.log_g[t, h]) * s[h]
            delta[h] = tokens.beta[t, h] * (tokens.v[t, h] - decayed @ k)
            s[h] = decayed + np.outer(delta[h], k)
            y[h] = s[h] @ q
        ys.append(y)
        deltas.append(delta)
    return np.array(ys), s, np.array(deltas)


def error(got: mx.array, wanted: np.ndarray) -> float:
    """Largest difference in units of the wanted array's largest value."""
    return float(np.abs(np.asarray(got) - wanted).max() / max(np.abs(wanted).max(), 1e-3))


def limit(num: int, chunk: int = 0) -> float:
    """Of `error`, for `num` tokens: each sums over the DK entries of a key, and over the tokens of its chunk where it has one. A key has
    length 1 and a step size is below 1, so that no token makes an earlier error larger."""
    return of_sum(num * (DK + chunk))


def same(a: mx.array, b: mx.array) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("kind", ["plain", "correlated eager", "keeping", "forgetting", "mixed eager"])
@pytest.mark.parametrize("num", [1, 2, 7, 33])
def test_steps_are_the_rule(num: int, kind: str) -> None:
    tokens, state = draw(num, kind=kind), state_of(1)
    y, after, tape = steps(*tokens.arrays(), mx.array(state))
    wanted_y, wanted_state, wanted_delta = loop(tokens, state[0])
    assert error(y, wanted_y) < limit(num)
    assert error(after[0], wanted_state) < limit(num)
    assert error(tape.delta, wanted_delta) < limit(num)
    assert same(tape.k, tokens.arrays()[1])


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "correlated",
        "eager",
        "correlated eager",
        "correlated eager keeping",
        "forgetting",
        "mixed",
        "correlated eager mixed",
    ],
)
@pytest.mark.parametrize("num", [1, 15, 16, 17, 31, 48, 63, 64, 65, 127, 128, 150, 200])
def test_chunks_are_the_steps(num: int, kind: str) -> None:
    tokens, state = draw(num, seed=num, kind=kind), state_of(1)
    y, after = chunks(*tokens.arrays(), mx.array(state))
    wanted_y, wanted_state, _ = loop(tokens, state[0])
    assert y.shape == (num, HV, DV)
    assert error(y, wanted_y) < limit(num, CHUNK)
    assert error(after[0], wanted_state) < limit(num, CHUNK)


def test_chunks_can_go_on_where_chunks_ended() -> None:
    tokens, state = draw(3 * CHUNK, seed=3), state_of(1)
    whole_y, whole = chunks(*tokens.arrays(), mx.array(state))
    now, ys = mx.array(state), []
    for start, end in ((0, 50), (50, 51), (51, 160), (160, 3 * CHUNK)):
        y, now = chunks(*tokens.part(start, end).arrays(), now)
        ys.append(y)
    assert error(mx.concatenate(ys), np.asarray(whole_y)) < 2 * limit(3 * CHUNK, CHUNK)
    assert error(now, np.asarray(whole)) < 2 * limit(3 * CHUNK, CHUNK)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), widths=WIDTHS)
def test_replay_is_bit_for_bit_what_steps_did(data: st.DataObject, widths: list[int]) -> None:
    """For every row and every number of kept tokens, also where rows are ragged or sit out."""
    kind = data.draw(st.sampled_from(["plain", "correlated eager", "mixed", "forgetting"]))
    kept = [data.draw(st.integers(0, w)) for w in widths]
    rows, state = FlatRows(tuple(widths)), state_of(len(widths))
    tokens = draw(rows.num_tokens, seed=sum(widths), kind=kind)
    ran = steps(*tokens.arrays(), mx.array(state), rows.index)
    after = replay(mx.array(state), ran.tape, mx.array(kept, mx.int32), rows.index)
    for r, count in enumerate(kept):
        wanted = mx.array(state[r : r + 1])
        if count:
            part = tokens.part(rows.starts[r], rows.starts[r] + count)
            wanted = steps(*part.arrays(), wanted).after
        assert same(after[r], wanted[0]), f"row {r}, {count} of {widths[r]} kept"


def test_replaying_everything_and_nothing() -> None:
    tokens, state = draw(8), mx.array(state_of(2))
    rows = FlatRows((4, 4))
    ran = steps(*tokens.arrays(), state, rows.index)
    assert same(replay(state, ran.tape, mx.array([4, 4]), None), ran.after)
    assert same(replay(state, ran.tape, mx.array([0, 0]), None), state)


@pytest.mark.parametrize("num", range(5))
def test_the_first_entries_of_every_row_are_replayed_without_a_mask(num: int) -> None:
    tokens, state = draw(8, kind="correlated eager"), mx.array(state_of(2))
    tape = steps(*tokens.arrays(), state).tape
    assert same(replay_first(state, tape, num), replay(state, tape, mx.array([num, num]), None))


def test_replay_never_looks_at_what_is_not_kept() -> None:
    """Rejected entries may hold anything: an infinity times 0 would be no number."""
    tokens, state = draw(4), mx.array(state_of(1))
    tape = steps(*tokens.arrays(), state).tape
    spoiled = np.asarray(tape.delta).copy()
    spoiled[2:] = np.inf
    bad_decay = np.asarray(tape.log_g).copy()
    bad_decay[2:] = np.nan
    after = replay(state, Tape(tape.k, mx.array(spoiled), mx.array(bad_decay)), mx.array([2]), None)
    assert same(after, replay(state, tape, mx.array([2]), None))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(widths=WIDTHS.filter(lambda w: len(set(w)) > 1))
def test_padding_is_neutral(widths: list[int]) -> None:
    """A row beside longer rows is, bit for bit, the row alone."""
    rows, state = FlatRows(tuple(widths)), state_of(len(widths))
    tokens = draw(rows.num_tokens, seed=7)
    y, after, tape = steps(*tokens.arrays(), mx.array(state), rows.index)
    for r, width in enumerate(widths):
        start, end = rows.starts[r], rows.starts[r + 1]
        if width == 0:
            assert same(after[r], mx.array(state[r]))
            continue
        part = tokens.part(start, end).arrays()
        alone_y, alone, alone_tape = steps(*part, mx.array(state[r : r + 1]))
        assert same(y[start:end], alone_y)
        assert same(after[r], alone[0])
        assert same(tape.delta[start:end], alone_tape.delta)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(dtype: mx.Dtype) -> None:
    tokens, state = draw(20), state_of(1)
    rounded = [x.astype(dtype) if i < 3 else x for i, x in enumerate(tokens.arrays())]
    exact = Tokens(*(np.asarray(x.astype(mx.float32)).astype(np.float64) for x in rounded))
    wanted_y, wanted_state, _ = loop(exact, state[0])
    for y, after in (steps(*rounded, mx.array(state))[:2], chunks(*rounded, mx.array(state))):
        assert y.dtype == after.dtype == mx.float32
        assert error(y, wanted_y) < limit(20, CHUNK)
        assert error(after[0], wanted_state) < limit(20, CHUNK)
