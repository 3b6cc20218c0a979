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
    """Copied rows of a language-model head, from which a drafter proposes only some tokens. Its parameters are the copied rows, not the
    whole head. ids (R,) int32: the tokens of the rows, ascending. vocab_size: rows of the whole head."""

    def __init__(
        self,
        head: nn.Module,
        ids: Sequence[int] | np.ndarray,
        vocab_size: int,
        *,
        bits: int | None = None,
        capped: Callable[[mx.array], mx.array] = lambda logits: logits,
    ) -> None:
        """Copy rows of `head` lazily. head: a linear or fused module, or an embedding used as a head. ids: tokens of the rows, without
        repetition. bits: bits to which float rows are quantized in affine groups; None leaves them floats. capped: what the model does to
        the logits. Raises ValueError for ids that the head does not have."""
        super().__init__()
        self._head, self._capped, self._bits = (head,), capped, bits
        self.vocab_size = vocab_size
        self.ids = np.unique(np.asarray(ids, np.int32))
        if len(self.ids) != len(ids) or not len(ids) or self.ids[0] < 0 or self.ids[-1] >= vocab_size:
            raise ValueError(f"ids must be different ones of 0 to {vocab_size - 1}, and at least one")
        self.rows = self.of(self.ids)

    def of(self, ids: np.ndarray) -> FusedLinear:
        """Return other rows (len(ids), H) of the head, in the same form as `rows`, lazily."""
        part = head_rows(self._head[0], mx.array(ids.astype(np.int32)))
        if self._bits is not None and "scales" not in part and part.weight.shape[1] % GROUP_SIZE == 0:
            form: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": self._bits, "mode": "affine"}
            part = quantized_linear(*mx.quantize(part.weight, **form), **form)
        return FusedLinear([part])

    def __call__(self, hidden: mx.array, more: FusedLinear | None = None) -> mx.array:
        """Return the logits (N, R) of hidden states (N, H) after the final norm, followed by the logits of the rows `more`, which `of`
        returned."""
        logits = self.rows(hidden)
        if more is not None:
            logits = mx.concatenate([logits, more(hidden)], axis=-1)
        return self._capped(logits)
