"""Penalties that depend on where tokens stand in the text: those of the last tokens only, and DRY, which is against repeating sequences.

They act at every position that a round verifies, as logits processors do (processors.py): each is given all tokens before the position,
those of its draft included, so the text is that of plain decoding. DRY is p-e-w's ("don't repeat yourself", 2024), as llama.cpp has it: a
token that would make the end of the text repeat an earlier sequence of n tokens loses multiplier * base ** (n - allowed_length).
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.config import SamplingParams
from mlxspec.platform.host import numbers
from mlxspec.sampling.filters import penalized
from mlxspec.sampling.processors import LogitsProcessor

LONGEST_MATCH = 64  # tokens: what is longer loses no more
_MOST = 1e4  # of a penalty: no logit is larger, and float32 has room for it


def processors_of(
    params: SamplingParams, num_prompt: int, breaks: NDArray[np.bool_] | None
) -> tuple[LogitsProcessor, ...]:
    """Return the logits processors for DRY and for penalties with a window. num_prompt: tokens of the prompt. breaks (V,): tokens that
    end a repeated sequence, for DRY."""
    found: list[LogitsProcessor] = []
    if params.dry_multiplier > 0:
        found.append(lambda tokens, logits: _less(logits, dry_penalties(numbers(tokens), params, breaks)))
    if params.has_window:
        found.append(lambda tokens, logits: _penalized(logits, numbers(tokens), params, num_prompt))
    return tuple(found)


def dry_penalties(
    text: NDArray[np.int32], params: SamplingParams, breaks: NDArray[np.bool_] | None
) -> Mapping[int, float]:
    """Return DRY's penalty for each token that may follow `text` (n,), by token id. Takes about n operations for each token of the
    longest match."""
    window = params.dry_penalty_last_n
    text = text[max(0, len(text) - window) :] if window >= 0 else text
    if len(text) < 2 or (breaks is not None and breaks[text[-1]]):
        return {}
    places = np.flatnonzero(text[:-1] == text[-1])  # ends of sequences that may match the end of the text
    lengths: dict[int, int] = {}
    for length in range(1, LONGEST_MATCH + 1):
        for token in np.unique(text[places + 1]).tolist():
            lengths[token] = length
        there = places[places >= length] - length
        own = len(text) - 1 - length
        if not len(there) or own < 0 or (breaks is not None and breaks[text[own]]):
            break
        places = there[text[there] == text[own]] + length
        if not len(places):
            break
    least = params.dry_allowed_length
    return {
        token: min(params.dry_multiplier * params.dry_base ** (length - least), _MOST)
        for token, length in lengths.items()
        if length >= least
    }


def _less(logits: mx.array, penalties: Mapping[int, float]) -> mx.array:
    if not penalties:
        return logits
    return logits.at[0, mx.array([*penalties])].add(-mx.array([*penalties.values()], mx.float32))


def _penalized(
    logits: mx.array, text: NDArray[np.int32], params: SamplingParams, num_prompt: int
) -> mx.array:
    """Apply the repetition penalty to the last `repeat_last_n` tokens, and presence and frequency penalties to those of them that are of
    the answer."""
    start = max(0, len(text) - params.repeat_last_n)
    vocab = logits.shape[1]
    seen = mx.array(np.bincount(text[start:], minlength=vocab)[:vocab] > 0)[None]
    counts = np.bincount(text[max(start, num_prompt) :], minlength=vocab)[:vocab].astype(np.float32)
    rates = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return penalized(logits, seen, mx.array(counts)[None], *rates)
