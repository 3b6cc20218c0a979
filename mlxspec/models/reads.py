"""Counts the bytes of weights that a forward reads, and the widths at which it reads them once more.

From that its time is estimated before anything has been measured: a forward of few tokens nearly always waits for memory, so its time is
proportional to the bytes it reads. Runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.kernels import plateaus
from mlxspec.models.layers import multiplied_weights

_STACKS = ("switch_mlp.", "switch_glu.")  # one matrix an expert


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
        """Of one forward over so many tokens. Which experts they go to is taken to be chance."""
        return self.dense + self.head + self.stacks * (1.0 - (1.0 - self.each) ** num_tokens)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What ranks take their shares of a model to read, as attribute `agreed` of each: shares may differ, and what is decided by them must
    not."""

    reads: Reads
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, module: Any, *, exact: bool) -> Agreed:
        """Of this rank's share."""
        return cls(reads=reads(module), ends=plateau_ends(module, exact=exact))

    def as_data(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"reads": asdict(self.reads), "ends": list(self.ends)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Agreed:
        return cls(reads=Reads(**data["reads"]), ends=tuple(data["ends"]))


def agree(model: Any, agreed: Agreed) -> None:
    """What is asked of this share of a model from here on."""
    model.agreed = agreed


def reads(module: Any, *, head: int | None = None) -> Reads:
    """Of a model or a part of one. head: bytes of the head where it is not among the module's parameters; None: it is, or is the embedding
    once more. Other embeddings are read a row at a time, which is nothing."""
    agreed = getattr(module, "agreed", None)
    if isinstance(agreed, Agreed):
        return agreed.reads
    dense = stacks = own_head = embedding = 0
    parameters: Callable[[], Any] = getattr(module, "parameters", dict)
    for name, value in tree_flatten(parameters()):
        if "embed_tokens_per_layer" in name:
            continue
        if "embed_tokens." in name:
            embedding += value.nbytes
        elif "lm_head." in name:
            own_head += value.nbytes
        elif any(stack in name for stack in _STACKS):
            stacks += value.nbytes
        else:
            dense += value.nbytes
    config = getattr(module, "config", None) or getattr(module, "_config", None)
    num, each = getattr(config, "num_experts", 0), getattr(config, "num_experts_per_token", 0)
    return Reads(
        dense=dense,
        stacks=stacks,
        each=each / num if num else 1.0,
        head=own_head or embedding if head is None else head,
        layers=max(1, len(_layers(module))),
    )


def plateau_ends(model: Any, *, exact: bool = False) -> tuple[int, ...]:
    """Widths behind which a forward takes a step in time on this GPU: those of the quantized products that have most of the bytes. Empty
    where there are none. exact: as `qmv_rows` has it."""
    agreed = getattr(model, "agreed", None)
    if isinstance(agreed, Agreed):
        return agreed.ends
    if not isinstance(model, nn.Module):
        return ()
    found: Counter[tuple[int, ...]] = Counter()
    for weight in multiplied_weights(model):
        found[plateaus.ends(weight, model.dtype, exact=exact)] += weight.codes.nbytes
    return found.most_common(1)[0][0] if found else ()


def _layers(module: Any) -> list[Any]:
    stack = getattr(getattr(module, "language_model", module), "model", module)
    return getattr(stack, "layers", [])
