"""Puts LoRA and DoRA adapters into a model before its layers are fused: one for all rows, or several beside one another, of which each row
has its own (gate.py). adapter_files.py reads them.

A LoRA layer gives W x + B A x, and A and B are small. DoRA then scales each output so that the adapted weight's rows have learned lengths.
Where W is kept as floats the change is added to it. Where W is quantized it stays as it is and the change is computed beside it
(`AdaptedLinear`): quantizing the sum again would round most of a small change away. Of several adapters all changes are computed beside W,
which is there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.loading.weights import Weights
from mlxspec.models.adapter_files import (
    ADAPTER_FILES,
    LINEAR,
    LOOKED_UP,
    AdapterChanges,
    Change,
    FoldedWeights,
    is_stack,
    path_among,
    read_adapter,
    shape_of,
)
from mlxspec.models.gate import AdapterGate
from mlxspec.models.layers import AdaptedLinear, weight_values

__all__ = ("ADAPTER_FILES", "add_adapter", "add_adapters")
_ALONE = "which a model can have for all requests only: load it alone, with --adapter"


def add_adapter(model: nn.Module, adapter: str | Path, published: FoldedWeights | None = None) -> None:
    """Add the adapter in a folder to `model`, lazily, for all rows. published: as in `read_adapter`; changes to the folder's tensors must
    have been made before. Raises ModelError, also where one of the adapter's tensors has no place in the model."""
    modules = dict(model.named_modules())
    with read_adapter(adapter, modules, published) as found:
        if found.tensors:
            _replace(model, found.tensors)
            return
        replaced = _replaced(found, modules)
        modules |= replaced
        changed = {path: _adapted(path, modules.get(path), change) for path, change in found.changes.items()}
    rows = [len(m.weight) for path, m in replaced.items() if isinstance(modules[path], LOOKED_UP)]
    model.update_modules(tree_unflatten(list((replaced | changed).items())))
    if rows and hasattr(model, "vocab_size"):
        model.vocab_size = rows[0]


def add_adapters(
    model: nn.Module, adapters: Mapping[str, str], gate: AdapterGate, published: FoldedWeights | None = None
) -> None:
    """Add several adapters to the layers of `model`, lazily, so that each row of a forward can use its own. adapters: folders by name.
    gate: gets the names, by which rows choose. published: as in `read_adapter`. An adapter that cannot be used is left out, and
    `gate.refused` gets the reason in one sentence."""
    modules, refused = dict(model.named_modules()), dict[str, str]()
    found: dict[str, list[tuple[int, Change]]] = {}
    names: list[str] = []
    for name, adapter in adapters.items():
        try:
            with read_adapter(adapter, modules, published) as read:
                if not read.is_low_rank:
                    raise ModelError(f"it holds whole layers, {_ALONE}")
                for path, change in read.changes.items():
                    _check_beside(path, _checked(path, modules.get(path), change), change)
        except ModelError as error:
            refused[name] = str(error)
            continue
        for path, change in read.changes.items():
            found.setdefault(path, []).append((len(names), change))
        names.append(name)
    gated = [(path, _gated(modules[path], changes, gate)) for path, changes in found.items()]
    model.update_modules(tree_unflatten(gated))
    gate.names, gate.refused = tuple(names), refused


def _checked(path: str, module: nn.Module | None, change: Change) -> nn.Module:
    """Return the module that a change is made to. Raises ModelError where there is none or the change does not fit its shape."""
    kinds = (*LINEAR, *LOOKED_UP)
    stacked = is_stack(module)
    if module is None or not (isinstance(module, kinds) or stacked):
        raise ModelError(f"{printable(path)} is no layer of this model that can be adapted.")
    looked_up = isinstance(module, LOOKED_UP)
    a, b, _, lengths = change
    delta_shape = (*a.shape[:-1], b.shape[-1]) if looked_up else (*a.shape[:-2], b.shape[-1], a.shape[-2])
    shape = shape_of(module)
    if a.shape[-1] != b.shape[-2] or delta_shape != shape or a.ndim != b.ndim:
        raise ModelError(
            f"The shape of the change to {printable(path)} does not match: {delta_shape}, expected {shape}."
        )
    if lengths is not None and (stacked or lengths.size != shape[0]):
        raise ModelError(f"The lengths that are learned for {printable(path)} do not match its layer.")
    return module


def _check_beside(path: str, module: nn.Module, change: Change) -> None:
    """Raise ModelError for a change that cannot differ between the rows of a forward. path: the module's."""
    if not isinstance(module, LINEAR) or path.endswith("lm_head"):
        raise ModelError(f"it changes {printable(path)}, {_ALONE}")
    if change.lengths is not None:
        raise ModelError(f"it learns lengths of rows (DoRA), {_ALONE}")


def _gated(module: nn.Module, changes: list[tuple[int, Change]], gate: AdapterGate) -> nn.Module:
    """Return a layer that computes `module` and adds the changes of several adapters for the rows that use them. changes: each with the
    number of its adapter in `gate.names`."""
    a = mx.concatenate([c.a for _, c in changes], axis=1)
    b = mx.concatenate([c.scale * c.b for _, c in changes])
    owner = np.repeat([i for i, _ in changes], [c.a.shape[1] for _, c in changes])
    return AdaptedLinear(module, a, b, gate=gate, owner=mx.array(owner.astype(np.int32)))


def _adapted(path: str, module: nn.Module | None, change: Change) -> nn.Module:
    """Return `module` with a change to its weight: added to the weight, or computed in addition to a quantized product. Raises ModelError
    where the change does not fit."""
    module = _checked(path, module, change)
    looked_up = isinstance(module, LOOKED_UP)
    a, b, scale, lengths = change
    is_head = path.endswith("lm_head")
    if "scales" in module and not looked_up and not is_head:
        return _beside(module, change)
    # floats; tokens are looked up and proposed by rows, so embedding and head become floats
    weight = weight_values(module)
    whole = merged(weight, change if not looked_up else Change(b.T, a.T, scale, lengths))
    if "scales" not in module:
        module.weight = whole.astype(weight.dtype)
        return module
    return _as_floats(module, whole.astype(weight.dtype))


def merged(weight: mx.array, change: Change) -> mx.array:
    """Return a weight (..., out, in) with a low-rank change added, in float32. Where the change has lengths (DoRA), each row of the sum
    (out, in) is scaled to its length."""
    a, b, scale, lengths = change
    whole = weight.astype(mx.float32) + scale * (a @ b).swapaxes(-1, -2)
    if lengths is None:
        return whole
    return whole * (lengths.astype(mx.float32).reshape(-1) / mx.linalg.norm(whole, axis=1))[:, None]


def _as_floats(module: nn.Module, weight: mx.array) -> nn.Module:
    """Return a linear layer or embedding, as `module` is one, with the float weight `weight` and the module's bias."""
    made: nn.Module = nn.Embedding(1, 1) if isinstance(module, LOOKED_UP) else nn.Linear(1, 1, bias=False)
    made.weight = weight
    if "bias" in module:
        made.bias = module.bias
    return made


def _replaced(found: AdapterChanges, modules: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return new modules, by path, for those whose whole weight or single rows the adapter replaces."""
    made: dict[str, nn.Module] = {}
    for path, value in found.layers.items():
        made[path] = _as_floats(modules[path], value.astype(weight_values(modules[path]).dtype))
    for path, (ids, rows) in found.rows.items():
        module = made.get(path, modules[path])
        weight = mx.array(weight_values(module))
        weight[mx.array(ids)] = rows.astype(weight.dtype)
        made[path] = _as_floats(module, weight)
    return made


def _beside(module: nn.Module, change: Change) -> nn.Module:
    """Return a layer that computes the quantized `module` unchanged and adds the change to its output."""
    a, b, scale, lengths = change
    if is_stack(module):
        from mlx_lm.tuner.lora import LoRASwitchLinear

        made = LoRASwitchLinear.from_base(module, r=a.shape[-1], scale=scale)
        made.lora_a, made.lora_b = a.swapaxes(1, 2), b.swapaxes(1, 2)
        made.eval()
        return made
    gain = None
    b = scale * b
    if lengths is not None:
        whole = weight_values(module).astype(mx.float32) + (a @ b).T
        gain = lengths.astype(mx.float32).reshape(-1) / mx.linalg.norm(whole, axis=1)
        b = b * gain
    return AdaptedLinear(module, a, b, gain)


def _replace(model: nn.Module, tensors: Weights) -> None:
    """Replace parameters of the model by the tensors of a training of whole layers. Raises ModelError where a tensor has no place or
    another shape."""
    there = dict(tree_flatten(model.parameters()))
    named = {path_among(name, there): value for name, value in tensors.items()}
    for name, value in named.items():
        if name not in there or there[name].shape != value.shape:
            raise ModelError(f"{printable(name)} is no tensor of this model, or its shape does not match.")
    model.load_weights(list(named.items()), strict=False)
