"""macOS's GPU watchdog: restored states are evaluated in parts, and errors say what to do."""

from __future__ import annotations

from types import SimpleNamespace

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


@pytest.mark.parametrize("seconds", [0.003, 0.01, 1.0])
def test_pieces_keep_their_size_on_a_macs_gpu(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """However long a token of a prompt takes: a piece is many command buffers, and the watchdog ends one that is long."""
    model = tiny_models.make(tiny_models.config())
    made = Engine(model, tiny_models.tokenizer(), config=EngineConfig(prefix_budget=0, prefill_chunk=256))
    clock, pieces = SimpleNamespace(now=0.0), list[int]()
    advance = engines.Prefill.advance

    def timed(self: engines.Prefill, end: int) -> object:
        pieces.append(end - self.num_done)
        clock.now += seconds * pieces[-1]
        return advance(self, end)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        patch.setattr(engines.Prefill, "advance", timed)
        request = made.submit([1 + i % 50 for i in range(1024)], PARAMS)
        patch.setattr(watchdog.device, "backend", lambda: "metal")
        while not request.num_generated:
            made.step()
    made.close()
    assert pieces == [256] * 4


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
