"""Policy auto beside plain decoding on a machine whose seconds are counted: a head that is never right, costs unknown and kept."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine import measure
from mlxspec.engine.engine import Engine
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.reads import Reads
from mlxspec.policy.account import GROWTH, MOST
from mlxspec.policy.controller import Controller
from mlxspec.policy.cost_file import CostFile, write_followed
from mlxspec.policy.costs import Curve
from tests.engine import equality

WIDTHS = Curve({1: 1.0, 2: 1.3, 4: 1.6, 8: 2.4, 17: 3.6})  # plain rounds
PAIRS = 5
PRICE = 1.0  # plain rounds by which the first estimates of what a draft takes are off
# shapes that drafting adds, each running cold twice: drafts of a prompt's rows and of one row, verifies of 2, 3 and 4 tokens, one more
SHAPES = 6


class Clock:
    """plain: seconds of a plain round. head: of the language-model head, layer: of the MTP head's layer, in plain rounds. cold: what the
    first two forwards of a width take longer, in plain rounds. `compiled` is the sum of that."""

    def __init__(self, *, plain: float, head: float, layer: float, cold: float = 1.0) -> None:
        self.plain, self.head, self.layer, self.cold = plain, head, layer, cold
        self.spent = 0.0
        self.compiled = 0.0
        self._runs: Counter[object] = Counter()

    def forward(self, num_tokens: int) -> bool:
        """Returns whether it was warm."""
        is_warm = self._is_warm("target", num_tokens)
        self.spend(WIDTHS.seconds(num_tokens) - self.head * (num_tokens > 0))
        return is_warm

    def draft(self, num_tokens: int) -> bool:
        is_warm = self._is_warm("head", num_tokens)
        self.spend(self.layer * WIDTHS.seconds(num_tokens))
        return is_warm

    def spend(self, rounds: float) -> None:
        self.spent += rounds * self.plain

    def _is_warm(self, *shape: object) -> bool:
        self._runs[shape] += 1
        is_warm = self._runs[shape] > 2
        if not is_warm:
            self.spend(self.cold)
            self.compiled += self.cold
        return is_warm


@contextmanager
def running(clock: Clock, *, is_sure: bool) -> Iterator[None]:
    """Time is what the clock says, and the MTP head's drafts are never right. is_sure: it is confident all the same."""
    with pytest.MonkeyPatch.context() as patch:
        target_forward, target_head = Qwen35.forward, Qwen35.head
        draft_forward, draft_head = Qwen35Mtp.forward, Qwen35Mtp.head

        def forward(self, tokens, rows, cache, **more):  # type: ignore[no-untyped-def]
            out = target_forward(self, tokens, rows, cache, **more)
            return out if clock.forward(rows.num_tokens) else cold(out)

        def cold(out):  # type: ignore[no-untyped-def]
            return replace(out, is_warm=False)

        def head(self, hidden):  # type: ignore[no-untyped-def]
            clock.spend(clock.head)
            return target_head(self, hidden)

        def draft(self, tokens, hidden, rows, cache, **more):  # type: ignore[no-untyped-def]
            out = draft_forward(self, tokens, hidden, rows, cache, **more)
            return out if clock.draft(rows.num_tokens) else cold(out)

        def wrong(self, hidden):  # type: ignore[no-untyped-def]
            """The token whose number is one higher than the likeliest one's."""
            logits = mx.roll(draft_head(self, hidden), 1, axis=-1)
            return logits if is_sure else 0.1 * logits

        target_reads = Reads(dense=int(1e9 * (1 - clock.head)), head=int(1e9 * clock.head), layers=24)
        patch.setattr(measure, "reads", lambda model: target_reads)
        head_reads = Reads(dense=int(1e9 * clock.layer), head=int(1e9 * clock.head))
        patch.setattr(Mtp, "reads", head_reads)
        patch.setattr(time, "perf_counter", lambda: clock.spent)
        patch.setattr(Qwen35, "forward", forward)
        patch.setattr(Qwen35, "head", head)
        patch.setattr(Qwen35Mtp, "forward", draft)
        patch.setattr(Qwen35Mtp, "head", wrong)
        yield


def loaded() -> Engine:
    """As `load` makes one."""
    engine = equality.engine(["mtp"], spec=SpecConfig(drafters=("mtp",), policy="auto"), prefix_budget=0)
    target, drafters, config = engine.model, engine.drafts.drafters, engine.config
    file = CostFile.of(target, drafters, config, engine.name)
    costs = measure.kept_costs(target, drafters, file.data())
    file.follow(costs)
    engine.policies.follow(Controller(costs))
    return engine


def ratios(engine: Engine, clock: Clock, tokens: int, temperature: float) -> list[float]:
    """Of pairs of answers: plain decoding's time over auto's. No answer loses more than the account allows, compiling apart."""

    def answer(spec: SpecConfig, turn: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=turn)
        began = clock.spent
        request = engine.submit([(7 * i + turn) % 90 for i in range(8)], params, spec=spec)
        while not engine.is_idle:
            engine.step()
        return clock.spent - began - request.stats.prefill_seconds

    answer(SpecConfig(), 0)  # what plain rounds compile
    compiled, found = clock.compiled, []
    for turn in range(PAIRS):
        compiled_before = clock.compiled
        times = {
            kind: answer(SpecConfig() if kind else engine.spec, turn) for kind in (turn % 2, 1 - turn % 2)
        }
        found.append(times[1] / times[0])
        compiling = clock.compiled - compiled_before
        allowed = MOST + GROWTH * times[0] / clock.plain + PRICE
        assert (times[0] - times[1]) / clock.plain - compiling <= allowed
    assert clock.compiled - compiled <= SHAPES * 2 * clock.cold
    return found


def processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_sure: bool, tokens: int, temperature: float
) -> tuple[list[float], list[float]]:
    """The ratios of a process that knows no costs, and of the next one."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(folder))
    found = []
    for _ in range(2):
        clock = Clock(plain=0.15, head=0.4, layer=0.1)
        with running(clock, is_sure=is_sure):
            found.append(ratios(loaded(), clock, tokens, temperature))
            write_followed()
    return found[0], found[1]


@pytest.mark.parametrize(
    ("is_sure", "tokens", "temperature"),
    [
        (False, 48, 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (False, 48, 0.0),
                (True, 48, 1.0),
                (False, 256, 1.0),
                (False, 256, 0.0),
                (True, 256, 1.0),
            )
        ),
    ],
)
def test_a_head_that_is_never_right_costs_little(
    is_sure: bool, tokens: int, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of half a plain round, as beside a vocabulary of 248k words. The median answer loses what an answer begins with at most, in a
    process that knows no costs and in the next one."""
    first, second = processes(tmp_path, monkeypatch, is_sure=is_sure, tokens=tokens, temperature=temperature)
    assert statistics.median(first) >= (0.93 if not is_sure else 0.90)
    assert statistics.median(second) >= (0.95 if not is_sure else 0.92)


def work(engine: Engine, spec: SpecConfig, turn: int, tokens: int) -> tuple[int, ...]:
    """What an answer had the device do: rounds, rounds that were waited for, evaluations begun, evaluations awaited, drafts."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, seed=turn)
    begun: Counter[str] = Counter()
    waited = engine.stats.num_synchronised
    with pytest.MonkeyPatch.context() as patch:
        for name in ("async_eval", "eval"):
            whole = getattr(mx, name)
            patch.setattr(
                mx, name, lambda *arrays, whole=whole, name=name: (begun.update([name]), whole(*arrays))[1]
            )
        request = engine.submit([(7 * i + turn) % 90 for i in range(8)], params, spec=spec)
        while not engine.is_idle:
            engine.step()
    drafts = sum(stats.num_calls for stats in request.stats.drafters.values())
    return (
        request.stats.num_rounds,
        engine.stats.num_synchronised - waited,
        begun["async_eval"],
        begun["eval"],
        drafts,
    )


def test_once_a_head_has_shown_that_it_never_pays_answers_do_what_plain_decoding_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a few drafts are asked in the first answers. Later answers begin and await as many evaluations as without a drafter, but
    for the reading of the prompt."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    clock = Clock(plain=0.15, head=0.4, layer=0.1)
    with running(clock, is_sure=False):
        engine = loaded()
        work(engine, SpecConfig(), 0, 24)
        assert sum(work(engine, engine.spec, turn, 96)[-1] for turn in range(3)) <= 4
        for turn in range(2):
            plain, auto = (work(engine, spec, turn, 48) for spec in (SpecConfig(), engine.spec))
            assert auto[:2] == plain[:2]
            assert all(
                a - p <= 1 for a, p in zip(auto[2:4], plain[2:4], strict=True)
            )  # the head reads the prompt
            assert plain[-1] == auto[-1] == 0
