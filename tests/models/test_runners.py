"""What is compiled when, and that it makes no difference to a bit."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.kernels.flat import FlatRows
from mlxspec.models import runners
from mlxspec.models.runners import COMPILE_ALL_AT_MOST, COMPILE_AT_MOST, Runners
from mlxspec.platform import device
from tests.tiny_models import mtp_head, target

import mlx.core as mx  # isort: skip
import mlx.nn as nn  # isort: skip


def run(x: mx.array) -> mx.array:
    return x * 2 + 1


def is_compiled(found: Runners, widths: tuple[int, ...], **options: int) -> bool:
    return found.get("key", run, FlatRows(widths), **options) is not run


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    return monkeypatch


def test_what_may_repeat_is_compiled(compiling: pytest.MonkeyPatch) -> None:
    assert is_compiled(Runners(), (1,))
    assert is_compiled(Runners(), (5, 1))
    assert is_compiled(Runners(), (17,) * 4)
    for backend, pays in (("cpu", True), ("metal", False)):
        compiling.setattr(device, "backend", lambda found=backend: found)
        assert is_compiled(Runners(), (COMPILE_AT_MOST + 1,)) == pays
    assert not is_compiled(Runners(), (COMPILE_AT_MOST + 1, 1))
    assert not is_compiled(Runners(), (COMPILE_AT_MOST,) * (COMPILE_ALL_AT_MOST // COMPILE_AT_MOST + 1))
    compiling.setattr(device, "compile_enabled", lambda: False)
    assert not is_compiled(Runners(), (1,))


def test_what_compiles_is_cold(compiling: pytest.MonkeyPatch) -> None:
    found = Runners()
    colds = []
    for widths in ((4,), (4,), (5,), (COMPILE_AT_MOST + 1, 1), (4,)):
        before = found.num_cold
        found.get("key", run, FlatRows(widths))
        colds.append(found.num_cold > before)
    assert colds == [True, False, True, False, False]


def test_the_oldest_shapes_are_forgotten(compiling: pytest.MonkeyPatch) -> None:
    compiling.setattr(runners, "_SHAPES_AT_MOST", 3)
    found = Runners()
    functions = [found.get("key", run, FlatRows((w,))) for w in (1, 2, 3, 4)]
    assert found.get("key", run, FlatRows((4,))) is functions[3]
    assert found.get("key", run, FlatRows((1,))) is not functions[0]
    assert found.num_cold == 5


def test_a_prompt_is_compiled_where_its_length_repeats(compiling: pytest.MonkeyPatch) -> None:
    compiling.setattr(device, "backend", lambda: "cpu")
    found = Runners()
    for width, repeats in ((5, False), (8, True), (37, False), (64, True), (101, False), (512, True)):
        rows = FlatRows((width,), is_prompt=True)
        assert (found.get("key", run, rows) is not run) == repeats, width


@pytest.mark.slow
@catches(
    "each length of a prompt is compiled",
    "mlxspec.kernels.flat:LADDER",
    lambda right: tuple(range(1, 385)),
)
def test_answers_to_different_prompts_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    monkeypatch.setattr(
        runners.mx, "compile", lambda made, **_: made
    )  # how long g++ takes is not what is tested
    widths: set[int] = set()
    kept = Runners._kept

    def seen(self: Runners, whole: Any, made: Any) -> Any:
        before = self.num_cold
        found = kept(self, whole, made)
        shape = whole[-1]
        widths.update([shape if isinstance(shape, int) else shape[0]] if self.num_cold > before else [])
        return found

    monkeypatch.setattr(Runners, "_kept", seen)
    model = target()
    engine = Engine(model, drafters=[Mtp(mtp_head(), model.max_context)], spec=SpecConfig(drafters=("mtp",)))
    for length in range(3, 63):
        engine.generate([*range(length)], SamplingParams(max_tokens=6, seed=length, ignore_eos=True))
    assert len(widths) <= 16, widths


def test_another_shape_has_another_function(compiling: pytest.MonkeyPatch) -> None:
    found = Runners()
    kinds = [((4,), "a"), ((4,), "b"), ((2, 2), "a"), ((3, 1), "a"), ((5,), "a")]
    functions = [found.get(key, run, FlatRows(w)) for w, key in kinds]
    assert len({id(f) for f in functions}) == len(kinds)
    assert found.get("b", run, FlatRows((4,))) is functions[1]


class Layer(nn.Module):
    def __init__(self, *, factor: float, size: int = 3, twice: bool = False) -> None:
        super().__init__()
        self._twice = twice
        self.inner = nn.Linear(size, size, bias=False)
        self.inner.weight = factor * mx.ones((size, size))
        self.rest = [mx.array([factor])]


def apply(layer: Layer, x: mx.array) -> mx.array:
    return layer.inner(x) * (2 if layer._twice else 1) + layer.rest[0]


def test_layers_of_one_form_share_what_is_compiled(compiling: pytest.MonkeyPatch) -> None:
    """And each is run with its own weights, which stay where they are."""
    layers = [Layer(factor=1), Layer(factor=2), Layer(factor=3, twice=True), Layer(factor=4, size=2)]
    found, traced = Runners(layers), []

    def run(layer: Layer, x: mx.array) -> mx.array:
        traced.append(layer)
        return apply(layer, x)

    for i in (0, 1, 2, 3, 1, 0):
        x = mx.arange(layers[i].inner.weight.shape[0], dtype=mx.float32)
        wanted = apply(layers[i], x)
        before = [layer.inner.weight for layer in layers]
        got = found.of_layer("key", i, run, FlatRows((1,)))(x)
        assert np.array_equal(np.array(got), np.array(wanted))
        assert all(layer.inner.weight is w for layer, w in zip(layers, before, strict=True))
    assert found.num_cold == 3
    assert {id(layer) for layer in traced} == {id(layers[i]) for i in (0, 2, 3)}


def test_a_layer_that_fails_keeps_its_weights(compiling: pytest.MonkeyPatch) -> None:
    layers = [Layer(factor=1), Layer(factor=2)]
    weight = layers[0].inner.weight
    with pytest.raises(ValueError, match="matmul"):
        Runners(layers).of_layer("key", 1, apply, FlatRows((1,)))(mx.zeros(7))
    assert layers[0].inner.weight is weight


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64") or not device.compile_enabled(),
    reason="elsewhere fused loops may round otherwise; run with --compiled",
)
def test_compiled_and_single_operations_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()

    def logits() -> list[np.ndarray]:
        cache, found = model.make_cache(1), []
        for width, kept in ((90, 90), (1, 1), (4, 3), (1, 1), (1, 1), (12, 5), (2, 2), (1, 1)):
            certain = width in (1, 90)
            out = model.forward(mx.arange(width), FlatRows((width,)), cache, certain=certain)
            found.append(np.array(out.logits))
            cache.commit(None if certain else (kept,))
        return found

    with device.private_kernels():
        found = [logits(), logits()]
        monkeypatch.setattr(runners.Runners, "_compiles", lambda *_: False)
        found.append(logits())
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))
