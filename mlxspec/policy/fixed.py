"""Policy fixed: every round drafts as long as the options allow, and the first drafter in the row's order that proposes anything wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxspec.drafters.base import Ask, Drafter, Unread
from mlxspec.drafters.chain import Proposal
from mlxspec.drafters.chain_row import ChainRow
from mlxspec.policy.base import Policy


class Fixed(Policy):
    """Looks at no costs."""

    def propose(
        self,
        rows: Sequence[ChainRow],
        rooms: Mapping[int, int],
        histories: Mapping[int, Sequence[int]],
        vocab_size: int,
    ) -> dict[int, Proposal]:
        won: dict[int, Proposal] = {}
        waiting: list[tuple[ChainRow, list[Drafter]]] = [(r, list(self.chain.drafters_of(r))) for r in rows]
        while queues := [(row, queue) for row, queue in waiting if queue and row.row not in won]:
            drafter = queues[0][1][0]
            asks = []
            for row, queue in queues:
                if queue[0] is not drafter:
                    continue
                queue.pop(0)
                limit = min(rooms[row.row], self.chain.limit(drafter, row))
                if limit > 0:
                    asks.append(Ask(row.row, histories[row.row], limit, row.sampler))
            if asks:
                won |= self.chain.ask(drafter, asks, vocab_size)
        return won

    def propose_behind(
        self,
        rows: Sequence[ChainRow],
        rooms: Mapping[int, int],
        histories: Mapping[int, Sequence[int]],
        unread: Unread,
        vocab_size: int,
        longest: int,
    ) -> dict[int, Proposal]:
        ways = {tuple(self.chain.drafters_of(r)) for r in rows}
        if len(ways) != 1 or not all(r.is_blind for r in rows):
            return {}
        drafters = ways.pop()
        limits = {min(longest, self.chain.limit(d, r)) for r in rows for d in drafters}
        if len(drafters) != 1 or len(limits) != 1 or not 1 <= min(limits) <= min(rooms.values()):
            return {}
        asks = [Ask(r.row, histories[r.row], min(limits), r.sampler) for r in rows]
        won = self.chain.ask(drafters[0], asks, vocab_size, unread)
        if 0 < len(won) < len(asks):
            # a draft was wrong, or empty: all rows are drafted for once their tokens are known
            self.chain.take_back(drafters[0])
            return {}
        return won
