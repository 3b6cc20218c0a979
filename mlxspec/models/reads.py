"""Counts the bytes of weights that a forward reads.

From that its time is estimated before anything has been measured: a forward of few tokens nearly always waits for memory, so its time is
proportional to the bytes it reads. Runs nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

_STACKS = ("SwitchLinear", "QuantizedSwitchLinear")  # mlx-lm's, of one matrix an expert


@dataclass(frozen=True, kw_only=True)
class Reads:
    """The bytes of weights that a forward reads. dense: bytes that every forward reads, without the language-model head. stacks: bytes of
    all experts; each: the share of them that one token uses. head: bytes of the language-model head. layers: number of layers."""

    dense: int
    stacks: int = 0
    each: float = 1.0
    head: int = 0
    layers: int = 1

    def bytes(self, num_tokens: int = 1) -> float:
        """Return the bytes that one forward over `num_tokens` tokens reads. Experts are assumed to be chosen at random."""
        return self.dense + self.head + self.stacks * (1.0 - (1.0 - self.each) ** num_tokens)


def reads(module: Any, *, head: int | None = None) -> Reads:
    """Return the bytes that a forward of a model, or of a part of a model, reads, by the classes of its modules. head: bytes of the
    language-model head; None: those of the module's own head or, where it has a method `head`, of its embedding. Looking up embeddings
    counts as 0 bytes."""
    inner = getattr(module, "module", module)  # of a model by mlx-lm's code
    parts = dict(inner.named_modules()) if isinstance(inner, nn.Module) else {}
    own_head, parameters = getattr(module, "head_module", None), getattr(module, "parameters", dict)
    sizes, tables = Counter[str](), Counter[str]()
    for name, value in tree_flatten(parameters()):
        path = name.rpartition(".")[0]
        part = parts.get(path)
        if isinstance(part, nn.Embedding | nn.QuantizedEmbedding):
            tables[path] += value.nbytes * ("embed_tokens_per_layer" not in path)
        elif "lm_head." in name or (part is not None and part is own_head):
            sizes["head"] += value.nbytes
        else:
            sizes["stacks" if type(part).__name__ in _STACKS else "dense"] += value.nbytes
    config = getattr(module, "config", None) or getattr(module, "_config", None)
    num, each = getattr(config, "num_experts", 0), getattr(config, "num_experts_per_token", 0)
    if head is None:
        has_head = hasattr(module, "head") or own_head is not None
        head = sizes["head"] or max(tables.values(), default=0) * has_head
    return Reads(
        dense=sizes["dense"],
        stacks=sizes["stacks"],
        each=getattr(config, "experts_share", each / num if num else 1.0),
        head=head,
        layers=max(1, len(_layers(inner))),
    )


def drafted_reads(module: Any, *, head: int | None = None) -> Reads:
    """Return the bytes that drafting one token reads, including the language-model head. module: the drafter's, whose `head_owner` has
    the head and whose `scored` is the share of the head that is read. head: bytes of the rows that replace the head, None for the whole
    head."""
    owner = getattr(module, "head_owner", module)
    whole = reads(module, head=head) if owner is module else reads(module, head=head or reads(owner).head)
    return (
        whole if head is not None else replace(whole, head=int(whole.head * getattr(module, "scored", 1.0)))
    )


def _layers(module: Any) -> list[Any]:
    stack = getattr(getattr(module, "language_model", module), "model", module)
    return getattr(stack, "layers", [])
