"""The decisions of an engine that follow from callers and from the clock: which requests come and end, and what a round took.

An engine that runs its model in one process makes them by itself (`Alone`). Several engines that run one model must make the same ones
(`Ranks`, in ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mlxspec.drafters.drafts import Drafts
from mlxspec.engine.places import RequestPlaces
from mlxspec.engine.request import Ending
from mlxspec.engine.rounds import TimedRound


class Orders(NamedTuple):
    """Decisions about one step. endings: requests that end now. paused: numbers of the requests whose rows do not decode. The others are
    for ranks. submitted: arguments of `RequestFactory.new_request` of requests that this engine does not have yet. seconds, is_warm: of the
    last round, as TimedRound has them. ends: the ranks end."""

    endings: Sequence[Ending] = ()
    paused: frozenset[int] = frozenset()
    submitted: Sequence[dict[str, Any]] = ()
    seconds: float = 0.0
    is_warm: bool = True
    ends: bool = False


class Alone:
    """The decisions of an engine whose model runs in this process alone. size: processes that run the model."""

    size = 1

    @property
    def leads(self) -> bool:
        """Whether this process has the callers and the clock: among ranks rank 0."""
        return True

    def begin(self, left: int) -> int:
        """Note that an engine has been made. left: bytes that its weights leave of its budget. Returns how many it may use."""
        return left

    def step(self, places: RequestPlaces, paused: frozenset[int], checksum: Callable[[], int]) -> Orders:
        """Return the orders of the step that begins. paused: as callers say. checksum: of the texts that are here."""
        return Orders(places.out_of_time, paused)

    def learn(self, times: TimedRound, drafts: Drafts) -> None:
        """Teach the policies what the last round took."""
        times.teach(drafts)

    def fail(self, error: BaseException) -> None:
        """Note that a computation has failed, or that a step was broken off by an error."""

    def end(self) -> None:
        """Note that the engine takes no more steps."""
