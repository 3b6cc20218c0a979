"""Joined products and folded norms of mlx-lm's modules: the same logits, fewer launches."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from adapted_zoo import ARCHITECTURES, module_of
from metal_graph import launches
from mlx.utils import tree_flatten
from planting import catches

from mlxspec.models import layers
from mlxspec.models.adapted.fused import Joined, fold_norms
from mlxspec.models.adapted.loading import fuse

FEW = ("qwen2", "gemma3_text", "lfm2")  # biases; norms with 1 added; another kind of layer
NAMES = [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES]


def logits(module: nn.Module, length: int) -> mx.array:
    tokens = mx.arange(length)[None] * 7 % 90
    found: mx.array = module(tokens)
    return found


def turned(right: Any) -> Any:
    """The shares of a product are handed out in another order."""
    return lambda self, x, place: right(self, x, (place + 1) % (len(self._splits) + 1))


@catches(
    "shares are mixed up",
    "mlxspec.models.adapted.fused:Joined.share",
    turned,
    case="qwen2",
    errors=(ValueError,),
)
@pytest.mark.parametrize("name", NAMES)
def test_fused_modules_give_the_same_logits(name: str) -> None:
    own = module_of(name)
    fused = copy.deepcopy(own)
    fuse(fused)
    assert sum(v.nbytes for _, v in tree_flatten(fused.parameters())) == sum(
        v.nbytes for _, v in tree_flatten(own.parameters())
    )
    for length in (1, 9):
        right = logits(own, length)
        assert mx.abs(logits(fused, length) - right).max() <= 1e-4 * mx.abs(right).max()
    assert launches([logits(fused, 3)]).total() <= launches([logits(own, 3)]).total()


def test_projections_of_one_input_are_one_product() -> None:
    for is_packed in (False, True):
        module = copy.deepcopy(module_of("qwen2"))
        if is_packed:
            nn.quantize(module, 32, 4)
        mx.eval(module.parameters())
        plain = launches([logits(module, 1)])
        fuse(module)
        mx.eval(module.parameters())
        (layer, *_) = module.model.layers
        assert isinstance(layer.self_attn.q_proj, Joined)
        assert isinstance(layer.mlp.gate_proj, Joined)
        fused = launches([logits(module, 1)])
        assert plain.total() - fused.total() >= 3 * len(module.model.layers)


def test_layers_of_different_forms_stay_apart() -> None:
    module = copy.deepcopy(module_of("llama"))
    nn.quantize(module, 32, 4, class_predicate=lambda path, _: path.endswith("q_proj"))
    mx.eval(module.parameters())
    right = logits(module, 5)
    fuse(module)
    layer = module.model.layers[0].self_attn
    assert isinstance(layer.q_proj, nn.QuantizedLinear)
    assert isinstance(layer.k_proj, Joined)
    assert mx.abs(logits(module, 5) - right).max() <= 1e-4 * mx.abs(right).max()


def test_a_share_of_another_input_is_its_own() -> None:
    """A module that calls its layers otherwise than in the lazy forward."""
    layers = [nn.Linear(4, 3), nn.Linear(4, 2)]
    mx.eval([layer.parameters() for layer in layers])
    x, y = mx.random.normal((1, 4)), mx.random.normal((1, 4))
    right = layers[0](x), layers[1](y), layers[1](x)
    joined = Joined(layers)
    found = joined(x), joined.share(y, 1), joined.share(x, 1)
    assert all(mx.allclose(a, b, atol=1e-6) for a, b in zip(found, right, strict=True))


class Odd(nn.Module):
    """A norm of its own: its weight counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = mx.ones(8), 1e-5

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 2 * self.weight, self.eps)


@catches("every norm is folded", "mlxspec.models.adapted.fused:_adds_one", lambda _: lambda norm: True)
def test_other_norms_stay() -> None:
    module = nn.Module()
    module.odd, module.own = Odd(), nn.RMSNorm(8)
    own = module.own
    fold_norms(module)
    assert type(module.odd) is Odd
    assert module.own is own


@catches(
    "quantized modules multiply by MLX alone",
    "mlxspec.models.adapted.loading:multiply_here",
    lambda _: lambda module: None,
)
def test_quantized_products_are_those_that_may_win_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of a forward but those with stacks of experts, and what is raced is what they multiply with."""
    module = copy.deepcopy(module_of("llama"))
    nn.quantize(module, 32, 4)
    mx.eval(module.parameters())
    right = logits(module, 5)
    fuse(module)
    used: list[Any] = []
    own = layers.product
    monkeypatch.setattr(
        layers, "product", lambda x, weight, **more: used.append(weight) or own(x, weight, **more)
    )
    assert mx.abs(logits(module, 5) - right).max() <= 1e-4 * mx.abs(right).max()
    raced = list(layers.multiplied_weights(module))
    assert {id(weight.codes) for weight in used} == {id(weight.codes) for weight in raced}
    assert len(raced) >= 4 * len(module.model.layers)
