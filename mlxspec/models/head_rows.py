"""Copies the rows of a language-model head that a drafter needs to propose the most frequent tokens only.

The rows are copied out of the head in the form in which it keeps them: packed rows with their scales where it is quantized. Rows of a head
of floats can be quantized on the way. Only proposals come from here; the target verifies with its whole head. Knows modules and ids of
rows; does not know which tokens are frequent, nor who drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.models.layers import FusedLinear, head_rows, quantized_linear

GROUP_SIZE = 64  # of rows that are quantized here


class HeadRows(nn.Module):
    """The rows `ids` of a head, and on request others. Its parameters are the copied rows; the head's own are not among them.

    Attributes: ids (R,) int32, ascending; vocab_size, the rows of the whole head.
    """

    def __init__(
        self,
        head: nn.Module,
        ids: Sequence[int] | np.ndarray,
        vocab_size: int,
        *,
        bits: int | None = None,
        capped: Callable[[mx.array], mx.array] = lambda logits: logits,
    ) -> None:
        """head: linear, fused or an embedding used as a head. ids: without repetition. bits: of affine groups that rows of floats are
        quantized to; None leaves them. capped: what the model does to the product. Nothing is evaluated. Raises ValueError for ids that
        the head does not have."""
        super().__init__()
        self._head, self._capped, self._bits = (head,), capped, bits
        self.vocab_size = vocab_size
        self.ids = np.unique(np.asarray(ids, np.int32))
        if len(self.ids) != len(ids) or not len(ids) or self.ids[0] < 0 or self.ids[-1] >= vocab_size:
            raise ValueError(f"ids must be different ones of 0 to {vocab_size - 1}, and at least one")
        self.rows = self.of(self.ids)

    def of(self, ids: np.ndarray) -> FusedLinear:
        """Rows of the head, (len(ids), H), in the form of `rows`; lazily."""
        part = head_rows(self._head[0], mx.array(ids.astype(np.int32)))
        if self._bits is not None and "scales" not in part and part.weight.shape[1] % GROUP_SIZE == 0:
            form: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": self._bits, "mode": "affine"}
            part = quantized_linear(*mx.quantize(part.weight, **form), **form)
        return FusedLinear([part])

    def __call__(self, hidden: mx.array, more: FusedLinear | None = None) -> mx.array:
        """hidden (N, H) behind the final norm -> logits (N, R), then those of `more`, which `of` has made."""
        logits = self.rows(hidden)
        if more is not None:
            logits = mx.concatenate([logits, more(hidden)], axis=-1)
        return self._capped(logits)
