"""A round's seconds are its own, whenever it was launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.engine import pipeline
from mlxspec.engine.pipeline import Pipeline
from mlxspec.engine.round import Accepted
from mlxspec.engine.stats import EngineStats

pytestmark = pytest.mark.smoke

LAUNCH, READ, DECIDE = 5.0, 0.25, 0.0625


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_launching_counts_for_the_round_that_is_launched(follows: list[bool]) -> None:
    """follows: whether the next round is put on its way before each is read."""
    clock, wall = [0.0], 0.0

    def spend(seconds: float, value: object) -> object:
        clock[0] += seconds
        return value

    rounds, wanted = (
        SimpleNamespace(
            is_open=False, requests=(), plan=None, rows=SimpleNamespace(num_tokens=1), is_warm=True
        ),
        iter(follows),
    )

    def launch_behind(*_: object, **__: object) -> object:
        return spend(LAUNCH, rounds) if next(wanted) else spend(DECIDE, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.time, "perf_counter", lambda: clock[0])
        patch.setattr(pipeline, "launch", lambda *_, **__: spend(LAUNCH, rounds))
        patch.setattr(Pipeline, "_launch_behind", launch_behind)
        patch.setattr(pipeline, "wait", lambda *_: None)
        patch.setattr(pipeline, "accept", lambda *_: spend(READ, Accepted([], [], False)))
        drafts, stats = SimpleNamespace(take_up=lambda *_: None), EngineStats()
        own = Pipeline(drafts, stats, widest=None, overlaps=False)  # type: ignore[arg-type]
        cache = SimpleNamespace(layers=[])
        read = [own.advance([], None, cache, may_follow=True).times for _ in follows]  # type: ignore[arg-type]
        wall = clock[0]
    times = [t for t in read if t is not None]
    assert len(times) == len(read)
    for i, one in enumerate(times):
        assert one.ahead == (i > 0 and follows[i - 1])
        assert one.seconds == LAUNCH + READ + (0.0 if follows[i] else DECIDE)
    assert sum(t.seconds for t in times) + (LAUNCH if follows[-1] else 0.0) == pytest.approx(wall)
