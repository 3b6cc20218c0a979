"""Which forwards are compiled, and that it makes no difference to a bit where plain steps are and verifies are not."""

from __future__ import annotations

import numpy as np
import pytest

from mlxspec import device
from mlxspec.kernels.flat import FlatRows
from mlxspec.models import layers
from mlxspec.models.layers import COMPILE_AT_MOST, compile_pays
from tests.tiny_models import target

import mlx.core as mx  # isort: skip


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    return monkeypatch


def test_a_gpu_compiles_whatever_may_repeat(compiling: pytest.MonkeyPatch) -> None:
    compiling.setattr(device, "backend", lambda: "metal")
    assert compile_pays(FlatRows((1,)))
    assert compile_pays(FlatRows((5, 1)), deferred=True)
    assert not compile_pays(FlatRows((COMPILE_AT_MOST + 1,)))


def test_a_cpu_compiles_plain_steps(compiling: pytest.MonkeyPatch) -> None:
    compiling.setattr(device, "backend", lambda: "cpu")
    compiling.setattr(layers, "_FUSED_IS_EXACT", True)
    assert compile_pays(FlatRows((1, 1)))
    assert not compile_pays(FlatRows((1, 2)))
    assert not compile_pays(FlatRows((1,)), deferred=True)
    compiling.setattr(layers, "_FUSED_IS_EXACT", False)  # then all of a width or nothing
    assert compile_pays(FlatRows((1, 2)))


def test_nothing_compiles_where_mlx_does_not(compiling: pytest.MonkeyPatch) -> None:
    compiling.setattr(device, "compile_enabled", lambda: False)
    assert not compile_pays(FlatRows((1,)))


@pytest.mark.skipif(
    not layers._FUSED_IS_EXACT or device.backend() != "cpu" or not device.compile_enabled(),
    reason="only an x86-64 CPU mixes both; run with --compiled",
)
def test_compiled_and_single_operations_give_the_same_bits() -> None:
    model = target()

    def logits() -> list[np.ndarray]:
        cache, found = model.make_cache(1), []
        for width, kept in ((9, 9), (1, 1), (4, 3), (1, 1), (1, 1), (12, 5), (2, 2), (1, 1)):
            facts = width in (1, 9)
            out = model.forward(mx.arange(width), FlatRows((width,)), cache, facts=facts)
            found.append(np.array(out.logits))
            cache.commit(None if facts else (kept,))
        return found

    mixed = logits()
    with pytest.MonkeyPatch.context() as patch, device.private_kernels():
        patch.setattr("mlxspec.models.qwen3_5.compile_pays", lambda rows, deferred=False: True)
        compiled = logits()
        patch.setattr("mlxspec.models.qwen3_5.compile_pays", lambda rows, deferred=False: False)
        single = logits()
    for a, b, c in zip(mixed, compiled, single, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
