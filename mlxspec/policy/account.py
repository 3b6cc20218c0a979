"""What drafting may lose against plain decoding: an account for each row.

The unit is a plain round: the time in which plain decoding gives each row of a group one token. A balance of 1.5 pays for drafting that
makes the group 1.5 plain rounds late. Rows that decode together gain and lose together, because all of them wait for each round.

Rule: a round may leave plain decoding only if the account of every row in it pays for the round's worst case. The worst case is that
every draft is rejected.

Theorem: no row is later than plain decoding by more than `credit` plain rounds and `earn` of its time. How late a row is, is the sum over
its rounds of the time they took, in plain rounds, less the tokens that the rows of the round got on average.

Proof: an account begins with `credit`. It changes by what rounds gained or lost against plain decoding and by `earn` of the time, and the
cap only takes away. So a row is late by at most `credit`, plus `earn` of its time, minus its balance. A round that leaves plain decoding
loses at most its worst case, which every account in it pays, so no balance falls below zero.

The same holds from any moment on, with the balance of that moment, which is at most `cap`, in place of `credit`: what was gained before
cannot all be lost again. Rows may join and leave.

The theorem is about the cost model's seconds. Where a round takes longer than its worst case by the cost model, the difference comes
on top.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxspec.policy.constants import Constants


class Account:
    """One row's. balance: plain rounds."""

    __slots__ = ("_cap", "_earn", "balance")

    def __init__(self, constants: Constants) -> None:
        self.balance, self._earn, self._cap = constants.credit, constants.earn, constants.cap

    def add(self, rounds: float, gained: float = 0.0) -> None:
        """So many plain rounds of time have passed, in which the group got `gained` plain rounds ahead of plain decoding, below 0 late."""
        self.balance = min(self.balance + self._earn * rounds + gained, self._cap)


def balance(accounts: Sequence[Account]) -> float:
    """Plain rounds that all of these rows may be made late."""
    return min(a.balance for a in accounts)
