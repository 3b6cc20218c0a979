"""Log-probabilities of the chosen and the likeliest tokens, under the softmax of the model's unchanged logits.

They are taken before penalties, grammar and temperature, so they show the model's own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlxspec.events import TokenLogprob, TopToken
from mlxspec.platform.host import numbers
from mlxspec.sampling.truncate import largest


class Logprobs(NamedTuple):
    """Lazy log-probabilities of N positions: chosen (N,) float32; top_tokens and top_values (N, n), likeliest first, None for n = 0."""

    chosen: mx.array
    top_tokens: mx.array | None
    top_values: mx.array | None

    @property
    def arrays(self) -> list[mx.array]:
        return [x for x in self if x is not None]

    def read(
        self, tokens: Sequence[int], num_top: int, start: int, data: Sequence[bytes]
    ) -> list[TokenLogprob]:
        """Return the log-probabilities of `tokens`, which are those at positions start, start + 1 and so on. data: bytes by token id."""
        end = start + len(tokens)
        own = numbers(self.chosen)[start:end].tolist()
        tops: list[tuple[TopToken, ...]] = [()] * len(tokens)
        if num_top and self.top_tokens is not None:
            ids = numbers(self.top_tokens)[start:end, :num_top].tolist()
            values = numbers(self.top_values)[start:end, :num_top].tolist()
            tops = [
                tuple(TopToken(token=t, logprob=v, data=data[t]) for t, v in zip(*pair, strict=True))
                for pair in zip(ids, values, strict=True)
            ]
        return [
            TokenLogprob(token=token, logprob=value, data=data[token], top=top)
            for token, value, top in zip(tokens, own, tops, strict=True)
        ]


def logprobs(logits: mx.array, chosen: mx.array, num_top: int) -> Logprobs:
    """Return the log-probabilities of tokens chosen (N,) under logits (N, V), and of the num_top likeliest tokens; of equally likely
    ones the lower ids come first."""
    given, logits = logits, logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logits, chosen[:, None], axis=-1) - total
    if not num_top:
        return Logprobs(own[:, 0], None, None)
    order = largest(given, min(num_top, given.shape[1]))
    return Logprobs(own[:, 0], order, mx.take_along_axis(logits, order, axis=-1) - total)
