"""The user's logits processors and sampler, with mlx-lm's signatures, applied at every position that a round verifies.

A processor takes (tokens, logits): all tokens before the position, prompt and drafts included, and its logits (1, V); it returns
logits (1, V). A sampler takes log-probabilities (1, V) and returns the token. All are float32 whatever the model computes in, so that a
callable can read them with numpy and gives the same for every dtype. Both are also called for drafts that may be rejected, so their
result must depend on their arguments only. An error in one, also one that comes when its array is computed, counts only if the text
reaches that position: so what they return is waited for, and no other row's graph holds it before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.errors import HookError
from mlxspec.platform import device

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Sampler = Callable[[mx.array], mx.array]


class Failure(NamedTuple):
    """A failure of a caller's own function for a row, at one of the row's positions (0 is the first). why: the exception, whose text is
    a sentence."""

    place: int
    why: BaseException


def process(
    processors: Sequence[LogitsProcessor],
    history: Sequence[int] | NDArray[np.int32],
    drafts: mx.array,
    logits: mx.array,
    *,
    num_ours: int = 0,
) -> tuple[mx.array, Failure | None]:
    """Apply logits processors to logits (w, V) after the history and after each of its drafts (w - 1,), position by position. From a
    failure on the logits are unchanged. num_ours: how many of the last processors are our own; their results are not waited for."""
    known = mx.array(np.asarray(history, np.int32))
    logits = logits.astype(mx.float32)
    out: list[mx.array] = []
    for place in range(logits.shape[0]):
        tokens = mx.concatenate([known, drafts[:place].astype(mx.int32)]) if place else known
        row = logits[place : place + 1]
        try:
            for order, processor in enumerate(processors):
                row = _processed(processor, tokens, row, waits=order < len(processors) - num_ours)
        except HookError as error:
            return mx.concatenate([*out, logits[place:]]), Failure(place, error)
        out.append(row)
    return mx.concatenate(out), None


def draw(sampler: Sampler, scores: mx.array) -> tuple[mx.array, Failure | None]:
    """Draw tokens (w,) int32 from scores (w, V) by the caller's sampler, position by position; zeros from a failure on."""
    chosen: list[mx.array] = []
    for place in range(scores.shape[0]):
        row = scores[place : place + 1]
        try:
            chosen.append(_drawn(sampler, row - mx.logsumexp(row, axis=-1, keepdims=True)))
        except HookError as error:
            nothing = mx.zeros((scores.shape[0] - place,), mx.int32)
            return mx.concatenate([*chosen, nothing]), Failure(place, error)
    return mx.concatenate(chosen), None


def _processed(processor: LogitsProcessor, tokens: mx.array, logits: mx.array, *, waits: bool) -> mx.array:
    found = _called(processor, "logits processor", tokens, logits, waits=waits)
    if not isinstance(found, mx.array) or found.shape != logits.shape:
        raise HookError(
            f"The logits processor {_name(processor)} must return logits of shape {tuple(logits.shape)}, not {_shown(found)}."
        )
    return found


def _drawn(sampler: Sampler, logprobs: mx.array) -> mx.array:
    found = _called(sampler, "sampler", logprobs, waits=True)
    if not isinstance(found, mx.array) or found.size != 1 or not mx.issubdtype(found.dtype, mx.integer):
        raise HookError(
            f"The sampler {_name(sampler)} must return one token id as an array, not {_shown(found)}."
        )
    return found.reshape(1).astype(mx.int32)


def _called(hook: Callable[..., mx.array], kind: str, *arguments: mx.array, waits: bool) -> mx.array:
    if waits:
        mx.eval(arguments)  # what fails here is not the hook's
    try:
        found = hook(*arguments)
        if waits and isinstance(found, mx.array):
            mx.eval(found)
        return found
    except Exception as error:  # it is not ours
        device.note_failure(error)
        said = str(error).strip().rstrip(".")
        raise HookError(
            f"The {kind} {_name(hook)} failed: {type(error).__name__}{': ' + said if said else ''}."
        ) from error


def _name(hook: object) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def _shown(value: object) -> str:
    if isinstance(value, mx.array):
        return f"an array of shape {tuple(value.shape)} and type {value.dtype}"
    return type(value).__name__
