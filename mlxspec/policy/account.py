"""Bounds the time that drafting may lose against plain decoding: one account for each row, and one bank for all answers.

The unit is a plain round: the time in which plain decoding gives each row of a group one token. A balance of 1.5 pays for drafting that
makes the group 1.5 plain rounds late. Rows that decode together gain and lose together, because all of them wait for each round.

Rule: a round may leave plain decoding only if every account in it pays for the worst case of that round and of all rounds that were
decided before and whose outcome is not known yet. The worst case of a round is that every draft is rejected.

An answer begins with `start` plain rounds, from LEAST to MOST, which the bank decides, and earns GROWTH of its time. Several rows that
decode together leave MOST - LEAST of their balances untouched: one row's failure would delay all others.

Theorem: after t plain rounds of time no row is later than plain decoding by more than start + GROWTH t plain rounds, if no round takes
longer than the worst case that was reserved for it. How late a row is, is the sum over its rounds of the time they took, in plain rounds,
less the tokens that the rows of the round got on average.

Proof: let b be the balance and r the part of it that is reserved for rounds that were decided and are not settled. A round is decided only
if its worst case is at most b - r, and its worst case is added to r; so r <= b holds after each decision. When a round is settled, r falls
by its worst case w, and b falls by what the round lost, which is at most w; what is earned only adds. So 0 <= r <= b holds after each
settlement too. b began at `start`; it has changed by what was earned and by what rounds gained or lost, and CAP only took away. So what was
lost, less what was gained, is at most start + GROWTH t - b, and b >= 0. QED.

By a clock: a round is settled by the seconds it took over those of a plain round. What plain rounds take is learned from plain rounds
alone: in a process before it has run costs.SOON rounds with drafts, and again behind costs.STALE of them. Where that is off by a share e,
the theorem holds with GROWTH + e. The worst case holds a round that costs PRUDENCE times what is believed of its width; where a round
exceeds its worst case all the same, the excess is settled too, so b may fall below 0 by that of one round and of those decided before it
was read, and no more is drafted until it is earned or gained back. Left out is what `CostModel.took` counts as expected: a round that
something else held up.

Left out too is the time in which a shape of a round compiles, which each process pays once.
"""

from __future__ import annotations

MOST = 2.9  # plain rounds at the beginning of an answer: pays for a draft of three by a costly head that fails. 32 tokens are
# then decoded at 0.90 of plain decoding's speed at worst, 96 at 0.945, 1,000 at 0.98
LEAST = 1.0  # plain rounds, where the bank is empty or several rows decode together
GROWTH = 0.016  # of a row's time
CAP = 16.0  # plain rounds: most that an account holds, which is what a good stretch can lose again
FULL = 12.0  # plain rounds: most that the bank holds
EARN = 0.008  # of all time, for the bank


class Bank:
    """The time that drafting has gained or lost over all answers, in plain rounds. It is kept when answers end. It decides how many plain
    rounds a new answer may lose at first (`start`)."""

    __slots__ = ("balance",)

    def __init__(self, balance: float = FULL) -> None:
        self.balance = balance

    @property
    def start(self) -> float:
        """Return the plain rounds that the account of a new answer begins with."""
        return min(MOST, max(LEAST, self.balance))

    def settle(self, rounds: float, gained: float) -> None:
        """Add a round that took the time of `rounds` plain rounds and got `gained` plain rounds ahead of plain decoding (below 0: late)."""
        self.balance = max(0.0, min(self.balance + EARN * rounds + gained, FULL))


class Account:
    """The account of one row. balance: plain rounds that the row may still lose; reserved: the part of them that rounds on their way may
    lose."""

    __slots__ = ("balance", "reserved")

    def __init__(self, start: float = MOST) -> None:
        self.balance, self.reserved = start, 0.0

    def available(self, *, is_alone: bool) -> float:
        """Return the plain rounds that a round which is decided now may lose at worst. is_alone: no other rows decode with this one."""
        return self.balance - self.reserved - (0.0 if is_alone else MOST - LEAST)

    def reserve(self, worst: float) -> None:
        """Add `worst` to the reserved part of the balance, until `settle` takes it away. worst: the plain rounds (the time of a round
        without drafts) that a round just decided loses if all its drafts are rejected."""
        self.reserved += worst

    def settle(self, rounds: float, gained: float = 0.0, worst: float = 0.0) -> None:
        """Add a round that was read, took the time of `rounds` plain rounds, and got `gained` plain rounds ahead of plain decoding (below
        0: late). worst: the plain rounds that were reserved for it."""
        self.balance = min(self.balance + GROWTH * rounds + gained, CAP)
        self.reserved = max(0.0, self.reserved - worst)
