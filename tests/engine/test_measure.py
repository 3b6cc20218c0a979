"""What measuring at load may take, on a clock that only rounds and drafts move, and what is made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import write_checkpoint
from planting import catches

from mlxspec.config import EngineConfig
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine import measure
from mlxspec.engine.load import load
from mlxspec.engine.measure import WIDTHS, BareRounds
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.reads import reads
from mlxspec.models.registry import architecture
from mlxspec.policy import cost_file
from mlxspec.policy.cost_file import write_followed
from mlxspec.policy.costs import CostModel, Curve, DraftCost
from tests import tiny_models

HEAD = 0.1  # plain rounds a draft's token
COSTS = "mlxspec.policy.costs:CostModel"


def _none(data: object) -> None:
    return None


def _know_as_before(self: CostModel, points: dict[int, float], measured: set[int], ends: Any) -> None:
    points = {w: s if w in measured else self.curve(0).seconds(w) for w, s in points.items()}
    self._curves[0, 1, "greedy"] = Curve(points, measured=measured)


class Clock:
    """plain: seconds of a plain round; each further token of a round costs a tenth of that. spent: seconds so far; rounds: how many."""

    def __init__(self) -> None:
        self.plain, self.spent, self.rounds = 1.0, 0.0, 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found, run, propose, head = Clock(), BareRounds.run, Mtp.propose, Qwen35.head
    read = reads(tiny_models.target())

    def slow_run(self: BareRounds, width: int) -> float:
        before = found.spent
        run(self, width)
        found.spent = before + found.plain * (0.9 + 0.1 * width)
        found.rounds += 1
        return found.spent - before

    def slow_propose(self: Mtp, asks, sampler) -> list:
        before = found.spent
        made = propose(self, asks, sampler)
        found.spent = before + found.plain * HEAD * asks[0].limit
        return made

    def slow_head(self: Qwen35, hidden: mx.array) -> mx.array:
        found.spent += found.plain * read.head / read.bytes()
        return head(self, hidden)

    monkeypatch.setattr(Qwen35, "head", slow_head)
    monkeypatch.setattr(time, "perf_counter", lambda: found.spent)
    monkeypatch.setattr(BareRounds, "run", slow_run)
    monkeypatch.setattr(Mtp, "propose", slow_propose)
    return found


@pytest.fixture(scope="module")
def parts() -> tuple:
    target = tiny_models.target()
    return target, {"mtp": Mtp(tiny_models.mtp_head(), target.max_context)}, EngineConfig()


@pytest.mark.parametrize("plain", [5.0, 0.3, 0.04, 0.01])
@pytest.mark.parametrize("seconds", [0.2, 2.0])
def test_no_more_seconds_than_allowed(plain: float, seconds: float, clock: Clock, parts: tuple) -> None:
    """Whatever a round takes: beside the budget only the two products with the head that the first expectation rests on."""
    clock.plain = plain
    costs = measure.measure(*parts, seconds)
    read = reads(parts[0])
    assert clock.spent <= max(seconds, 2 * plain * read.head / read.bytes()) + 1e-9
    curve = costs.curve(0)
    assert curve.seconds(1) == pytest.approx(plain)
    for width in costs.measured:
        assert curve.seconds(width) == pytest.approx(plain * (0.9 + 0.1 * width), rel=0.05)
    assert 1.0 < curve.seconds(5) / plain < 5.0  # a guess is no reason never to try
    likely = measure.likely_draft(parts[1]["mtp"], parts[0])
    one = costs.draft("mtp").seconds(1, 1) / plain
    assert costs.is_guess("mtp") or one == pytest.approx(HEAD, rel=0.02)
    assert one == pytest.approx(HEAD, rel=0.02) or one == pytest.approx(likely.seconds(1, 1), rel=0.02)


def test_with_time_enough_everything_is_measured(clock: Clock, parts: tuple) -> None:
    clock.plain = 0.001
    costs = measure.measure(*parts)
    assert costs.measured == {1, *WIDTHS}
    assert costs.draft("mtp").step == pytest.approx(HEAD * clock.plain)
    assert clock.spent < 2.0


def test_what_one_load_has_no_time_for_the_next_ones_add(
    clock: Clock, parts: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    clock.plain, known = 0.04, set()
    for _ in range(20):
        before = clock.spent
        costs = measure.kept_costs(*parts, "tiny", 1.5)
        assert clock.spent - before <= 1.5
        assert costs.measured >= known
        known = set(costs.measured)
        if clock.spent == before:  # nothing was left to measure
            break
    assert known == {1, *WIDTHS}
    for width in (1, 2, 5, 17):
        assert costs.curve(0).seconds(width) == pytest.approx(clock.plain * (0.9 + 0.1 * width))
    assert costs.draft("mtp").step == pytest.approx(HEAD * clock.plain)


@pytest.fixture
def other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """From the call on the code of the rounds is another one."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "rounds.py").write_text("faster = True")

    def change() -> None:
        monkeypatch.setattr(cost_file.kernels, "__path__", [str(changed)])
        cost_file._code.cache_clear()

    yield change
    cost_file._code.cache_clear()


@catches("costs of other code are believed", f"{COSTS}.doubt", lambda right: lambda self: None)
@catches("costs of other code are thrown away", "mlxspec.engine.measure:known_costs", lambda right: _none)
def test_what_other_code_has_measured_is_a_start(
    clock: Clock, parts: tuple, other_code: Callable[[], None]
) -> None:
    clock.plain = 0.001
    before = measure.kept_costs(*parts, "tiny")
    before.accepted("greedy", "mtp").mean = 0.25
    for _ in range(20):
        before.curve(0).refine(1, clock.plain)
    write_followed()
    assert not measure.kept_costs(*parts, "tiny").is_doubted
    other_code()
    clock.plain = 0.002
    start = measure.kept_costs(*parts, "tiny", 0.0)  # no time to measure anything
    assert start.is_doubted
    assert not start.measured
    assert start.is_guess("mtp")
    assert start.curve(0).knots() == pytest.approx(before.curve(0).knots())
    assert start.draft("mtp") == before.draft("mtp")
    assert start.accepted("greedy", "mtp").mean == pytest.approx(0.25)
    found = measure.kept_costs(*parts, "tiny")
    assert found.measured == {1, *WIDTHS}
    for width in WIDTHS:
        assert found.curve(0).seconds(width) == pytest.approx(clock.plain * (0.9 + 0.1 * width))
    assert not found.is_guess("mtp")
    assert found.draft("mtp").step == pytest.approx(HEAD * clock.plain)
    assert found.accepted("greedy", "mtp").mean == pytest.approx(0.25)


@catches("nothing moves with a plain round", f"{COSTS}.know", lambda right: _know_as_before)
def test_widths_without_time_keep_their_ratio_to_a_plain_round(
    clock: Clock, parts: tuple, other_code: Callable[[], None]
) -> None:
    clock.plain = 0.001
    measure.kept_costs(*parts, "tiny")
    other_code()
    clock.plain = 0.1
    found = measure.kept_costs(*parts, "tiny", 1.0)
    assert found.measured < {1, *WIDTHS}
    assert 1 in found.measured
    for width in WIDTHS:
        assert found.curve(0).seconds(width) == pytest.approx(clock.plain * (0.9 + 0.1 * width), rel=0.02)


def test_a_load_says_once_that_another_version_measured(
    other_code: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.engine.load.allowance", lambda load_seconds: 0.0)

    def told() -> list[str]:
        with load("demo") as engine:
            return [n for n in engine.notices if "another version" in n]

    assert told() == []
    other_code()
    assert len(told()) == 1
    assert told() == []


def test_drafters_of_one_name_and_different_sizes_keep_costs_apart(
    clock: Clock, parts: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Heavy(Mtp):
        weight_bytes = 10**9  # type: ignore[assignment]

    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    clock.plain = 0.001
    target, light, config = parts
    heavy = {"mtp": Heavy(tiny_models.mtp_head(), target.max_context)}
    measured = measure._draft_cost
    monkeypatch.setattr(
        measure,
        "_draft_cost",
        lambda drafter, *rest: (
            (DraftCost(step=9.0), True) if isinstance(drafter, Heavy) else measured(drafter, *rest)
        ),
    )
    for _ in range(2):
        for drafters, step in ((light, HEAD * clock.plain), (heavy, 9.0)):
            found = measure.kept_costs(target, drafters, config, "tiny", 60.0)
            assert list(found.drafts) == ["mtp"]
            assert found.draft("mtp").step == pytest.approx(step)
        monkeypatch.setattr(measure, "_draft_cost", None)  # from here on everything is known


def test_a_machine_that_is_slow_for_a_while_makes_no_width_dear(
    clock: Clock, parts: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the rounds takes three times as long, in stretches longer than a width's own rounds."""
    clock.plain, run = 0.001, BareRounds.run

    def run_(self: BareRounds, width: int) -> float:
        seconds = run(self, width)
        if clock.rounds % 60 < 20:
            clock.spent += 2 * seconds
            seconds *= 3
        return seconds

    monkeypatch.setattr(BareRounds, "run", run_)
    curve = measure.measure(*parts, 60.0).curve(0)
    for width in (1, *WIDTHS):
        assert curve.seconds(width) / curve.seconds(1) == pytest.approx(0.9 + 0.1 * width, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "stalls", "where"),
    [
        (0.1, 2, 0),
        *(
            pytest.param(seconds, stalls, where, marks=pytest.mark.slow)
            for seconds in (0.1, 3.0)
            for stalls in (1, 2)
            for where in (0, 1, 3, 5)
        ),
    ],
)
def test_a_stall_is_not_kept_for_the_next_process(
    where: int,
    stalls: int,
    seconds: float,
    clock: Clock,
    parts: tuple,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine stops for a while in some drafts of the calibration, which eats its time."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    clock.plain, calls, propose = 0.01, 0, Mtp.propose

    def stalled(self: Mtp, asks, sampler) -> list:
        nonlocal calls
        made = propose(self, asks, sampler)
        clock.spent += seconds * (where <= calls < where + stalls)
        calls += 1
        return made

    monkeypatch.setattr(Mtp, "propose", stalled)
    costs = measure.kept_costs(*parts, "tiny")
    for _ in range(20):  # rounds of its answers
        costs.curve(0).refine(1, clock.plain)
    write_followed()
    monkeypatch.setattr(Mtp, "propose", propose)
    again = measure.kept_costs(*parts, "tiny")
    assert not again.is_guess("mtp")
    assert again.draft("mtp").seconds(1, 1) == pytest.approx(HEAD * clock.plain, rel=0.1)


@pytest.mark.parametrize(("load", "most"), [(0.0, 2.0), (0.5, 1.5), (1.9, 0.1), (10.0, 0.5), (60.0, 3.0)])
def test_two_seconds_with_the_load_or_a_twentieth_of_it(load: float, most: float) -> None:
    assert measure.allowance(load) == pytest.approx(most)


def published(size: str, layers: int | None = None) -> tuple[Qwen35, Mtp]:
    """Not allocated."""
    config = write_checkpoint.cut(write_checkpoint.SIZES[size], layers, None)
    parsed = architecture(config).parse(config)
    model = Qwen35(parsed)
    return model, Mtp(Qwen35Mtp(parsed, model), 4096)


@pytest.mark.parametrize(
    ("size", "layers", "least", "most"),
    [("qwen3.5-0.8b", None, 0.36, 0.46), ("qwen3.5-0.8b", 4, 0.8, 1.05), ("qwen3.6-27b", None, 0.04, 0.1)],
)
def test_a_draft_is_guessed_from_bytes(size: str, layers: int | None, least: float, most: float) -> None:
    """In plain rounds: a large vocabulary makes drafts of a small model dear."""
    model, head = published(size, layers)
    assert least < measure.likely_draft(head, model).seconds(1, 1) < most


def test_where_the_host_is_what_takes_time_a_draft_is_guessed_from_layers(parts: tuple) -> None:
    model, head = parts[0], parts[1]["mtp"]
    assert measure.likely_draft(head, model).step >= 2 / (reads(model).layers + 1)


def test_wide_rounds_of_a_mixture_are_guessed_dearer() -> None:
    dense, mixture = (measure.likely_rounds(published(s, 8)[0]) for s in ("qwen3.6-27b", "qwen3.6-35b-a3b"))
    assert dense.seconds(4) == pytest.approx(measure.LIKELY.seconds(4))
    assert mixture.seconds(4) > 1.1 * dense.seconds(4)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "4bit"])
def test_the_head_is_timed_in_the_models_dtype(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hidden of another dtype would have MLX convert all weights of the head, which takes longer than the product, and memory."""
    model, found, head = tiny_models.target(form), [], Qwen35.head

    def seen(self: Qwen35, hidden: mx.array) -> mx.array:
        logits = head(self, hidden)
        found.append(logits.dtype)
        return logits

    monkeypatch.setattr(Qwen35, "head", seen)
    measure._likely_plain(model)
    assert set(found) == {model.dtype}


def test_costs_in_which_only_wider_rounds_are_known_can_be_gone_on_from(
    clock: Clock, parts: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load had no time to measure anything, and all answers of its process were drafted: nothing is known of a plain round."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    clock.plain = 5.0
    costs = measure.kept_costs(*parts, "tiny", 0.1)
    assert not costs.measured
    for _ in range(4):
        costs.curve(0).refine(4, 11.0)
        costs.refine_draft("mtp", 1, 1, 1, 0.7)
    wanted = costs.curve(0).knots()
    write_followed()
    again = measure.kept_costs(*parts, "tiny", 0.1)
    assert again.measured == {4}
    assert again.curve(0).knots() == pytest.approx(wanted)
    assert not again.is_guess("mtp")


class Watched(Mtp):
    """Remembers how many tokens it was asked for and gave."""

    def propose(self, asks, sampler) -> list:
        made = super().propose(asks, sampler)
        self.__dict__.setdefault("given", []).append((asks[0].limit, made[0].length))
        return made


@pytest.mark.parametrize(("context", "longest"), [(64, None), (48, 2), (2048, 1)])
def test_drafts_are_measured_within_the_drafters_limits(context: int, longest: int | None) -> None:
    """Drafts that a drafter refuses take no time, and would be measured as free."""
    head = Watched(tiny_models.mtp_head(), context)
    head.max_draft = longest
    model = tiny_models.target()
    costs = measure.measure(model, {"mtp": head}, EngineConfig(), 60.0)
    assert not costs.is_guess("mtp")
    assert len(head.given) > 15
    assert all(asked == given for asked, given in head.given)
    assert max(asked for asked, _ in head.given) == (longest or 4)
    assert not head._rows


def test_a_drafter_without_room_for_a_draft_is_guessed() -> None:
    costs = measure.measure(
        tiny_models.target(), {"mtp": Mtp(tiny_models.mtp_head(), 20)}, EngineConfig(), 60.0
    )
    assert costs.is_guess("mtp")
    assert costs.draft("mtp").seconds(1, 1) > 0
