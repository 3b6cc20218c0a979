"""Tells the controller the measured times of rounds: of a plain round, of drafts by width, and each row's current speed.

Plain rounds that run ahead are all alike, so several of them are told at once: telling costs the host about as much as asking a lookup
does, at a time when the device may be waiting for it. Rounds that are not what they will be once their shape has come up often (they
compile, or are not compiled yet) say nothing of what a width costs. Knows rows and seconds; knows no drafter and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxspec.policy.auto_row import AutoRow
from mlxspec.policy.controller import Controller
from mlxspec.policy.cost import Curve

CALM = 1  # plain rounds in a row before rounds run ahead


class RoundTimes:
    """Of one engine. Whoever reads what the controller knows of rows calls `settle` first."""

    def __init__(self, control: Controller) -> None:
        self._control = control
        self._after: tuple[Curve, int, float, int] | None = None  # the last round, if it verified drafts
        self._resting: list[AutoRow] = []  # whose plain rounds have not been told
        self._num_rows, self._num_rounds, self._seconds = 0, 0, 0.0

    def took(
        self,
        rows: list[AutoRow],
        num_rows: int,
        num_tokens: int,
        seconds: float,
        *,
        drafting: float,
        compiling: float = 0.0,
        ahead: bool,
        is_warm: bool,
    ) -> None:
        """A round was read: `num_tokens` verified for `num_rows` rows, in `seconds` with everything, of which `drafting`, in which
        `compiling` what the first draft of a shape compiles.

        num_rows: also those that do not follow the controller and those that had ended when it was launched. ahead: it was launched
        before its turn, as plain rounds are when nothing else pays: what a plain round costs is what it costs then. The plain round
        behind drafts cannot run ahead and has to undo what did not stand: what it takes longer is a cost of those drafts.
        """
        plain = num_tokens == num_rows
        if ahead and plain and is_warm:
            self._rest(rows, num_rows, seconds)
            return
        self.settle()
        rows = [r for r in rows if r.emitted]
        if not rows:
            return
        curve = self._curve(rows, num_rows)
        spent, usual = seconds - drafting, curve.seconds(num_rows)
        longer = max(0.0, min(spent - usual, usual)) if plain and not ahead and is_warm else 0.0
        if self._after is not None:
            self._end_drafts(num_rows, longer)
            if not any(r.control.left_plain for r in rows):
                self._control.held_up([r.control for r in rows], num_rows, longer)
        elif plain and not ahead and is_warm:
            self._control.pause += self._control.constants.fade * (longer - self._control.pause)
        if not is_warm:
            spent = min(spent, curve.seconds(num_tokens))
        elif not plain:
            self._after = curve, num_tokens, spent, num_rows
        elif min(r.calm for r in rows) > CALM:
            curve.refine(num_tokens, spent)
        self._tell([(r, r.emitted) for r in rows], num_rows, spent + drafting - compiling, 1)
        for row in rows:
            row.emitted = 0

    def settle(self) -> None:
        """Tell what has not been told."""
        rows, num_rounds, seconds = [r for r in self._resting if r.rested], self._num_rounds, self._seconds
        self._resting, self._num_rounds, self._seconds = [], 0, 0.0
        if rows:
            self._curve(rows, self._num_rows).refine(self._num_rows, seconds / num_rounds, num_rounds)
            self._tell([(r, r.rested) for r in rows], self._num_rows, seconds, num_rounds)
            for row in rows:
                row.rested = 0

    def _rest(self, rows: list[AutoRow], num_rows: int, seconds: float) -> None:
        if rows != self._resting or num_rows != self._num_rows:
            self.settle()
            self._resting, self._num_rows = rows, num_rows
        if self._after is not None:
            self._end_drafts(num_rows, 0.0)
        for row in rows:
            row.rested += row.emitted
            row.emitted = 0
        self._num_rounds += 1
        self._seconds += seconds
        if self._num_rounds >= 2.0 * self._control.constants.spell:
            self.settle()

    def _end_drafts(self, num_rows: int, longer: float) -> None:
        """Behind a round with drafts one of so many rows has been read, which took so much longer than a plain one."""
        if self._after is not None:
            curve, width, took, width_rows = self._after
            curve.refine(width, took + (longer if width_rows == num_rows else 0.0))
            self._after = None

    def _curve(self, rows: Sequence[AutoRow], num_rows: int) -> Curve:
        return self._control.curve([r.control for r in rows], num_rows)

    def _tell(
        self, emitted: Sequence[tuple[AutoRow, int]], num_rows: int, seconds: float, num_rounds: int
    ) -> None:
        plain = self._curve([r for r, _ in emitted], num_rows).seconds(num_rows)
        self._control.spent(
            [(row.control, num_tokens, row.looked_up) for row, num_tokens in emitted],
            num_rows,
            seconds,
            num_rounds,
        )
        for row, num_tokens in emitted:
            tokens, expected = row.plain
            row.plain = tokens + num_tokens, expected + num_tokens * plain
