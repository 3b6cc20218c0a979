"""Orders as data: whatever rank 0 decides arrives as it was, and nothing else is taken for orders."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.ranks.orders import Clocked, Ending, Orders, Submission
from mlxspec.errors import ConfigError, RankError
from mlxspec.sampling.grammar import LateClock
from tests.engine import equality

numbers = st.integers(0, 2**31)
seconds = st.floats(0, 1e6)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 4096),
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    stop=st.lists(st.text(min_size=1), max_size=2),
    bad_words=st.lists(st.text(min_size=1), max_size=2),
    ignore_eos=st.just(False),
    top_logprobs=st.integers(0, 5),
    thinking_budget=st.none() | st.integers(0, 100),
    json_schema=st.none() | st.just({"type": "object", "properties": {"a": {"type": "integer"}, "0": {}}}),
)
specs = st.builds(
    SpecConfig,
    drafters=st.lists(st.sampled_from(["mtp", "ngram-simple", "own-1"]), unique=True),
    policy=st.sampled_from([None, "auto", "fixed"]),
    n_max=st.none() | st.integers(0, 16),
    p_min=st.floats(0, 1),
)
submissions = st.builds(
    Submission,
    number=numbers,
    prompt=st.lists(st.integers(-(2**40), 2**31), min_size=1).map(tuple),
    params=params,
    spec=specs,
    marks=st.lists(numbers, max_size=3).map(tuple),
    client=st.text(),
    deadline=st.none() | st.floats(0, 1e5),
)
orders = st.builds(
    Orders,
    number=numbers,
    checksum=st.integers(0, 2**32 - 1),
    work=st.sampled_from(["step", "end"]),
    submitted=st.lists(submissions, max_size=2).map(tuple),
    endings=st.lists(
        st.builds(Ending, number=numbers, error=st.none() | st.text(), is_late=st.booleans()), max_size=3
    ).map(tuple),
    resting=st.frozensets(numbers, max_size=3),
    clocked=st.none()
    | st.builds(
        Clocked,
        seconds=seconds,
        is_warm=st.booleans(),
    ),
)


@given(orders)
def test_orders_arrive_as_they_were(given: Orders) -> None:
    """To the last bit of every number: ranks decide by them."""
    assert Orders.decode(given.encode()) == given


def test_a_plain_step_is_small() -> None:
    plain = Orders(
        number=123456, checksum=2**32 - 1, clocked=Clocked(seconds=0.0123456789012345, is_warm=True)
    )
    assert len(plain.encode()) < 100


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no json",
        b"[]",
        b"{}",
        b'{"n": 1}',
        b'{"n": -1, "c": 0}',
        b'{"n": 1, "c": 0, "w": "dance"}',
        b'{"n": 1, "c": 0, "t": [1.0]}',
        b'{"n": 1, "c": 0, "s": [{"n": 1, "p": [1], "o": {"seed": 1, "max_tokens": 0}, "d": {}}]}',
        b'{"n": 1, "c": 0, "s": [{"n": 1, "p": [1], "o": {"seed": 1, "frobnicate": 0}, "d": {}}]}',
    ],
)
def test_what_is_no_orders_is_refused(raw: bytes) -> None:
    with pytest.raises(RankError, match="cannot be read"):
        Orders.decode(raw)


def test_callables_cannot_travel() -> None:
    def sampler(logprobs: Any) -> int:
        return 0

    with pytest.raises(ConfigError, match="divided among ranks"):
        Submission(number=0, prompt=(1,), params=SamplingParams(seed=1, sampler=sampler), spec=SpecConfig())


def test_a_schema_keeps_its_order() -> None:
    """The order of a schema's properties is that of the answer."""
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}
    given = Submission(
        number=0, prompt=(1,), params=SamplingParams(seed=1, json_schema=schema), spec=SpecConfig()
    )
    found = Orders.decode(Orders(number=0, checksum=0, submitted=(given,)).encode()).submitted[0]
    assert json.dumps(found.params.json_schema) == json.dumps(schema)


def test_an_overdue_grammar_ends_its_row_with_the_next_orders() -> None:
    """Among ranks a grammar is not ended by the clock of the rank that applies it."""
    engine = equality.engine([])
    engine.factory.constraints.clock = LateClock(seconds=-1.0)
    bound, free = (
        engine.submit([1, 2, 3], SamplingParams(max_tokens=6, regex=regex, seed=1))
        for regex in ("[a-f]{3,20}", None)
    )
    engine.step()
    assert bound.finish_reason is None
    assert bound.constraints is not None
    assert bound.constraints.overdue is not None
    engine.step()
    assert (bound.finish_reason, bound.error) == ("error", bound.constraints.overdue)
    while not engine.is_idle:
        engine.step()
    assert free.finish_reason in ("stop", "length")
