"""Policies. A policy decides for its rows who drafts, how much of a draft is verified, and when a plain round may run ahead. Policy fixed
is the simplest: every round drafts as long as the options allow, and the first drafter in the row's order that proposes anything wins.

A policy sees rows of a chain of drafters. For each row `begin` comes first and `close` last. In between, every round is

    propose | plain     drafts for the round; `plain` tells that the round needs none, so that it can be launched early
    take_up             the round is read next
    observe             the row's text goes on, drafted or not
    took                what the round cost

Invariants: whatever a policy proposes, the text stays that of plain decoding, because the target decides what is accepted. `observe` is
called once for every token of a row, prompt included, in order. A policy may delay telling its drafters, never skip it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlxspec.drafters.base import Drafter
from mlxspec.drafters.chain import Chain, Proposal
from mlxspec.drafters.chain_row import ChainRow
from mlxspec.drafters.plan import RoundPlan


class Policy:
    """Policy fixed, which others derive from: takes no account of costs. rows: chain rows, in the order of the round."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def begin(self, row: ChainRow) -> None:
        """A new row. Its drafters have begun it."""

    def observe(self, row: ChainRow, num_tokens: int) -> None:
        """The row's text has gone on by so many tokens, which wait for the row's drafters."""
        self.tell(row)

    def tell(self, row: ChainRow) -> None:
        """The row's drafters hear what waits for them."""
        self.chain.tell(row)

    def answers(self, row: ChainRow) -> None:
        """The row's answer begins: its prompt and first token have been observed."""

    def propose(self, plan: RoundPlan) -> dict[int, Proposal]:
        """What each row submits to the round, by the row's number; rows that submit nothing are absent."""
        won: dict[int, Proposal] = {}
        waiting: list[tuple[ChainRow, list[Drafter]]] = [
            (r, list(self.chain.drafters_of(r))) for r in plan.rows
        ]
        while queues := [(row, queue) for row, queue in waiting if queue and row.row not in won]:
            drafter = queues[0][1][0]
            asks = []
            for row, queue in queues:
                if queue[0] is not drafter:
                    continue
                queue.pop(0)
                limit = min(plan.rooms[row.row], self.chain.limit(drafter, row))
                if limit > 0:
                    asks.append(plan.ask(row, limit))
            if asks:
                won |= self.chain.ask(drafter, asks, plan)
        return won

    def propose_behind(self, plan: RoundPlan) -> dict[int, Proposal] | None:
        """`propose` behind tokens that only the device knows (`plan.unread`), with drafts that nobody needs to see; None where the host
        must read those tokens first."""
        orders = {tuple(self.chain.drafters_of(r)) for r in plan.rows}
        if len(orders) != 1:
            return None
        drafters = orders.pop()
        limits = {min(plan.longest, self.chain.limit(d, r)) for r in plan.rows for d in drafters}
        if len(drafters) != 1 or len(limits) != 1 or not 1 <= min(limits) <= min(plan.rooms.values()):
            return None
        asks = [plan.ask(r, min(limits)) for r in plan.rows]
        won = self.chain.ask(drafters[0], asks, plan)
        # where a draft was wrong, or empty, all rows are drafted for once their tokens are known
        return won if len(won) == len(asks) else None

    def take_up(self, rows: Mapping[int, object]) -> None:
        """A round's turn has come to be read. rows: by number, what a policy has put into the row's proposal (`Proposal.decided`). A round
        behind an unread one that is dropped is never taken up."""

    def plain(self, rows: Sequence[ChainRow], plan: Callable[[], RoundPlan]) -> bool:
        """Whether the next round of these rows is plain, so that it may be launched before this one is read. plan: that round, for a policy
        that has to look at the texts."""
        return False

    def took(
        self,
        rows: Sequence[ChainRow],
        num_rows: int,
        num_tokens: int,
        seconds: float,
        *,
        ahead: bool,
        is_warm: bool,
    ) -> None:
        """A round over these rows and others, `num_rows` in all, verified `num_tokens` tokens in so many seconds. ahead: it was launched
        before the round in front of it was read. is_warm: nothing was compiled in it."""

    def close(self, row: int) -> None:
        """The row is gone."""
