"""The head as a function of its weights gives what the drafting head gives, and its gradients are those of finite differences."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from planting import catches

from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.head_norms import TargetRun
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.training.adapt_head import _loss
from mlxspec.training.mtp_network import Head, MtpNetwork, _attend, float_head
from mlxspec.training.states import Batch
from tests import tiny_models

CONFIG = tiny_models.config()
TEXT = [3 + 7 * i * i % 80 for i in range(24)]
DEPTH = 3


def both() -> tuple[Qwen35Mtp, Head]:
    """A fused head, and its weights as they were before."""
    bare = Qwen35Mtp(CONFIG, tiny_models.target())
    rng = np.random.default_rng(5)
    bare.update(
        tree_map(
            lambda x: mx.array((1.0 * (x.ndim == 1) + 0.3 * rng.standard_normal(x.shape)).astype(np.float32)),
            bare.parameters(),
        )
    )
    weights = float_head(bare)
    bare.fuse()
    mx.eval(bare.parameters())
    return bare, weights


def test_drafts_are_those_of_the_drafting_head() -> None:
    """At every depth, behind every beginning: cells of the text in the cache, then the draft's own, each fed with the one before."""
    head, weights = both()
    run = TargetRun.over(tiny_models.target(), TEXT)
    found = MtpNetwork(CONFIG, head.target).drafts(weights, run.tokens[None], run.hidden[None], DEPTH)
    for begin in range(1, len(TEXT) - DEPTH):
        cache = head.make_cache(1)
        out = head.forward(run.tokens[1 : begin + 1], run.hidden[:begin], FlatRows((begin,)), cache)
        cache.commit()
        hidden = out.hidden[-1:]
        for j in range(DEPTH):
            right = np.array(hidden[0])
            bound = 1e-4 * np.abs(right).max()  # float32, sums of at most 128 terms, three layers deep
            np.testing.assert_allclose(np.array(found[j][0, begin - 1]), right, atol=bound)
            token = run.tokens[begin + 1 + j : begin + 2 + j]
            hidden = head.forward(token, hidden, FlatRows((1,)), cache).hidden
            cache.commit()


@catches(
    "drafts see cells of other drafts",
    "mlxspec.training.mtp_network:_attend",
    lambda right: lambda q, seen, scale: right(q, [(k, mx.roll(v, 1, axis=2)) for k, v in seen], scale),
)
def test_a_draft_sees_its_own_cells_and_those_of_the_text() -> None:
    rng = np.random.default_rng(0)
    q, first, second = (mx.array(rng.standard_normal((1, h, 5, 8)), mx.float32) for h in (4, 2, 2))
    values = [mx.array(rng.standard_normal((1, 2, 5, 8)), mx.float32) for _ in range(2)]
    out = np.array(_attend(q, [(first, values[0]), (second, values[1])], 0.5))
    for head in range(4):
        for i in range(5):
            keys = np.concatenate(
                [np.array(first)[0, head // 2, : i + 1], np.array(second)[0, head // 2, i : i + 1]]
            )
            own = np.concatenate(
                [np.array(values[0])[0, head // 2, : i + 1], np.array(values[1])[0, head // 2, i : i + 1]]
            )
            scores = 0.5 * keys @ np.array(q)[0, head, i]
            shares = np.exp(scores - scores.max())
            np.testing.assert_allclose(out[0, head, i], shares @ own / shares.sum(), atol=1e-5)


def test_gradients_are_those_of_finite_differences() -> None:
    """Along a random direction of each weight; central differences of a float32 loss, so 2 % of the largest slope is allowed."""
    head, weights = both()
    run = TargetRun.over(tiny_models.target(), TEXT)
    network, batch = MtpNetwork(CONFIG, head.target), Batch(run.tokens[None], run.hidden[None])
    places = mx.arange(len(TEXT) - DEPTH)
    slopes = mx.grad(lambda w: _loss(network, w, batch, places))(weights)
    rng, step, pairs = np.random.default_rng(1), 1e-2, {}
    for name, weight in weights.items():
        towards = mx.array(rng.standard_normal(weight.shape), mx.float32)
        towards = towards / mx.sqrt((towards * towards).sum())
        ahead, back = (
            _loss(network, {**weights, name: weight + by * towards}, batch, places).item()
            for by in (step, -step)
        )
        pairs[name] = ((ahead - back) / (2 * step), (slopes[name] * towards).sum().item())
    largest = max(abs(found) for _, found in pairs.values())
    for name, (wanted, found) in pairs.items():
        assert abs(wanted - found) < 0.02 * largest, name


def test_quantized_matrices_count_as_what_they_stand_for() -> None:
    bare = Qwen35Mtp(CONFIG, tiny_models.target())
    nn.quantize(bare, 32, 4)
    found = float_head(bare)
    layer = bare.layers[0].mlp.up_proj
    right = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4)
    assert mx.array_equal(found["layers.0.mlp.up_proj.weight"], right.astype(mx.float32))
    assert {value.dtype for _, value in tree_flatten(found)} == {mx.float32}


def test_norms_that_loading_shifted_are_those_that_count() -> None:
    head, weights = both()
    head.set_norms(head.norms(), {"layer": 1.0, "queries and keys": -1.0})
    bare = Qwen35Mtp(CONFIG, tiny_models.target())
    bare.update(tree_map(mx.zeros_like, bare.parameters()))
    found = float_head(bare, head)
    for name, by in (
        ("layers.0.input_layernorm", 1.0),
        ("layers.0.self_attn.k_norm", -1.0),
        ("layers.0.self_attn.q_norm", -1.0),
        ("norm", 0.0),
    ):
        np.testing.assert_allclose(
            np.array(found[f"{name}.weight"]), np.array(weights[f"{name}.weight"]) + by, atol=1e-5
        )


def test_a_head_with_experts_is_refused() -> None:
    with pytest.raises(ModelError, match="experts"):
        MtpNetwork(tiny_models.QWEN3_MOE, tiny_models.target())
