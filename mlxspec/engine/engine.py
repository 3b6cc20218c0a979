"""The engine: requests come in, rounds run over all rows that decode, events come out.

    step():  expire()    requests whose deadline has passed end
             admit()     who waits gets a place
             read()      one chunk of prompts is read; a prompt that is through joins the rows         engine/prefill.py
             round()     draft, one target forward over all rows, accept, commit, observe              engine/round.py
             retire()    rows that ended leave

Of several ranks (engine/ranks/), rank 0 sends orders before each step, and every rank runs that step by them.

So whoever decodes waits for one chunk of other prompts at most. Batch-native: one chat and eight rows take the same path. Rows join and
leave between rounds and change nothing for the others; what fails for one request ends that request. Not thread-safe: one thread owns an
engine. Knows tokens in, events out; knows no files, no terminal, no HTTP.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache, Snapshot
from mlxspec.cache.quantized import check_kv_bits
from mlxspec.cache.rollback import rollback
from mlxspec.config import MAX_ROWS, EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.chain import Chain
from mlxspec.engine.api import EngineApi, Prompt, Result
from mlxspec.engine.image_prompt import NO_IMAGES
from mlxspec.engine.memory import EngineMemory, default_budget
from mlxspec.engine.pipeline import Pipeline
from mlxspec.engine.prefill import Prefill
from mlxspec.engine.prefix import NEAR, Prefix, stride_of
from mlxspec.engine.prefix_disk.open import open_disk
from mlxspec.engine.probe import PROBE_AT_MOST, probe
from mlxspec.engine.ranks.lead import Leader
from mlxspec.engine.ranks.orders import Clocked, Ending, Orders, Submission
from mlxspec.engine.ranks.peers import Peers
from mlxspec.engine.request import Request
from mlxspec.engine.request_factory import RequestFactory
from mlxspec.engine.schedule import Queue, Turns, makes_room, next_of
from mlxspec.engine.stats import EngineStats
from mlxspec.engine.verdict import ProbeReport
from mlxspec.errors import (
    CacheError,
    ConfigError,
    EngineBusyError,
    EngineStoppedError,
    MlxspecError,
    QueueFullError,
    RankError,
)
from mlxspec.events import Event, FinishEvent, TokensEvent
from mlxspec.kernels.attention import weigh_alike
from mlxspec.kernels.launch import KernelReport, needed
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.base import Model
from mlxspec.models.image_features import FEATURE_BYTES, ImageFeatures
from mlxspec.models.layers import add_alike
from mlxspec.models.reads import Agreed, agree
from mlxspec.models.sizes import bytes_of
from mlxspec.models.vision.base import Vision
from mlxspec.platform import device
from mlxspec.policy import clock
from mlxspec.policy.calibrate import guessed_costs
from mlxspec.policy.controller import Controller
from mlxspec.policy.cost import CostModel
from mlxspec.policy.drafting import Drafting
from mlxspec.sampling.constraints import Compiled
from mlxspec.sampling.grammar import LateClock

_FEATURE_SHARE = (
    32  # one part in so many of the memory budget, at most, is for rows of images that no request has
)
_DISK_SECONDS = 0.01  # between two looks for what comes from the disk
_BEHIND_SECONDS = 0.2  # behind an answer, for what waits for the disk


class Engine(EngineApi):
    """A loaded model with its drafters.

    Attributes: model, tokenizer (None: token ids only), chain (the drafters), drafting (what decides on them), config, spec (default
    for requests), stats, notices (whole sentences on what was found at loading), memory (its budget), prefix (the prefix store), vision
    (None: text only, no_images says why), features (rows of images that the tower has computed).
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        drafters: Sequence[Drafter] = (),
        spec: SpecConfig | None = None,
        config: EngineConfig | None = None,
        name: str = "model",
        notices: Sequence[str] = (),
        vision: Vision | None = None,
        no_images: str = NO_IMAGES,
        peers: Peers | None = None,
        widest: Model | None = None,
    ) -> None:
        """vision: what the model has for images, None where it reads text only; then no_images is the sentence that says why. peers: the
        ranks among which the model is divided; all of them make their engines at the same time. widest: the share of the rank that needs
        most memory for a row, without weights; None: all ranks need as much. Raises RankError, on every rank, where ranks differ."""
        super().__init__()
        self._peers = peers
        self._leader = Leader(peers.line) if peers is not None and peers.leads else None
        if peers is not None:
            peers.on_end = self.dismiss
        self.checksum = self._departed = 0  # among ranks, of all that was chosen; and of how requests ended
        self._untold: _Untold | None = (
            None  # the last round, of which the policies do not know yet what it took
        )
        self._gone: list[Request] = []  # that have lost their place in the queue
        self._is_stepping = False
        device.keep_heap()
        self._model: Model | None = model
        self.tokenizer, self.name = tokenizer, name
        self.notices = tuple(notices)
        self.config = config or EngineConfig()
        if self.config.kv_bits != EngineConfig.kv_bits:
            check_kv_bits(model.make_cache(0).layers, self.config.kv_bits, "This model", "kv_bits")
        self.chain = Chain(drafters, model.hidden_size)
        _check_layers(self.chain, model)
        self.drafting = Drafting(self.chain)
        spec = spec if spec is not None else SpecConfig(drafters=tuple(self.chain.drafters))
        self.spec = replace(spec, policy=spec.policy or "fixed")
        self.stats = EngineStats()
        self.vision, self.no_images = vision, no_images
        most = (self.config.memory_budget or default_budget()) // _FEATURE_SHARE
        self.features = None if vision is None else ImageFeatures(vision.tower, min(FEATURE_BYTES, most))
        self._request_factory = RequestFactory(
            tokenizer,
            model.vocab_size,
            self.max_context,
            self.chain.drafters,
            self.spec,
            vision=vision,
            features=self.features,
            no_images=no_images,
        )
        num_states = self.config.num_states or max(2, self.chain.longest_draft(self.spec) + 1)
        by_steps = self.config.exact or model.dtype != mx.float32  # see by_tape
        self._rollback = rollback(self.config.rollback, num_states, exact=by_steps)
        self._widest = self._exact_width() if self.config.exact else None
        # behind unread drafts attention sums over more than a row's own tokens, which rounds otherwise
        overlaps, num_bytes = not self.config.exact, bytes_of(model)
        self._pipeline = Pipeline(
            self.drafting, self.stats, widest=self._widest, overlaps=overlaps, num_bytes=num_bytes
        )
        self._queue, self._turns = Queue(self.config.max_waiting), Turns()
        self._prefills: list[Prefill] = []
        verify = max(self.chain.longest_draft(self.spec) + 1, 16)
        images = 0 if vision is None or self.features is None else vision.nbytes + self.features.budget
        tower = None if vision is None else vision.tower
        self.memory = EngineMemory(model, self.chain.drafters.values(), self.config, verify, images, tower)
        disk = open_disk(model, self.chain.drafters.values(), self.config, name, near=NEAR, tower=tower)
        if peers is not None:
            self._agree(peers, model, widest)
        budget, stride = (
            self.memory.prefix_budget,
            stride_of(model.make_cache(0, kv_bits=self.config.kv_bits)),
        )
        self.prefix = Prefix(budget, stride=stride, disk=disk)
        self._rows: list[Request] = []  # in cache order
        self._parked: dict[Request, Snapshot] = {}  # rows that have made room for other clients'
        self._awaits_read = False  # rows change once the round on its way has been read
        self._cache: ModelCache | None = None
        self._outbox: list[Event] = []  # of submitted requests, until somebody steps

    def _agree(self, peers: Peers, model: Model, widest: Model | None) -> None:
        """On everything that ranks decide by and that their machines have a say in."""
        if self.config.prefix_disk:
            raise ConfigError(
                "A model that is divided among ranks keeps no files of earlier texts; leave prefix_disk out."
            )
        self._request_factory.constraints.clock = LateClock()
        self.chain.may_fail = False
        sizes = peers.share(model.make_cache(0, kv_bits=self.config.kv_bits).snapshot_bytes())
        is_even = all(given == sizes[0] for given in sizes)
        self.memory.agree(peers.least(self.memory.left), widest or model, keeps=is_even)
        if not is_even and self.memory.prefix_budget == 0 and self.config.prefix_budget != 0:
            self.notices += (
                "Nothing is kept of earlier texts: this model's heads are not divided evenly among the ranks.",
            )
        peers.compare(
            "plan",
            self.memory.plan
            | {"drafters": list(self.chain.drafters), "options": _told(self.config, self.spec)},
        )
        own = Agreed.of(model, exact=self.config.exact)
        agree(model, Agreed.from_data(peers.share(own.as_data())[0]))
        if self.chain.drafters:
            with clock.of(peers.read_clock):
                self.follow(guessed_costs(model, self.chain.drafters))

    # --- for a scheduler

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        marks: Iterable[int] | None = None,
        deadline: float | None = None,
        compiled: Compiled | None = None,
        client: str = "",
    ) -> Request:
        """Queue a request; its events come out of `step`.

        marks: places in the prompt, in tokens, to which later prompts may share its beginning (ends of the system prompt and of turns);
        None: behind the tokens that end a turn. deadline: seconds from now, after which it ends with finish_reason "error" wherever
        it is. compiled: what `compile` made of params; None: it is made here. client: rows are shared out by client. Raises
        ConfigError, GrammarError, ContextOverflowError, MemoryBudgetError, QueueFullError, EngineStoppedError; nothing is
        queued then.
        """
        self._queue.check(client)
        request = self._make(
            prompt, params, spec, marks=marks, deadline=deadline, compiled=compiled, client=client
        )
        if not self.memory.may_wait(self._queue.num_tokens + len(request.prompt)) and len(self._queue):
            raise QueueFullError(len(self._queue))
        displaced = self._queue.put(request)
        self._told_ranks(request, deadline)
        if displaced is not None:
            displaced.fail(QueueFullError(len(self._queue)))
            if self._leader is None:
                self._leave(displaced)
            else:
                self._leader.end(Ending(number=displaced.number, error=displaced.error))
                self._gone.append(displaced)
        return request

    def compile(self, params: SamplingParams, num_rows: int = 1) -> Compiled:
        """What takes long to make of a request's parameters, for `submit` of up to num_rows requests. May be called in any thread, and
        take seconds. Raises GrammarError, ConfigError."""
        return self._request_factory.constraints.compile(params, num_rows)

    def _enqueue(self, request: Request) -> None:
        self._queue.put(request, bounded=False)
        self._told_ranks(request, None)

    def _told_ranks(self, request: Request, deadline: float | None) -> None:
        """The other ranks hear of a request with the next orders."""
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

    def _rest(self) -> None:
        if self.is_idle:
            self.prefix.flush(_BEHIND_SECONDS)

    def drain(self) -> None:
        """Take no more requests; those that are here go on."""
        self._queue.is_draining = True

    def close(self) -> None:
        """Cancel what is here and let go of model, drafters, rows and prefix store, so that their memory is free where nobody else holds
        them. Events of what was cancelled come with one more step; requests are refused from here on. Raises EngineBusyError within a
        step."""
        self._check_outside("close")
        self.drain()
        self.dismiss()
        for request in self._requests():
            self.cancel(request.number)
        self._model, self.chain, self._cache = None, Chain(()), None
        self._request_factory.features = self.features = None
        self.drafting = Drafting(self.chain)
        self._pipeline = Pipeline(self.drafting, self.stats, widest=None, overlaps=False)
        self.prefix.close()
        self.memory.close()
        device.release(self.memory)
        gc.collect()  # compiled functions of a model and the model hold each other
        mx.clear_cache()

    def dismiss(self) -> None:
        """The other ranks let go of their engines, and this one answers no more. Does nothing in a process alone."""
        leader, self._leader, self._peers = self._leader, None, None
        if leader is not None:
            self._queue.is_draining = True
            self.prefix.is_on = False  # what is left of rows is not kept: drafters would have to run
            with suppress(RankError):  # whoever watches the ranks says so
                leader.order("end", self.checksum)

    @property
    def is_among_ranks(self) -> bool:
        """Whether other ranks run the same model."""
        return self._peers is not None

    @property
    def peers(self) -> Peers | None:
        return self._peers

    def announce_rehearsal(self) -> None:
        """The other ranks run the next piece of a rehearsal with this one."""
        if self._leader is not None:
            self._leader.order("rehearse", self.checksum)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> Model:
        """Raises EngineStoppedError once the engine is closed."""
        if self._model is None:
            raise EngineStoppedError("The engine has been closed.")
        return self._model

    def follow(self, costs: CostModel) -> None:
        """Requests with policy auto decide by these costs from now on. Without it they begin with guesses, which answers replace."""
        self.drafting.follow(Controller(costs))

    @property
    def prefill_chunk(self) -> int:
        """Tokens of prompts that are read between two rounds; may be set between two steps. Raises ConfigError."""
        return self.memory.full_chunk

    @prefill_chunk.setter
    def prefill_chunk(self, num_tokens: int) -> None:
        if num_tokens != self.memory.full_chunk:
            self._check_outside("change how prompts are read")
            if self._peers is not None:
                raise ConfigError(
                    "How prompts are read is chosen at the start where a model is divided among ranks."
                )
            self.config = replace(self.config, prefill_chunk=num_tokens)
            self.memory.read_by(num_tokens)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, is being read, or decodes. Events of what was cancelled may still be there for the next step."""
        return not (self._queue or self._prefills or self._rows or self._parked or self._gone)

    @property
    def num_waiting(self) -> int:
        """Requests that have no row, or none at the moment."""
        return len(self._queue) + len(self._parked)

    @property
    def num_running(self) -> int:
        """Requests whose prompt is being read, or that decode."""
        return len(self._prefills) + len(self._rows)

    def step(self) -> list[Event]:
        """Read at most one chunk of prompts, run one round, let ended rows go. Returns events of submitted requests since the last step.

        What fails for a request ends that request with a FinishEvent; what fails in a forward of several ends those. Raises
        EngineBusyError where a step calls it, through a drafter, a logits processor or a sampler.
        """
        self._advance()
        events, self._outbox = self._outbox, []
        return events

    def _advance(self) -> None:
        self._check_outside("step")
        endings, clocked = self._endings(), None
        if self._leader is not None:
            clocked = None if self._untold is None else self._untold.clocked(self.drafting)
            self._leader.order("step", self.checksum, endings=endings, clocked=clocked)
        self._step(endings, clocked)

    def obey(self, orders: Orders) -> None:
        """Do what rank 0 has decided; on other ranks. Raises RankError where this rank cannot."""
        for given in orders.submitted:
            request = self._request_factory.make(
                given.prompt,
                given.params,
                given.spec,
                marks=given.marks,
                deadline=given.deadline,
                client=given.client,
                number=given.number,
            )
            self._queue.put(request, bounded=False)
        if orders.work == "step":
            self._step(orders.endings, orders.clocked)
        else:
            self._end(orders.endings)
        self._outbox.clear()

    def _endings(self) -> list[Ending]:
        """Requests that end now because of a clock: a deadline has passed, or a grammar takes too long."""
        found = []
        for request in self._requests():
            if request.finish_reason is not None:
                continue
            why = None if request.constraints is None else request.constraints.overdue
            if request.is_late:
                found.append(Ending(number=request.number, is_late=True))
            elif why is not None:
                found.append(Ending(number=request.number, error=why))
        return found

    def _end(self, endings: Iterable[Ending]) -> None:
        by_number = {ending.number: ending for ending in endings}
        for request in self._requests() if by_number else ():
            ending = by_number.get(request.number)
            if ending is None or request.finish_reason is not None:
                continue
            if ending.is_late:
                request.expire()
            elif ending.error is not None:
                request.fail(ending.error)
            else:
                request.finish_reason = "cancelled"

    def _step(self, endings: Iterable[Ending], clocked: Clocked | None) -> None:
        """clocked: what the last round took, by rank 0's clock."""
        self._is_stepping = True
        try:
            with device.private_kernels(), self._counted():
                self._learn(clocked)
                self._end(endings)
                self._retire()
                self._admit()
                # rows join a cache only behind a round that has been read
                is_first = self._pipeline.is_open and bool(self._prefills)
                if is_first:
                    self._round(has_read=False)
                    self._retire()
                has_read = self._read_prompts()
                if not is_first:
                    self._round(has_read=has_read)
                self._retire()
                self.prefix.work(is_busy=bool(self._rows or self._prefills))
        finally:
            self._is_stepping = False
        self._sum_up()

    def _learn(self, clocked: Clocked | None) -> None:
        """Tell the policies what the last round took."""
        untold, self._untold = self._untold, None
        if untold is None:
            return
        if clocked is not None:
            untold = untold.by(clocked, self.drafting)
        self.drafting.took(
            untold.numbers, untold.num_tokens, untold.seconds, ahead=untold.ahead, is_warm=untold.is_warm
        )

    def _sum_up(self) -> None:
        """Among ranks: put what this step came to into the checksum."""
        if self._peers is not None:
            self._mix(
                self.stats.num_rounds,
                self.stats.num_verified,
                self._departed,
                self.prefix.store.nbytes,
                len(self._queue),
                [p.num_done for p in self._prefills],
            )

    def _mix(self, *facts: object) -> None:
        self.checksum = crc32(repr(facts).encode(), self.checksum)

    def _counted(self) -> AbstractContextManager[None]:
        """Among ranks: how far this one has come in the step can be seen by the others."""
        return nullcontext() if self._peers is None else self._peers.line.counting(device.num_given)

    def _end_all(self, error: BaseException) -> None:
        """Among ranks: raises RankError for what no other rank may have met, so that ranks would go on differently."""
        if self._peers is None or (
            isinstance(error, MlxspecError) and not isinstance(error, (CacheError, RankError))
        ):
            return
        if self._leader is None or isinstance(error, RankError):
            raise error
        raise self._leader.reason(error) from error

    def _check_outside(self, what: str) -> None:
        if self._is_stepping:
            raise EngineBusyError(
                f"The engine cannot {what} within one of its own steps: a drafter, a logits processor or a sampler called it."
            )

    def _tell(self, events: Iterable[Event]) -> None:
        for event in events:
            if self._peers is not None and isinstance(event, TokensEvent) and event.tokens:
                self._mix(event.request, event.tokens)
            self._inboxes.get(event.request, self._outbox).append(event)

    def _requests(self) -> list[Request]:
        """All that have not left: waiting, being read, decoding."""
        return [*self._queue, *self._parked, *(p.request for p in self._prefills), *self._rows]

    def _admit(self) -> None:
        """Rows for those whose turn it is."""
        self._awaits_read = False
        most = min(self.config.max_rows, self._widest or MAX_ROWS)
        while self._queue or self._parked:
            places = Counter(r.client for r in (*(p.request for p in self._prefills), *self._rows))
            request = next_of((*self._parked, *self._queue), places)
            victim = None
            if request is None:
                return
            if self.num_running >= most:
                victim = makes_room(self._rows, request.client, places)
                if victim is None:
                    return
            if (victim is not None or request in self._parked) and self._pipeline.next is not None:
                self._awaits_read = True
                return
            if request not in self._parked and not self.memory.reserve(request):
                return
            if victim is not None:
                self._park(victim)
            if request in self._parked:
                self._unpark(request)
                continue
            self.prefix.limit(self.memory.for_store)
            self._queue.remove(request)
            try:
                if request.spec.drafters:
                    begun = self.drafting.begin(request.number, request.spec, request.sampler, request.seen)
                    request.stats.notices = begun.notices
                prefill = Prefill(
                    request,
                    self.model,
                    self.drafting,
                    self.prefix,
                    self._rollback,
                    kv_bits=self.config.kv_bits,
                )
                request.stats.notices += self.chain.cuts(request.spec, prefill.cache.max_rollback)
                self._prefills.append(prefill)
            except Exception as error:
                self._end_all(error)
                request.fail(error)
                self._leave(request)

    def _park(self, request: Request) -> None:
        """Its row leaves; its state stays."""
        if self._cache is None:
            raise ValueError("no row can leave where there are none")
        row = self._rows.index(request)
        kept = self._parked[request] = self._cache.snapshot(row)
        mx.eval(kept.arrays)
        self._rows.remove(request)
        if self._rows:
            self._cache.select([i for i in range(len(self._rows) + 1) if i != row])
        else:
            self._cache = None

    def _unpark(self, request: Request) -> None:
        """Its row goes on where it was."""
        cache = self.model.make_cache(1, self._rollback, kv_bits=self.config.kv_bits)
        kept = self._parked.pop(request)
        cache.restore(kept)
        if request.seen is not None:
            cache.shift(0, request.seen.images.shift(kept.length))
        self._join(request, cache)

    def _join(self, request: Request, cache: ModelCache) -> None:
        if self._cache is None:
            self._cache = cache
        else:
            self._cache.join(cache)
        self._rows.append(request)

    def _read_prompts(self) -> bool:
        """Pieces of prompts, a chunk's worth of tokens together; whether there were any."""
        if not self._prefills:
            return False
        chunk = self.memory.chunk
        left = chunk
        ready = self._arrived()
        while ready:
            served = [p.num_pieces for p in ready]
            prefill = ready[self._turns.next(served, [p.request.client for p in ready])]
            end = prefill.next_end(chunk)
            if left < chunk and end - prefill.num_done > left:
                break
            if self._look(prefill, end):
                left = min(left, chunk - 1)
                self._turns.took()
                break
            left -= end - prefill.num_done
            self._turns.took()
            self._read(prefill, end)
            ready = [p for p in ready if p in self._prefills]
        return left < chunk

    def _look(self, prefill: Prefill, end: int) -> bool:
        """Whether an image of the prompt has gone through the tower: one counts as a chunk, whatever its size."""
        try:
            return prefill.look(end)
        except Exception as error:
            prefill.request.fail(error)
            self._prefills.remove(prefill)
            self._leave(prefill.request)
            return True

    def _arrived(self) -> list[Prefill]:
        """Prompts that can be read: nothing of them is still on its way from the disk. Waits a little for that where there is nothing else
        to do."""
        ready = [p for p in list(self._prefills) if self._arrive(p)]
        if not ready and self._prefills and not self._rows:
            self._prefills[0].wait(_DISK_SECONDS)
        return ready

    def _arrive(self, prefill: Prefill) -> bool:
        try:
            return prefill.arrive(is_busy=bool(self._rows))
        except Exception as error:
            prefill.request.fail(error)
            self._prefills.remove(prefill)
            prefill.leave()
            self._leave(prefill.request)
            return False

    def _read(self, prefill: Prefill, end: int) -> None:
        """One piece, and after the last one into the rows."""
        request = prefill.request
        try:
            self._tell(prefill.advance(end))
            if not prefill.is_done:
                return
            self._tell(prefill.first_token())
        except BaseException as error:
            self._end_all(error)
            request.fail(error)
            if not isinstance(error, Exception):
                self._retire()
                raise
        self._prefills.remove(prefill)
        if request.finish_reason is not None:
            self._leave(request)
            return
        self._join(request, prefill.cache)

    def _round(self, *, has_read: bool) -> None:
        """If anybody decodes. has_read: pieces of prompts have been read in this step."""
        if not self._rows or self._cache is None:
            return
        started = time.perf_counter()
        before = self.stats.draft_seconds, self.stats.verify_seconds
        self._request_factory.constraints.clock.begin(sum(r.params.has_grammar for r in self._rows))
        try:
            may_follow = not self._prefills and not self._awaits_read
            flown = self._pipeline.advance(self._rows, self.model, self._cache, may_follow=may_follow)
            self._tell(flown.events)
        except BaseException as error:
            self._end_all(error)
            self._pipeline.forget()
            self._cache = None
            for request in self._rows:
                request.fail(error)
            if not isinstance(error, Exception):
                self._retire()
                raise
            return self._charge(time.perf_counter() - started, before)
        self._charge(time.perf_counter() - started, before)
        if not (flown.ahead and has_read):  # else the device was at it while prompts were read
            self._untold = _Untold(
                numbers=[r.number for r in flown.round.requests],
                num_tokens=flown.round.rows.num_tokens,
                seconds=flown.seconds,
                ahead=flown.ahead,
                is_warm=flown.round.is_warm,
            )
            if self._peers is None:  # else with the next orders
                self._learn(None)

    def _charge(self, seconds: float, before: tuple[float, float]) -> None:
        """A round's time, to every row. before: seconds of drafting and verifying that it began with."""
        self.stats.round_seconds += seconds
        drafting, verifying = self.stats.draft_seconds - before[0], self.stats.verify_seconds - before[1]
        for request in self._rows:
            request.stats.decode_seconds += seconds
            request.stats.draft_seconds += drafting
            request.stats.verify_seconds += verifying

    def cancel(self, number: int) -> bool:
        """End a request at any stage; False if it is not running. Its row leaves at once, or within a step at that step's end; its
        FinishEvent comes with the next step."""
        for request in self._requests():
            if request.number == number and request.finish_reason is None:
                request.finish_reason = "cancelled"
                if self._leader is not None:  # its row leaves in the next step, on all ranks
                    self._leader.end(Ending(number=number))
                elif not self._is_stepping:
                    self._retire()
                return True
        return False

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """Which Metal kernels this process uses, and why not the others."""
        return needed()

    def probe(self, widths: Sequence[int] | None = None) -> ProbeReport:
        """Whether verifying so many tokens at once changes numbers on this machine; kept in `stats.probe`.

        widths: None for every one that drafts may have, up to a limit. Raises EngineBusyError within a step.
        """
        self._check_outside("probe")
        every = range(2, min(PROBE_AT_MOST, self.chain.longest_draft(self.spec) + 1) + 1)
        self.stats.probe = probe(
            self.model,
            every if widths is None else widths,
            rollback=self._rollback,
            kv_bits=self.config.kv_bits,
        )
        return self.stats.probe

    def keep_kv_in(self, bits: int) -> None:
        """From here on the target's keys and values are kept in so many bits, see EngineConfig. What the prefix store holds in memory
        goes. Raises ConfigError for a model or an engine that cannot, and EngineBusyError while requests are here; nothing has changed
        then."""
        if bits == self.config.kv_bits:
            return
        if self._peers is not None:
            raise ConfigError(
                f"kv_bits is chosen at the start where a model is divided among ranks; it is {self.config.kv_bits}."
            )
        config = replace(self.config, kv_bits=bits)
        check_kv_bits(self.model.make_cache(0).layers, bits, "This model", "kv_bits")
        if self.prefix.disk is not None or config.exact:
            which = "exact" if config.exact else "prefix_disk"
            raise ConfigError(
                f"An engine with {which} keeps the kv_bits it was made with, {self.config.kv_bits}; give kv_bits with {which}."
            )
        if any(True for _ in self._requests()):
            raise EngineBusyError(f"kv_bits cannot become {bits} while requests run; end them first.")
        self.prefix.store.clear()
        self.config = self.memory.config = config
        self.prefix.space(stride_of(self.model.make_cache(0, kv_bits=bits)))

    def _exact_width(self) -> int:
        """The widest round with the bits of plain steps; rows count as tokens of it."""
        widest = min(PROBE_AT_MOST, max(self.chain.longest_draft(self.spec) + 1, self.config.max_rows))
        weigh_alike(widest)
        add_alike()
        return self.probe(range(2, widest + 1)).exact_width

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' state: the target's and the drafters'."""
        caches = [*(p.cache for p in self._prefills), *([self._cache] if self._cache else [])]
        parked = sum(s.nbytes for s in self._parked.values())
        return parked + sum(c.nbytes for c in caches) + sum(d.nbytes for d in self.chain.drafters.values())

    @property
    def max_context(self) -> int:
        return min(self.config.max_context or self.model.max_context, self.model.max_context)

    def _make(
        self, prompt: Prompt, params: SamplingParams | None, spec: SpecConfig | None, **more: Any
    ) -> Request:
        self._queue.check_open()
        if self._peers is not None and params is not None and params.has_hooks:
            raise ConfigError(
                "Logits processors and samplers cannot be given to a model that is divided among ranks."
            )
        request = self._request_factory.make(prompt, params, spec, **more)
        self.memory.check(request)
        if request.spec.policy == "auto" and request.spec.drafters and self.drafting.auto is None:
            self.follow(guessed_costs(self.model, self.chain.drafters))
        return request

    def _retire(self) -> None:
        """Whoever has ended leaves, wherever it is."""
        gone, self._gone = self._gone, []
        for request in gone:
            self._leave(request)
        for request in self._queue:
            if request.finish_reason is not None:
                self._queue.remove(request)
                self._leave(request)
        for request in [r for r in self._parked if r.finish_reason is not None]:
            del self._parked[request]
            self._leave(request)
        for prefill in list(self._prefills):
            if prefill.request.finish_reason is not None:
                self._prefills.remove(prefill)
                prefill.leave()
                if prefill.request.error is None:
                    prefill.keep()
                self._leave(prefill.request)
        staying = [i for i, r in enumerate(self._rows) if r.finish_reason is None]
        if len(staying) == len(self._rows):
            return
        if self._cache is not None:
            self._pipeline.drop(self._cache)
        leaving = [r for r in self._rows if r.finish_reason is not None]
        self._keep_answers(leaving)
        if not staying:
            self._cache = self._pipeline.next = None
        elif self._cache is not None:
            self._cache.select(staying)
        self._rows = [self._rows[i] for i in staying]
        for request in leaving:
            self._leave(request)

    def _keep_answers(self, leaving: Sequence[Request]) -> None:
        """What a conversation may go on from. Not where texts must have the bits of a cold run: rounds round otherwise than prompts."""
        cache = self._cache
        if cache is None or self.config.exact:
            return
        for request in leaving:
            row = self._rows.index(request)
            tokens = request.tokens_in_cache(cache.lengths[row])
            if request.error is None and tokens is not None and request.tail is not None:
                hidden, place = request.tail
                self.prefix.keep(request, tokens, cache, row, self.drafting, hidden[place : place + 1])

    def _leave(self, request: Request) -> None:
        """The one place where a request's last event comes from."""
        request.count_asked(
            self.drafting.chain.asked(request.number), self.drafting.plain_seconds(request.number)
        )
        self.drafting.close(request.number)
        self.memory.release(request)
        self.prefix.limit(self.memory.for_store)
        reason = request.finish_reason or "error"
        self._departed = (self._departed + crc32(f"{request.number} {reason}".encode())) & 0xFFFFFFFF
        with suppress(Exception):  # its text may be what failed
            self._tell(request.rest())
        self._tell([FinishEvent(request=request.number, reason=reason, error=request.error)])


@dataclass(frozen=True, kw_only=True)
class _Untold:
    """A round that has been read, as `Drafting.took` has it."""

    numbers: list[int]
    num_tokens: int
    seconds: float
    ahead: bool
    is_warm: bool

    def clocked(self, drafting: Drafting) -> Clocked:
        """What this rank's clock said."""
        seconds, asked = drafting.readings
        return Clocked(seconds=self.seconds, is_warm=self.is_warm, drafting=seconds, asked=asked)

    def by(self, clocked: Clocked, drafting: Drafting) -> _Untold:
        """What rank 0's clock said instead."""
        drafting.read_anew(clocked.drafting, clocked.asked)
        return replace(self, seconds=clocked.seconds, is_warm=clocked.is_warm)


def _told(config: EngineConfig, spec: SpecConfig) -> str:
    """Options that have a say in what is decided; not the machine's memory."""
    return repr((replace(config, memory_budget=None), spec))


def _check_layers(chain: Chain, model: Model) -> None:
    """Raises ConfigError for a drafter that needs layers which the model does not have."""
    for name, drafter in chain.drafters.items():
        beyond = [i for i in drafter.needs.layers if i >= model.num_layers]
        if beyond:
            raise ConfigError(
                f"The drafter {name} reads layer {beyond[0]} of the model, whose last one is {model.num_layers - 1}."
            )


__all__ = ["Engine", "FinishEvent", "Prompt", "Result", "TokensEvent"]
