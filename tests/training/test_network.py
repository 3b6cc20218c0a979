"""A drafter as a function of its weights gives what drafts, at every depth, and its gradients are those of finite differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from planting import catches
from training.block_network import BlockNetwork
from training.network import ChainNetwork, Head, Network, _attend, float_weights
from training.new_drafter import config_for
from training.states import Batch
from training.teach import loss

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.dflash import DFlash
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from tests import tiny_models

CONFIG = tiny_models.config()
TEXT = [3 + 7 * i * i % 80 for i in range(24)]
DEPTH = 3
BLOCKS = ("DFlash", "DFlash2", "DSpark")


def made(kind: str) -> tuple[Any, Head, Network]:
    """A fused drafter with random weights, those weights, and its form for gradients."""
    target = tiny_models.target()
    if kind == "mtp":
        like: Any = tiny_models.mtp_head()
        new: Any = lambda: Qwen35Mtp(CONFIG, target)  # noqa: E731
    elif kind == "experts":
        mixed = replace(CONFIG, num_experts=4, num_experts_per_token=2, expert_size=64, shared_expert_size=64)
        like = new = lambda: Qwen35Mtp(mixed, target)
    elif kind == "eagle3":
        like = tiny_models.eagle3()
        new = lambda: Eagle3Head(like.config, target, {"d2t"})  # noqa: E731
    elif kind == "new":
        parsed = Eagle3Config.from_dict(config_for(target))
        new = lambda: Eagle3Head(parsed, target, {"d2t"})  # noqa: E731
        like = new()
        like.fuse()
    else:
        like = tiny_models.dflash(kind)
        new = lambda: DFlash(like.config, target)  # noqa: E731
    rng, bare = np.random.default_rng(5), new()
    bare.update(
        tree_map(
            lambda x: (
                mx.array(
                    (1.0 * (x.ndim == 1) + x.shape[-1] ** -0.5 * rng.standard_normal(x.shape)).astype(
                        np.float32
                    )
                )
                if x.dtype == mx.float32
                else like.ids - mx.arange(len(x))
            ),
            bare.parameters(),
        )
    )
    weights, fixed = float_weights(bare)
    bare.fuse()
    mx.eval(bare.parameters())
    network = (BlockNetwork if kind in BLOCKS else ChainNetwork)(
        target, new, fixed, bare if kind == "experts" else like
    )
    return bare, weights, network


def batch_of(network: Network) -> Batch:
    found = Batch.of(tiny_models.target(), network.layers, [TEXT])
    mx.eval([x for x in found if x is not None])
    return found


def close(found: mx.array, right: mx.array) -> None:
    bound = 1e-4 * mx.abs(right).max().item()  # float32, sums of at most 192 terms, three layers deep
    np.testing.assert_allclose(np.array(found), np.array(right), atol=bound)


@pytest.mark.parametrize("kind", ["mtp", "experts", "eagle3", "new"])
def test_chains_are_those_of_the_drafter(kind: str) -> None:
    """At every depth, behind every beginning: cells of the text in the cache, then the draft's own, each fed with the one before."""
    head, weights, network = made(kind)
    batch = batch_of(network)
    found = network.drafts(network.module(weights), batch, DEPTH)
    tokens = batch.tokens[0]
    given = batch.hidden[0] if batch.streams is None else head.take(batch.streams[0])
    for begin in range(1, len(TEXT) - DEPTH):
        cache = head.make_cache(1)
        out = head.forward(tokens[1 : begin + 1], given[:begin], FlatRows((begin,)), cache)
        cache.commit()
        hidden = out.hidden[-1:]
        for j in range(DEPTH):
            close(found[j][0, begin - 1], hidden[0])
            token = tokens[begin + 1 + j : begin + 2 + j]
            hidden = head.forward(token, hidden, FlatRows((1,)), cache).hidden
            cache.commit()


@pytest.mark.parametrize("kind", BLOCKS)
@catches(
    "a block does not see its newest cell",
    "training.block_network:_attend",
    lambda right: lambda own, context, places, *rest, **more: right(own, context, places - 1, *rest, **more),
)
def test_blocks_are_those_of_the_drafter(kind: str) -> None:
    """At every place: hiddens of a block, and logits behind the text's tokens, as drafts are drawn from them. Windows of 9 are filled."""
    drafter, weights, network = made(kind)
    batch, num = batch_of(network), len(network.depths)
    places = mx.arange(1, len(TEXT) - num)
    hidden = network.blocks(network.module(weights), batch, places)[0]
    scored = list(network.scored(weights, batch, places, is_drafting=True))
    masks = [drafter.config.mask_id] * (num - drafter.config.starts_at_anchor)
    for i, place in enumerate(places.tolist()):
        cache = drafter.make_cache(1)
        drafter.remember(batch.streams[0, :place], FlatRows((place,)), cache)
        cache.commit()
        tokens = mx.array([TEXT[place], *masks], mx.int32)
        right = drafter.block(tokens, FlatRows((len(tokens),)), cache).hidden[-num:]
        close(hidden[i], right)
        logits = drafter.head(right)
        if drafter.picks_in_order:
            logits = drafter.follow(right, logits, batch.tokens[0, place : place + num])
        for j in range(num):
            close(mx.softmax(scored[j].own[0, i]), mx.softmax(logits[j]))


@catches(
    "drafts see cells of other drafts",
    "training.network:_attend",
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


@pytest.mark.parametrize("kind", ["mtp", "experts", "eagle3", *BLOCKS])
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    """Along a random direction of each weight; central differences of a float32 loss, so 2 % of the largest slope is allowed."""
    _, weights, network = made(kind)
    batch, places = batch_of(network), mx.array([2, 14] if kind in BLOCKS else [*range(len(TEXT) - DEPTH)])
    network.reach = 0.0  # weights by what is accepted so far are held fast on the way back
    slopes = mx.grad(lambda w: loss(network, w, batch, places))(weights)
    rng, step, pairs = np.random.default_rng(1), 1e-2, {}
    for name, weight in weights.items():
        towards = mx.array(rng.standard_normal(weight.shape), mx.float32)
        towards = towards / mx.sqrt((towards * towards).sum())
        ahead, back = (
            loss(network, {**weights, name: weight + by * towards}, batch, places).item()
            for by in (step, -step)
        )
        pairs[name] = ((ahead - back) / (2 * step), (slopes[name] * towards).sum().item())
    largest = max(abs(found) for _, found in pairs.values())
    for name, (wanted, found) in pairs.items():
        assert abs(wanted - found) < 0.02 * largest, name


def test_quantized_matrices_count_as_what_they_stand_for() -> None:
    bare = Qwen35Mtp(CONFIG, tiny_models.target())
    nn.quantize(bare, 32, 4)
    found, fixed = float_weights(bare)
    layer = bare.layers[0].mlp.up_proj
    right = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4)
    assert mx.array_equal(found["layers.0.mlp.up_proj.weight"], right.astype(mx.float32))
    assert {value.dtype for _, value in tree_flatten(found)} == {mx.float32}
    assert not fixed


def test_norms_that_loading_shifted_are_those_that_count() -> None:
    head, weights, _ = made("mtp")
    head.set_norms(head.norms(), {"layer": 1.0, "queries and keys": -1.0})
    bare = Qwen35Mtp(CONFIG, tiny_models.target())
    bare.update(tree_map(mx.zeros_like, bare.parameters()))
    found, _ = float_weights(bare, head)
    for name, by in (
        ("layers.0.input_layernorm", 1.0),
        ("layers.0.self_attn.k_norm", -1.0),
        ("layers.0.self_attn.q_norm", -1.0),
        ("norm", 0.0),
    ):
        np.testing.assert_allclose(
            np.array(found[f"{name}.weight"]), np.array(weights[f"{name}.weight"]) + by, atol=1e-5
        )
