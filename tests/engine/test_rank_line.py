"""The connections between ranks: messages arrive in order, and a rank that is gone is noticed and told of."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from mlxspec.engine.ranks import line as lines
from mlxspec.engine.ranks.lead import Leader
from mlxspec.engine.ranks.line import CLOCK, ORDERS, VALUE, Line
from mlxspec.engine.ranks.orders import Orders
from mlxspec.engine.ranks.peers import Peers
from mlxspec.errors import RankError
from mlxspec.models.ranks import Ranks

WAIT = 5.0


class Ends:
    """Lines of three ranks in one process, and what each was told of a fault."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.sockets = {0: [a for a, _ in pairs], 1: [pairs[0][1]], 2: [pairs[1][1]]}
        self.first = Line(0, 3, {1: pairs[0][0], 2: pairs[1][0]})
        self.others = [Line(r, 3, {0: self.sockets[r][0]}) for r in (1, 2)]
        self.lines = [self.first, *self.others]
        self.told: dict[int, str] = {}
        self._all = threading.Condition()
        for each in self.lines:
            each.on_fault(lambda why, rank=each.rank: self._tell(rank, str(why)))  # type: ignore[misc]

    def _tell(self, rank: int, why: str) -> None:
        with self._all:
            self.told[rank] = why
            self._all.notify_all()

    def wait(self, *ranks: int) -> None:
        with self._all:
            assert self._all.wait_for(lambda: set(ranks) <= set(self.told), WAIT), self.told


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(lines, "_BEAT", 0.05)
    monkeypatch.setattr(lines, "SILENT", 0.4)
    monkeypatch.setattr(lines, "STILL", 0.5)
    found = Ends()
    yield found
    for each in found.lines:
        each.close()
    for sockets in found.sockets.values():
        for each_socket in sockets:
            each_socket.close()


def test_messages_arrive_in_order_by_kind(ends: Ends) -> None:
    for i in range(50):
        ends.first.send(ORDERS, b"o%d" % i)
        ends.first.send(CLOCK, b"c%d" % i)
    ends.others[1].send(VALUE, b"x" * 300_000)
    for other in ends.others:
        assert [other.receive(CLOCK) for _ in range(50)] == [b"c%d" % i for i in range(50)]
        assert [other.receive(ORDERS) for _ in range(50)] == [b"o%d" % i for i in range(50)]
    assert ends.first.receive(VALUE, 2) == b"x" * 300_000
    assert not ends.told


def test_a_good_end_is_no_fault(ends: Ends) -> None:
    for other in ends.others:
        other.close()
    assert ends.first.wait_left(WAIT)
    time.sleep(0.6)
    assert not ends.told
    with pytest.raises(RankError, match="Rank 1 has ended"):
        ends.first.receive(VALUE, 1)


def test_a_rank_that_ends_is_told_to_all(ends: Ends) -> None:
    """Also to the rank that has no connection with it, and to whoever waits."""
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            ends.others[1].receive(ORDERS)
        except RankError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    ends.sockets[1][0].shutdown(socket.SHUT_RDWR)
    ends.wait(0, 2)
    waiting.join(WAIT)
    assert ends.told[0] == ends.told[2] == "Rank 1 has ended, or the link to it is lost."
    assert [str(e) for e in caught] == [ends.told[2]]
    assert ends.others[1].was_told
    assert not ends.first.was_told
    with pytest.raises(RankError, match="Rank 1 has ended"):
        ends.first.send(ORDERS, b"")


def test_a_silent_rank_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = ends.others[0]._peers[0]
    monkeypatch.setattr(peer, "send", lambda kind, payload: None)
    ends.wait(0, 2)
    assert "Rank 1 has not been heard of" in ends.told[0]
    assert ends.told[2] == ends.told[0]


def test_a_rank_that_begins_no_orders_hangs(ends: Ends) -> None:
    """Its signs of life come all the same."""
    leader = Leader(ends.first)
    leader.order("step", 0)
    ends.others[1].begun = 0
    ends.wait(0)
    assert "Rank 1 hangs: it has not begun what was ordered" in ends.told[0]


def test_a_rank_that_stands_still_behind_rank_0_hangs(ends: Ends) -> None:
    leader = Leader(ends.first)
    leader.order("step", 0)
    for other in ends.others:
        other.begun = 0
    done = {0: 1, 1: 1, 2: 0}
    with ExitStack() as stack:
        counts = dict.fromkeys(done, 0)
        for each in ends.lines:
            stack.enter_context(each.counting(partial(counts.__getitem__, each.rank)))
        counts.update(done)
        ends.wait(0)
    assert "Rank 2 hangs: it has stood still" in ends.told[0]


def test_a_rank_that_is_ahead_of_rank_0_which_stands_still(ends: Ends) -> None:
    """As where ranks have decided differently: each waits for another sum."""
    Leader(ends.first).order("step", 0)
    for other in ends.others:
        other.begun = 0
    ends.others[0]._done = 3
    ends.wait(0, 1, 2)
    assert "Rank 0 has stood still" in ends.told[0]
    assert ends.told[0] == ends.told[1] == ends.told[2]


def test_ranks_that_wait_for_each_other(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "STUCK", 0.6)
    Leader(ends.first).order("step", 0)
    for other in ends.others:
        other.begun = 0
    with ends.first.counting(lambda: 0):
        ends.wait(0)
    assert "they wait for each other" in ends.told[0]


def test_ranks_that_work_are_left_alone(ends: Ends) -> None:
    leader = Leader(ends.first)
    for number in range(6):
        leader.order("step", 7 * number)
        for other in ends.others:
            found = Orders.decode(other.receive(ORDERS))
            assert (found.number, found.checksum) == (number, 7 * number)
            other.begun = number
            other._done += 1
        ends.first._done += 1
        time.sleep(0.15)
    time.sleep(0.6)
    assert not ends.told


def test_what_is_no_message_of_ours(ends: Ends) -> None:
    ends.sockets[1][0].sendall(b"\x00\x00\x00\x01\xff")
    ends.wait(0, 2)
    assert ends.told[0] == "Rank 1 sent what is no message of ours."


def test_facts_are_compared_on_every_rank(ends: Ends) -> None:
    peers = [Peers(Ranks(rank=each.rank, size=3), each) for each in ends.lines]
    found: dict[int, object] = {}

    def work(rank: int) -> None:
        found[rank] = peers[rank].least(10 - rank)
        peers[rank].compare("version", {"mlx": "1"})
        try:
            peers[rank].compare("file", {"a": "same", "b": "other" if rank == 2 else "same"})
        except RankError as error:
            found[rank] = found[rank], str(error)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    sentence = (
        "Rank 2 has another file than rank 0: b is other there and same on rank 0; every rank needs the same."
    )
    assert found == dict.fromkeys(range(3), (8, sentence))


def test_a_rank_that_fails_tells_why(ends: Ends) -> None:
    peers = Peers(Ranks(rank=1, size=3), ends.others[0])
    with pytest.raises(ValueError, match="disk"), peers.failing_together():
        raise ValueError("the disk is full.")
    ends.wait(0, 2)
    assert ends.told[0] == ends.told[2] == "Rank 1 cannot go on: the disk is full."
    assert 1 not in ends.told  # it says so itself


# ---- a machine that is too busy


def test_a_rank_that_compiles_does_not_stand_still(ends: Ends) -> None:
    Leader(ends.first).order("step", 0)
    for other in ends.others:
        other.begun = 0
    compiling = [True]
    ends.others[1]._compiles = lambda: compiling[0]
    with ExitStack() as stack:
        counts = dict.fromkeys(range(3), 0)
        for each in ends.lines:
            stack.enter_context(each.counting(partial(counts.__getitem__, each.rank)))
        counts.update({0: 1, 1: 1})
        time.sleep(1.5)  # three times as long as a rank may stand still
        assert not ends.told
        compiling[0] = False
        ends.wait(0)
    assert "Rank 2 hangs: it has stood still" in ends.told[0]


def test_a_rank_that_compiles_need_not_begin_the_next_orders(ends: Ends) -> None:
    ends.others[1]._compiles = lambda: True
    Leader(ends.first).order("step", 0)
    ends.others[0].begun = 0
    time.sleep(1.2)
    assert not ends.told


def test_a_limit_grows_to_twice_what_has_ended_by_itself() -> None:
    limit = lines._Limit(5.0)
    assert not any(limit.is_over(w) for w in (0.0, 2.0, 4.9))
    assert str(limit) == "5 seconds"
    assert not any(limit.is_over(w) for w in (0.5, 7.0, 9.7, 0.2))
    assert str(limit) == "19.4 seconds"
    assert limit.is_over(19.5)
    assert lines._Limit(5.0).is_over(5.1)
