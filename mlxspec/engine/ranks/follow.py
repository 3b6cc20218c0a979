"""The main loop of a rank other than rank 0: it obeys orders until rank 0 ends. It has no callers, reads nothing and prints nothing but
why it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxspec.engine.ranks.line import ORDERS
from mlxspec.engine.ranks.orders import Orders
from mlxspec.engine.ranks.peers import Peers
from mlxspec.engine.ranks.rank_group import RankGroup
from mlxspec.errors import RankError

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine


def follow(engine: Engine, peers: Peers) -> None:
    """Until rank 0 orders the end. Raises RankError where the ranks cannot go on."""
    with peers.failing_together():
        _obey_all(engine, peers)


def _obey_all(engine: Engine, peers: Peers) -> None:
    line, group = peers.line, engine.group
    if not isinstance(group, RankGroup):
        raise RankError("This rank's engine has been dismissed.")
    expected = line.begun + 1
    while True:
        orders = Orders.decode(line.receive(ORDERS))
        if orders.number != expected:
            raise RankError(f"Rank {line.rank} got orders {orders.number} where {expected} were next.")
        expected += 1
        line.begun = orders.number
        if orders.checksum != group.checksum:
            raise RankError(
                f"Rank {line.rank} and rank 0 have computed different texts, so all ranks stop. Nothing that came in the last round "
                "can be trusted."
            )
        if orders.work == "end":
            return
        for given in orders.submitted:
            engine.enqueue(
                engine.factory.new_request(
                    given.prompt,
                    given.params,
                    given.spec,
                    marks=given.marks,
                    deadline=given.deadline,
                    client=given.client,
                    number=given.number,
                )
            )
        if orders.work == "step":
            group.orders = orders
            engine.step()
        else:
            engine.end(orders.endings)
