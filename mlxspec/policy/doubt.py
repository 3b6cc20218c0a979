"""Decides which rounds tell what a machine takes. Something else may hold up a round, or slow the machine for a while.

A round that is far off what was expected counts as expected until another of its kind (rows, width, drafters) is as far off: the second,
where a usual round came between, else the third. A faster round with drafts counts at once, since nothing makes a round faster by accident.
Two rounds in a row that are far off put costs in doubt, and plain rounds are asked for. Where two of these are as far off, the machine has
another speed. All differences are logarithms of ratios; knows no costs.
"""

from __future__ import annotations

from typing import NamedTuple

CLIP = 0.15  # no single round moves known costs by more, however late it was
_FAR = 3.0  # times what rounds are off by in the mean, and CLIP at least: so far off is a round that something else held up
_FADE = 0.05  # share of the mean that one round replaces


class Verdict(NamedTuple):
    """A judgement of one round's time. off: the part of its deviation that counts (a logarithm). teaches: whether costs learn from the
    round. is_sure: whether they take over the whole deviation."""

    off: float
    teaches: bool = True
    is_sure: bool = False


class Doubt:
    """The judge of rounds whose time is far from the expected one. It keeps the mean deviation of rounds, the last round if it was far
    off, and for each kind of round the last one that was far off, with the number of usual rounds before it. is_open: the next rounds
    should be plain, because the machine may have another speed."""

    def __init__(self) -> None:
        self.is_open = False
        self._usual, self._num_usual = CLIP / _FAR, 0
        self._last = 0.0
        self._far: dict[tuple[object, ...], tuple[float, int]] = {}

    def judge(
        self, kind: tuple[object, ...], off: float, beyond: float, *, is_plain: bool, is_new: bool
    ) -> Verdict:
        """Return the judgement of a round of this kind whose time deviates by `off` (a logarithm). beyond: the deviation from the most
        that the round was believed to take. is_new: few rounds have taught its costs."""
        far = max(CLIP, _FAR * self._usual)
        self._usual += _FADE * (min(abs(off), far) - self._usual)
        last, when = self._far.pop(kind, (0.0, 0))
        both, before = (sorted((0.0, off, o))[1] for o in (last, self._last))  # what two have in common
        found = Verdict(off)
        self._last = 0.0
        if max(-off, beyond) > far:
            is_sure = abs(both) > far and (is_plain or when < self._num_usual)
            if off < 0 and (not is_plain or is_new):
                both, is_sure = off, is_sure or is_plain
            self._last = off
            self.is_open |= abs(before) > far and not is_sure and not is_plain
            if not is_sure and (off > 0 or is_plain):
                self._far[kind] = off, -1 if abs(both) > far else self._num_usual
                return Verdict(0.0, teaches=False)
            found = Verdict(both, is_sure=is_sure)
        else:
            self._num_usual += 1
        self.is_open &= not is_plain
        return found

    def settle(self) -> None:
        """Forget rounds that were far off, because all costs have followed the machine's speed."""
        self._far, self._last = {}, 0.0
