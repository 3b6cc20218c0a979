"""The group interface for an engine that is one rank of several; engine/group.py has its invariants.

Rank 0 sends orders at the beginning of each step, with everything that its clock and its callers have decided. The others get them from
follow.py and step by them. `checksum` covers every token that was chosen and every length, so that ranks which differ stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from zlib import crc32

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.group import Decided, GroupEngine, ProcessGroup
from mlxspec.engine.measure import guessed_costs
from mlxspec.engine.pipeline import TimedRound
from mlxspec.engine.ranks.lead import Leader
from mlxspec.engine.ranks.orders import Clocked, Orders, Submission
from mlxspec.engine.ranks.peers import Peers
from mlxspec.engine.request import Ending, Request
from mlxspec.engine.stats import EngineStats
from mlxspec.errors import CacheError, ConfigError, MlxspecError, RankError
from mlxspec.models.base import Model
from mlxspec.models.reads import Reads, agree, reads
from mlxspec.platform import device
from mlxspec.policy.drafting import Drafting
from mlxspec.sampling.grammar import LateClock


def group_of(peers: Peers | None) -> ProcessGroup:
    """The hook of an engine whose model is divided among `peers`; None: it is alone."""
    return ProcessGroup() if peers is None else RankGroup(peers)


class RankGroup(ProcessGroup):
    """peers: the ranks. checksum: of all that was chosen so far. orders: on ranks other than 0, those of the step to come."""

    is_alone = False

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._leader = Leader(peers.line) if peers.leads else None
        self.checksum = self._departed = 0
        self.orders: Orders | None = None
        self._unlearned: tuple[TimedRound, Drafting] | None = None  # the last round that was read

    def agree(self, engine: GroupEngine, model: Model, widest: Model | None) -> None:
        peers, config, memory = self.peers, engine.config, engine.memory
        peers.on_end = engine.dismiss
        for name in ("prefix_disk", "past_texts_disk"):
            if getattr(config, name):
                raise ConfigError(
                    f"A model that is divided among ranks keeps no files of earlier texts; leave {name} out."
                )
        engine.factory.constraints.clock = LateClock()
        engine.chain.may_fail = False
        sizes = peers.share(model.make_cache(0, kv_bits=config.kv_bits).snapshot_bytes())
        is_even = all(given == sizes[0] for given in sizes)
        memory.agree(peers.least(memory.left), widest or model, keeps=is_even)
        if not is_even and memory.prefix_budget == 0 and config.prefix_budget != 0:
            engine.notices += (
                "Nothing is kept of earlier texts: this model's heads are not divided evenly among the ranks.",
            )
        options = {"drafters": list(engine.chain.drafters), "options": _deciding(config, engine.spec)}
        peers.compare("plan", memory.plan | options)
        agree(model, Reads(**peers.share(asdict(reads(model)))[0]))
        if engine.chain.drafters:
            engine.follow(guessed_costs(model, engine.chain.drafters))

    def check_request(self, params: SamplingParams) -> None:
        if params.has_hooks:
            raise ConfigError(
                "Logits processors and samplers cannot be given to a model that is divided among ranks."
            )

    def check_changeable(self, sentence: str) -> None:
        raise ConfigError(sentence)

    def submitted(self, request: Request, deadline: float | None) -> None:
        if self._leader is not None:
            self._leader.submit(
                Submission(
                    number=request.number,
                    prompt=tuple(request.prompt),
                    params=replace(request.params, seed=request.sampler.seed),
                    spec=request.spec,
                    marks=request.marks,
                    client=request.client,
                    deadline=deadline,
                )
            )

    def postpones(self, ending: Ending) -> bool:
        if self._leader is None:
            return False
        self._leader.end(ending)
        return True

    def decide(self, endings: Callable[[], Sequence[Ending]], resting: frozenset[int]) -> Decided:
        unlearned, self._unlearned = self._unlearned, None
        if self._leader is not None:
            clocked = None if unlearned is None else _clocked(unlearned[0])
            orders = self._leader.order(
                "step", self.checksum, endings=endings(), resting=resting, clocked=clocked
            )
        elif self.orders is not None:
            orders, self.orders = self.orders, None
        else:
            raise RankError("This rank steps without orders of rank 0.")
        if unlearned is not None:
            times, drafting = unlearned
            if orders.clocked is not None:
                times = replace(times, seconds=orders.clocked.seconds, is_warm=orders.clocked.is_warm)
            times.teach(drafting)
        return Decided(orders.endings, orders.resting)

    def learn(self, times: TimedRound, drafting: Drafting) -> None:
        self._unlearned = times, drafting

    def stepping(self) -> AbstractContextManager[None]:
        """How far this rank has come in the step can be seen by the others."""
        return self.peers.line.counting(device.num_given)

    def chose(self, request: int, tokens: Sequence[int]) -> None:
        self._mix(request, tokens)

    def left(self, request: int, reason: str) -> None:
        self._departed = (self._departed + crc32(f"{request} {reason}".encode())) & 0xFFFFFFFF

    def stepped(
        self, stats: EngineStats, store_bytes: int, num_waiting: int, num_read: Sequence[int]
    ) -> None:
        self._mix(stats.num_rounds, stats.num_verified, store_bytes, num_waiting, num_read, self._departed)

    def failed(self, error: BaseException) -> None:
        if isinstance(error, MlxspecError) and not isinstance(error, (CacheError, RankError)):
            return  # every rank has met it
        if self._leader is None or isinstance(error, RankError):
            raise error
        raise self._leader.reason(error) from error

    def dismiss(self, engine: GroupEngine) -> None:
        if self._leader is not None:
            engine.drain()
            engine.prefix.is_on = False  # what is left of rows is not kept: drafters would have to run
            with suppress(RankError):  # whoever watches the ranks says so
                self._leader.order("end", self.checksum)

    def _mix(self, *chosen: object) -> None:
        self.checksum = crc32(repr(chosen).encode(), self.checksum)


def _clocked(times: TimedRound) -> Clocked:
    """The time of a round by this rank's clock."""
    return Clocked(seconds=times.seconds, is_warm=times.is_warm)


def _deciding(config: EngineConfig, spec: SpecConfig) -> str:
    """Options that have a say in what is decided; not the machine's memory."""
    return repr((replace(config, memory_budget=None), spec))
