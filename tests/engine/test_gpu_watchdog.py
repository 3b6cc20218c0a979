"""macOS's GPU watchdog: prompts are handed over in parts, restored states evaluated in parts, and errors say what to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import families
import mlx.core as mx
import pytest
import tiny_models
from planting import catches, rewritten

from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.engine import engine as engines
from mlxspec.engine.engine import Engine
from mlxspec.engine.request import described
from mlxspec.kernels.flat import FlatRows
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


class Gpu:
    """A stand-in: parts take seconds of a clock of its own. handed: parts of each hand-over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.pending, self.handed = 0.0, list[float](), list[list[float]]()
        monkeypatch.setattr(device, "backend", lambda: "metal")
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(mx, "async_eval", self._hand_over)
        monkeypatch.setattr(mx, "eval", self._wait)
        self._queue = list[float]()

    def _hand_over(self, *_: mx.array) -> None:
        self.handed.append(self.pending)
        self._queue.append(sum(self.pending))
        self.pending = []

    def _wait(self, *_: mx.array) -> None:
        self.now += self._queue.pop(0)

    def read(self, watch: watchdog.PromptWatch, num_tokens: int, parts: list[float]) -> None:
        """A piece whose parts take so many seconds each."""
        with watch.reading(num_tokens):
            for seconds in parts:
                self.pending.append(seconds)
                device.start(mx.zeros(1), num_launches=14)
        self._queue, self.pending = [], []

    def pieces(
        self, watch: watchdog.PromptWatch, num: int, seconds: Callable[[int, int], list[float]]
    ) -> list[int]:
        """Lengths of so many pieces. seconds: of a piece's parts, by its number and its length."""
        found = []
        for i in range(num):
            length = watch.limited(2048)
            self.read(watch, length, seconds(i, length))
            found.append(length)
        return found


@pytest.mark.parametrize(
    ("speed", "layers"),
    [(140, 64), (199, 64), (300, 64), (363, 64), (780, 64), (580, 40), (2350, 40), (1160, 48)],
)
def test_pieces_keep_their_size_at_published_speeds(
    monkeypatch: pytest.MonkeyPatch, speed: int, layers: int
) -> None:
    """27B on M2 Max to M5 Max, 35B-A3B on M2 and M3 Max: no hand-over takes a second or more layers than a quarter of one holds."""
    gpu, watch = Gpu(monkeypatch), watchdog.PromptWatch()
    sizes = gpu.pieces(watch, 12, lambda _, length: [length / speed / layers] * layers)
    assert sizes == [2048] * 12
    part = 2048 / speed / layers
    assert max(map(sum, gpu.handed)) <= max(0.25, part) + 1e-9
    assert max(map(len, gpu.handed)) <= 100 / 14 + 1


@catches(
    "pieces that were made shorter stay so",
    "mlxspec.platform.watchdog:_QUICK_PIECES",
    lambda right: 1 << 30,
    case="layer",
)
@pytest.mark.parametrize("stall", ["layer", "piece"])
def test_a_stall_changes_nothing_for_good(monkeypatch: pytest.MonkeyPatch, stall: str) -> None:
    """A layer 3 s late, as behind another program or a wake from sleep, or each of a piece's 40 layers late by 0.03 s."""
    gpu, watch = Gpu(monkeypatch), watchdog.PromptWatch()

    def seconds(i: int, length: int) -> list[float]:
        late = [3.0, *[0.0] * 39] if stall == "layer" else [0.03] * 40
        return [length / 2350 / 40 + (late[k] if i == 0 else 0.0) for k in range(40)]

    sizes = gpu.pieces(watch, 8, seconds)
    assert sizes == ([2048, 1024, 1024, 1024, 2048, 2048, 2048, 2048] if stall == "layer" else [2048] * 8)


@catches(
    "quick pieces on both sides of a slow one count together",
    "mlxspec.platform.watchdog:PromptWatch._judge",
    rewritten("self._num_quick = 0\n        if", "if"),
)
@catches(
    "two quick pieces in sequence are enough",
    "mlxspec.platform.watchdog:PromptWatch._judge",
    rewritten("self._num_quick >= _QUICK_PIECES", "self._num_quick >= _QUICK_PIECES - 1"),
)
def test_pieces_grow_back_behind_three_quick_ones_in_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for _ in range(20):
        gpu, watch = Gpu(monkeypatch), watchdog.PromptWatch()
        late = [rng.random() < 0.3 for _ in range(16)]
        wanted, num_quick, is_short = [], 0, False
        for is_late in late:
            wanted.append(1024 if is_short else 2048)
            num_quick = 0 if is_late else num_quick + 1
            if is_late or num_quick == 3:
                num_quick, is_short = 0, is_late
        parts = [[3.0 if is_late else 0.1, 0.1] for is_late in late]
        assert gpu.pieces(watch, len(late), lambda i, _, parts=parts: parts[i]) == wanted


@catches(
    "pieces become shorter without an end",
    "mlxspec.platform.watchdog:_SHORTEST",
    lambda right: 64,
)
def test_layers_of_seconds_leave_pieces_of_1024_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, watch = Gpu(monkeypatch), watchdog.PromptWatch()
    assert gpu.pieces(watch, 6, lambda _, length: [length / 500] * 4) == [2048, *[1024] * 5]
    watch = watchdog.PromptWatch()
    watch.may_shorten = False  # among ranks, which must agree
    assert gpu.pieces(watch, 4, lambda _, length: [length / 500] * 4) == [2048] * 4


@catches(
    "hand-overs are counted by launches alone",
    "mlxspec.platform.watchdog:PromptWatch.is_due",
    lambda right: lambda self: right(self) and False,
    case="[hybrid-float32]",
)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "4bit"])
@pytest.mark.parametrize("family", ["hybrid", "gemma3", "gemma4-e", "llama alone"])
def test_a_hand_over_changes_no_bit_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch, family: str, form: str
) -> None:
    """The same logits, hiddens and states with a hand-over after each part, and with none."""
    model = families.target(family, form)
    tokens = mx.array([1 + i % 50 for i in range(300)], mx.int32)

    def read(watch: watchdog.PromptWatch | None) -> list[mx.array]:
        cache = model.make_cache(1)
        with monkeypatch.context() as patch:
            patch.setattr(device, "backend", lambda: "metal")
            if watch is None:
                out = model.forward(tokens, FlatRows((300,), is_prompt=True), cache, certain=True)
            else:
                patch.setattr(watchdog, "_HANDED_SECONDS", 0.0)
                with watch.reading(300):
                    out = model.forward(tokens, FlatRows((300,), is_prompt=True), cache, certain=True)
        cache.commit()
        return [out.logits, out.hidden, *cache.arrays]

    handed, whole = list[int](), read(None)
    right = watchdog.PromptWatch.handed

    def counted(self: watchdog.PromptWatch, arrays: tuple[mx.array, ...]) -> None:
        handed.append(len(arrays))
        right(self, arrays)

    monkeypatch.setattr(watchdog.PromptWatch, "handed", counted)
    parts = read(watchdog.PromptWatch())
    assert len(handed) >= model.num_layers
    assert all(bytes(memoryview(a)) == bytes(memoryview(b)) for a, b in zip(whole, parts, strict=True))


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
