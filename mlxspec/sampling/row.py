"""One request as sampling knows it: its parameters, seed, token counts and constraints."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.sampling import bits
from mlxspec.sampling.constraints import Constraints
from mlxspec.sampling.history import processors_of


class RowSampler:
    """The sampling state of one request: parameters, seed, token counts and constraints.

    `observe` is called with every token of the answer, in order; the prompt is given at the start. is_greedy: the target and drafters
    choose the likeliest token, without noise. constraints: their owner gives them the answer's tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        *,
        constraints: Constraints | None = None,
        breaks: NDArray[np.bool_] | None = None,
    ) -> None:
        """Read the parameters. breaks (V,): tokens that end a repeated sequence, for DRY. Raises ConfigError for a token that the model
        does not have, and where no token may begin the answer."""
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.is_greedy = params.temperature == 0.0
        self.is_plain = not (
            params.has_penalties or params.logit_bias or params.allowed_token_ids or params.needs_text
        )
        self.processors = (*params.logits_processors, *processors_of(params, len(prompt), breaks))
        self.constraints = constraints
        self._vocab_size = vocab_size
        self.prompt_seen: mx.array | None = None
        self.counts: mx.array | None = None
        self.bias: mx.array | None = None
        if params.has_penalties and not params.has_window:
            self.prompt_seen = mx.array(np.bincount(list(prompt), minlength=vocab_size)[:vocab_size] > 0)
            self.counts = mx.zeros((vocab_size,), mx.float32)
        named = {"logit_bias": [*params.logit_bias], "allowed_token_ids": [*params.allowed_token_ids]}
        for name, tokens in named.items():
            if tokens and max(tokens) >= vocab_size:
                raise ConfigError(f"{name} names token {max(tokens)}; this model has 0 to {vocab_size - 1}.")
        if params.logit_bias or params.allowed_token_ids:
            bias = np.full(vocab_size, -np.inf if params.allowed_token_ids else 0.0, np.float32)
            bias[named["allowed_token_ids"]] = 0.0
            bias[named["logit_bias"]] += list(params.logit_bias.values())
            self.bias = mx.array(bias)
        self._check_beginning()

    def _check_beginning(self) -> None:
        """Raise ConfigError where allowed_token_ids or min_tokens, with the other constraints, leave no first token."""
        params = self.params
        if self.constraints is None or not (params.allowed_token_ids or params.min_tokens):
            return
        (first,) = self.constraints.masks(())
        if first is None:
            return
        tokens = params.allowed_token_ids
        if not (any(bits.holds(first, token) for token in tokens) if tokens else first.any()):
            raise ConfigError(
                "No token may begin the answer: allowed_token_ids, min_tokens, bad words, the grammar and the thinking budget leave none."
            )

    @property
    def is_waiting(self) -> bool:
        """Return whether no token is forbidden until a tag starts a grammar."""
        return self.constraints is not None and self.constraints.is_waiting

    @property
    def is_bound(self) -> bool:
        """Return whether the allowed tokens must be computed at every position."""
        return self.constraints is not None and not self.constraints.is_waiting

    def observe(self, tokens: Sequence[int]) -> None:
        """Count these tokens, which are final, as tokens of the answer."""
        if self.counts is not None and tokens:
            self.counts = self.counts + mx.array(
                np.bincount(list(tokens), minlength=self._vocab_size).astype(np.float32)
            )

    def needs_tokens(self, width: int) -> bool:
        """Return whether the host must know the tokens before each of the next `width` positions to sample there."""
        return self.constraints is not None and self.constraints.reaches(width)
