"""Mamba-2's recurrence in the form of plain steps: a verify has the bits of plain steps where projections have, in the forms where mlx-lm's
chunked form rounds otherwise."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from planting import catches

from mlxspec.engine.probe import PROBE_AT_MOST, probe
from mlxspec.models.adapted import stepwise
from mlxspec.models.adapted.model import AdaptedModel
from tests.models import adapted_zoo as zoo

MIXERS = ("mamba2", "granitemoehybrid", "nemotron_h", "falcon_h1")


def model(name: str, bits: int) -> AdaptedModel:
    """A small model whose layers all say something, in bfloat16, of 4 bits or unpacked."""
    code = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(7)
    module = code.Model(code.ModelArgs.from_dict(zoo.config_of(name, 96)))

    def loud(p: mx.array) -> mx.array:
        noise = mx.random.normal(p.shape)
        found = noise * 0.2 if p.ndim > 1 else p + 0.1 * noise
        return found.astype(mx.bfloat16) if mx.issubdtype(p.dtype, mx.floating) else p

    module.update(tree_map(loud, module.parameters()))
    if bits == 4:
        nn.quantize(
            module,
            group_size=32,
            bits=4,
            class_predicate=lambda _, x: hasattr(x, "to_quantized") and not x.weight.shape[-1] % 32,
        )
    module.eval()
    return zoo.adapted(module, 512)


@catches(
    "the recurrence of a verify is mlx-lm's chunked form",
    "mlxspec.models.adapted.stepwise:by_steps",
    lambda _: nullcontext,
)
@catches(
    "the widest rounds are not by steps",
    "mlxspec.models.adapted.stepwise:STEPS_AT_MOST",
    lambda _: PROBE_AT_MOST - 1,
)
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("name", MIXERS)
def test_a_verify_has_the_bits_of_plain_steps(name: str, bits: int) -> None:
    found = probe(model(name, bits), (2, 5, PROBE_AT_MOST))
    assert all(verdict.largest == 0 for verdict in found.widths), found


@pytest.mark.parametrize("width", [1, 2, stepwise.STEPS_AT_MOST, stepwise.STEPS_AT_MOST + 1])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("given", ["state", "nothing", "mask"])
def test_few_tokens_with_a_state_are_steps_within_and_mlx_lm_s_own_otherwise(
    width: int, is_open: bool, given: str
) -> None:
    calls = list[int]()

    def own(x: mx.array, a: Any, b: Any, c: Any, d: Any, dt: Any, bias: Any, state: Any, *_: Any) -> Any:
        calls.append(x.shape[1])
        return x + dt[..., None], state

    update = stepwise._stepping(own)
    x, dt = mx.zeros((1, width, 2, 4)), mx.arange(float(2 * width)).reshape(1, width, 2)
    state = None if given == "nothing" else mx.zeros((1, 2, 4, 8))
    mask = mx.ones((1, width)) if given == "mask" else None
    with stepwise.by_steps() if is_open else nullcontext():
        out, _ = update(x, None, x, x, None, dt, None, state, (0.0, 1.0), mask)
    assert mx.array_equal(out, x + dt[..., None])
    is_few = is_open and given == "state" and width <= stepwise.STEPS_AT_MOST
    assert calls == ([1] * width if is_few else [width])
