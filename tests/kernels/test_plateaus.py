"""Widths at which quantized products take a step: what MLX's choice of kernels makes of them, and what policy auto makes of those.

MLX's rules are written down here a second time, as a table of cases from its source (`mlx/backend/metal/quantized.cpp`, commit 846d176)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mlxspec.platform import device  # before mlx

# isort: split
import mlx.core as mx
import pytest

from mlxspec.config import EngineConfig
from mlxspec.engine import measure
from mlxspec.engine.measure import WIDTHS, BareRounds, widths
from mlxspec.kernels import launch, plateaus, qmv_rows
from mlxspec.kernels.qmv_rows import QuantizedWeight
from mlxspec.models.reads import plateau_ends
from mlxspec.policy.acceptance import Offer
from mlxspec.policy.controller import Choice, Controller, PolicyRow
from mlxspec.policy.costs import CostModel, Curve, DraftCost
from tests import tiny_models

BF16 = mx.bfloat16


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    def become(generation: int | None, *, two_dies: bool = False, units: bool = False) -> None:
        monkeypatch.setattr(device, "gpu_generation", lambda: generation)
        monkeypatch.setattr(device, "gpu_has_two_dies", lambda: two_dies)
        monkeypatch.setattr(device, "has_matrix_units", lambda: units)

    return become


def weight(size: int, mode: str = "affine") -> QuantizedWeight:
    """Of a square matrix; only its shape counts."""
    group, bits = qmv_rows.MICROSCALING.get(mode, (64, 4))
    scales = mx.zeros((size, size // group), BF16 if mode == "affine" else mx.uint8)
    codes = mx.zeros((size, size * bits // 32), mx.uint32)
    return QuantizedWeight(codes, scales, scales if mode == "affine" else None, group, bits, mode)


@pytest.mark.parametrize(
    ("generation", "two_dies", "units", "size", "mode", "expected"),
    [
        (13, False, False, 5120, "affine", (5, 32)),  # M1, M2: rows one by one, then tiles of 32
        (14, False, False, 2048, "affine", (13, 32)),
        (13, True, False, 5120, "affine", (11, 32)),
        (13, False, False, 5120, "mxfp4", (5, 32)),
        (15, False, False, 5120, "affine", (5, 10, 12, 32)),  # M3, M4: tiles of 5
        (16, False, False, 4096, "affine", (5, 10, 14, 32)),
        (15, True, False, 5120, "affine", (5, 10, 11, 32)),
        (17, False, True, 5120, "affine", (5, 10, 12, 32)),  # M5
        (17, False, True, 4096, "affine", (5, 10, 15, 20, 24, 32)),
        (17, False, True, 2048, "nvfp4", (5, 10, 15, 20, 25, 30, 32)),
        (None, False, False, 5120, "affine", ()),
    ],
)
def test_steps_lie_where_mlx_reads_weights_once_more(
    gpu, generation: int | None, two_dies: bool, units: bool, size: int, mode: str, expected: tuple[int, ...]
) -> None:
    gpu(generation, two_dies=two_dies, units=units)
    found = plateaus.ends(weight(size, mode), BF16)
    assert found[: len(expected)] == expected
    assert all(end % 32 == 0 for end in found[len(expected) :])
    assert (64 in found) == (generation is not None)


def test_where_our_kernel_won_its_plateau_counts(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(13)
    monkeypatch.setattr(launch, "may_mix", lambda name: True)
    monkeypatch.setattr(launch, "in_use", lambda name: True)
    w = weight(5120)
    monkeypatch.setattr(launch, "wins", lambda name, width: not width.endswith(" 1 rows"))
    assert plateaus.ends(w, BF16)[:2] == (8, 32)
    assert plateaus.ends(w, BF16, exact=True)[:2] == (8, 32)


def test_a_model_has_the_steps_that_most_of_its_bytes_have(gpu) -> None:
    gpu(15)
    model = tiny_models.target("4bit")
    model = getattr(model, "model", model)
    assert plateau_ends(model)[:3] == (5, 10, 12)
    assert plateau_ends(tiny_models.target()) == ()


# ---- what the policy makes of them


def stepped(ends: Sequence[int], height: float = 0.4) -> dict[int, float]:
    """Plain rounds by width: a plateau up to each end, one step higher behind it."""
    return {w: 1.0 + height * sum(w > end for end in ends) + 0.001 * w for w in range(1, 65)}


def measured(truth: dict[int, float], ends: Sequence[int]) -> Curve:
    """As calibration makes it: timed at the widths that it chooses."""
    timed = widths(tiny_models.target(), ends)
    return Curve({w: truth[w] for w in timed}, ends=ends)


@pytest.mark.parametrize(
    "ends", [(5, 10, 12, 32), (5, 10, 14, 32), (5, 10, 15, 20, 24, 32), (8, 32)], ids=str
)
def test_the_measured_curve_has_the_steps_where_they_are(ends: tuple[int, ...]) -> None:
    truth = stepped(ends)

    def worst(curve: Curve) -> float:
        return max(abs(curve.seconds(w) / truth[w] - 1.0) for w in range(1, 34))

    assert worst(measured(truth, ends)) < 0.005
    assert worst(Curve({w: truth[w] for w in (1, *WIDTHS)})) > 0.05  # not without knowing the ends
    assert {w for end in ends if end < 33 for w in (end, end + 1)} <= set(widths(tiny_models.target(), ends))


def test_drafts_jump_to_the_end_of_a_plateau() -> None:
    """Of a sure lookup, and of a head whose draft is asked for by what it costs: one token more than a plateau holds does not pay, but the
    whole next plateau does."""
    ends = (5, 10, 12, 32)
    truth = stepped(ends)

    def verified(curve: Curve, length: int, *, is_lookup: bool = True) -> int:
        control = Controller(CostModel({0: curve.knots()}, {"mtp": DraftCost()}, ends=curve.ends))
        row = PolicyRow("", 0)
        row.account.balance = 16.0
        sure = [0.99] * length
        for _ in range(60):
            control.learn(row, Offer("mtp", length, sure), length, length)
            control.drafted(row, Offer("mtp", length, sure), 1, Choice(model="mtp", depth=length))
        asked = [] if is_lookup else [{"mtp": (length, 1)}]
        choices = control.choose([row], [[Offer("ngram", length, sure)] * is_lookup], asked or [{}])
        drafts = [Offer("ngram" if is_lookup else "mtp", choices[0].depth, sure[: choices[0].depth])]
        return control.trim([row], drafts, choices).widths[0]

    curve = measured(truth, ends)
    assert verified(curve, 6) == 4  # the seventh token of a round is on the next plateau
    assert verified(curve, 10) == 9  # all of it
    assert verified(curve, 63) == 31
    truth = stepped(ends, height=1.5)
    assert verified(measured(truth, ends), 6, is_lookup=False) == 4
    assert verified(measured(truth, ends), 10) == 4  # of a dear plateau a burst takes none


def test_calibration_times_both_sides_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "plateau_ends", lambda model, exact: (5, 10, 12, 32))
    timed: set[int] = set()

    def run(self: BareRounds, width: int) -> float:
        timed.add(width)
        return 1e-6 * width

    monkeypatch.setattr(BareRounds, "run", run)
    costs = measure.measure(tiny_models.target(), {}, EngineConfig(), 60.0)
    assert timed >= {5, 6, 10, 11, 12, 13, 32, 33}
    assert costs.measured >= {5, 6, 10, 11, 12, 13, 32, 33}
    assert costs.curve(0).ends == costs.curve(0, 4).ends == (5, 10, 12, 32)
    again = CostModel.from_data(json.loads(json.dumps(costs.as_data())))
    assert again.curve(0).ends == (5, 10, 12, 32)
