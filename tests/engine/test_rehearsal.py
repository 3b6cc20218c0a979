"""Rounds nobody asked for: what the first answer then need not compile, and that nothing else is different."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine import measure
from mlxspec.engine import worker as workers
from mlxspec.engine.engine import Engine
from mlxspec.engine.measure import BareRounds, widths
from mlxspec.engine.rehearsal import WARM, _verifies, rehearse, rehearse_for, unraced_notice
from mlxspec.engine.worker import Worker
from mlxspec.kernels import launch, qmv_rows, races
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.qmv_rows import QuantizedWeight
from mlxspec.models import tune
from mlxspec.models.runners import Runners
from mlxspec.platform import device
from mlxspec.policy.controller import Controller
from mlxspec.policy.costs import CostModel
from tests import tiny_models
from tests.models import deep
from tests.models.metal_graph import as_on_metal

LONG = 120.0
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def make(policy: str = "auto") -> Engine:
    target = tiny_models.target()
    return Engine(
        target,
        tiny_models.tokenizer(),
        drafters=[ngram_lookup("ngram-simple", 2, 16), Mtp(tiny_models.mtp_head(), target.max_context)],
        spec=SpecConfig(drafters=("ngram-simple", "mtp"), policy=policy),
        config=EngineConfig(max_rows=4, prefill_chunk=64),
    )


@pytest.mark.parametrize("is_rehearsed", [True, False])
def test_the_first_answer_compiles_nothing(is_rehearsed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    engine = make()
    runners = Runners(engine.model.language_model.model.layers)  # type: ignore[attr-defined]
    monkeypatch.setattr(engine.model._segments, "runners", runners)  # others have used this model
    engine.drafting.follow(
        Controller(CostModel({0: {1: 0.01, 2: 0.01}}, {}))
    )  # drafting and verifying are free
    engine.generate([PROMPT], SamplingParams(max_tokens=1))  # prompts compile by their own length
    if is_rehearsed:
        for _ in rehearse(engine):
            pass
    before = runners.num_cold
    result = engine.generate([PROMPT], PARAMS)[0]
    assert result.stats.num_drafted > 0
    assert (runners.num_cold == before) == is_rehearsed


@catches(
    "a width is rehearsed behind few others",
    "mlxspec.engine.measure:BareRounds.behind",
    lambda right: lambda self, widths: [],
)
def test_a_round_behind_any_other_has_been_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Metal a forward takes back what the round before it tried, and is compiled for what that left."""
    with as_on_metal(monkeypatch):
        monkeypatch.setattr(mx, "eval", lambda *_: None)
        monkeypatch.setattr(measure, "numbers", lambda x: np.zeros(x.shape, np.int32))
        model = deep.ours(4)
        rounds, of = BareRounds(model, EngineConfig(), drafts=True), widths(model)
        pieces = list(_verifies(rounds, of))
        before = model._segments.runners.num_cold
        for first in of:
            for second in of:
                rounds.run(first)
                rounds.run(second)
        assert model._segments.runners.num_cold == before
    assert len(pieces) <= WARM * len(of) * 7  # each width behind six kinds of rounds at most


def test_answers_and_what_is_kept_are_as_without() -> None:
    plain, rehearsed = make(), make()
    rehearse_for(rehearsed, LONG)
    assert rehearsed.nbytes == plain.nbytes
    assert rehearsed.is_idle
    assert rehearsed.stats == plain.stats
    one, other = (e.generate([PROMPT, PROMPT[3:]], PARAMS) for e in (plain, rehearsed))
    assert [r.tokens for r in one] == [r.tokens for r in other]


@pytest.mark.parametrize("spec", [SpecConfig(drafters=("mtp",), policy="fixed"), SpecConfig(policy="auto")])
def test_an_engine_that_does_not_choose_its_drafts_rehearses_plain_rounds(spec: SpecConfig) -> None:
    engine = make()
    engine.spec = spec
    assert len(list(rehearse(engine))) == WARM


def test_it_ends_in_time_or_with_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, pieces = make(), []

    def endless(_: Engine) -> Iterator[None]:
        while len(pieces) < 7:
            pieces.append(None)
            yield
        raise RuntimeError("a drafter failed")

    monkeypatch.setattr("mlxspec.engine.rehearsal.rehearse", endless)
    rehearse_for(engine, 0.0)
    assert len(pieces) == 1
    rehearse_for(engine, LONG)
    assert len(pieces) == 7


def test_a_worker_rehearses_until_somebody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever comes between two pieces waits for no more of them; the rest is done behind it, once."""
    begun, pieces, requests = threading.Event(), [], []

    def counted(engine: Engine) -> Iterator[None]:
        for piece in rehearse(engine):
            pieces.append(engine.num_waiting)
            begun.set()
            yield piece
            if len(pieces) == 1:
                assert asked.wait(LONG)

    asked = threading.Event()
    monkeypatch.setattr(workers, "rehearse", counted)
    with Worker(make) as worker:
        assert begun.wait(LONG)
        requests.append(worker.submit(PROMPT, PARAMS))
        asked.set()
        assert [type(e).__name__ for e in requests[0]][-1] == "FinishEvent"
        assert worker.call(lambda engine: engine.is_idle).result(LONG)
        done = threading.Event()
        while worker._rehearsal is not None:
            assert not done.wait(0.01)
        assert len(pieces) == len(list(rehearse(make())))


def test_a_rehearsal_that_fails_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Engine) -> Iterator[None]:
        yield
        raise RuntimeError("no memory")

    monkeypatch.setattr(workers, "rehearse", broken)
    with Worker(make) as worker:
        assert worker.wait_ready(LONG) is not None
        assert [type(e).__name__ for e in worker.submit(PROMPT, PARAMS)][-1] == "FinishEvent"
        assert worker.state == "ready"


@pytest.mark.parametrize("generation", [None, 13, 14, 15, 17])
def test_an_m1_races_products_of_few_rows_once(
    generation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any round, one number of rows at a time; what was compiled before is traced anew; no race is run twice, and none whose result
    could not be used."""
    weight = QuantizedWeight.of(mx.ones((8, 512)))
    useless = QuantizedWeight.of(mx.ones((8, 512)), 32, 4, "mxfp4")
    raced: list[int] = []

    def race(num_rows: int, found: QuantizedWeight, dtype: mx.Dtype) -> None:
        assert found is weight
        raced.append(num_rows)
        launch.set_speedup("qmv_rows", qmv_rows.race_key(num_rows, found, dtype), 1.5)

    monkeypatch.setattr(device, "gpu_generation", lambda: generation)
    monkeypatch.setattr(launch, "_speedups", {})
    monkeypatch.setattr(tune, "raced_weights", lambda *modules: [weight, useless])
    monkeypatch.setattr(qmv_rows, "race", race)
    monkeypatch.setattr(launch, "may_mix", lambda name: name == "qmv_rows")
    monkeypatch.setattr(races, "save", lambda: None)
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    engine = make("fixed")
    runners = Runners(engine.model.language_model.model.layers)  # type: ignore[attr-defined]
    monkeypatch.setattr(engine.model._segments, "runners", runners)
    runners.get("key", lambda x: x, FlatRows((1,)))
    pieces = rehearse(engine)
    races_them = generation in (13, 14)
    assert len(unraced_notice(engine)) == races_them
    next(pieces)
    assert len(raced) == races_them
    list(pieces)
    list(rehearse(engine))
    assert raced == (list(range(1, qmv_rows.MAX_ROWS + 1)) if races_them else [])
    assert unraced_notice(engine) == ()
    assert (("key", FlatRows((1,)).shape, 0) in runners._few) == (not races_them)
