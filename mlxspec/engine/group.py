"""The interface by which an engine talks to the other processes of a model that is divided among ranks. The class here is for an engine
that runs alone: it sends nothing.

engine/ranks/rank_group.py is the other implementation. An engine calls both alike and never asks which one it has.

Invariants that the engine keeps:
1. `decide` is the first call of a step. Nothing of the step is computed before it, and the step goes by what it returns.
2. What callers decide between two steps is told: a request that is queued (`submitted`), one that ends (`postpones`). Where `postpones`
   says so, its row leaves in the next step, on all ranks, and not now.
3. Clocks are read by `decide` (deadlines) and through `learn` (what a round took), and nowhere else where they change what is computed.
4. All that a step has chosen is told: tokens (`chose`), requests that left (`left`), and lengths at the step's end (`stepped`).
5. An error that other ranks may not have met goes through `failed` before a request is ended by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.chain import Chain
from mlxspec.engine.memory import EngineMemory
from mlxspec.engine.pipeline import TimedRound
from mlxspec.engine.prefix.rows import Prefix
from mlxspec.engine.request import Ending, Request
from mlxspec.engine.request_factory import RequestFactory
from mlxspec.engine.stats import EngineStats
from mlxspec.models.base import Model
from mlxspec.policy.costs import CostModel
from mlxspec.policy.drafting import Drafting


class GroupEngine(Protocol):
    """The part of an engine that a group needs, see there."""

    config: EngineConfig
    spec: SpecConfig
    notices: tuple[str, ...]
    chain: Chain
    memory: EngineMemory
    factory: RequestFactory
    prefix: Prefix

    def follow(self, costs: CostModel) -> None: ...

    def drain(self) -> None: ...

    def dismiss(self) -> None: ...


class Decided(NamedTuple):
    """The decisions that a step follows. endings: requests that end. resting: those whose rows rest, by number."""

    endings: Sequence[Ending] = ()
    resting: frozenset[int] = frozenset()


class ProcessGroup:
    """One process. is_alone: whether no other rank runs the same model."""

    is_alone = True

    def agree(self, engine: GroupEngine, model: Model, widest: Model | None) -> None:
        """While the engine is made: agree on all that decides how it runs. widest: the share of the rank that needs most memory for a
        row. Raises RankError, on every rank, where ranks differ, and ConfigError for what several ranks cannot do."""

    def check_request(self, params: SamplingParams) -> None:
        """Raises ConfigError for what a request cannot ask of several ranks."""

    def check_changeable(self, sentence: str) -> None:
        """Raises ConfigError with `sentence` where an option is chosen at the start, for all ranks."""

    def submitted(self, request: Request, deadline: float | None) -> None:
        """A request is queued. deadline: seconds from now."""

    def postpones(self, ending: Ending) -> bool:
        """A request has ended between two steps, or within one. Whether its row leaves with the next step and not at once."""
        return False

    def decide(self, endings: Callable[[], Sequence[Ending]], resting: frozenset[int]) -> Decided:
        """A step begins. endings: finds the requests that end now by this process's clock. resting: those whose clients do not read, as
        this process knows."""
        return Decided(endings(), resting)

    def learn(self, times: TimedRound, drafting: Drafting) -> None:
        """A round has been read: its policies learn what it took, now or with the next step."""
        times.teach(drafting)

    def stepping(self) -> AbstractContextManager[None]:
        """Around a step."""
        return nullcontext()

    def chose(self, request: int, tokens: Sequence[int]) -> None:
        """A request goes on with these tokens."""

    def left(self, request: int, reason: str) -> None:
        """A request has left with this reason."""

    def stepped(
        self, stats: EngineStats, store_bytes: int, num_waiting: int, num_read: Sequence[int]
    ) -> None:
        """A step has ended. num_read: tokens of each prompt that is being read."""

    def failed(self, error: BaseException) -> None:
        """A computation failed. Raises RankError where ranks would go on differently; else the error ends its requests."""

    def dismiss(self, engine: GroupEngine) -> None:
        """The other ranks let go of their engines. This one is alone from here on and takes no more requests."""
