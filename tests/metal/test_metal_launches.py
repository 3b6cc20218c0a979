"""How many kernels a round launches, counted in the graph that MLX records; nothing runs, so no Metal is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checks_conv import SHAPE, draw, draw_weights, num_columns
from checks_gdn import Shape, ints, layout

from mlxspec.kernels import conv_qkv, gdn_round

VIEWS = {"ExpandDims", "Squeeze"}


def zeros(*shape: int) -> mx.array:
    return mx.array(np.zeros(shape, np.float32))


def recorded(function: Callable[..., Any], *arrays: mx.array) -> list[str]:
    """Names of all primitives in the graph of function(*arrays) that are not mere views."""
    mx.eval(arrays)
    seen: list[dict[str, Any]] = []
    mx.export_function(seen.append, function, *arrays)
    return [e["name"] for e in seen if e.get("type") == "primitive" and e["name"] not in VIEWS]


@pytest.mark.parametrize("certain", [False, True])
def test_convolution_and_recurrence_are_two_launches(certain):
    rng = np.random.default_rng(0)
    weights, rows = draw_weights(rng, SHAPE, mx.float32), layout(2, 1)
    mx.eval(weights.weight, weights.neg_a, weights.dt_bias)
    projected, window = draw(rng, 3, num_columns(SHAPE)), draw(rng, 2, 3, SHAPE.conv_size)
    state = Shape(key_dim=SHAPE.k_dim).state(rng, 2)
    last_inputs = conv_qkv.LastInputs(mx.array(np.array(projected)), rows, ints([1, 1]))

    def mixer(
        projected: mx.array, window: mx.array, state: mx.array, delta: mx.array, log_g: mx.array
    ) -> list[mx.array]:
        last = gdn_round.Replay(
            gdn_round.Tape(projected[:, :128].reshape(3, 2, 64), delta, log_g), rows, ints([1, 1])
        )
        inputs, after, _ = conv_qkv.conv_qkv_metal(
            projected, window, weights, SHAPE, rows, last_inputs, certain=certain
        )
        if certain:
            return [after, *gdn_round.gdn_advance_metal(inputs, state, rows, last)]
        y, base, tape = gdn_round.gdn_round_metal(inputs, state, rows, last)
        return [after, y, base, *tape]

    names = recorded(mixer, projected, window, state, zeros(3, 4, 32), zeros(3, 4))
    assert [n for n in names if n not in ("Slice", "Reshape")] == ["CustomKernel", "CustomKernel"]


def test_a_flush_is_one_launch():
    rng, shape, rows = np.random.default_rng(0), Shape(), layout(2, 1)
    tokens, state = shape.tokens(rng, (2, 1)), shape.state(rng, 2)
    tape = gdn_round.Tape(tokens.inputs.k, zeros(3, 4, 32), tokens.inputs.log_g)
    flush = recorded(
        lambda s: gdn_round.gdn_flush_metal(s, gdn_round.Replay(tape, rows, ints([1, 0]))), state
    )
    assert flush == ["CustomKernel"]
