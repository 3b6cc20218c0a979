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
    """dense: bytes that any forward reads, head left out; stacks: bytes of all experts, of which a token goes to `each`, a share; head:
    bytes of the language-model head; layers: how many there are."""

    dense: int
    stacks: int = 0
    each: float = 1.0
    head: int = 0
    layers: int = 1

    def bytes(self, num_tokens: int = 1) -> float:
        """Return the bytes that one forward over `num_tokens` tokens reads. Experts are assumed to be chosen at random."""
        return self.dense + self.head + self.stacks * (1.0 - (1.0 - self.each) ** num_tokens)


def reads(module: Any, *, head: int | None = None) -> Reads:
    """Count what a model or a part of one reads, by the classes of its parts. head: bytes of the head where it is not among the module's
    parameters; None: it is, or is the embedding once more where the module has a method `head`. Embeddings are read a row at a time, which
    is nothing."""
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
    """Return what drafting a token reads, by a drafter's module: its part of the language-model head, too. A module that borrows a head has
    it in `head_owner`; one that scores a part of the vocabulary says which in `scored`. head: bytes of what replaces the head, None for all
    of it."""
    owner = getattr(module, "head_owner", module)
    whole = reads(module, head=head) if owner is module else reads(module, head=head or reads(owner).head)
    return (
        whole if head is not None else replace(whole, head=int(whole.head * getattr(module, "scored", 1.0)))
    )


def _layers(module: Any) -> list[Any]:
    stack = getattr(getattr(module, "language_model", module), "model", module)
    return getattr(stack, "layers", [])
