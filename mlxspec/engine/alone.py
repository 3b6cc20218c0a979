"""The decisions of an engine that follow from callers and from the clock: which requests begin and end, and how long a round took.

An engine that runs its model in one process makes them by itself (`Alone`). Several engines that run one model together must all make the
same decisions (`Ranks`, in ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mlxspec.drafters.drafts import Drafts
from mlxspec.engine.places import RequestPlaces
from mlxspec.engine.request import Ending
from mlxspec.engine.rounds import TimedRound


class Orders(NamedTuple):
    """The decisions about one step of an engine. endings: requests that end now. paused: numbers of the requests whose rows do not
    decode in this step. The other fields are for engines that share a model among ranks. submitted: arguments of
    `RequestFactory.new_request` for the requests that this engine does not have yet. seconds, is_warm: of the last round, as in
    TimedRound. ends: whether the ranks end."""

    endings: Sequence[Ending] = ()
    paused: frozenset[int] = frozenset()
    submitted: Sequence[dict[str, Any]] = ()
    seconds: float = 0.0
    is_warm: bool = True
    ends: bool = False


class Alone:
    """The source of the decisions of an engine whose model runs in this process alone. size: number of processes that run the model."""

    size = 1

    @property
    def leads(self) -> bool:
        """Return whether this process receives requests from callers and reads the clock. Among ranks only rank 0 does."""
        return True

    def begin(self, left: int) -> int:
        """Note that an engine has been made, and return the number of bytes that it may use for anything but weights. left: bytes that
        the weights leave of this process's memory budget."""
        return left

    def step(self, places: RequestPlaces, paused: frozenset[int], checksum: Callable[[], int]) -> Orders:
        """Return the decisions about the step that begins. places: the engine's requests. paused: numbers of the requests whose callers
        have not read the tokens that they already have. checksum: computes a number over the engine's texts, by which ranks find out
        whether their texts differ."""
        return Orders(places.out_of_time, paused)

    def learn(self, times: TimedRound, drafts: Drafts) -> None:
        """Teach the policies the time that the last round took."""
        times.teach(drafts)

    def fail(self, error: BaseException) -> None:
        """Note that a computation has failed, or that an error has ended a step early."""

    def end(self) -> None:
        """Note that the engine runs no more steps."""
