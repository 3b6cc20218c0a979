"""What is compiled when, and that it makes no difference to a bit."""

from __future__ import annotations

import numpy as np
import pytest

from mlxspec import device
from mlxspec.kernels.flat import FlatRows
from mlxspec.models import runners
from mlxspec.models.runners import COMPILE_ALL_AT_MOST, COMPILE_AT_MOST, HOT_AFTER, Runners
from tests.tiny_models import target

import mlx.core as mx  # isort: skip


def run(x: mx.array) -> mx.array:
    return x * 2 + 1


def compiled_at(found: Runners, widths: tuple[int, ...], **options: int) -> int | None:
    """Which call, from 0, is the first that gets a compiled function, within more than enough of them."""
    for i in range(3 * HOT_AFTER):
        if found.get("key", run, FlatRows(widths), **options) is not run:
            return i
    return None


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    monkeypatch.setattr(device, "backend", lambda: "cpu")
    monkeypatch.setattr(runners, "FUSED_IS_EXACT", True)
    return monkeypatch


def test_a_gpu_compiles_at_once_what_may_repeat(compiling: pytest.MonkeyPatch) -> None:
    compiling.setattr(device, "backend", lambda: "metal")
    assert compiled_at(Runners(), (5, 1), deferred=3) == 0
    assert compiled_at(Runners(), (COMPILE_AT_MOST + 1,)) is None
    assert compiled_at(Runners(), (17,) * 4) == 0
    assert compiled_at(Runners(), (COMPILE_AT_MOST,) * (COMPILE_ALL_AT_MOST // COMPILE_AT_MOST + 1)) is None
    assert compiled_at(Runners(), (5, 1), is_shaped=False) is None


def test_a_cpu_compiles_plain_steps_at_once_and_verifies_when_they_have_repeated(
    compiling: pytest.MonkeyPatch,
) -> None:
    assert compiled_at(Runners(), (1, 1)) == 0
    assert compiled_at(Runners(), (4,)) == HOT_AFTER
    assert compiled_at(Runners(), (1,), deferred=4) == HOT_AFTER
    found = Runners()
    for width in range(2, 2 + 3 * HOT_AFTER):  # each width once: none is worth it
        assert found.get("key", run, FlatRows((width,))) is run


def test_what_compiles_or_is_still_to_be_compiled_is_cold(compiling: pytest.MonkeyPatch) -> None:
    found = Runners()
    colds = []
    for _ in range(HOT_AFTER + 3):
        before = found.num_cold
        found.get("key", run, FlatRows((4,)))
        colds.append(found.num_cold > before)
    assert colds == [True] * (HOT_AFTER + 1) + [False, False]
    found.get("key", run, FlatRows((COMPILE_AT_MOST + 1,)))  # always runs as it does here
    assert found.num_cold == HOT_AFTER + 1


def test_another_shape_has_another_function(compiling: pytest.MonkeyPatch) -> None:
    compiling.setattr(device, "backend", lambda: "metal")
    found = Runners()
    kinds = [((4,), 0), ((4,), 2), ((4,), 3), ((2, 2), 0), ((3, 1), 0), ((5,), 0)]
    functions = [found.get("key", run, FlatRows(w), deferred=d) for w, d in kinds]
    assert len({id(f) for f in functions}) == len(kinds)
    assert found.get("key", run, FlatRows((4,)), deferred=2) is functions[1]


def test_where_fused_loops_round_otherwise_all_of_a_width_is_compiled(compiling: pytest.MonkeyPatch) -> None:
    compiling.setattr(runners, "FUSED_IS_EXACT", False)
    assert compiled_at(Runners(), (4,), deferred=4) == 0


def test_nothing_compiles_where_mlx_does_not(compiling: pytest.MonkeyPatch) -> None:
    compiling.setattr(device, "compile_enabled", lambda: False)
    assert compiled_at(Runners(), (1,)) is None


@pytest.mark.skipif(
    not runners.FUSED_IS_EXACT or device.backend() != "cpu" or not device.compile_enabled(),
    reason="only an x86-64 CPU mixes both; run with --compiled",
)
def test_compiled_and_single_operations_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()

    def logits() -> list[np.ndarray]:
        cache, found = model.make_cache(1), []
        for width, kept in ((9, 9), (1, 1), (4, 3), (1, 1), (1, 1), (12, 5), (2, 2), (1, 1)):
            facts = width in (1, 9)
            out = model.forward(mx.arange(width), FlatRows((width,)), cache, facts=facts)
            found.append(np.array(out.logits))
            cache.commit(None if facts else (kept,))
        return found

    with device.private_kernels():
        found = []
        for hot_after in (10**9, 0, 1):
            monkeypatch.setattr(runners, "HOT_AFTER", hot_after)
            monkeypatch.setattr(model, "_runners", Runners())
            found += [logits(), logits(), logits()]
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))
