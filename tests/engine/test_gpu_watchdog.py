"""macOS's GPU watchdog: pieces of prompts become shorter where they take long, restored states are evaluated in parts, and errors say what
to do."""

from __future__ import annotations

import mlx.core as mx
import pytest
import tiny_models
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.engine import engine as engines
from mlxspec.engine.engine import Engine
from mlxspec.engine.request import described
from mlxspec.platform import device, watchdog

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


class Clock:
    """Each token of a piece takes so many seconds. The first piece takes `compiling` seconds more."""

    def __init__(self, compiling: float = 0.0) -> None:
        self.now, self.compiling = 0.0, compiling

    def perf_counter(self) -> float:
        return self.now


def read(
    monkeypatch: pytest.MonkeyPatch, seconds: float, *, backend: str = "metal", compiling: float = 0.0
) -> list[int]:
    """Lengths of the pieces in which a prompt of 1,024 tokens is read by 256, where a token takes so long."""
    model = tiny_models.make(tiny_models.config())
    made = Engine(model, tiny_models.tokenizer(), config=EngineConfig(prefix_budget=0, prefill_chunk=256))
    clock, pieces = Clock(compiling), list[int]()
    advance = engines.Prefill.advance

    def timed(self: engines.Prefill, end: int) -> object:
        pieces.append(end - self.num_done)
        clock.now += seconds * pieces[-1] + clock.compiling
        clock.compiling = 0.0
        return advance(self, end)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "time", clock)
        patch.setattr(engines.Prefill, "advance", timed)
        request = made.submit([1 + i % 50 for i in range(1024)], PARAMS)
        patch.setattr(watchdog.device, "backend", lambda: backend)
        while not request.num_generated:
            made.step()
    made.close()
    return pieces


@catches(
    "pieces stay long however long they take",
    "mlxspec.engine.memory:EngineMemory.took",
    lambda right: lambda self, num_tokens, seconds: None,
)
def test_pieces_are_halved_until_they_are_read_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.56 and 1.28 seconds are too long, 0.64 are not. The first slow piece may have compiled; each one behind it halves them."""
    assert read(monkeypatch, 0.01) == [256, 256, 128, *[64] * 6]


@pytest.mark.parametrize(
    "told", [{"seconds": 0.003}, {"seconds": 0.003, "compiling": 9.0}, {"seconds": 1.0, "backend": "cpu"}]
)
def test_pieces_stay_as_they_are_elsewhere(monkeypatch: pytest.MonkeyPatch, told: dict) -> None:
    """Where they are read in time, where one took long as it compiled, and where there is no watchdog."""
    assert read(monkeypatch, **told) == [256] * 4


@catches(
    "a restored state is evaluated at once",
    "mlxspec.platform.watchdog:evaluate_in_parts",
    lambda right: lambda arrays: mx.eval(list(arrays)),
)
def test_large_states_are_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    evaluate = mx.eval
    monkeypatch.setattr(device, "backend", lambda: "metal")
    monkeypatch.setattr(watchdog, "_BYTES_AT_ONCE", 1000)
    monkeypatch.setattr(mx, "eval", lambda *a: sizes.append(sum(x.nbytes for x in a[0])) or evaluate(*a))
    watchdog.evaluate_in_parts(mx.zeros(100) for _ in range(7))
    assert sizes == [1200, 1200, 400]


def test_a_request_that_the_watchdog_ended_says_what_to_do() -> None:
    said = "[METAL] Command buffer execution failed: Impacting Interactivity (kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
    assert described(RuntimeError(said)) == f"RuntimeError: {said}. {watchdog.ADVICE}"
    assert watchdog.ADVICE not in described(RuntimeError("out of memory"))
