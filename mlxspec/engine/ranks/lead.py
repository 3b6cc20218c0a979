"""Rank 0's side of orders: collects what its engine has decided since the last step, and sends it before the next one.

Knows orders and the line; knows no model and no rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxspec.engine.ranks.line import ORDERS, Line
from mlxspec.engine.ranks.orders import Clocked, Orders, Submission, Work
from mlxspec.engine.request import Ending
from mlxspec.errors import RankError


class Leader:
    """The leader of one engine's ranks."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._next = line.begun + 1  # behind those of an engine that was here before
        self._submitted: list[Submission] = []
        self._endings: list[Ending] = []

    def submit(self, submission: Submission) -> None:
        """A request is queued."""
        self._submitted.append(submission)

    def end(self, ending: Ending) -> None:
        """A request ends by what happens on rank 0 alone."""
        self._endings.append(ending)

    def order(
        self,
        work: Work,
        checksum: int,
        *,
        endings: Iterable[Ending] = (),
        resting: frozenset[int] = frozenset(),
        clocked: Clocked | None = None,
    ) -> Orders:
        """Send the next orders. Nothing of that work has been computed yet. Raises RankError where a rank is gone."""
        orders = Orders(
            number=self._next,
            checksum=checksum,
            work=work,
            submitted=tuple(self._submitted),
            endings=(*self._endings, *endings),
            resting=resting,
            clocked=clocked,
        )
        self._submitted, self._endings = [], []
        self._line.begun = orders.number
        self._line.send(ORDERS, orders.encode())
        self._next += 1
        return orders

    def reason(self, error: BaseException) -> BaseException:
        """The sentence to say where a computation failed with `error`: a rank that is gone, where one is."""
        return self._line.explain() or RankError(
            f"Rank 0 cannot go on: {str(error).strip().rstrip('.') or type(error).__name__}."
        )
