"""Bounds the time that drafting may lose against plain decoding, by one account for each row.

The unit is a plain round: the time in which plain decoding gives each row of a group one token. A balance of 1.5 pays for drafting that
makes the group 1.5 plain rounds late. Rows that decode together gain and lose together, because all of them wait for each round.

Rule: a round may leave plain decoding only if every account in it pays for the worst case of that round and of all rounds that were
decided before and whose outcome is not known yet. The worst case of a round is that every draft is rejected.

An account is granted FIRST at the beginning of an answer and GROWTH of its time until CREDIT has been granted, and EARN of its time for
good. So short answers may lose little: granted(t) = min(FIRST + GROWTH t, CREDIT) behind t plain rounds of time.

Theorem: behind t plain rounds of time no row is later than plain decoding by more than granted(t) + EARN t plain rounds. How late a row
is, is the sum over its rounds of the time they took, in plain rounds, less the tokens that the rows of the round got on average.

Proof: let b be the balance and r the part of it that is reserved for rounds that were decided and are not settled. A round is decided
only if its worst case is at most b - r, and its worst case is added to r; so r <= b holds behind each decision. When a round is settled,
r falls by its worst case w, and b falls by at most w, because a round loses at most its worst case; what is granted and earned only adds.
So 0 <= r <= b holds behind each settlement too. b began at FIRST; it has changed by what was granted, by what was earned, by what rounds
gained or lost, and CAP only took away. So what was lost, less what was gained, is at most granted(t) + EARN t - b, and b >= 0. QED.

The same holds from any moment on, with the balance of that moment, which is at most CAP, and what is granted later: what was gained
before cannot all be lost again. Rows may join and leave. The theorem is about estimated seconds: where a round takes longer than its worst
case by the cost model, the difference comes on top.
"""

from __future__ import annotations

FIRST = 1.0  # plain rounds: with EARN no answer of 32 tokens is below 0.95 of plain decoding
GROWTH = 0.0145  # of a row's time, until CREDIT is reached: no answer of 96 tokens is below 0.97
CREDIT = 3.8  # plain rounds: most that an answer is granted
EARN = 0.005  # of a row's time, for good: what a probe every now and then costs
CAP = 16.0  # plain rounds: most that an account holds, which is what a good stretch can lose again


def allowance(rounds: float) -> float:
    """Plain rounds that a row may be late behind so many plain rounds of time."""
    return min(FIRST + GROWTH * rounds, CREDIT) + EARN * rounds


class Account:
    """One row's. balance, reserved: plain rounds."""

    __slots__ = ("_granted", "balance", "reserved")

    def __init__(self) -> None:
        self.balance = self._granted = FIRST
        self.reserved = 0.0

    @property
    def available(self) -> float:
        """What a round that is decided now may lose at worst."""
        return self.balance - self.reserved

    def reserve(self, worst: float) -> None:
        """A round has been decided that may lose so much."""
        self.reserved += worst

    def settle(self, rounds: float, gained: float = 0.0, worst: float = 0.0) -> None:
        """Rounds have been read that took so many plain rounds of time and got `gained` plain rounds ahead of plain decoding (below 0:
        late). worst: what was reserved for them."""
        granted = min(self._granted + GROWTH * rounds, CREDIT)
        self.balance = min(self.balance + granted - self._granted + EARN * rounds + gained, CAP)
        self._granted = granted
        self.reserved = max(0.0, self.reserved - worst)
