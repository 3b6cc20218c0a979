"""Tries on a loaded model whether its caches go back to the accepted tokens, as they say they do."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted.model import AdaptedModel

_TRIES = 3  # a mixture of experts may choose others by a last bit, and a lie shows every time
_WINDOW_AT_MOST = 512  # tokens: behind such a window it is tried as well
_LIMIT, _LIMIT_OF_16_BITS = 2e-3, 0.06  # of the largest logit
_SHARE = 0.25  # of what leaving rejected tokens in does


def check_rollback(model: AdaptedModel) -> str | None:
    """A notice where caches cannot be trimmed although they say so: then they go back to the state before each verify. Raises ModelError
    where that does not help either."""
    for cuts in (True, False):
        model.cuts = cuts
        if all(_goes_back(model, length) for length in _lengths(model)):
            if cuts:
                return None
            return (
                "mlx-lm's caches of this model say that tokens can be taken away, and they cannot: what a verify rejects is undone by "
                "going back to the state before it, which takes longer."
            )
    raise ModelError(
        "mlx-lm's caches of this model do not go back to accepted tokens, so it cannot be run here."
    )


def _lengths(model: AdaptedModel) -> set[int]:
    """Of the prompts that are tried."""
    windows = [form.most for form in model.forms if form.most is not None and form.most <= _WINDOW_AT_MOST]
    return {4, *(w + 3 for w in windows if w + 16 < model.max_context)}


def _goes_back(model: AdaptedModel, length: int) -> bool:
    return any(_tried(model, length, seed) for seed in range(_TRIES))


def _tried(model: AdaptedModel, length: int, seed: int) -> bool:
    """Whether a verify of which one token is accepted leaves what that token alone would, for the steps behind it."""
    text = np.random.default_rng(seed).integers(0, model.vocab_size, length + 7)
    tokens = mx.array(text.astype(np.int32))
    prompt, verify, step, after = mx.split(tokens, [length, length + 4, length + 5])
    limit = _LIMIT if model.dtype == mx.float32 else _LIMIT_OF_16_BITS

    def logits(middle: mx.array, kept: int) -> mx.array:
        cache = model.make_cache(1)
        for piece, certain in ((prompt, True), (middle, False), (step, True), (after, True)):
            found = model.forward(piece, FlatRows((piece.shape[0],)), cache, certain=certain).logits
            cache.commit(None if certain else [kept])
        if found is None:
            raise RuntimeError("a forward gave no logits")
        return found.astype(mx.float32)

    right, tried, wrong = logits(verify[:1], 1), logits(verify, 1), logits(verify, 4)
    if not mx.isfinite(right).all().item():
        return True  # nothing can be compared, and requests end with their own errors
    near = limit * mx.abs(right).max() + 1e-6
    bound = mx.maximum(near, _SHARE * mx.abs(wrong - right).max())
    return bool((mx.abs(tried - right).max() <= bound).item())
