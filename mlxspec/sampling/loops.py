"""Notices a text that loops, by its last tokens alone: the same tokens give the same verdict, whoever drafted them.

A text loops with a period of up to LONGEST tokens where of its last LEAST tokens, and of its last three periods, nine in ten are those one
period before. So a loop may drift (a counter that rises), and a list whose entries differ is none. It is looked at every EVERY tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST = 400  # tokens of a period
LEAST = 400  # tokens that must repeat
EVERY = 64  # tokens between two looks
WINDOW = 4 * LONGEST  # tokens that a verdict depends on
_PERIODS, _DRIFT = 3, 10  # one token in so many may differ
_NEAR = 3  # last tokens of which two must be those one period before: the rest is not looked at


def period_of(tokens: Sequence[int]) -> int | None:
    """The shortest period with which the end of `tokens` loops; None where it does not."""
    text = np.asarray(tokens[-WINDOW:], np.int64)
    most = min(LONGEST, len(text) // (_PERIODS + 1), len(text) - LEAST)
    if most < 1:
        return None
    ends = np.arange(len(text) - _NEAR, len(text))
    agree = (text[ends] == text[ends - np.arange(1, most + 1)[:, None]]).sum(axis=1)
    for period in (np.flatnonzero(agree >= _NEAR - 1) + 1).tolist():
        length = max(LEAST, _PERIODS * period)
        if length + period <= len(text):
            last = text[-length:]
            if _DRIFT * np.count_nonzero(last != text[-length - period : -period]) <= length:
                return period
    return None
