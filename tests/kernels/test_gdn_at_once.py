"""The recurrence of a few tokens at once: a CPU's form against a float64 loop and against the steps."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels import cpu, exactness, gdn_round
from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.cpu import gdn_at_once
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_ops import Tape, steps
from mlxspec.kernels.gdn_round import Replay, RowLayout
from tests.kernels.test_gdn_ops import WIDTHS, draw, error, limit, loop, same, state_of

KINDS = ["plain", "correlated eager", "correlated eager keeping", "forgetting", "mixed eager"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [1, 2, 7, 17, 33, 64])
def test_all_at_once_is_the_rule(num: int, kind: str) -> None:
    tokens, state = draw(num, kind=kind), state_of(1)
    wanted_y, wanted_state, wanted_delta = loop(tokens, state[0])
    y, before, tape = gdn_at_once.verify(GdnInputs(*tokens.arrays()), mx.array(state), None)
    after = gdn_at_once.replayed(before, tape, mx.array([num], mx.int32), None)
    assert same(before, mx.array(state))
    assert error(y, wanted_y) < limit(num, num)
    assert error(after[0], wanted_state) < limit(num, num)
    assert error(tape.delta, wanted_delta) < limit(num, num)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), widths=WIDTHS)
def test_the_tape_leads_to_any_token(data: st.DataObject, widths: list[int]) -> None:
    """Every row, also where rows are ragged or sit out. Nothing kept leaves the very bits of the state."""
    kind = data.draw(st.sampled_from(KINDS))
    kept = [data.draw(st.integers(0, w)) for w in widths]
    rows, state = FlatRows(tuple(widths)), mx.array(state_of(len(widths)))
    tokens = draw(rows.num_tokens, seed=sum(widths), kind=kind)
    y, _, tape = gdn_at_once.verify(GdnInputs(*tokens.arrays()), state, rows.index)
    found = gdn_at_once.replayed(state, tape, mx.array(kept, mx.int32), rows.index)
    for r, count in enumerate(kept):
        if not count:
            assert same(found[r], state[r])
            continue
        part = tokens.part(rows.starts[r], rows.starts[r] + count)
        wanted = steps(*part.arrays(), state[r : r + 1])
        most = 2 * limit(max(widths), max(widths))
        assert error(found[r], np.asarray(wanted.after[0])) < most, f"row {r}, {count} of {widths[r]} kept"
        assert error(y[rows.starts[r] : rows.starts[r] + count], np.asarray(wanted.y)) < most


def test_what_is_not_kept_may_hold_anything() -> None:
    tokens, state = draw(6), mx.array(state_of(1))
    _, _, tape = gdn_at_once.verify(GdnInputs(*tokens.arrays()), state, None)
    spoiled, decay = np.asarray(tape.delta).copy(), np.asarray(tape.log_g).copy()
    spoiled[2:], decay[2:] = np.inf, np.nan
    tapes = tape, Tape(tape.k, mx.array(spoiled), mx.array(decay))
    assert same(*(gdn_at_once.replayed(state, t, mx.array([2], mx.int32), None) for t in tapes))


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """For float32 rows of more than a few tokens on a CPU that compiles, unless bits are asked for; the round and the flush agree."""
    if not cpu.takes(mx.float32):
        pytest.skip("no CPU that compiles")
    state, ran = mx.array(state_of(2)), []
    for name in ("verify", "replayed"):
        right = getattr(gdn_at_once, name)

        def noted(*given: Any, right: Any = right, name: str = name) -> Any:
            ran.append(name)
            return right(*given)

        monkeypatch.setattr(gdn_at_once, name, noted)

    def taken(*widths: int, dtype: mx.Dtype = mx.float32) -> list[str]:
        rows = RowLayout.of(FlatRows(widths))
        q, k, v, *gates = draw(sum(widths)).arrays()
        inputs = GdnInputs(*(x.astype(dtype) for x in (q, k, v)), *gates)
        ran.clear()
        tape = gdn_round.gdn_round(inputs, state, rows).tape
        gdn_round.gdn_flush(state, Replay(tape, rows, mx.array([1, 1], mx.int32)))
        return list(ran)

    assert taken(gdn_at_once.BY_STEPS, 1) == taken(4, 4) == taken(9, 2, dtype=mx.bfloat16) == []
    assert taken(5, 5) == taken(1, 9) == ["verify", "replayed"]
    monkeypatch.setattr(exactness, "is_demanded", True)
    assert taken(9, 2) == []
