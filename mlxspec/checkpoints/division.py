"""What each of several ranks needs for its share of a model. Knows how to count; how a model is divided is models/ranks.py's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxspec.checkpoints.memory import bytes_of, state_bytes
from mlxspec.errors import ModelError
from mlxspec.models.assemble import Assembled
from mlxspec.models.ranks import Ranks
from mlxspec.models.traffic import of_forward


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank. weights: its share of the model and the whole MTP head; state: as MemoryEstimate has it, of its own heads."""

    rank: int
    weights: int
    state: int

    @property
    def total(self) -> int:
        return self.weights + self.state


@dataclass(frozen=True, kw_only=True)
class Division:
    """A model among `size` ranks. refusal: why it cannot be divided so, one sentence, else empty. messages: of a rank in a forward, however
    many tokens it has; message_bytes: what it puts into them for each token."""

    size: int
    refusal: str = ""
    ranks: tuple[RankMemory, ...] = ()
    messages: int = 0
    message_bytes: int = 0


def divide(
    size: int,
    assembled: Callable[[Ranks], Assembled],
    context: int,
    rows: int,
    kv_bits: int,
    draft_kv_bits: int,
) -> Division:
    """assembled: a rank's share, not evaluated. kv_bits, draft_kv_bits: as in EngineConfig and SpecConfig. Reads no weights."""
    found = []
    try:
        for r in range(size):
            made = assembled(Ranks(rank=r, size=size))
            heads = [] if made.mtp is None else [made.mtp]
            found.append(
                RankMemory(
                    rank=r,
                    weights=bytes_of(made.model, *heads),
                    state=state_bytes(made.model, context, rows, kv_bits)
                    + sum(state_bytes(m, context, rows, draft_kv_bits) for m in heads),
                )
            )
    except ModelError as error:
        return Division(size=size, refusal=str(error))
    sent = of_forward(made.config, size)
    return Division(
        size=size,
        ranks=tuple(found),
        messages=sent.messages,
        message_bytes=sent.numbers * made.model.dtype.size,
    )
