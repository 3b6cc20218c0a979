"""LoRA and DoRA adapters of mlx-lm and PEFT, put into a model before its layers are fused: one for all rows, or several beside one another,
of which each row has its own (gate.py).

A LoRA layer gives W x + B A x, and A and B are small. DoRA then scales each output so that the adapted weight's rows have learned lengths.
Where W is kept as floats the change is added to it. Where W is quantized it stays as it is and the change is computed beside it
(`AdaptedLinear`): quantizing the sum again would round most of a small change away. Of several adapters all changes are computed beside W,
which is there once.

Formats: mlx-lm has `NAME.lora_a` (in, r), `NAME.lora_b` (r, out) and `NAME.m`; PEFT has `NAME.lora_A.weight` (r, in),
`NAME.lora_B.weight` (out, r) and `NAME.lora_magnitude_vector`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.loading.weights import Weights, our_name, read_file
from mlxspec.models.gate import AdapterGate
from mlxspec.models.layers import AdaptedLinear, weight_values

CONFIG_FILE = "adapter_config.json"
MLX_FILE, PEFT_FILE = "adapters.safetensors", "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, MLX_FILE, PEFT_FILE)  # of which one with tensors is there
_PEFT = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:(embedding_)?([AB])|(magnitude_vector))(?:\.default)?(?:\.weight)?"
)
_OURS = "language_model."
_LOOKED_UP = (nn.Embedding, nn.QuantizedEmbedding)
_ALONE = "which a model can have for all requests only: load it alone, with --adapter"


class Change(NamedTuple):
    """The change that an adapter makes to a module: scale * a @ b, with a (..., in, r) and b (..., r, out); of an embedding a is
    (tokens, r). lengths: of the rows of the adapted weight, None where they are not learned."""

    a: mx.array
    b: mx.array
    scale: float
    lengths: mx.array | None


def add_adapter(model: nn.Module, adapter: str | Path) -> None:
    """Put the adapter in a folder into `model`, lazily; a path may be that of a file of `scripts/adapt`. Raises ModelError, also where any
    of its tensors has no place in the model."""
    modules = dict(model.named_modules())
    with _read(adapter, modules) as (tensors, changes):
        if not changes:
            _replace(model, tensors)
            return
        adapted = [(path, _adapted(path, modules.get(path), change)) for path, change in changes.items()]
    model.update_modules(tree_unflatten(adapted))


def add_adapters(model: nn.Module, adapters: Mapping[str, str], gate: AdapterGate) -> None:
    """Put the adapters in these folders, by name, beside the layers of `model`, lazily; its gate knows them by these names from then on.
    One that cannot be used costs only itself: `gate.refused` says why in one sentence."""
    modules, refused = dict(model.named_modules()), dict[str, str]()
    found: dict[str, list[tuple[int, Change]]] = {}
    names: list[str] = []
    for name, adapter in adapters.items():
        try:
            with _read(adapter, modules) as (_, changes):
                for path, change in changes.items():
                    _check_beside(path, _checked(path, modules.get(path), change), change)
                if not changes:
                    raise ModelError(f"it holds whole layers, {_ALONE}")
        except ModelError as error:
            refused[name] = str(error)
            continue
        for path, change in changes.items():
            found.setdefault(path, []).append((len(names), change))
        names.append(name)
    gated = [(path, _gated(modules[path], changes, gate)) for path, changes in found.items()]
    model.update_modules(tree_unflatten(gated))
    gate.names, gate.refused = tuple(names), refused


@contextmanager
def _read(adapter: str | Path, modules: Mapping[str, Any]) -> Iterator[tuple[Weights, dict[str, Change]]]:
    """Tensors of the adapter in a folder, and changes by the paths of these modules; no changes where it holds whole layers. Whatever
    is wrong with it, also within the `with`, is raised as ModelError with one sentence."""
    is_file = isinstance(adapter, Path) and adapter.is_file()
    folder = Path(adapter) if is_file else _folder(str(adapter))
    try:
        if is_file:
            tensors = read_file(folder)
            rank = next((x.shape[-1] for name, x in tensors.items() if name.endswith("lora_a")), 0)
            yield tensors, _of_mlx_lm(tensors, {"lora_parameters": {"scale": 1.0, "rank": rank}}, modules)
            return
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ModelError(f"{CONFIG_FILE} is no object.")
        is_mlx_lms = (folder / MLX_FILE).is_file()
        tensors = read_file(folder / (MLX_FILE if is_mlx_lms else PEFT_FILE))
        is_whole = is_mlx_lms and config.get("fine_tune_type", "lora") == "full"
        changes = {} if is_whole else (_of_mlx_lm if is_mlx_lms else _of_peft)(tensors, config, modules)
        if not changes and not is_whole:
            raise ModelError("It adapts no layer.")
        yield tensors, changes
    except KeyError as error:
        raise ModelError(f"The adapter in {folder} has no {error} in {CONFIG_FILE}.") from error
    except (ModelError, ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ModelError(
            f"The adapter in {folder} cannot be used: {printable(error).rstrip('.')}."
        ) from error


def _of_mlx_lm(tensors: Weights, config: Mapping[str, Any], modules: Mapping[str, Any]) -> dict[str, Change]:
    """Changes by the path of a module."""
    settings = config["lora_parameters"]
    scale, rank = float(settings["scale"]), int(settings["rank"])
    found: dict[str, dict[str, mx.array]] = {}
    for name, value in tensors.items():
        path, _, part = name.rpartition(".")
        if part not in ("lora_a", "lora_b", "m"):
            raise ModelError(f"{printable(name)} is no tensor of an adapter.")
        found.setdefault(_path(path, modules), {})[part] = value
    changes = {}
    for path, parts in found.items():
        a, b = _pair(path, parts, "lora_a", "lora_b")
        if a.ndim == 3:  # of experts, stored (experts, r, in) and (experts, out, r)
            a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
        if a.shape[-1] != rank:
            raise ModelError(f"The shape of {path}.lora_a does not match the rank {rank} of {CONFIG_FILE}.")
        changes[path] = Change(a, b, scale, parts.get("m"))
    return changes


def _of_peft(tensors: Weights, config: Mapping[str, Any], modules: Mapping[str, Any]) -> dict[str, Change]:
    """Changes by the path of a module."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"peft_type is {printable(kind)}, and only LORA is supported.")
    found: dict[str, dict[str, mx.array]] = {}
    names: dict[str, str] = {}  # of modules, as PEFT knows them
    for name, value in tensors.items():
        match = _PEFT.fullmatch(name)
        if match is None:
            raise ModelError(f"{printable(name)} is no tensor of an adapter that is supported.")
        part = "m" if match[4] else match[3]
        path = _path(match[1], modules)
        names[path] = match[1]
        # an embedding's A is (r, tokens), B (dims, r): like a linear layer's, but looked up by A
        found.setdefault(path, {})[part] = value
    changes = {}
    for path, parts in found.items():
        a, b = _pair(path, parts, "A", "B")
        rank = a.shape[0]
        alpha = float(_by_pattern(config.get("alpha_pattern"), names[path], config["lora_alpha"]))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        changes[path] = Change(a.T, b.T, scale, parts.get("m"))
    return changes


def _by_pattern(patterns: Any, name: str, default: Any) -> Any:
    """PEFT's value for a module: that of the first key which matches its name, or the end of it behind a dot, as a regular expression.
    Raises ModelError for one that cannot be used, or that could take long."""
    for key, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if len(key) > 200 or len(re.findall(r"[*+{]", key)) > 3 or re.search(r"\)[*+{]", key):
            raise ModelError(f"the pattern {printable(key, 40)} of {CONFIG_FILE} is too complex.")
        try:
            if re.match(rf"(.*\.)?({key})$", name):
                return value
        except re.error as error:
            raise ModelError(
                f"the pattern {printable(key, 40)} of {CONFIG_FILE} is none: {error}."
            ) from error
    return default


def _path(path: str, modules: Mapping[str, Any]) -> str:
    """The path of an adapter's name among these modules: they are ours, or mlx-lm's, whose names lack what ours begin with."""
    ours = our_name(path + ".").removesuffix(".")
    return next((name for name in (ours, path, ours.removeprefix(_OURS)) if name in modules), ours)


def _pair(path: str, parts: Mapping[str, mx.array], first: str, second: str) -> tuple[mx.array, mx.array]:
    if first not in parts or second not in parts:
        raise ModelError(f"Of {printable(path)} one half of the change is missing.")
    return parts[first].astype(mx.float32), parts[second].astype(mx.float32)


def _checked(path: str, module: nn.Module | None, change: Change) -> nn.Module:
    """The module that a change is to. Raises ModelError where it does not fit."""
    kinds = (nn.Linear, nn.QuantizedLinear, *_LOOKED_UP)
    is_stack = _is_stack(module)
    if module is None or not (isinstance(module, kinds) or is_stack):
        raise ModelError(f"{printable(path)} is no layer of this model that can be adapted.")
    looked_up = isinstance(module, _LOOKED_UP)
    a, b, _, lengths = change
    delta_shape = (*a.shape[:-1], b.shape[-1]) if looked_up else (*a.shape[:-2], b.shape[-1], a.shape[-2])
    shape = _shape(module)
    if a.shape[-1] != b.shape[-2] or delta_shape != shape or a.ndim != b.ndim:
        raise ModelError(
            f"The shape of the change to {printable(path)} does not match: {delta_shape}, expected {shape}."
        )
    if lengths is not None and (is_stack or lengths.size != shape[0]):
        raise ModelError(f"The lengths that are learned for {printable(path)} do not match its layer.")
    return module


def _check_beside(path: str, module: nn.Module, change: Change) -> None:
    """Raises ModelError for a change that rows cannot have each for themselves."""
    if not isinstance(module, (nn.Linear, nn.QuantizedLinear)) or path.endswith("lm_head"):
        raise ModelError(f"it changes {printable(path)}, {_ALONE}")
    if change.lengths is not None:
        raise ModelError(f"it learns lengths of rows (DoRA), {_ALONE}")


def _gated(module: nn.Module, changes: list[tuple[int, Change]], gate: AdapterGate) -> nn.Module:
    """The layer as it is, with the changes of several adapters, by their places in `gate.names`, computed beside it."""
    a = mx.concatenate([c.a for _, c in changes], axis=1)
    b = mx.concatenate([c.scale * c.b for _, c in changes])
    owner = np.repeat([i for i, _ in changes], [c.a.shape[1] for _, c in changes])
    return AdaptedLinear(module, a, b, gate=gate, owner=mx.array(owner.astype(np.int32)))


def _is_stack(module: nn.Module | None) -> bool:
    """Whether it is a matrix an expert."""
    return type(module).__name__ in ("SwitchLinear", "QuantizedSwitchLinear")


def _adapted(path: str, module: nn.Module | None, change: Change) -> nn.Module:
    """A module in place of `module`. Raises ModelError."""
    module = _checked(path, module, change)
    is_stack, looked_up = _is_stack(module), isinstance(module, _LOOKED_UP)
    a, b, scale, lengths = change
    is_head = path.endswith("lm_head")
    if "scales" in module and not looked_up and not is_head:
        return _beside(module, change, is_stack=is_stack)
    # floats; tokens are looked up and proposed by rows, so embedding and head become floats
    weight = weight_values(module)
    delta = scale * (a @ b if looked_up else (a @ b).swapaxes(-1, -2))
    whole = weight.astype(mx.float32) + delta
    if lengths is not None:
        whole = whole * (lengths.astype(mx.float32).reshape(-1) / mx.linalg.norm(whole, axis=1))[:, None]
    if "scales" not in module:
        module.weight = whole.astype(weight.dtype)
        return module
    made: nn.Module = nn.Embedding(1, 1) if looked_up else nn.Linear(1, 1, bias=False)
    made.weight = whole.astype(weight.dtype)
    if "bias" in module:
        made.bias = module.bias
    return made


def _beside(module: nn.Module, change: Change, *, is_stack: bool) -> nn.Module:
    """The quantized layer as it is, with the change computed beside it."""
    a, b, scale, lengths = change
    if is_stack:
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


def _shape(module: nn.Module) -> tuple[int, ...]:
    *rows, last = module.weight.shape
    return (*rows, last * 32 // module.bits if "scales" in module else last)


def _replace(model: nn.Module, tensors: Weights) -> None:
    """Whole layers that were trained, in place of the model's. Raises ModelError."""
    there = dict(tree_flatten(model.parameters()))
    named = {_path(name, there): value for name, value in tensors.items()}
    for name, value in named.items():
        if name not in there or there[name].shape != value.shape:
            raise ModelError(f"{printable(name)} is no tensor of this model, or its shape does not match.")
    model.load_weights(list(named.items()), strict=False)


def _folder(adapter: str) -> Path:
    try:
        folder = Path(adapter).expanduser()
        is_folder = folder.is_dir()
        has_config = (folder / CONFIG_FILE).is_file()
        has_tensors = any((folder / name).is_file() for name in (MLX_FILE, PEFT_FILE))
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{adapter} can be no folder of an adapter.") from error
    if not is_folder:
        raise ModelError(
            f"There is no folder {adapter}; an adapter is a folder as mlx-lm's training or PEFT writes it."
        )
    if not has_config or not has_tensors:
        lacks = MLX_FILE if has_config else CONFIG_FILE
        raise ModelError(f"The adapter in {folder} lacks {lacks}.")
    return folder
