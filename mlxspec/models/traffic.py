"""Counts the messages and bytes that ranks send each other in forwards and rounds, from a model's config alone.

A message is a sum or a gather in which every rank takes part. How many there are does not depend on how many tokens a forward has, so a
verify of several tokens costs as many messages as a plain step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.qwen3_5_config import Qwen35Config

Config = Qwen35Config | GemmaConfig
Topology = Literal["ring", "mesh"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """sums, gathers: messages. summed, gathered: numbers of the compute dtype that a rank puts into them."""

    sums: int = 0
    gathers: int = 0
    summed: int = 0
    gathered: int = 0

    @property
    def messages(self) -> int:
        return self.sums + self.gathers

    @property
    def numbers(self) -> int:
        """What a rank puts into all of its messages."""
        return self.summed + self.gathered

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            sums=self.sums + other.sums,
            gathers=self.gathers + other.gathers,
            summed=self.summed + other.summed,
            gathered=self.gathered + other.gathered,
        )

    def sent(self, size: int, itemsize: int, topology: Topology = "ring") -> int:
        """Bytes that each of `size` ranks sends, as MLX does it. On a ring of sockets a sum travels in parts, once around to be added up
        and once to be told, and a gather once around. In a mesh of RDMA links every rank sends all that it puts in to every other rank, as
        MLX does with messages of up to 32 KB."""
        if topology == "mesh":
            return itemsize * (size - 1) * self.numbers
        return itemsize * (ceil(2 * (size - 1) * self.summed / size) + (size - 1) * self.gathered)


def of_forward(config: Config, size: int, num_tokens: int = 1, *, num_logits: int | None = None) -> Traffic:
    """Of a target forward over so many tokens. num_logits: of how many of them the logits are wanted, None for all, 0 for none."""
    layers = len(config.layers) if isinstance(config, GemmaConfig) else len(config.is_linear)
    own_inputs = config.per_layer_size if isinstance(config, GemmaConfig) else 0
    of_a_layer = 3 if isinstance(config, GemmaConfig) and config.num_experts else 2
    hiddens = of_a_layer * layers + 1  # and the embedding
    body = Traffic(
        sums=hiddens + bool(own_inputs),
        summed=num_tokens * (hiddens * config.hidden_size + layers * own_inputs),
    )
    return body + of_head(config, size, num_tokens if num_logits is None else num_logits)


def of_head(config: Config, size: int, num_logits: int) -> Traffic:
    """Of the logits of so many tokens."""
    if not num_logits:
        return Traffic()
    return Traffic(gathers=1, gathered=num_logits * ceil(config.vocab_size / size))


def of_embedding(config: Config, num_tokens: int) -> Traffic:
    """Of the embeddings of so many tokens."""
    return Traffic(sums=1, summed=num_tokens * config.hidden_size)


def of_mtp_drafts(config: Config, size: int, depth: int, num_known: int) -> Traffic:
    """Of `depth` tokens that the MTP head drafts for a row, one forward each: the head is whole on each rank and uses the model's embedding
    and language-model head. num_known: tokens that have come since it drafted last, which the first of these forwards reads."""
    found = Traffic()
    for step in range(depth):
        found += of_embedding(config, num_known if step == 0 else 1) + of_head(config, size, 1)
    return found
