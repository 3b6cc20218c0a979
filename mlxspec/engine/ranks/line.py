"""TCP connections between rank 0 and the other ranks, beside those of MLX, and the detection of a rank that has ended or hangs.

Each other rank has one TCP connection with rank 0. Everybody says every second that it is there, how far it has come, and whether it
compiles. A rank is given up
    that closes its connection without having said goodbye: it has ended, or its link is down,
    that is not heard of for SILENT seconds: its machine or its link is down, or the process is stopped,
    that has not begun orders which were sent SILENT seconds ago, or stands still for STILL seconds within a step while another rank is
    ahead: it hangs. Where all stand still for STUCK seconds they wait for each other.
A rank that compiles does not stand still. On a machine that is too busy the limits grow: each is at least PATIENCE times the longest wait
of its kind that has ended by itself.
The first rank that gives another one up tells all others why. Then nothing can be received any more: `fault` is the reason, and whoever
asked for it (`on_fault`) is called in a thread of this module, because the thread that computes may wait in MLX for the rank that is gone.

Frames: four bytes with the length of what follows, one byte with its kind, the payload. Knows bytes and clocks; knows no engine.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from mlxspec.errors import RankError

SILENT = 5.0  # seconds
STILL = 6.0  # seconds
STUCK = 120.0  # seconds: no forward takes longer
PATIENCE = 2.0
_BEAT = 1.0  # seconds between two signs of life
_TELL_SECONDS = 0.5  # in which a rank that does not read is told why
_EXPLAIN_SECONDS = 2.0  # in which the reason of a failed computation may come
_LONGEST = 256 << 20  # bytes of a frame
_HEAD = struct.Struct(">IB")
_STATE = struct.Struct(">qq?")
BEAT, ORDERS, VALUE, CLOCK, FAULT, BYE = range(6)


def _nothing() -> int:
    return 0


def _never() -> bool:
    return False


class _Limit:
    """Seconds that a wait may take: `least`, or PATIENCE times the longest that has ended by itself."""

    def __init__(self, least: float) -> None:
        self._least, self._longest, self._last = least, 0.0, 0.0

    def is_over(self, waited: float) -> bool:
        """Whether the wait that goes on has taken too long. Called often: a wait shorter than the one before is the next one."""
        if waited < self._last:
            self._longest = max(self._longest, self._last)
        self._last = waited
        return waited > self.seconds

    @property
    def seconds(self) -> float:
        return max(self._least, PATIENCE * self._longest)

    def __str__(self) -> str:
        return f"{self.seconds:.3g} seconds"


class _Peer:
    """One connection. begun, progress: what the other side last said of itself; heard, moved: when it said anything, and when these
    changed or it compiled. silent, late, still: how long it may take to be heard of, to begin, and to move on."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.lock = threading.Lock()
        self.inbox = {kind: SimpleQueue[bytes | None]() for kind in (ORDERS, VALUE, CLOCK)}
        self.heard = self.moved = time.monotonic()
        self.begun, self.progress = -1, 0
        self.has_left = False
        self.silent, self.late, self.still = _Limit(SILENT), _Limit(SILENT), _Limit(STILL)

    def send(self, kind: int, payload: bytes) -> None:
        with self.lock:
            self.connection.sendall(_HEAD.pack(len(payload) + 1, kind) + payload)


class Line:
    """One rank's end. begun: number of the last orders that this rank has begun."""

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, socket.socket],
        compiles: Callable[[], bool] = _never,
    ) -> None:
        """connections: by the rank at the other end. compiles: whether this process waits for a compiler; any thread may ask."""
        self.rank, self.size, self._compiles = rank, size, compiles
        self.begun = -1
        self._done, self._count = 0, _nothing
        self._moved = time.monotonic()  # when that was seen to change
        self.fault: RankError | None = None
        self.was_told = False  # the fault is what another rank has said
        self._ordered = -1, 0.0  # number of the last orders that were sent, and when
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[RankError], None]] = []
        self._is_closed = threading.Event()
        self._peers = {r: _Peer(r, c) for r, c in connections.items()}
        for peer in self._peers.values():
            peer.connection.settimeout(None)
            with suppress(OSError):  # small messages go out at once
                peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._listen, args=(peer,), name="mlxspec-line", daemon=True).start()
        threading.Thread(target=self._beat, name="mlxspec-line-beat", daemon=True).start()
        self._watcher = threading.Thread(target=self._watch, name="mlxspec-line-watch", daemon=True)
        self._watcher.start()

    @property
    def progress(self) -> int:
        """Counts what this rank has done within steps; equal on ranks that have done the same."""
        return self._done + self._count()

    @contextmanager
    def counting(self, count: Callable[[], int]) -> Iterator[None]:
        """Counts what `count` grows by inside as progress."""
        before = count()
        self._count = lambda: count() - before
        try:
            yield
        finally:
            self._done, self._count = self.progress, _nothing

    # --- for the thread that computes

    def send(self, kind: int, payload: bytes) -> None:
        """To every rank at the other end. Raises RankError where one of them is gone."""
        self.check()
        if kind == ORDERS:
            self._ordered = self._ordered[0] + 1, time.monotonic()
        for peer in self._peers.values():
            try:
                peer.send(kind, payload)
            except OSError:
                self.fail(f"Rank {peer.rank} has ended, or the link to it is lost.", peer)
        self.check()

    def receive(self, kind: int, rank: int = 0) -> bytes:
        """The next of that kind from a rank. Waits for it; raises RankError once the ranks cannot go on."""
        self.check()
        found = self._peers[rank].inbox[kind].get()
        if found is None:
            self.check()
            raise RankError(f"Rank {rank} has ended.")
        return found

    def check(self) -> None:
        """Raises RankError once the ranks cannot go on."""
        if self.fault is not None:
            raise self.fault

    def fail(self, why: str, about: _Peer | None = None, *, is_own: bool = False) -> None:
        """The ranks cannot go on; everybody is told why. The first reason counts. about: the rank that is to blame. is_own: this one is,
        and ends by itself."""
        with self._lock:
            if self.fault is not None or self._is_closed.is_set():
                return
            self.fault = RankError(why)
            callbacks = [] if is_own else list(self._callbacks)
        telling = [
            threading.Thread(target=self._say, args=(peer, why), daemon=True)
            for peer in self._peers.values()
            if peer is not about
        ]
        for thread in telling:
            thread.start()
        for thread in telling:
            thread.join(_TELL_SECONDS)
        for peer in self._peers.values():
            for inbox in peer.inbox.values():
                inbox.put(None)
        for callback in callbacks:
            callback(self.fault)

    def is_left_to_others(self, error: BaseException) -> bool:
        """Whether `error` is the reason why the ranks cannot go on, and somebody who was told of it ends the process."""
        return error is self.fault and bool(self._callbacks)

    def on_fault(self, callback: Callable[[RankError], None]) -> None:
        """Is called with the reason, in another thread, once the ranks cannot go on; at once where that is so already."""
        with self._lock:
            fault = self.fault
            if fault is None:
                self._callbacks.append(callback)
                return
        callback(fault)

    def explain(self) -> RankError | None:
        """Tells what became of the ranks, where a computation has failed: the reason may come a moment later."""
        until = time.monotonic() + _EXPLAIN_SECONDS
        while self.fault is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.fault

    def close(self) -> None:
        """This rank ends as it should: the others are told, and nothing of theirs is a fault any more."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        for peer in self._peers.values():
            if self.fault is None:
                with suppress(OSError):
                    peer.send(BYE, b"")
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
            for inbox in peer.inbox.values():
                inbox.put(None)

    def wait_left(self, seconds: float) -> bool:
        """Wait until every other rank has ended; whether all have."""
        until = time.monotonic() + seconds
        while not all(p.has_left for p in self._peers.values()) and time.monotonic() < until:
            time.sleep(0.01)
        return all(p.has_left for p in self._peers.values())

    # --- the threads

    def _say(self, peer: _Peer, why: str) -> None:
        with suppress(OSError):
            peer.send(FAULT, why.encode())

    def _listen(self, peer: _Peer) -> None:
        try:
            with peer.connection.makefile("rb") as stream:
                while True:
                    head = stream.read(_HEAD.size)
                    if len(head) < _HEAD.size:
                        break
                    length, kind = _HEAD.unpack(head)
                    if not 1 <= length <= _LONGEST or kind > BYE:
                        self.fail(f"Rank {peer.rank} sent what is no message of ours.", peer)
                        return
                    payload = stream.read(length - 1)
                    if len(payload) < length - 1:
                        break
                    self._take(peer, kind, payload)
        except OSError:
            pass
        was_told, peer.has_left = peer.has_left, True
        if not was_told:
            self.fail(f"Rank {peer.rank} has ended, or the link to it is lost.", peer)

    def _take(self, peer: _Peer, kind: int, payload: bytes) -> None:
        peer.heard = time.monotonic()
        if kind == BEAT:
            begun, progress, compiles = _STATE.unpack(payload)
            if compiles or (begun, progress) != (peer.begun, peer.progress):
                peer.begun, peer.progress, peer.moved = begun, progress, peer.heard
        elif kind == FAULT:
            self.was_told = self.fault is None
            self.fail(payload.decode(errors="replace"), peer)
        elif kind == BYE:
            peer.has_left = True
            for inbox in peer.inbox.values():
                inbox.put(None)
        else:
            peer.inbox[kind].put(payload)

    def _beat(self) -> None:
        while not self._is_closed.wait(_BEAT):
            state = _STATE.pack(self.begun, self.progress, self._compiles())
            for peer in self._peers.values():
                if not peer.has_left:
                    with suppress(OSError):  # the listener sees it too
                        peer.send(BEAT, state)

    def _watch(self) -> None:
        last, looked = self.progress, time.monotonic()
        while not self._is_closed.wait(_BEAT / 2):
            now = time.monotonic()
            was_paused, looked = now - looked > 2 * _BEAT, now
            if self.progress != last or self._compiles():
                last, self._moved = self.progress, now
            if was_paused:  # by a busy machine: what others have said is heard first
                continue
            for peer in self._peers.values():
                if peer.has_left:
                    continue
                why = self._wrong(peer, now)
                if why is not None:
                    self.fail(why)

    def _wrong(self, peer: _Peer, now: float) -> str | None:
        """The fault of a rank, None where there is none."""
        rank = peer.rank
        if peer.silent.is_over(now - peer.heard):
            return (
                f"Rank {rank} has not been heard of for {peer.silent}: it hangs, or the link to it is lost."
            )
        if self.rank:
            return None
        number, sent = self._ordered
        waited = now - max(sent, peer.moved) if peer.begun < number else 0.0
        if peer.late.is_over(waited):
            return f"Rank {rank} hangs: it has not begun what was ordered {peer.late} ago."
        still = now - max(peer.moved, self._moved) if peer.begun == self.begun else 0.0
        is_over = peer.still.is_over(still if peer.progress != self.progress else 0.0)
        if is_over and peer.progress < self.progress:
            return f"Rank {rank} hangs: it has stood still for {peer.still}, behind rank 0."
        if is_over:
            return f"Rank 0 has stood still for {peer.still}, behind rank {rank}: it hangs, or they do not compute the same."
        if self._count is not _nothing and still > STUCK:
            return (
                f"The ranks have stood still for {STUCK:g} seconds within a step: they wait for each other."
            )
        return None
