"""Tries on a loaded model whether it runs here as by mlx-lm alone: rows that share a forward, and what a verify rejects.

What is tried is compared with the module and mlx-lm's caches on one row's text, logits by logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import create_attention_mask

from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted.model import AdaptedModel

_TRIES = 3  # a mixture of experts may choose others by a last bit, and a lie shows every time
_WINDOW_AT_MOST = 512  # tokens: behind such a window it is tried as well
_LIMIT, _LIMIT_OF_16_BITS = 2e-3, 0.06  # of the largest logit
_SHARE = 0.25  # of what leaving rejected tokens in does
_FAR = 32  # tokens before the end of the context, where positions are tried too


def check_model(model: AdaptedModel) -> str | None:
    """Check on random texts that the model gives mlx-lm's logits where rows share a forward and where a verify rejects tokens. Where it
    does not, the model shares less from then on. Return a notice where rows do not share all of a forward, else None. Raises ModelError
    where rejected tokens cannot be removed, and for several adapters on a model whose rows do not share all of a forward."""
    if model.seams is not None:
        if _all_agree(model):
            return None
        model.cut = None
        if _all_agree(model):
            return None
        model.stop_sharing("in one forward it gives other logits, or none")
        if model.gate.names:
            raise ModelError(
                f"Rows of this model do not share all of a forward, so it takes one adapter: {model.by_rows}."
            )
    if model.parts is not None and not _holds(model, _rows_agree):
        model.stop_sharing("it gives other logits, or none")
    if model.parts is None and not _holds(model, _rows_agree):
        raise ModelError(
            "mlx-lm's caches of this model do not go back to accepted tokens, so it cannot be run here."
        )
    share = 1 - model.share_by_rows
    return f"Rows of this model share {share:.0%} of its weights in a forward, and read the others one by one: {model.by_rows}."


def _holds(model: AdaptedModel, tried: Callable[[AdaptedModel, int], bool]) -> bool:
    """Return whether `tried` is true for one of a few seeds. A forward that raises counts as false."""
    try:
        return any(tried(model, seed) for seed in range(_TRIES))
    except Exception:  # whatever the module's code does when it computes
        return False


def _all_agree(model: AdaptedModel) -> bool:
    return _holds(model, _rows_agree) and _holds(model, _far_rows_agree)


def _limit(model: AdaptedModel) -> float:
    return _LIMIT if model.dtype == mx.float32 else _LIMIT_OF_16_BITS


def _flat(
    model: AdaptedModel, cache: Any, pieces: Sequence[mx.array], kept: Sequence[int] | None = None
) -> list[mx.array]:
    """Run one forward over a piece of text for each row, and return each row's logits (w, V). Then commit the first kept[r] tokens of each
    row r; None: commit all."""
    rows = FlatRows(tuple(piece.shape[0] for piece in pieces))
    rows.repeats = False  # nothing is compiled for a trial
    found = model.forward(mx.concatenate(list(pieces)), rows, cache, certain=kept is None).logits
    cache.commit(kept)
    if found is None:
        raise RuntimeError("a forward gave no logits")
    return mx.split(found.astype(mx.float32), list(rows.starts[1:-1]))


def _near(model: AdaptedModel, found: mx.array, right: mx.array, wrong: mx.array) -> bool:
    """Return whether the logits `found` are close to the logits `right`. wrong: the logits that result where rejected tokens are left in;
    the same as `right` where no tokens can be left in."""
    if not mx.isfinite(right).all().item():
        return True  # nothing can be compared, and requests end with their own errors
    limit = mx.maximum(_limit(model) * mx.abs(right).max() + 1e-6, _SHARE * mx.abs(wrong - right).max())
    return bool((mx.abs(found - right).max() <= limit).item())


def _alone(model: AdaptedModel, caches: list[Any], pieces: Sequence[mx.array]) -> list[mx.array]:
    """Run mlx-lm's module and caches over consecutive pieces of one row's text. Return the logits (w, V) of each piece."""
    return [model.head(model.body(piece, caches)).astype(mx.float32) for piece in pieces]


def _texts(model: AdaptedModel, seed: int, lengths: Sequence[int]) -> list[mx.array]:
    rng = np.random.default_rng(seed)
    return [mx.array(rng.integers(0, model.vocab_size, n).astype(np.int32)) for n in lengths]


def _rows_agree(model: AdaptedModel, seed: int) -> bool:
    """Return whether three rows in shared forwards give the logits that each row gives alone: in prompts, in a verify that rejects some
    tokens, and in a forward of one or two tokens a row. seed: of the random texts."""
    if model.seams is not None:
        windows = [form.window for form in model.seams.forms if form is not None]
    else:
        windows = [form.most for form in model.forms]
    tried = (w + 3 for w in windows if w and w <= _WINDOW_AT_MOST and w + 16 < model.max_context)
    prompts, verifies, steps = (
        _texts(model, seed * 3 + i, n)
        for i, n in enumerate(((max(tried, default=6), 1, 3), (4, 1, 3), (2, 1, 1)))
    )
    kept, cache = [2, 1, 1], model.make_cache(3)
    found = [_flat(model, cache, prompts), _flat(model, cache, verifies, kept), _flat(model, cache, steps)]
    for row, count in enumerate(kept):
        text, verified, step = prompts[row], verifies[row], steps[row]
        right = wrong = _alone(model, model.new_caches(), (text, verified[:count], step))
        if model.seams is None:
            wrong = _alone(model, model.new_caches(), (text, verified, step))
        for own, logits, bad in zip(found, right, wrong, strict=True):
            num = logits.shape[0]
            if not _near(model, own[row][:num], logits, bad[:num]):
                return False
    return True


class _FarCache:
    """A cache of the keys and values of one row whose first token has the position `start`, with the methods of mlx-lm's caches."""

    def __init__(self, start: int) -> None:
        self.offset, self._start = start, start
        self._keys: tuple[mx.array, mx.array] | None = None

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self.offset - self._start, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._keys is not None:
            keys, values = (
                mx.concatenate(pair, axis=2) for pair in zip(self._keys, (keys, values), strict=True)
            )
        self._keys, self.offset = (keys, values), self._start + keys.shape[2]
        return keys, values


def _far_rows_agree(model: AdaptedModel, seed: int) -> bool:
    """Return whether three rows whose positions are near the end of the context give in shared forwards the logits that each row gives
    alone. seed: of the random texts."""
    start = model.max_context - _FAR
    if start <= 0:
        return True
    pieces = [_texts(model, seed * 2 + i, n) for i, n in enumerate(((5, 1, 3), (1, 2, 1)))]
    cache = model.make_cache(3)
    for row in range(3):
        cache.shift(row, start)
    found = [_flat(model, cache, piece) for piece in pieces]
    for row in range(3):
        caches = [_FarCache(start) for _ in model.new_caches()]
        for own, right in zip(found, _alone(model, caches, [piece[row] for piece in pieces]), strict=True):
            if not _near(model, own[row], right, right):
                return False
    return True
