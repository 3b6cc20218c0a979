"""Mamba-2's recurrence in mlx-lm's code, for the few tokens of a verify: in the form that plain steps have.

mlx-lm computes one token by a step, and several by a chunked form that rounds otherwise: in 16 and in 4 bits, texts that were drafted then
differed from plain ones at near ties. Within `by_steps`, a few tokens are as many steps. The recurrence alone is: projections, which read
the weights, take all tokens at once as before. Knows the function's arguments; knows no architecture.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_NAME = "ssm_update"  # in the code of every architecture that has such layers
STEPS_AT_MOST = (
    24  # tokens: the chunked form launches about so many kernels, however many its tokens are, and a step one
)


class _Within(threading.local):
    """A mark, for each thread, that recurrences over a few tokens are computed step by step."""

    is_open = False


_within = _Within()


@contextmanager
def by_steps() -> Iterator[None]:
    """Compute Mamba-2's recurrence over a few tokens token by token in the `with` block, as plain decoding does."""
    before, _within.is_open = _within.is_open, True
    try:
        yield
    finally:
        _within.is_open = before


def watch(module: nn.Module) -> None:
    """Replace mlx-lm's function for the recurrence in the code of this module by one that `by_steps` acts on. Outside of a `by_steps` block
    the results do not change."""
    for code in {sys.modules[type(part).__module__] for part in module.modules()}:
        own = vars(code).get(_NAME)
        if own is not None and not hasattr(own, "__wrapped__"):
            setattr(code, _NAME, _stepping(own))


def _stepping(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def ssm_update(
        x: mx.array,
        a_log: mx.array,
        b: mx.array,
        c: mx.array,
        d: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        *more: Any,
        **named: Any,
    ) -> tuple[mx.array, mx.array]:
        """Run the recurrence over x (1, n, H, D), b and c (1, n, G, S), dt (1, n, H). Return the outputs (1, n, H, D) and the state after
        the last token."""
        width = x.shape[1]
        is_masked = any(isinstance(value, mx.array) for value in (*more, *named.values()))
        if not _within.is_open or state is None or is_masked or not 1 < width <= STEPS_AT_MOST:
            found: tuple[mx.array, mx.array] = own(x, a_log, b, c, d, dt, dt_bias, state, *more, **named)
            return found
        outs, carried = [], state
        for x1, b1, c1, dt1 in zip(*(mx.split(each, width, axis=1) for each in (x, b, c, dt)), strict=True):
            out, carried = own(x1, a_log, b1, c1, d, dt1, dt_bias, carried, *more, **named)
            outs.append(out)
        return mx.concatenate(outs, axis=1), carried

    return ssm_update
