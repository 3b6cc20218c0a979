"""Runs one model that is divided among several processes, the ranks, over mx.distributed alone.

Every rank runs the same engine on the same requests. What an engine does follows from its requests and from what it has computed, which is
the same on every rank, except for callers and clocks. Rank 0 alone has callers and reads clocks. At the beginning of each step, before
anything of it is computed, rank 0 sends its orders to the others: new requests, requests that end, rows that pause, and the time of the
last round. With them each rank sends a checksum of its texts; where checksums differ all ranks stop. A rank that ends takes the others with
it, because MLX's sums fail then.

An engine calls the five methods that `Alone` (alone.py) has. The ranks trust each other: orders are pickled, as in mlx-lm's server.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.drafters.drafts import Drafts
from mlxspec.engine.alone import Alone, Orders
from mlxspec.engine.places import RequestPlaces
from mlxspec.engine.request import Ending
from mlxspec.engine.rounds import TimedRound
from mlxspec.errors import CacheError, MlxspecError, RankError
from mlxspec.platform.host import numbers
from mlxspec.version import __version__

_INLINE = 500  # bytes of orders that go with the first message
_SAMPLED = 1 << 20  # bytes


class RanksEnd(Exception):
    """The exception that ends a rank's main loop after rank 0's order to end. It is no error."""


class Ranks(Alone):
    """This process as one of the ranks that run a model together. on_fault: called with the error because of which the ranks cannot go
    on. has_ended: whether no step may follow. has_engine: whether the other ranks wait for orders."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.size = group.size()
        self.on_fault: Callable[[RankError], None] | None = None
        self.has_ended, self.has_engine = False, False
        self._known = frozenset[int]()  # numbers of the requests that the other ranks have
        self._unlearned: tuple[TimedRound, Drafts] | None = None  # the last round that was read

    @property
    def leads(self) -> bool:
        return self.group.rank() == 0

    # --- all ranks call these, in the same order

    def share(self, value: Any = None, number: int = 0) -> tuple[Any, list[int]]:
        """Return rank 0's value, which pickle must accept, and every rank's number. All ranks call this at the same time. Raises
        RankError where a rank has ended."""
        data = pickle.dumps(value) if self.leads else b""
        head = np.zeros(self.group.size() + 1, np.int64)
        head[-1], head[self.group.rank()] = len(data), number
        message = self._sum(head.tobytes() + (data if len(data) <= _INLINE else b"").ljust(_INLINE, b"\0"))
        *all_numbers, size = np.frombuffer(message[: head.nbytes], np.int64).tolist()
        data = message[head.nbytes :] if size <= _INLINE else self._sum(data.ljust(size, b"\0"))
        return pickle.loads(data), all_numbers

    def _sum(self, raw: bytes) -> bytes:
        """Return the elementwise sum of all ranks' bytes. Where only one rank's are not zero, the sum is that rank's bytes."""
        total = mx.distributed.all_sum(mx.array(np.frombuffer(raw, np.uint8)), group=self.group)
        try:
            return numbers(total).tobytes()
        except RuntimeError as error:
            raise self._because_of(error) from error

    def first(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return self.share(value)[0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Check that every rank has the same facts as rank 0. Raises RankError, on every rank alike, that names the first fact that
        differs."""
        told = {name: repr(value) for name, value in facts.items()}
        first = self.first(told)
        names = sorted({*first, *told})
        odd = next((i + 1 for i, name in enumerate(names) if first.get(name) != told.get(name)), 0)
        for rank, place in enumerate(self.share(number=odd)[1]):
            if place:
                name = names[place - 1] if place <= len(names) else "configuration"
                raise self.fault(f"Rank {rank} has another {name} than rank 0; every rank needs the same.")

    # --- what an engine calls

    def begin(self, left: int) -> int:
        self.has_engine, self.has_ended, self._known = True, False, frozenset()
        return min(self.share(number=left)[1])

    def step(self, places: RequestPlaces, paused: frozenset[int], checksum: Callable[[], int]) -> Orders:
        """Return rank 0's decisions about the step that begins, and teach the policies the last round's time as rank 0 measured it.
        Arguments are those of `Alone.step`. Raises RanksEnd where rank 0 ends the ranks, and RankError where they cannot go on, for
        example because their texts differ."""
        own = self._orders(places, paused) if self.leads else None
        orders, sums = self.share(own, checksum())
        if orders.ends:
            self.has_ended = True
            raise RanksEnd
        if any(each != sums[0] for each in sums):
            raise self.fault(
                "The ranks have computed different texts, so all of them stop. Nothing of the last round can be trusted."
            )
        unlearned, self._unlearned = self._unlearned, None
        if unlearned is not None:
            times, drafts = unlearned
            replace(times, seconds=orders.seconds, is_warm=orders.is_warm).teach(drafts)
        return orders._replace(submitted=()) if self.leads else orders

    def _orders(self, places: RequestPlaces, paused: frozenset[int]) -> Orders:
        """Return the decisions that rank 0 sends: new requests, and the endings of requests that a caller or the clock has ended."""
        here = [*places.gone, *places.requests]
        ended = [r for r in here if r.finish_reason is not None]
        new = [r for r in places.queue if r.finish_reason is None and r.number not in self._known]
        self._known = frozenset(r.number for r in here)
        orders = Orders(
            submitted=[
                {
                    "prompt": r.prompt,
                    "params": replace(r.params, seed=r.sampler.seed),
                    "spec": r.spec,
                    "marks": r.marks,
                    "client": r.client,
                    "number": r.number,
                }
                for r in new
            ],
            endings=(*(Ending(number=r.number, error=r.error) for r in ended), *places.out_of_time),
            paused=paused,
        )
        if self._unlearned is not None:
            orders = orders._replace(seconds=self._unlearned[0].seconds, is_warm=self._unlearned[0].is_warm)
        return orders

    def learn(self, times: TimedRound, drafts: Drafts) -> None:
        """Keep a round's time until the next step, in which the policies learn it with rank 0's seconds."""
        self._unlearned = times, drafts

    def fail(self, error: BaseException) -> None:
        """Raise RankError unless the error is one that every rank meets alike. RanksEnd is ignored."""
        if isinstance(error, RanksEnd):
            return
        if isinstance(error, RankError):
            raise error
        if not isinstance(error, MlxspecError) or isinstance(error, CacheError):
            raise self._because_of(error) from error

    def end(self) -> None:
        """Send the order to end to the other ranks. Does nothing on other ranks than 0, without an engine, and after the ranks have
        ended."""
        if self.leads and self.has_engine and not self.has_ended:
            self.has_ended = True
            with suppress(RankError):
                self.share(Orders(ends=True))

    def _because_of(self, error: BaseException) -> RankError:
        """Return a RankError for a computation that failed on this rank. Where another rank has ended, MLX's message is "[ring]
        connection to a peer was lost"."""
        said = str(error).strip().rstrip(".") or type(error).__name__
        return self.fault(f"Rank {self.group.rank()} cannot go on: {said}.")

    def fault(self, why: str) -> RankError:
        """Return a RankError with this sentence, note that the ranks have ended, and call on_fault with the error."""
        error = RankError(why)
        self.has_ended = True
        if self.on_fault is not None:
            self.on_fault(error)
        return error


def versions() -> dict[str, str]:
    """Return the versions of the packages that can change the text, by name."""
    found = {"mlxspec": __version__, **{name: version(name) for name in ("mlx", "tokenizers")}}
    return {f"version of {name}": each for name, each in found.items()}


def files_of(folders: Sequence[Path]) -> dict[str, tuple[int, str]]:
    """Return the size and a digest of each file in these model folders, by name. The digest of a large file covers only its beginning
    and end."""
    found = {}
    for path in sorted(p for folder in folders for p in folder.iterdir() if p.is_file()):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = sha256(file.read(_SAMPLED))
            file.seek(max(0, size - _SAMPLED))
            digest.update(file.read())
        found[f"file {path.name}"] = size, digest.hexdigest()
    return found


def follow(step: Callable[[], object]) -> None:
    """Run the main loop of a rank other than rank 0: call `step`, which runs one step of its engine, until rank 0 orders the end. Raises
    RankError where the ranks cannot go on."""
    with suppress(RanksEnd):
        while True:
            step()


def join() -> Ranks | None:
    """Return the ranks that mlx.launch has started; None where this process is the only one. Waits for ranks that start late. Raises
    RankError where they cannot be joined."""
    if "MLX_RANK" not in os.environ:
        return None
    hosts = os.environ.get("MLX_HOSTFILE")
    with suppress(OSError):
        if hosts is not None and not Path(hosts).read_text(encoding="utf-8").strip():
            return None  # mlx.launch -n 1 writes an empty file, which MLX cannot read
    try:
        group = mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        raise RankError(f"The ranks cannot be joined: {str(error).strip().rstrip('.')}.") from error
    return Ranks(group) if group.size() > 1 else None
