"""Policy fixed: every round drafts as long as the options allow, and the first drafter in the row's order that proposes anything wins."""

from __future__ import annotations

from mlxspec.drafters.base import Drafter
from mlxspec.drafters.chain import Proposal
from mlxspec.drafters.chain_row import ChainRow
from mlxspec.drafters.plan import RoundPlan
from mlxspec.policy.base import Policy


class Fixed(Policy):
    """Takes no account of costs."""

    def propose(self, plan: RoundPlan) -> dict[int, Proposal]:
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
        orders = {tuple(self.chain.drafters_of(r)) for r in plan.rows}
        if len(orders) != 1 or not all(r.is_blind for r in plan.rows):
            return None
        drafters = orders.pop()
        limits = {min(plan.longest, self.chain.limit(d, r)) for r in plan.rows for d in drafters}
        if len(drafters) != 1 or len(limits) != 1 or not 1 <= min(limits) <= min(plan.rooms.values()):
            return None
        asks = [plan.ask(r, min(limits)) for r in plan.rows]
        won = self.chain.ask(drafters[0], asks, plan)
        if 0 < len(won) < len(asks):
            # a draft was wrong, or empty: all rows are drafted for once their tokens are known
            self.chain.take_back(drafters[0])
            return None
        return won or None
