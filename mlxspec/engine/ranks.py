"""Engines in several processes, the ranks, that run one model divided among them, over mx.distributed alone.

Every rank runs the same engine on the same requests. What an engine does follows from its requests and from what it has computed, which is
the same on every rank, except for callers and clocks. Rank 0 alone has callers and reads clocks. At the beginning of each step, before
anything of it is computed, it tells the others its orders: new requests, requests that end, rows that rest, and the time of the last round.
With them comes a checksum of each rank's texts; where they differ all ranks stop. A rank that ends takes the others with it: MLX's sums
fail then.

The ranks trust each other: orders are pickled, as mlx-lm's server does it.
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
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.drafters.drafts import Drafts
from mlxspec.engine.request import Ending, Request
from mlxspec.engine.rounds import TimedRound
from mlxspec.errors import CacheError, MlxspecError, RankError
from mlxspec.platform.host import numbers
from mlxspec.version import __version__

_INLINE = 500  # bytes of orders that go with the first message
_SAMPLED = 1 << 20  # bytes


class Orders(NamedTuple):
    """Decisions of rank 0 by its callers and clocks. submitted: arguments of `RequestFactory.new_request`. resting: requests whose
    rows rest. seconds, is_warm: of the last round, as TimedRound has them. ends: the ranks end."""

    submitted: Sequence[dict[str, Any]] = ()
    endings: Sequence[Ending] = ()
    resting: frozenset[int] = frozenset()
    seconds: float = 0.0
    is_warm: bool = True
    ends: bool = False


class RanksEnd(Exception):
    """Rank 0 has ordered the end."""


class Ranks:
    """This process among the ranks. on_fault: is told why the ranks cannot go on. is_between: no step is on its way, so that the end may be
    ordered."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.on_fault: Callable[[RankError], None] | None = None
        self.is_between, self.has_ended, self.has_engine = True, False, False
        self._submitted: list[dict[str, Any]] = []
        self._endings: list[Ending] = []
        self._unlearned: tuple[TimedRound, Drafts] | None = None  # the last round that was read

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.group.rank() == 0

    # --- all ranks call these, in the same order

    def share(self, value: Any = None, number: int = 0) -> tuple[Any, list[int]]:
        """Rank 0's value, anything that pickle takes, and every rank's number. Raises RankError where a rank is gone."""
        data = pickle.dumps(value) if self.leads else b""
        head = np.zeros(self.group.size() + 1, np.int64)
        head[-1], head[self.group.rank()] = len(data), number
        message = self._sum(head.tobytes() + (data if len(data) <= _INLINE else b"").ljust(_INLINE, b"\0"))
        *all_numbers, size = np.frombuffer(message[: head.nbytes], np.int64).tolist()
        data = message[head.nbytes :] if size <= _INLINE else self._sum(data.ljust(size, b"\0"))
        return pickle.loads(data), all_numbers

    def _sum(self, raw: bytes) -> bytes:
        """The sum of all ranks' bytes: one sends some where the others send zeros."""
        total = mx.distributed.all_sum(mx.array(np.frombuffer(raw, np.uint8)), group=self.group)
        try:
            return numbers(total).tobytes()
        except RuntimeError as error:
            raise self._because_of(error) from error

    def first(self, value: Any) -> Any:
        """Rank 0's value."""
        return self.share(value)[0]

    def least(self, value: int) -> int:
        """The least of the ranks' numbers."""
        return min(self.share(number=value)[1])

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raises RankError, on every rank alike, where one of a rank's facts is not rank 0's."""
        told = {name: repr(value) for name, value in facts.items()}
        first = self.first(told)
        names = sorted({*first, *told})
        odd = next((i + 1 for i, name in enumerate(names) if first.get(name) != told.get(name)), 0)
        for rank, place in enumerate(self.share(number=odd)[1]):
            if place:
                name = names[place - 1] if place <= len(names) else "configuration"
                raise self.fault(f"Rank {rank} has another {name} than rank 0; every rank needs the same.")

    def step(self, news: Orders, checksum: int) -> Orders:
        """A step begins, and nothing of it has been computed. Returns rank 0's orders; `news` is a part of them. The
        last round's time is learned. Raises RanksEnd, and RankError where the ranks cannot go on."""
        own = None
        unlearned, self._unlearned = self._unlearned, None
        if self.leads:
            own = news._replace(submitted=self._submitted, endings=(*self._endings, *news.endings))
            if unlearned is not None:
                own = own._replace(seconds=unlearned[0].seconds, is_warm=unlearned[0].is_warm)
            self._submitted, self._endings = [], []
        orders, sums = self.share(own, checksum)
        if orders.ends:
            self.has_ended = True
            raise RanksEnd
        if any(each != sums[0] for each in sums):
            raise self.fault(
                "The ranks have computed different texts, so all of them stop. Nothing of the last round can be trusted."
            )
        self.is_between = False
        if unlearned is not None:
            times, drafts = unlearned
            replace(times, seconds=orders.seconds, is_warm=orders.is_warm).teach(drafts)
        return orders

    # --- what an engine says

    def submitted(self, request: Request, deadline: float | None) -> None:
        """A request is queued on this rank. deadline: in seconds; only rank 0 looks at its clock."""
        if self.leads:
            self._submitted.append(
                {
                    "prompt": request.prompt,
                    "params": replace(request.params, seed=request.sampler.seed),
                    "spec": request.spec,
                    "marks": request.marks,
                    "deadline": deadline,
                    "client": request.client,
                    "number": request.number,
                }
            )

    def ended(self, ending: Ending) -> None:
        """A request has ended by what a caller did; its row leaves with the next step, on all ranks."""
        self._endings.append(ending)

    def learn(self, times: TimedRound, drafts: Drafts) -> None:
        """A round has been read. Its time is learned with the next orders."""
        self._unlearned = times, drafts

    def judge(self, error: BaseException) -> None:
        """A computation failed. Raises RankError unless every rank has met the same error."""
        if isinstance(error, RankError):
            raise error
        if not isinstance(error, MlxspecError) or isinstance(error, CacheError):
            raise self._because_of(error) from error

    def _because_of(self, error: BaseException) -> RankError:
        """MLX says "[ring] connection to a peer was lost" where another rank has ended."""
        said = str(error).strip().rstrip(".") or type(error).__name__
        return self.fault(f"Rank {self.group.rank()} cannot go on: {said}.")

    def fault(self, why: str) -> RankError:
        """The ranks cannot go on."""
        error = RankError(why)
        self.has_ended = True
        if self.on_fault is not None:
            self.on_fault(error)
        return error

    def end(self) -> None:
        """Rank 0 orders the end, if nothing has ended the ranks and no step was broken off."""
        if self.leads and self.has_engine and self.is_between and not self.has_ended:
            self.has_ended = True
            with suppress(RankError):
                self.share(Orders(ends=True))


def versions() -> dict[str, str]:
    """The versions of what has a say in the text."""
    found = {"mlxspec": __version__, **{name: version(name) for name in ("mlx", "tokenizers")}}
    return {f"version of {name}": each for name, each in found.items()}


def files_of(folders: Sequence[Path]) -> dict[str, tuple[int, str]]:
    """Size and digest of each file of model folders; beginning and end of a large one."""
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
    """The main loop of a rank other than rank 0: the steps of its engine, until rank 0 orders the end. Raises RankError where the ranks
    cannot go on."""
    with suppress(RanksEnd):
        while True:
            step()


def join() -> Ranks | None:
    """Find the other ranks that mlx.launch has started; None where this process is the only one. MLX waits for ranks that start late.
    Raises RankError."""
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
