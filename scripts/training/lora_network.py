"""A draft model, a whole small language model, as a function of low-rank changes to its linear layers (LoRA), for gradients.

mlx-lm's module of its folder is what is taught: MLX has gradients of all of it. The model drafts by mlxspec's own code, which knows the
changes by mlx-lm's names. Any token of a draft has the same distribution given the text before it, so one depth is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxspec.errors import ModelError
from mlxspec.loading.weights import Weights
from mlxspec.models.adapted.loading import cast, load_module
from mlxspec.models.folder import ModelFolder
from mlxspec.models.registry import Trunk
from training.network import Head, Network, Scored
from training.states import Batch

_RANK = 8


class LoraNetwork(Network):
    """begun: the changes as they begin, by mlx-lm's names; they change nothing yet."""

    depths = (1.0,)
    pace = 4.0  # at 1, fifty steps gained an eighth of what they do so

    def __init__(self, target: Trunk, folder: ModelFolder, like: Trunk) -> None:
        """like: the draft model as it was loaded. Raises ModelError where mlx-lm has no code for it."""
        size = like.hidden_size
        sizes = SimpleNamespace(hidden_size=size, intermediate_size=4 * size, num_heads=1 + size // 64)
        super().__init__(target, lambda: None, {}, sizes, 1 + like.num_layers // 4)  # no depths, no blocks
        self.num_words = min(target.vocab_size, like.vocab_size)
        self._module, _, _ = load_module(folder)
        cast(self._module, like.dtype)
        self._module.freeze()
        mx.random.seed(0)
        linear = {
            name
            for layer in self._module.layers
            for name, part in layer.named_modules()
            if isinstance(part, nn.Linear | nn.QuantizedLinear)
        }
        about = {"rank": _RANK, "scale": 1.0, "dropout": 0.0, "keys": linear}
        linear_to_lora_layers(self._module, len(self._module.layers), about)
        self._module.train()  # by operations that have gradients
        self.begun: Head = dict(tree_flatten(self._module.trainable_parameters()))
        self.layer_bytes += sum(x.nbytes for _, x in tree_flatten(self._module.parameters()))
        mx.eval(self.begun)

    def filled(self, weights: Weights) -> nn.Module:
        """Such changes as a module of nothing else. Raises ModelError where they are not of this model."""
        shapes = {name: value.shape for name, value in weights.items()}
        if shapes != {name: value.shape for name, value in self.begun.items()}:
            raise ModelError("they are changes of another model")
        made = nn.Module()
        for name, value in weights.items():
            made[name] = value
        return made

    def module(self, head: Head) -> Any:
        self._module.update(tree_unflatten(list(head.items())))
        return self._module

    def right(self, batch: Batch, places: mx.array) -> mx.array:
        return super().right(batch, places)[..., : self.num_words]

    def scored(self, head: Head, batch: Batch, places: mx.array, *, is_drafting: bool) -> Iterator[Scored]:
        out = self.module(head)(batch.tokens)[:, places, : self.num_words]
        yield Scored(out.astype(mx.float32), self.right(batch, places))
