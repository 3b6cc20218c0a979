"""Divides a model among processes, the ranks, as mlx-lm's `shard(group)` does (tensor parallel): each holds a part of every layer.

- Attention is divided by key heads, each with the query heads that read it; Gated DeltaNet by key heads, each with its value heads. Where
  there are more ranks than key heads, several ranks keep the same one, and divide the heads that read it.
- MLPs and experts are divided by width, the language-model head by vocabulary where that goes evenly.
- Norms, routers, embeddings and drafters are whole on each rank.

Every rank has parts of the same shape. What cannot be divided evenly is filled up with heads or columns of zeros, whose results are zeros.
A rank builds its modules from `own_config` and fills them with `own_weights`; `join` wraps those whose results are parts of a sum. The
residual stream, the hiddens and the logits come out of sums and gathers over the ranks, so they have the same bits on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, gcd
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.layers import FusedLinear, project, rows_of
from mlxspec.models.qwen3_5_config import Qwen35Config

Config = Qwen35Config | GemmaConfig
_KEYS = ("k_proj", "v_proj")
_ROWS = ("q_proj", "gate_proj", "up_proj", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias")
_COLUMNS = ("o_proj", "down_proj", "out_proj")
_MIXED = ("in_proj_qkv", "conv1d")  # queries and keys of key heads, then values
_JOINED = ("in_proj_qkvz", "in_proj_ba")  # key head by key head, each with its value heads
_UNIT = 64  # widths are cut at multiples of it, which are whole groups of quantized numbers


class _Heads(NamedTuple):
    """How heads are divided among ranks. num: key heads. each: heads that read one key head. copies: ranks that keep the same key head. A
    width is described as heads of `unit` numbers that read one key head."""

    num: int
    each: int
    copies: int
    unit: int = 1

    @classmethod
    def of(cls, num: int, all_heads: int, size: int) -> _Heads:
        """Return how `num` key heads and `all_heads` heads that read them are divided among `size` ranks. Raises ModelError where they
        cannot be."""
        if size % num and num % size:
            raise ModelError(f"A model with {num} key heads cannot be divided among {size} ranks.")
        return cls(num, all_heads // num, max(1, size // num))

    @classmethod
    def of_width(cls, width: int, size: int) -> _Heads:
        unit = gcd(width, _UNIT)
        return cls.of(1, width // unit, size)._replace(unit=unit) if width else cls(0, 0, 1)

    @property
    def per_copy(self) -> int:
        """Return how many heads a rank has for one of its key heads, heads of zeros included."""
        return ceil(self.each / self.copies)

    def own(self, size: int) -> tuple[int, int]:
        """Return the number of a rank's key heads, and the number (or the width) of the heads that read them. size: the number of ranks."""
        keys = max(1, self.num // size)
        return keys, keys * self.per_copy * self.unit

    def keys_of(self, value: mx.array, axis: int, group: mx.distributed.Group) -> mx.array:
        """Return a rank's part of an array that has `num` equal parts along `axis`, one for each key head."""
        parts = mx.split(value, min(self.num, group.size()), axis)
        return parts[group.rank() // self.copies]

    def part_of(self, value: mx.array, axis: int, group: mx.distributed.Group) -> mx.array:
        """Return a rank's part of an array that has `num * each` equal parts along `axis`, one for each head that reads a key head. Missing
        heads are zeros."""
        missing = self.copies * self.per_copy - self.each
        if missing:
            value = mx.unflatten(value, axis, (self.num, self.each, -1))
            value = mx.pad(value, [(0, missing if i == axis + 1 else 0) for i in range(value.ndim)])
            value = mx.flatten(value, axis, axis + 2)
        return mx.split(value, group.size(), axis)[group.rank()]


def own_config(config: Config, size: int) -> Any:
    """Return the config of one rank of `size`. Raises ModelError where the model cannot be divided among this number of ranks."""

    def widths(part: Any, *names: str) -> dict[str, Any]:
        return {name: _Heads.of_width(getattr(part, name), size).own(size)[1] for name in names}

    if isinstance(config, GemmaConfig):
        shared = [_Heads.of(s.num_kv_heads, config.num_heads, size).own(size) for s in config.layers]
        if len({heads for _, heads in shared}) > 1:
            raise ModelError(f"The heads of this model's layers cannot be divided alike among {size} ranks.")
        layers = tuple(
            replace(s, num_kv_heads=keys, **widths(s, "intermediate_size"))
            for s, (keys, _) in zip(config.layers, shared, strict=True)
        )
        return replace(config, num_heads=shared[0][1], layers=layers, **widths(config, "expert_size"))
    sizes = widths(config, "intermediate_size", "expert_size", "shared_expert_size")
    names = ["num_kv_heads", "num_heads"]
    sizes |= zip(names, _Heads.of(config.num_kv_heads, config.num_heads, size).own(size), strict=True)
    if any(config.is_linear):
        linear = _Heads.of(config.num_k_heads, config.num_v_heads, size)
        if config.joins_projections and linear.copies > 1:
            raise ModelError(f"This model's projections cannot be divided among {size} ranks.")
        sizes |= zip(["num_k_heads", "num_v_heads"], linear.own(size), strict=True)
    return replace(config, **sizes)


def own_weights(
    weights: Mapping[str, mx.array], config: Config, group: mx.distributed.Group
) -> dict[str, mx.array]:
    """Return a rank's part of a trunk's tensors, lazily. weights: under mlxspec's names; config: of the whole model. Raises ModelError
    where a group of quantized numbers would be divided."""
    found = {}
    for name, value in weights.items():
        try:
            found[name] = _own(name.split("."), value, config, group)
        except ValueError as error:
            raise ModelError(
                f"{printable(name)} cannot be divided among {group.size()} ranks: its numbers are quantized in groups that are too large."
            ) from error
    return found


def _own(path: list[str], value: mx.array, config: Config, group: mx.distributed.Group) -> mx.array:
    leaf = path[-2] if path[-1] in ("weight", "scales", "biases") else path[-1]
    if "layers" not in path or leaf not in (*_KEYS, *_ROWS, *_COLUMNS, *_MIXED, *_JOINED):
        return value
    heads = _heads(path, config, group.size())
    rows = 0 if leaf == "conv1d" else max(value.ndim - 2, 0)
    if leaf in _KEYS:
        part = heads.keys_of(value, rows, group)
    elif leaf in _MIXED and isinstance(config, Qwen35Config):
        queries, keys, values = mx.split(value, [config.key_dim, 2 * config.key_dim], rows)
        both = [heads.keys_of(part, rows, group) for part in (queries, keys)]
        part = mx.concatenate([*both, heads.part_of(values, rows, group)], rows)
    else:
        part = heads.part_of(value, value.ndim - 1 if leaf in _COLUMNS else rows, group)
    return mx.contiguous(part)


def _heads(path: list[str], config: Config, size: int) -> _Heads:
    """Return how the heads of a layer's module are divided, or its width for an MLP. path: the parts of a tensor's name."""
    if "linear_attn" in path and isinstance(config, Qwen35Config):
        return _Heads.of(config.num_k_heads, config.num_v_heads, size)
    number = int(path[path.index("layers") + 1])
    layer: Any = config.layers[number] if isinstance(config, GemmaConfig) else config
    if "self_attn" in path:
        return _Heads.of(layer.num_kv_heads, config.num_heads, size)
    if "switch_mlp" in path or "switch_glu" in path:
        return _Heads.of_width(config.expert_size, size)
    return _Heads.of_width(
        layer.shared_expert_size if "shared_expert" in path else layer.intermediate_size, size
    )


class Summed(nn.Module):
    """A module whose output is the sum of the outputs of all ranks."""

    def __init__(self, part: nn.Module, group: mx.distributed.Group) -> None:
        super().__init__()
        self.part, self._group = part, group

    def __call__(self, *inputs: mx.array) -> mx.array:
        """Return the sum over all ranks, with the same bits on every rank."""
        return mx.distributed.all_sum(self.part(*inputs), group=self._group)


class GatheredHead(nn.Module):
    """A language-model head whose rows are divided equally among ranks."""

    def __init__(self, head: nn.Module, group: mx.distributed.Group) -> None:
        """Take this rank's rows of `head`. head: the whole head, linear or an embedding; the embedding stays in memory."""
        super().__init__()
        whole = head.parts[0] if isinstance(head, FusedLinear) and "parts" in head else head
        self.part, self._group = rows_of(whole, (group.size(), -1), group.rank()), group
        if isinstance(head, FusedLinear):
            self.part.update(tree_map(mx.contiguous, self.part.parameters()))

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return the logits (N, V) of hidden states (N, H), gathered from all ranks."""
        columns = project(self.part, hidden).T  # those of the ranks are gathered one below the other
        return mx.distributed.all_gather(columns, group=self._group).T


def join(model: Any, group: mx.distributed.Group) -> None:
    """Make a rank's loaded and fused model exchange its parts with the other ranks in forwards. Call this once."""
    for layer in model.language_model.model.layers:
        mixer = layer["linear_attn"] if "linear_attn" in layer else layer["self_attn"]
        last = "out" if "out" in mixer else "o_proj"
        mixer[last] = Summed(mixer[last], group)
        layer.mlp = Summed(layer.mlp, group)
        if "experts" in layer:
            layer.experts = Summed(layer.experts, group)
    if model.vocab_size % group.size() == 0:
        model.language_model.lm_head = GatheredHead(model.head_module, group)


def is_divided(model: Any) -> bool:
    """Return whether `join` has been called for this model."""
    return isinstance(model.language_model.model.layers[0].mlp, Summed)
