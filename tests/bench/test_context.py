"""The longest context that fits: it ends before memory does, whatever the estimates say, and servers end contexts there."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from planting import catches

import mlxspec
from mlxspec.bench.context import LEAST, Longest, longest
from mlxspec.cli.main import main
from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.engine.memory import EngineMemory
from mlxspec.errors import ContextOverflowError, MemoryBudgetError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))


def demo(budget: int | None = None, **more: object) -> Engine:
    mx.clear_cache()
    config = EngineConfig(memory_budget=budget, prefix_budget=0, prefill_chunk=64, past_texts=0)
    return mlxspec.load("demo", draft="off", config=config, **more)  # type: ignore[arg-type]


@pytest.fixture
def estimates_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes more than the engine thinks: nothing while it runs, and half for its rows."""
    right = EngineMemory.row
    monkeypatch.setattr(EngineMemory, "activations", lambda *args, **options: 0)
    monkeypatch.setattr(EngineMemory, "row", lambda self, length, spec: right(self, length, spec) // 2)


def test_a_model_whose_whole_context_fits() -> None:
    told: list[tuple[int, int]] = []
    with demo() as engine:
        found = longest(engine, lambda done, total: told.append((done, total)))
        assert (found.context, found.ended_by) == (engine.max_context, "model")
        assert engine.memory.weights < found.peak <= found.budget
        assert engine.is_idle
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][1] == found.context


def test_a_small_budget_ends_it_where_requests_are_refused() -> None:
    with demo() as engine:
        weights = engine.memory.weights
    with demo(weights + 6_000_000) as engine:
        found = longest(engine)
        assert LEAST <= found.context < engine.max_context
        assert found.ended_by in ("estimate", "memory")
        assert found.peak <= found.budget == weights + 6_000_000
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        assert engine.generate([7] * (found.context - 1), params).finish_reason == "length"
        with pytest.raises(MemoryBudgetError, match="ask for fewer"):
            engine.submit([7] * (engine.max_context - 2), params)


@catches(
    "what a chunk will take is not looked at before it runs",
    "mlxspec.bench.context:_fits",
    lambda right: lambda held, grows, budget: True,
)
@pytest.mark.usefixtures("estimates_too_low")
def test_it_ends_before_memory_does_where_estimates_are_too_low() -> None:
    found = measured(6_000_000)
    assert found.ended_by == "memory"
    assert LEAST <= found.context < 2048
    assert found.peak <= found.budget


def measured(room: int) -> Longest:
    with demo() as engine:
        weights = engine.memory.weights
    with demo(weights + room) as engine:
        return longest(engine)


def test_nothing_fits() -> None:
    with pytest.raises(MemoryBudgetError, match="Not even 64 tokens fit"):
        measured(1000)


def test_what_was_found_is_kept_and_ends_contexts_of_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with demo() as engine:
        budget = engine.memory.weights + 6_000_000
    given = ["--draft", "off", "--memory-budget", str(budget)]
    assert main(["tune", "--context", "--json", *given]) == 0
    data = json.loads(capsys.readouterr().out)
    assert Path(data["kept"]).parent == tmp_path / "cache" / "contexts"
    assert LEAST <= data["context"] < data["model_context"] == 2048
    assert main(["tune", "--context", *given]) == 0
    ran = capsys.readouterr()
    assert f"demo: {data['context']:,} tokens of context fit, " in ran.out
    assert str(data["kept"]) in ran.err
    config = EngineConfig(memory_budget=budget)
    with mlxspec.load("demo", draft="off", config=config, max_context="tuned") as engine:
        assert engine.max_context == data["context"]
        assert any("tune --context" in notice for notice in engine.notices)
        with pytest.raises(ContextOverflowError):
            engine.submit([7] * (data["context"] + 1))
    others = (
        {"max_context": "tuned", "config": EngineConfig(memory_budget=budget + 1)},
        {"max_context": "tuned", "config": EngineConfig(memory_budget=budget, kv_bits=8)},
        {"config": config},
    )
    for other in others:
        with mlxspec.load("demo", draft="off", **other) as engine:  # type: ignore[arg-type]
            assert engine.max_context == 2048
    own = EngineConfig(memory_budget=budget, max_context=1000)
    with mlxspec.load("demo", draft="off", config=own, max_context="tuned") as engine:
        assert engine.max_context == 1000
    Path(data["kept"]).write_text('{"context": "many"}')
    with mlxspec.load("demo", draft="off", config=config, max_context="tuned") as engine:
        assert engine.max_context == 2048


@pytest.mark.parametrize("flag", ["--prompts", "--texts", "--plot", "--max-context"])
def test_options_that_measure_something_else(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--context", flag, "9"]) == 2
    assert f"leave {flag} out" in capsys.readouterr().err
