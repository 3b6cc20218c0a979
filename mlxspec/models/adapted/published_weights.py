"""Follows what mlx-lm's code does to the weights of a folder before modules have them (`sanitize`: it renames, splits and scales), so that
an adapter fits that was trained on the published weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.loading.weights import Weights, our_name
from mlxspec.models.adapted.classes import classes_of
from mlxspec.models.adapted.words import older_name, older_names
from mlxspec.models.adapter_files import read_adapter
from mlxspec.models.adapters import merged
from mlxspec.platform import device


class PublishedWeights:
    """The weights of a folder before mlx-lm's code renames, splits or scales them, and the adapter that changes them, if there is one."""

    def __init__(self, adapter: str | Path | None = None) -> None:
        self.names: Mapping[str, str] = {}
        self._config: dict[str, Any] = {}
        self._adapter = adapter

    def classes_of(self, config: dict[str, Any]) -> tuple[Callable[[Any], Any], Any]:
        """Return a function that makes the module, and the class of its arguments. Before the module's `sanitize`, tensors get the names
        that mlx-lm's code reads, and the adapter's changes to tensors that are no module's weight are added."""
        self._config = config
        model, arguments = classes_of(config)
        return partial(self._hooked, model), arguments

    def _hooked(self, model: Any, arguments: Any) -> Any:
        module = model(arguments)
        own = getattr(module, "sanitize", dict)

        def sanitize(weights: Weights) -> Weights:
            del module.sanitize
            weights = older_names(self._config.get("model_type"), weights)
            if self._adapter is not None:
                self._change(module, self._adapter, weights)
            return dict(own(weights))

        module.sanitize = sanitize
        return module

    def _change(self, module: Any, adapter: str | Path, weights: Weights) -> None:
        floats = {name for name, value in weights.items() if mx.issubdtype(value.dtype, mx.floating)}
        self.names = {our_name(name): name for name in floats}
        with read_adapter(adapter, dict(module.named_modules()), self) as found:
            for name, change in found.stored.items():
                weight = weights[name]
                is_table = weight.shape[0] == self._config.get("vocab_size")
                if is_table and not any("lm_head" in other or "embed_out" in other for other in weights):
                    raise ModelError(
                        f"it changes {printable(name)} alone, which is the head of this model as well"
                    )
                shape = (change.b.shape[-1], change.a.shape[0])
                if weight.shape != shape or change.a.shape[1] != change.b.shape[0]:
                    raise ModelError(
                        f"The shape of the change to {printable(name)} does not match: {shape}, expected {weight.shape}."
                    )
                weights[name] = merged(weight, change).astype(
                    weight.dtype if device.has_gpu() else mx.float32
                )

    def name_of(self, path: str) -> str:
        """Return the name under which mlx-lm's code reads the layer that transformers names `path`."""
        return older_name(self._config.get("model_type"), f"{path}.").removesuffix(".")

    def factor(self, path: str) -> mx.array | None:
        """Return the factor by which mlx-lm's code multiplies the published weight of the module at `path`: a number, or one for each row
        (rows, 1). None where the code does more than that."""
        ones, twos = (made.get(f"{path}.weight") for made in self._made)
        shape = self._shapes.get(f"{path}.weight")
        if ones is None or twos is None or not ones.shape == twos.shape == shape:
            return None
        rows = ones[..., :1]
        if not (mx.all(ones == rows) & mx.all(twos == 2 * ones)).item():
            return None
        first = rows.reshape(-1)[0]
        return first if mx.all(rows == first).item() else rows

    @cached_property
    def _module(self) -> Any:
        model, arguments = classes_of(self._config)
        return model(arguments.from_dict(dict(self._config)))

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: value.shape for name, value in tree_flatten(self._module.parameters())}

    @cached_property
    def _made(self) -> tuple[Weights, Weights]:
        """Return the results of mlx-lm's `sanitize` on weights of ones and on weights of twos. The weights have the modules' names, and
        convolutions the published axis order."""

        def made(number: float) -> Weights:
            given = {name: mx.full(shape, number) for name, shape in self._shapes.items()}
            for name, value in given.items():
                if "conv1d.weight" in name and value.ndim == 3:
                    given[name] = value.swapaxes(1, 2)
            return dict(getattr(self._module, "sanitize", dict)(given))

        return made(1.0), made(2.0)
