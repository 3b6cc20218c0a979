"""A few tokens at once or one by one, against a float64 loop and against the steps; the trail against fewer tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_few import few_facts, few_round, go_back, go_back_known, passes, trail_bytes
from mlxspec.kernels.gdn_ops import steps
from tests.kernels.test_gdn_ops import HV, WIDTHS, Tokens, draw, error, limit, loop, same, state_of

KINDS = ["plain", "correlated eager", "correlated eager keeping", "forgetting", "mixed eager"]


def inputs_of(tokens: Tokens) -> GdnInputs:
    return GdnInputs(*tokens.arrays())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [1, 2, 7, 17, 33, 64])
def test_all_at_once_is_the_rule(num: int, kind: str) -> None:
    tokens, state = draw(num, kind=kind), state_of(1)
    wanted_y, wanted_state, wanted_delta = loop(tokens, state[0])
    y, after = few_facts(inputs_of(tokens), mx.array(state), None, 1)
    assert error(y, wanted_y) < limit(num, num)
    assert error(after[0], wanted_state) < limit(num, num)
    trail = few_round(inputs_of(tokens), mx.array(state), None, 1)
    assert same(trail.y, y)
    if num > 1:
        assert error(trail.held[0][0].transpose(2, 0, 1), wanted_delta) < limit(num, num)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), widths=WIDTHS, one_by_one=st.sampled_from([1, 4, 64]))
def test_the_trail_leads_back_to_any_token(data: st.DataObject, widths: list[int], one_by_one: int) -> None:
    """Of every row, also where rows are ragged or sit out; one by one with the bits of steps."""
    kind = data.draw(st.sampled_from(KINDS))
    kept = [data.draw(st.integers(0, w)) for w in widths]
    rows, state = FlatRows(tuple(widths)), mx.array(state_of(len(widths)))
    tokens = draw(rows.num_tokens, seed=sum(widths), kind=kind)
    ran = few_round(inputs_of(tokens), state, rows.index, one_by_one)
    groups = None if rows.index is None else rows.index.groups
    counts = mx.array(kept, mx.int32)
    found = go_back(state, ran.held, counts, groups, rows.max_width, one_by_one)
    known = go_back_known(state, ran.held, kept, rows.grouped, one_by_one)
    wide = {r for group, width in rows.grouped if not passes(width, 0, one_by_one) for r in group}
    for r, count in enumerate(kept):
        wanted_y, wanted = mx.zeros((0,)), state[r : r + 1]
        part = tokens.part(rows.starts[r], rows.starts[r] + count)
        if count:
            wanted_y, wanted, *_ = steps(*part.arrays(), wanted)
        got_y = ran.y[rows.starts[r] : rows.starts[r] + count]
        assert same(known[r], found[r])
        if r not in wide:
            assert same(found[r], wanted[0]), f"row {r}, {count} of {widths[r]} kept"
            assert not count or same(got_y, wanted_y)
        elif count:
            most = 2 * limit(widths[r], widths[r])
            assert error(found[r], np.asarray(wanted[0])) < most, f"row {r}, {count} of {widths[r]} kept"
            assert error(got_y, np.asarray(wanted_y)) < most
        else:
            assert same(found[r], state[r])


def test_what_does_not_stand_may_hold_anything() -> None:
    tokens, state = draw(6), mx.array(state_of(1))
    delta, *rest = few_round(inputs_of(tokens), state, None, 1).held
    spoiled = np.asarray(delta).copy()
    spoiled[..., 2:] = np.inf
    found = [go_back(state, [d, *rest], mx.array([2]), None, 6, 1) for d in (delta, mx.array(spoiled))]
    assert same(*found)


def test_states_are_passed_while_they_are_few_and_small() -> None:
    assert [w for w in range(1, 9) if passes(w, 1000, 4)] == [1, 2, 3, 4]
    assert [w for w in range(1, 9) if passes(w, 2 << 20, 6)] == [1, 2, 3, 4]
    assert [w for w in range(1, 9) if passes(w, 9 << 20, 6)] == [1]


def test_bytes_grow_with_the_tokens() -> None:
    found = [trail_bytes(w, (HV, 16, 32), 4) for w in range(1, 40)]
    assert found == sorted(found)
    assert found[3] == 4 * 4 * HV * 16 * 32, "four states"
