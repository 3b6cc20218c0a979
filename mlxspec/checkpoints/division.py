"""Counts what each of several processes, the ranks, needs for its share of a model, and what they send each other. models/ranks.py divides
the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.checkpoints.memory import state_bytes
from mlxspec.errors import ModelError
from mlxspec.loading.weights import Weights, is_of_a_tower
from mlxspec.models.assemble import Assembled
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.ranks import Config, Ranks, share
from mlxspec.models.sizes import bytes_of
from mlxspec.models.traffic import Traffic, of_forward, of_mtp_drafts
from mlxspec.platform.memory import machine_memory

VERIFY = 4  # tokens of the verify that is told of


@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """Of one rank. Bytes: weights, its share of the model and the whole MTP head; drafter_weights, of a drafter that was named, whole;
    state, as MemoryEstimate has it, of its own heads; reads, of the model's files. heads, value_heads: how many of the model's query heads,
    and of its Gated DeltaNet layers' value heads, it has. fits: whether a machine like this one has memory for it alone."""

    rank: int
    weights: int
    drafter_weights: int
    state: int
    reads: int
    heads: int
    value_heads: int
    fits: bool

    @property
    def total(self) -> int:
        return self.weights + self.drafter_weights + self.state


@dataclass(frozen=True, kw_only=True)
class Sent:
    """messages: sums and gathers that a rank takes part in. bytes: what it sends over a ring for them."""

    messages: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Division:
    """A model among `size` ranks. refusal: why it cannot be divided so, one sentence, else empty; then nothing else is told. heads,
    value_heads: of the whole model. plain: of a round without drafts; verify: of one forward over VERIFY tokens; draft: of each token that
    the MTP head drafts, None where there is no head."""

    size: int
    refusal: str = ""
    heads: int = 0
    value_heads: int = 0
    ranks: tuple[RankNeeds, ...] = ()
    plain: Sent | None = None
    verify: Sent | None = None
    draft: Sent | None = None

    @property
    def is_even(self) -> bool:
        """Whether every rank has as many heads of each kind."""
        return len({(r.heads, r.value_heads) for r in self.ranks}) == 1


def divide(
    size: int,
    assembled: Callable[[Ranks], Assembled],
    weights: Weights,
    context: int,
    rows: int,
    kv_bits: int,
    draft_kv_bits: int,
    beside: Sequence[Any] = (),
) -> Division:
    """assembled: a rank's share, not evaluated. weights: of the model's folder. kv_bits, draft_kv_bits: as in EngineConfig and SpecConfig.
    beside: modules of drafters that were named, which are whole on each rank. Reads no weights."""
    found: list[RankNeeds] = []
    machine = machine_memory()
    try:
        for r in range(size):
            who = Ranks(rank=r, size=size)
            made = assembled(who)
            drafting = [m for m in (made.mtp, *beside) if m is not None]
            held = bytes_of(made.model, *([] if made.mtp is None else [made.mtp]))
            more = bytes_of(*beside)
            state = state_bytes(made.model, context, rows, kv_bits) + sum(
                state_bytes(m, context, rows, draft_kv_bits) for m in drafting if hasattr(m, "make_cache")
            )
            heads, value_heads = _heads(share(made.config, who).config)
            found.append(
                RankNeeds(
                    rank=r,
                    weights=held,
                    drafter_weights=more,
                    state=state,
                    reads=_read_by(who, made.config, weights),
                    heads=heads,
                    value_heads=value_heads,
                    fits=held + more + state <= machine,
                )
            )
    except ModelError as error:
        return Division(size=size, refusal=str(error))
    itemsize = made.model.dtype.size

    def sent(traffic: Traffic) -> Sent:
        return Sent(messages=traffic.messages, bytes=traffic.sent(size, itemsize))

    whole, whole_values = _heads(made.config)
    return Division(
        size=size,
        heads=whole,
        value_heads=whole_values,
        ranks=tuple(found),
        plain=sent(of_forward(made.config, size)),
        verify=sent(of_forward(made.config, size, VERIFY)),
        draft=None if made.mtp is None else sent(of_mtp_drafts(made.config, size, 1, 1)),
    )


def _heads(config: Config) -> tuple[int, int]:
    """Query heads, and value heads of Gated DeltaNet layers."""
    if isinstance(config, GemmaConfig) or not any(config.is_linear):
        return config.num_heads, 0
    return config.num_heads, config.num_v_heads


def _read_by(who: Ranks, config: Config, weights: Weights) -> int:
    """Bytes of the text model's tensors that a rank reads; what is not used is not read."""
    own = share(config, who)
    read = 0
    for name, value in weights.items():
        cut = own.cut_of(name)
        if cut is not None:
            axis, ranges = cut.of(name, value.shape)
            read += value.nbytes * sum(end - first for first, end in ranges) // value.shape[axis]
        elif not is_of_a_tower(name):
            read += value.nbytes
    return read
