"""Reads what an adapter in a folder changes, as mlx-lm's training or PEFT writes it, by the paths of a model's modules.

Formats: mlx-lm has `NAME.lora_a` (in, r), `NAME.lora_b` (r, out) and `NAME.m`; PEFT has `NAME.lora_A.weight` (r, in),
`NAME.lora_B.weight` (out, r) and `NAME.lora_magnitude_vector`, and beside them whole layers (`NAME.weight`) and rows of an embedding
(`NAME.token_adapter.trainable_tokens_delta`).

PEFT adapts experts in two ways: one by one (`experts.3.up_proj`), or as the stacked parameters that transformers has (`target_parameters`).
Then one A (experts * r, in) has the expert as its slowest axis, and one B (out, experts * r) has it as its fastest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.loading.weights import Weights, our_name, read_file
from mlxspec.models.adapter_keys import CONFIG_FILE, check_keys

MLX_FILE, PEFT_FILE = "adapters.safetensors", "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, MLX_FILE, PEFT_FILE)  # of which one with tensors is there
LOOKED_UP = (nn.Embedding, nn.QuantizedEmbedding)
LINEAR = (nn.Linear, nn.QuantizedLinear)
_START, _END = r"(?:base_model\.model\.)?(.+?)", r"(?:\.default)?"
_LORA = re.compile(
    rf"{_START}((?:\.base_layer)*)\.lora_(?:(?:embedding_)?([AB])|(magnitude_vector)){_END}(?:\.weight)?"
)
_ROWS = re.compile(rf"{_START}\.token_adapter\.trainable_tokens_delta{_END}")
_WHOLE = re.compile(rf"{_START}(?:\.base_layer|\.modules_to_save)*{_END}\.weight")
_LAYER = re.compile(r"(.*layers\.\d+)\.(.+)\.(\w+)")
_IN_LAYER = re.compile(r"(.*layers\.\d+)\.")
_EXPERT = re.compile(r".+\.experts\.(\d{1,5})\.(\w+)")
_PARTS = {  # Mixtral's names, and those of mlx-lm's stacks without a gate
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "fc1": "up_proj",
    "fc2": "down_proj",
}
_OURS = "language_model."

Modules = Mapping[str, Any]


class Change(NamedTuple):
    """The low-rank change that an adapter makes to a module's weight: scale * a @ b, with a (..., in, r) and b (..., r, out). For an
    embedding a is (tokens, r). lengths: DoRA's learned lengths of the adapted weight's rows; None without DoRA."""

    a: mx.array
    b: mx.array
    scale: float
    lengths: mx.array | None


class AdapterChanges(NamedTuple):
    """All changes that an adapter makes. changes: low-rank changes, by module path. layers: whole weights (rows, in) that replace a
    module's, by its path. rows: ids and values of single rows that replace those of a weight, by module path. tensors: all parameters by
    name, where mlx-lm trained whole layers. stored: low-rank changes to tensors of the folder that are no module's weight, by name. Layers
    and rows are replaced before a low-rank change to the same module is added."""

    changes: dict[str, Change]
    layers: dict[str, mx.array]
    rows: dict[str, tuple[list[int], mx.array]]
    tensors: Weights
    stored: dict[str, Change]

    @property
    def is_low_rank(self) -> bool:
        """Return whether the adapter makes low-rank changes to modules only, so that each row of a forward can have its own adapter."""
        return bool(self.changes) and not (self.layers or self.rows or self.tensors or self.stored)


class FoldedWeights(Protocol):
    """The published weights of a folder whose code renames, splits or scales them before modules get them. PEFT's adapters are trained on
    the published weights. names: the folder's name of each float tensor, by mlxspec's name."""

    names: Mapping[str, str]

    def name_of(self, path: str) -> str:
        """Return the name under which the code reads the layer that transformers names `path`."""

    def factor(self, path: str) -> mx.array | None:
        """Return the factor by which the code multiplies the published weight of the module at `path`: a number, or one for each row (rows,
        1). None where the code does more than multiply."""


@contextmanager
def read_adapter(
    adapter: str | Path, modules: Modules, published: FoldedWeights | None = None
) -> Iterator[AdapterChanges]:
    """Read the adapter in a folder lazily, and yield its changes by the paths of `modules`. published: the published weights, None where
    modules have them unchanged. Any error in the adapter, also in the `with` block, is raised as ModelError with one sentence."""
    folder = _folder(str(adapter))
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ModelError(f"{CONFIG_FILE} is no object.")
        is_mlx_lms = (folder / MLX_FILE).is_file()
        check_keys(config, of_mlx_lm=is_mlx_lms)
        tensors = read_file(folder / (MLX_FILE if is_mlx_lms else PEFT_FILE))
        if is_mlx_lms and config.get("fine_tune_type", "lora") == "full":
            yield AdapterChanges({}, {}, {}, tensors, {})
            return
        found = (
            _of_mlx_lm(tensors, config, modules)
            if is_mlx_lms
            else _of_peft(tensors, config, modules, published)
        )
        if not (found.changes or found.layers or found.rows or found.stored):
            raise ModelError("It adapts no layer.")
        yield found
    except KeyError as error:
        raise ModelError(f"The adapter in {folder} has no {error} in {CONFIG_FILE}.") from error
    except (ModelError, ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ModelError(
            f"The adapter in {folder} cannot be used: {printable(error).rstrip('.')}."
        ) from error


def _of_mlx_lm(tensors: Weights, config: Mapping[str, Any], modules: Modules) -> AdapterChanges:
    settings = config["lora_parameters"]
    scale, rank = float(settings["scale"]), int(settings["rank"])
    found: dict[str, dict[str, mx.array]] = {}
    for name, value in tensors.items():
        path, _, part = name.rpartition(".")
        if part not in ("lora_a", "lora_b", "m"):
            raise ModelError(f"{printable(name)} is no tensor of an adapter.")
        found.setdefault(path_among(path, modules), {})[part] = value
    changes = {}
    for path, parts in found.items():
        a, b = _pair(path, parts, "lora_a", "lora_b")
        if a.ndim == 3:  # of experts, stored (experts, r, in) and (experts, out, r)
            a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
        if a.shape[-1] != rank:
            raise ModelError(f"The shape of {path}.lora_a does not match the rank {rank} of {CONFIG_FILE}.")
        changes[path] = Change(a, b, scale, parts.get("m"))
    return AdapterChanges(changes, {}, {}, {}, {})


def _of_peft(
    tensors: Weights, config: Mapping[str, Any], modules: Modules, published: FoldedWeights | None
) -> AdapterChanges:
    found: dict[tuple[str, str], dict[str, mx.array]] = {}  # by PEFT's name, and the wrappers around
    made = AdapterChanges({}, {}, {}, {}, {})
    names = {} if published is None else published.names
    turned = set[str]()  # PEFT's names of layers whose weight is stored (in, out)
    named = (lambda path: path) if published is None else published.name_of
    for name, value in tensors.items():
        lora, rows, whole = (pattern.fullmatch(name) for pattern in (_LORA, _ROWS, _WHOLE))
        if lora is not None:
            found.setdefault((lora[1], lora[2]), {})["m" if lora[4] else lora[3]] = value
            if config.get("fan_in_fan_out") is True or "lora_embedding_" in name:
                turned.add(lora[1])
        elif rows is not None:
            made.rows[path_among(named(rows[1]), modules)] = ([], value)
        elif whole is not None:
            made.layers[path_among(named(whole[1]), modules)] = value
        else:
            raise ModelError(f"{printable(name)} is no tensor of an adapter that is supported.")
    _number_rows(made.rows, config.get("trainable_token_indices") or {})
    _check_saved(made.layers, config.get("modules_to_save") or [])
    stacks = _stacks(modules)
    alone: dict[str, dict[int, Change]] = {}
    for (name, _), parts in found.items():
        a, b = _pair(name, parts, "A", "B")
        place = named(name)
        expert, layer = _EXPERT.fullmatch(place), _IN_LAYER.match(place)
        beside = stacks.get(path_among(layer[1], stacks), {}) if layer else {}
        if beside and name.endswith(".experts"):
            made.changes.update(_of_stacked(name, parts, beside, config, modules))
            continue
        if config.get("use_dora") and "m" not in parts:
            raise ModelError(f"use_dora is set, and {printable(name)} has no lengths.")
        # an embedding's A is (r, tokens), B (dims, r): like a linear layer's, but looked up by A
        change = Change(a.T, b.T, _scale(config, name, a.shape[0]), parts.get("m"))
        path = path_among(place, modules)
        stack = beside.get(_PARTS.get(expert[2], expert[2])) if expert is not None else None
        if stack is not None and expert is not None:
            alone.setdefault(stack, {})[int(expert[1])] = change
        elif not _is_layer(modules.get(path)) and (tensor := our_name(f"{place}.weight")) in names:
            made.stored[names[tensor]] = _turned(name, change) if name in turned else change
        else:
            made.changes[path] = change
    made.changes.update((path, _in_stack(path, each, modules)) for path, each in alone.items())
    _check_embeddings(made, config, modules)
    if published is not None:
        _follow(made, published, modules)
    return made


def _turned(path: str, change: Change) -> Change:
    """Return a change to a weight that is stored (out, in) as one to a weight that is stored (in, out). Raises ModelError for one that
    learns lengths. path: of its layer."""
    if change.lengths is not None:
        raise ModelError(
            f"it learns lengths of {printable(path)}, whose weight is stored with its inputs first"
        )
    return change._replace(a=change.b.T, b=change.a.T)


def _follow(made: AdapterChanges, published: FoldedWeights, modules: Modules) -> None:
    """Multiply the adapter's changes by the factors with which code multiplies the published weights. Raises ModelError where the code does
    more than multiply a changed weight."""
    for path in {*made.changes, *made.layers, *made.rows} & modules.keys():
        factor, change = published.factor(path), made.changes.get(path)
        is_one = factor is not None and factor.size == 1 and factor.item() == 1
        if is_one:
            continue
        looked_up = isinstance(modules[path], LOOKED_UP)
        fits = factor is not None and (
            factor.size == 1 or not (looked_up or path in made.layers or path in made.rows)
        )
        if factor is None or not fits or (change is not None and change.lengths is not None):
            raise ModelError(
                f"mlx-lm's code changes the weight of {printable(path)} in a way that an adapter cannot follow."
            )
        if change is not None:
            made.changes[path] = change._replace(b=change.b * factor.reshape(-1))
        if path in made.layers:
            made.layers[path] = made.layers[path] * factor
        if path in made.rows:
            ids, rows = made.rows[path]
            made.rows[path] = ids, rows * factor


def _number_rows(rows: dict[str, tuple[list[int], mx.array]], told: Any) -> None:
    """Set the ids of embedding rows from `trainable_token_indices` of the adapter's config. told: the value of that key. Raises ModelError
    where the ids do not match the rows."""
    ids_of = told if isinstance(told, Mapping) else {"embed_tokens": told}
    for name, ids in ids_of.items():
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise ModelError("trainable_token_indices is no list of ids.")
        for path in [path for path in rows if is_named(path, name)]:
            rows[path] = (ids, rows[path][1])
    named = {name for name in ids_of if ids_of[name] and not any(is_named(path, name) for path in rows)}
    # PEFT keeps no rows of a head that is the embedding
    if (named and not (named == {"lm_head"} and len(ids_of) > 1)) or any(
        len(ids) != value.shape[0] for ids, value in rows.values()
    ):
        raise ModelError("trainable_token_indices tells of other rows than its tensors hold.")


def _check_saved(layers: Mapping[str, mx.array], names: Any) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("modules_to_save is no list of names.")
    absent = [name for name in names if not any(is_named(path, name) for path in layers)]
    if absent:
        raise ModelError(f"modules_to_save names {printable(absent[0])}, of which it holds no tensors.")


def _stacks(modules: Modules) -> dict[str, dict[str, str]]:
    """Return, for each layer that has exactly one group of stacked experts, the module paths of its parts (such as "up_proj") by their
    names."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for path, module in modules.items():
        layer = _LAYER.fullmatch(path)
        if layer and is_stack(module):
            part = _PARTS.get(layer[3], layer[3])
            found.setdefault(layer[1], {}).setdefault(layer[2], {})[part] = path
    return {path: next(iter(each.values())) for path, each in found.items() if len(each) == 1}


def _of_stacked(
    name: str,
    parts: Mapping[str, mx.array],
    beside: Mapping[str, str],
    config: Mapping[str, Any],
    modules: Modules,
) -> dict[str, Change]:
    """Return the changes of one stacked parameter of experts by module path. The shapes of the tensors tell whether the parameter is
    down_proj or gate_up_proj, which is up_proj where experts have no gate. beside: module paths of the layer's parts. Raises ModelError."""
    a, b = _pair(name, parts, "A", "B")
    num, hidden, inner = shape_of(modules[beside["down_proj"]])
    has_gate = "gate_proj" in beside or "gate_up_proj" in beside
    wide = ("gate_up_proj", 2 * inner) if has_gate else ("up_proj", inner)
    sizes = {wide[0]: (hidden, wide[1]), "down_proj": (inner, hidden)}
    fitting = [p for p, size in sizes.items() if size == (a.shape[-1], b.shape[0])]
    part = fitting[0] if len(fitting) == 1 else None
    rank, odd = divmod(a.shape[0], num)
    if part is None or odd or b.shape[-1] != a.shape[0] or "m" in parts:
        raise ModelError(f"The shape of the change to the experts of {printable(name)} does not match.")
    a = a.reshape(num, rank, -1).swapaxes(1, 2)
    b = b.reshape(-1, rank, num).transpose(2, 1, 0)
    scale = _scale(config, f"{name}.{part}", rank)
    if part in beside:
        return {beside[part]: Change(a, b, scale, None)}
    takes_turns = type(modules.get("")).__module__.endswith(".gpt_oss")  # rows of gate and up, one by one
    halves = (b[..., ::2], b[..., 1::2]) if takes_turns else mx.split(b, 2, axis=-1)
    return {
        beside[p]: Change(a, half, scale, None)
        for p, half in zip(("gate_proj", "up_proj"), halves, strict=True)
    }


def _in_stack(path: str, each: Mapping[int, Change], modules: Modules) -> Change:
    """Return the changes of single experts as one change of their stack; experts without a change get zeros. each: changes by number of the
    expert. Raises ModelError."""
    if not is_stack(modules.get(path)):
        raise ModelError(f"{printable(path)} is no layer of this model that can be adapted.")
    num, rows, columns = shape_of(modules[path])
    fits = all(
        i < num and change.a.shape[0] == columns and change.b.shape[1] == rows and change.lengths is None
        for i, change in each.items()
    )
    if not fits:
        raise ModelError(f"The changes to the experts of {printable(path)} do not match.")
    rank = max(change.a.shape[1] for change in each.values())
    a, b = mx.zeros((columns, rank)), mx.zeros((rank, rows))

    def filled(change: Change) -> tuple[mx.array, mx.array]:
        more = rank - change.a.shape[1]
        return mx.pad(change.a, ((0, 0), (0, more))), mx.pad(change.scale * change.b, ((0, more), (0, 0)))

    pairs = [filled(each[i]) if i in each else (a, b) for i in range(num)]
    return Change(mx.stack([p for p, _ in pairs]), mx.stack([p for _, p in pairs]), 1.0, None)


def _check_embeddings(made: AdapterChanges, config: Mapping[str, Any], modules: Modules) -> None:
    """Check that the model can have the adapter's changes to its embedding, its language-model head and whole layers. Raises ModelError."""
    shapes = {path: shape_of(m) for path, m in modules.items() if isinstance(m, (*LINEAR, *LOOKED_UP))}
    for path in [p for p in (*made.layers, *made.changes) if isinstance(modules.get(p), LOOKED_UP)]:
        heads = [p for p in shapes if shapes[p] == shapes[path] and not isinstance(modules[p], LOOKED_UP)]
        value = made.layers.get(path)
        if heads:
            rows = [made.layers[p].shape[0] if p in made.layers else shapes[p][0] for p in (path, heads[0])]
            if rows[0] != rows[1]:
                raise ModelError(
                    f"its {printable(path)} and {printable(heads[0])} have other numbers of rows"
                )
        else:
            head = next((p for p in made.layers if is_named(p, "lm_head") and p not in modules), "")
            other = made.layers.pop(head, None)
            is_shared = value is not None and other is not None and bool(mx.array_equal(other, value).item())
            is_saved = any(is_named(path, name) for name in config.get("modules_to_save") or [])
            is_alone = path in made.changes or is_saved or other is not None
            if is_alone and not (config.get("ensure_weight_tying") or is_shared):
                raise ModelError(
                    f"it changes {printable(path)} alone, which is the head of this model as well (ensure_weight_tying is not set)"
                )
        grows = value is not None and value.shape[0] != shapes[path][0]
        if grows and any(p.endswith("_per_layer") for p in modules):
            raise ModelError(f"it gives {printable(path)} other rows, and a second embedding has its own")
    for path, value in made.layers.items():
        if path not in shapes or value.ndim != 2 or value.shape[1:] != shapes[path][1:]:
            raise ModelError(
                f"{printable(path)} is no layer of this model that can be replaced, or its shape differs."
            )
    for path, (ids, value) in made.rows.items():
        shape = made.layers[path].shape if path in made.layers else shapes.get(path, (0,))
        if value.shape[1:] != shape[1:] or max(ids, default=0) >= shape[0]:
            raise ModelError(f"The rows of {printable(path)} do not match this model.")


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    alpha = float(_by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Any, name: str, default: Any) -> Any:
    """Return the value of the first pattern, as a regular expression, that matches the module name or the end of it after a dot, as PEFT
    does; `default` where none does. Raises ModelError for an invalid pattern, and for one whose matching could take long."""
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


def path_among(path: str, modules: Modules) -> str:
    """Return the path among `modules` that an adapter's module name `path` means: under mlxspec's names, or under mlx-lm's, which may lack
    the prefix "language_model."."""
    ours = our_name(path + ".").removesuffix(".")
    return next((name for name in (ours, path, ours.removeprefix(_OURS)) if name in modules), ours)


def _pair(path: str, parts: Mapping[str, mx.array], first: str, second: str) -> tuple[mx.array, mx.array]:
    if first not in parts or second not in parts:
        raise ModelError(f"Of {printable(path)} one half of the change is missing.")
    return parts[first].astype(mx.float32), parts[second].astype(mx.float32)


def is_named(path: str, name: str) -> bool:
    """Return whether a module's path is `name` or ends with it after a dot, as PEFT compares names."""
    return path == name or path.endswith(f".{name}")


def _is_layer(module: Any) -> bool:
    """Return whether a module is a linear layer, an embedding or a stack of experts, to which low-rank changes can be added."""
    return isinstance(module, (*LINEAR, *LOOKED_UP)) or is_stack(module)


def is_stack(module: Any) -> bool:
    """Return whether a module holds the stacked matrices of all experts of a layer."""
    return type(module).__name__ in ("SwitchLinear", "QuantizedSwitchLinear")


def shape_of(module: Any) -> tuple[int, ...]:
    """Return the shape that a module's weight has when it is not quantized."""
    *rows, last = module.weight.shape
    return (*rows, last * 32 // module.bits if "scales" in module else last)


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
