"""Drafting with an EAGLE-3 layer. It is fed as an MTP head is (mtp.py): one cell for each known token but the first, made of the token
and of what the target had at the token before. Drafted tokens recycle the layer's own output, and those never stay. What it is given
of the target are the residual streams behind a few layers, and its logits may be of a part of the vocabulary.
"""

from __future__ import annotations

import mlx.core as mx

from mlxspec.cache.quantized import PLAIN
from mlxspec.drafters.base import Needs
from mlxspec.drafters.mtp import Mtp
from mlxspec.models.eagle3 import Eagle3Head


class Eagle3(Mtp):
    """A drafter that drafts with an EAGLE-3 head. needs.layers: the target's layers whose outputs the head was trained on."""

    name = "eagle3"
    turns_by_axes = False  # the layer is trained on positions that are indices

    def __init__(self, head: Eagle3Head, max_context: int, *, kv_bits: int = PLAIN) -> None:
        """Draft with `head`. max_context: the target's, in tokens. Raises ConfigError as Mtp does."""
        super().__init__(head, max_context, kv_bits=kv_bits)
        self.needs = Needs(layers=head.layers_read)

    @property
    def ids(self) -> mx.array | None:
        return self.model.ids

    def _taken(self, hidden: mx.array) -> mx.array:
        return self.model.take(hidden)
