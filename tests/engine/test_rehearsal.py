"""Rounds nobody asked for: what the first answer then need not compile, and that nothing else is different."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine import measure as measure_module
from mlxspec.engine import worker as workers
from mlxspec.engine.engine import Engine
from mlxspec.engine.rehearsal import known_widths, measure, rehearse, rehearse_for, steps_of, unraced_notice
from mlxspec.engine.worker import Worker
from mlxspec.kernels import gdn_prefill, launch, products, qmv_rows, races
from mlxspec.kernels.flat import LADDER, FlatRows
from mlxspec.kernels.quantized_weight import QuantizedWeight, race_key
from mlxspec.models import tune
from mlxspec.models.runners import Runners
from mlxspec.platform import device
from mlxspec.policy.controller import Controller
from mlxspec.policy.cost_file import CostFile
from mlxspec.policy.costs import DraftCost
from tests import tiny_models
from tests.engine import equality
from tests.known_costs import known_costs

LONG = 120.0
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def make(policy: str = "auto") -> Engine:
    spec = SpecConfig(drafters=("ngram-simple", "mtp"), policy=policy)
    drafters = [ngram_lookup("ngram-simple", 2, 16), "mtp"]
    return equality.engine(drafters, spec=spec, max_rows=4, prefill_chunk=64)


@pytest.mark.parametrize("is_rehearsed", [True, False])
def test_the_first_answer_compiles_nothing(is_rehearsed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    engine = make()
    runners = Runners(engine.model.language_model.model.layers)  # type: ignore[attr-defined]
    monkeypatch.setattr(engine.model._segments, "runners", runners)  # others have used this model
    engine.policies.follow(Controller(known_costs({1: 0.01, 2: 0.01})))  # drafting and verifying are free
    for each in (engine.policies.auto, engine.policies.auto.control.costs.curve(0)):  # type: ignore[union-attr]
        if hasattr(each, "refine"):
            monkeypatch.setattr(each, "refine", lambda *_, **__: None)
    engine.generate([PROMPT], SamplingParams(max_tokens=1))  # prompts compile by their own length
    if is_rehearsed:
        for _ in rehearse(engine):
            pass
    before = runners.num_cold
    result = engine.generate([PROMPT], PARAMS)[0]
    assert result.stats.num_drafted > 0
    assert (runners.num_cold == before) == is_rehearsed


@catches(
    "one turn of each width is taken to be enough",
    "mlxspec.engine.rehearsal:steps_of",
    lambda right: lambda engine, turns=1: right(engine, 1),
)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_each_width_of_the_ladder_and_each_model_run_twice(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run of a shape compiles, and so does the first that takes back what that one tried. Also where answers' drafted rounds run
    ahead."""
    monkeypatch.setattr(device, "has_gpu", lambda: has_gpu)
    engine, widths = make(), []
    engine.policies.follow(Controller(known_costs({1: 0.01, 2: 0.01})))
    engine.policies.costs.guesses["mtp"] = DraftCost(step=0.1)
    learn = engine.drafts.learn

    def seen(plan, rows, num_tokens, *args, **more):  # type: ignore[no-untyped-def]
        widths.append(num_tokens)
        learn(plan, rows, num_tokens, *args, **more)

    engine.drafts.learn = seen  # type: ignore[method-assign]
    for _ in rehearse(engine):
        pass
    for width in [w for w in LADDER if w <= 16]:
        assert widths.count(width) >= 2, width
    assert not engine.policies.costs.is_guess("mtp", "greedy")
    assert list(rehearse(engine)) == []  # nothing is left to be run


@pytest.mark.parametrize("policy", ["auto", "fixed"])
def test_measuring_learns_each_width_and_keeps_it(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    engine = make(policy)
    path = measure(engine)
    costs = engine.policies.costs
    assert set(costs.curve(0).known) >= {w for w in LADDER if w <= 16}
    assert [*costs.drafts] == [("mtp", "greedy")]
    assert costs.acceptance == {}  # these texts are nobody's
    kept = measure_module.kept_costs(
        engine.model,
        engine.drafts.drafters,
        CostFile.of(engine.model, engine.drafts.drafters, engine.config, engine.name).data(),
    )
    assert path.is_file()
    assert kept.curve(0).seconds(4) == pytest.approx(costs.curve(0).seconds(4))


def test_measuring_runs_each_width_also_of_an_engine_whose_drafts_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    engine = make()
    engine.spec = SpecConfig(drafters=("mtp",), policy="fixed")  # three tokens
    measure(engine)
    assert set(engine.policies.costs.curve(0).known) >= {w for w in LADDER if w <= 16}


def test_who_comes_while_an_engine_rehearses_is_answered_as_without() -> None:
    engine = make()
    running = rehearse(engine)
    for _ in range(4):
        next(running)
    running.close()
    assert engine.is_idle
    assert engine.prefix.is_on
    assert engine.generate([PROMPT], PARAMS)[0].tokens == make().generate([PROMPT], PARAMS)[0].tokens


def test_answers_and_what_is_kept_are_as_without() -> None:
    plain, rehearsed = make(), make()
    rehearse_for(rehearsed, LONG)
    assert rehearsed.nbytes == plain.nbytes
    assert rehearsed.is_idle
    assert rehearsed.stats.probe is not None
    assert replace(rehearsed.stats, plain=plain.stats.plain, probe=None) == plain.stats
    one, other = (e.generate([PROMPT, PROMPT[3:]], PARAMS) for e in (plain, rehearsed))
    assert [r.tokens for r in one] == [r.tokens for r in other]


@pytest.mark.parametrize("spec", [SpecConfig(drafters=("mtp",), policy="fixed"), SpecConfig(policy="auto")])
def test_an_engine_that_does_not_choose_its_drafts_rehearses_plain_rounds(spec: SpecConfig) -> None:
    engine = make()
    engine.spec = spec
    assert {step.depth for step in steps_of(engine)} == {0}
    assert len(list(rehearse(engine))) >= 2


def test_it_ends_in_time_or_with_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, pieces = make(), []

    def endless(_: Engine) -> Generator[None]:
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
    """Who comes between two pieces ends it. The rest is run when the engine is idle again."""
    begun, asked, runs = threading.Event(), threading.Event(), []

    def counted(engine: Engine) -> Generator[None]:
        runs.append(0)
        running = rehearse(engine)
        try:
            for _ in running:
                runs[-1] += 1
                begun.set()
                yield
                if len(runs) == 1:
                    assert asked.wait(LONG)
        finally:
            running.close()

    monkeypatch.setattr(workers, "rehearse", counted)
    with Worker(make) as worker:
        assert begun.wait(LONG)
        stream = worker.submit(PROMPT, PARAMS)
        asked.set()
        assert [type(e).__name__ for e in stream][-1] == "FinishEvent"
        assert worker.call(lambda engine: engine.is_idle).result(LONG)
        until = time.monotonic() + LONG
        while len(runs) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert runs[0] <= 2


def test_a_rehearsal_that_fails_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Engine) -> Generator[None]:
        yield
        raise RuntimeError("no memory")

    monkeypatch.setattr(workers, "rehearse", broken)
    with Worker(make) as worker:
        assert worker.wait_ready(LONG) is not None
        assert [type(e).__name__ for e in worker.submit(PROMPT, PARAMS)][-1] == "FinishEvent"
        assert worker.state == "ready"


@pytest.mark.parametrize("generation", [None, 13, 14, 15, 17])
def test_an_apple_gpu_races_products_of_few_rows_once(
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
        launch.set_speedup("qmv_rows", race_key(num_rows, found, dtype), 1.5)

    monkeypatch.setattr(device, "gpu_generation", lambda: generation)
    monkeypatch.setattr(launch, "_speedups", {})
    monkeypatch.setattr(tune, "raced_weights", lambda *modules: [weight, useless])
    monkeypatch.setattr(products, "race", race)
    monkeypatch.setattr(launch, "in_use", lambda name: False)  # qmm_few
    monkeypatch.setattr(launch, "may_mix", lambda name: name == "qmv_rows")
    monkeypatch.setattr(races, "save", lambda: None)
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    engine = make("fixed")
    runners = Runners(engine.model.language_model.model.layers)  # type: ignore[attr-defined]
    monkeypatch.setattr(engine.model._segments, "runners", runners)
    runners.get("key", lambda x: x, FlatRows((1,)))
    pieces = rehearse(engine)
    races_them = generation is not None
    assert len(unraced_notice(engine)) == races_them
    next(pieces)
    assert len(raced) == races_them
    list(pieces)
    list(rehearse(engine))
    assert raced == (list(range(1, qmv_rows.MAX_ROWS + 1)) if races_them else [])
    assert unraced_notice(engine) == ()
    assert (("key", FlatRows((1,)).shape) in runners._functions) == (not races_them)


@catches(
    "the kernel of prompts is not raced while idle",
    "mlxspec.engine.rehearsal:unraced_prompts",
    lambda right: lambda engine: [],
    case="17",
)
@pytest.mark.parametrize("generation", [None, 17])
def test_the_kernel_of_prompts_is_raced_once(generation: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an Apple GPU, for each recurrence of the model and each number of tokens, against MLX's own operation."""
    raced: list[int] = []

    def race(name: str, width: str, *_: object, **__: object) -> float:
        raced.append(int(re.findall(r"(\d+) tokens", width)[0]))
        launch.set_speedup(name, width, 0.9)
        return 0.9

    monkeypatch.setattr(device, "gpu_generation", lambda: generation)
    monkeypatch.setattr(launch, "_speedups", {})
    monkeypatch.setattr(tune, "raced_weights", lambda *modules: [])
    monkeypatch.setattr(gdn_prefill, "_is_raced", lambda *of: True)
    monkeypatch.setattr(launch, "race", race)
    monkeypatch.setattr(races, "save", lambda: None)
    engine = make("fixed")
    assert len(tune.recurrences(engine.model)) == 1
    for _ in range(2):
        list(rehearse(engine))
    assert raced == ([] if generation is None else list(gdn_prefill.RACED_TOKENS))


def test_the_exact_width_is_found_once_on_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And is not taken for another model's, nor for that of other kernels."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    first, later = make(), make()
    assert first.exact_width is None
    assert known_widths(later) is None
    rehearse_for(first, LONG)
    assert first.exact_width is not None
    found = known_widths(later)
    assert found == first.stats.probe
    later.stats.probe = found
    monkeypatch.setattr(later, "probe", None)
    rehearse_for(later, LONG)
    assert later.stats.probe is found
    other = Engine(tiny_models.stack("attention"), tiny_models.tokenizer(), config=later.config)
    assert known_widths(other) is None
    (file,) = (tmp_path / "widths").glob("*.json")
    file.write_text('{"widths": [{"width": 2}], "context": 48}')
    assert known_widths(later) is None
    launch.set_speedup("qmv_rows", "any", 2.0)
    try:
        assert known_widths(first) is None
    finally:
        launch.forget()
