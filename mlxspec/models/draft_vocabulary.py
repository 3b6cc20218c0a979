"""A drafter's own vocabulary: which of the target's tokens the rows of its language-model head stand for (`d2t`)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxspec.errors import ModelError
from mlxspec.platform.host import numbers


def target_ids(d2t: mx.array, vocab_size: int, title: str) -> mx.array:
    """(R,) int32: row i stands for the target's token i + d2t[i]. d2t (R,) int32; vocab_size: the target's; title: of the drafter, for
    sentences. Raises ModelError where it names no token of the target, or one twice."""
    ids = numbers(d2t).astype(np.int64) + np.arange(len(d2t))
    beyond = ids[(ids < 0) | (ids >= vocab_size)]
    if len(beyond):
        raise ModelError(
            f"The {title} cannot be loaded: its d2t names token {beyond[0]}, and the target has tokens 0 to {vocab_size - 1}."
        )
    if len(np.unique(ids)) != len(ids):
        raise ModelError(f"The {title} cannot be loaded: its d2t names a token twice.")
    return mx.array(ids.astype(np.int32))
