"""The engine: callers submit requests, rounds run over all rows that decode, and steps return events.

    step():  _expire()    requests end whose deadline has passed, or whose grammar takes too long
             _admit()     waiting requests get a place                                               engine/places.py
             _read()      one chunk of prompts is read; a prompt that is read joins the rows         engine/prefill.py
             _round()     draft, one target forward over all rows, accept, commit, observe           engine/rounds.py, engine/round.py
             _retire()    requests that ended leave

A round: a row whose newest token is x drafts d[1] .. d[k]. One forward over x, d[1] .. d[k] of all rows gives the target's distribution
after each of them, from which the sampler draws the tokens t[0] .. t[k]. The row accepts the first n drafted tokens, as long as d[i + 1] =
t[i], and goes on with t[0] .. t[n]. These are the tokens of plain decoding, because noise is keyed by seed and place. x and the n accepted
tokens are committed.

So a row waits for one chunk of other prompts at most. One chat and eight rows take the same path. Rows join and leave between rounds and
change nothing for the others; an error of one request ends that request. Not thread-safe: one thread owns an engine. Several processes may
run one model together (engine/ranks.py). The engine has no files, no terminal and no HTTP.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any
from zlib import crc32

from mlxspec.cache.quantized import check_kv_bits
from mlxspec.config import MAX_ROWS, EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.drafts import Drafts
from mlxspec.drafters.text_index import TextIndex
from mlxspec.engine.alone import Alone
from mlxspec.engine.api import EngineApi, Result
from mlxspec.engine.calls import Prompt
from mlxspec.engine.drafter_health import DrafterHealth
from mlxspec.engine.image_prompt import NO_IMAGES
from mlxspec.engine.measure import guessed_costs
from mlxspec.engine.memory import EngineMemory, default_budget
from mlxspec.engine.pipeline import Pipeline
from mlxspec.engine.places import RequestPlaces
from mlxspec.engine.prefill import Prefill
from mlxspec.engine.prefix.disk import open_disk
from mlxspec.engine.prefix.rows import CLOSE_SECONDS, Prefix, stride_of
from mlxspec.engine.prefix.signature import fingerprint
from mlxspec.engine.probe import PROBE_AT_MOST, ProbeReport, probe
from mlxspec.engine.request import Request
from mlxspec.engine.request_factory import RequestFactory
from mlxspec.engine.rounds import Rounds
from mlxspec.engine.stats import EngineStats
from mlxspec.engine.text_files import keep_texts
from mlxspec.engine.thread import JobThread
from mlxspec.errors import ConfigError, EngineBusyError, EngineStoppedError, QueueFullError, RankError
from mlxspec.events import Event, FinishEvent, TokensEvent
from mlxspec.kernels import exactness
from mlxspec.kernels.launch import KernelReport, needed
from mlxspec.loading.pooling import NO_POOLING, Pooling
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.base import Model
from mlxspec.models.image_features import FEATURE_BYTES, ImageFeatures
from mlxspec.models.sizes import bytes_of
from mlxspec.models.vision.base import Vision
from mlxspec.option import by_name, check_number, shown
from mlxspec.platform import device
from mlxspec.platform.macos import Awake
from mlxspec.policy.controller import Controller
from mlxspec.policy.costs import CostModel
from mlxspec.policy.policies import Policies
from mlxspec.sampling.constraints import Compiled
from mlxspec.sampling.grammar import LateClock

_SHARE = 32  # of the memory budget, at most 1 / _SHARE is for rows of images that no request has, as much for earlier texts
_FLUSH_SECONDS = 0.2  # after an answer, for what waits to be written to the disk


class Engine(EngineApi):
    """A loaded model with its drafters.

    Attributes: model, tokenizer (None: token ids only), drafts (the drafters and their rows), policies (they choose between drafters),
    config, spec (default for requests), stats, notices (sentences on what was found at loading), memory (its budget), prefix (the prefix
    cache), vision (None: text only; no_images says why), features (rows of images that the vision tower has computed), texts (earlier
    texts, from which the drafter `suffix` drafts), text_files (their files, None where there are none), factory (makes requests), ranks
    (the processes that run the model together), health (finds drafters that are hardly ever right; None: no check), pooling (how hidden
    states become embeddings, or the sentence why they do not), refused_adapters (by adapter's name, why it cannot be used), dtype_reason
    (a sentence on the dtype that the model computes in, and why; empty for a model that `load` did not load), places (all requests, by
    place), pipeline (launches and reads the rounds).
    """

    @by_name
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
        ranks: Alone | None = None,
    ) -> None:
        """Make an engine that waits for requests. vision: the vision parts of the model, None where it reads text only; no_images is
        then the sentence that says why. ranks: the processes among which the model is divided, None where it runs in this process
        alone; all ranks make their engines at the same time. Raises ConfigError for options that contradict each other,
        MemoryBudgetError where the weights do not fit, and RankError, on every rank, where the ranks differ."""
        super().__init__()
        if not hasattr(model, "make_cache"):
            raise ConfigError(
                f"Engine takes a loaded model, not {shown(model)}; mlxspec.load takes its name or folder."
            )
        self.ranks = ranks or Alone()
        self._stepping: int | None = None  # the thread that runs a step
        self._process = os.getpid()
        self._awake = Awake()
        device.keep_heap()
        self._model: Model | None = model
        self.tokenizer, self.name = tokenizer, name
        self.notices = tuple(notices)
        self.config = config or EngineConfig()
        if self.config.kv_bits != EngineConfig.kv_bits:
            check_kv_bits(model.make_cache(0).layers, self.config.kv_bits, "This model", "kv_bits")
        budget = self.config.memory_budget or default_budget()
        most = budget // _SHARE
        # ranks must draft alike, whatever memory each of them has
        room = max(0, budget - bytes_of(model)) // _SHARE if self.ranks.size == 1 else 0
        self._file_thread = JobThread("mlxspec-files")
        most_texts = min(self.config.past_texts, room)
        self.texts = TextIndex(most_texts)
        self.text_files = keep_texts(self.texts, self.config.past_texts_disk, tokenizer, self._file_thread)
        self.drafts = Drafts(drafters, model.vocab_size, model.hidden_size, self.texts)
        _check_layers(self.drafts, model)
        self.policies = Policies()
        self.health: DrafterHealth | None = None
        self.pooling: Pooling | str = NO_POOLING
        self.refused_adapters: Mapping[str, str] = {}
        self.dtype_reason = ""
        spec = spec if spec is not None else SpecConfig(drafters=tuple(self.drafts.drafters))
        self.spec = replace(spec, policy=spec.policy or "fixed")
        self.stats = EngineStats()
        self.vision, self.no_images = vision, no_images
        self.features = None if vision is None else ImageFeatures(vision.tower, min(FEATURE_BYTES, most))
        self.factory = RequestFactory(
            tokenizer,
            model.vocab_size,
            self.max_context,
            self.drafts.drafters,
            self.spec,
            vision=vision,
            features=self.features,
            no_images=no_images,
        )
        self._widest = self._exact_width() if self.config.exact else None
        # after unread drafts attention sums over more than a row's own tokens, which rounds otherwise
        overlaps, num_bytes = not self.config.exact, bytes_of(model)
        self.pipeline: Rounds = Pipeline(
            self.drafts, self.stats, widest=self._widest, overlaps=overlaps, num_bytes=num_bytes
        )
        self.places = RequestPlaces(self.config.max_waiting)
        self._queue, self._prefills, self._rows = (
            self.places.queue,
            self.places.prefills,
            self.places.rows,
        )
        self._unread: frozenset[int] = frozenset()  # requests whose clients do not read, as callers say
        self._paused: frozenset[int] = frozenset()  # likewise, as this step goes by
        verify = max(self.drafts.longest_draft(self.spec) + 1, 16)
        held = 0 if vision is None or self.features is None else vision.nbytes + self.features.budget
        held += self.texts.budget if "suffix" in self.spec.drafters else 0
        tower = None if vision is None else vision.tower
        self.memory = EngineMemory(model, self.drafts.drafters.values(), self.config, verify, held, tower)
        disk = None
        if self.config.prefix_disk:
            disk = open_disk(
                model, self.drafts.drafters.values(), self.config, name, self._file_thread, tower
            )
        if self.ranks.size > 1:
            self._decide_alike()
        stride = stride_of(model.make_cache(0, kv_bits=self.config.kv_bits))
        self.prefix = Prefix(self.memory.prefix_budget, stride=stride, disk=disk)
        self._outbox: list[Event] = []  # of submitted requests, until the next step returns them

    # --- for a scheduler

    @by_name
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
        """Queue a request and return it. Its events are returned by `step`.

        marks: places in the prompt, in tokens, up to which later prompts may share its beginning (ends of the system prompt and of
        turns); None: after each token that ends a turn. deadline: seconds from now after which the request ends with finish_reason
        "error", even while it waits. compiled: the result of `compile` for params; None: they are compiled now. client: name by which
        rows are shared out fairly. Raises ConfigError, GrammarError, ContextOverflowError, MemoryBudgetError, QueueFullError and
        EngineStoppedError; the request is then not queued.
        """
        self._queue.check(client)
        request = self._new_request(
            prompt, params, spec, marks=marks, deadline=deadline, compiled=compiled, client=client
        )
        if not self.memory.may_wait(self._queue.num_tokens + len(request.prompt)) and len(self._queue):
            raise QueueFullError(len(self._queue))
        displaced = self._queue.put(request)
        if displaced is not None:
            displaced.fail(QueueFullError(len(self._queue)))
            self.places.gone.append(displaced)
            self._retire_soon()
        return request

    def compile(self, params: SamplingParams, num_rows: int = 1, owner: str = "") -> Compiled:
        """Compile the parts of `params` that take long, such as a grammar, and return them for `submit`. num_rows: number of requests
        that will use the result. owner: owner of those requests. May be called in any thread, and may take seconds. Raises
        GrammarError and ConfigError."""
        return self.factory.constraints.compile(params, num_rows, owner)

    @property
    def stores_off(self) -> tuple[str, ...]:
        """Return a sentence for each store on disk (prefix cache, earlier texts) that is not written at the moment, because the disk has
        refused a write."""
        disk, texts = self.prefix.disk, self.text_files
        found = {
            "The prefix cache": disk is not None and disk.files.rests,
            "Earlier texts": texts is not None and texts.rests,
        }
        return tuple(
            f"{what}: the disk refused, and is tried again within a minute"
            for what, rests in found.items()
            if rests
        )

    def enqueue(self, request: Request) -> None:
        self._queue.put(request, bounded=False)

    def rest(self, numbers: frozenset[int]) -> None:
        """Pause the rows of these requests, and of no others, from the next step on, because their callers have not read the tokens they
        already have. numbers: of the requests. A paused row keeps its memory. It goes on where it was after a call that does not name
        it."""
        self._unread = numbers

    @property
    def is_resting(self) -> bool:
        """Return whether steps only check deadlines now: all requests that have begun are paused by `rest`, and there is no memory for
        those that wait."""
        parked = self.places.parked
        return not self.places.is_busy and bool(parked) and all(r.number in self._unread for r in parked)

    def _rest(self) -> None:
        if self.is_idle:
            self.prefix.flush(_FLUSH_SECONDS)

    def drain(self) -> None:
        """Refuse new requests from now on; the requests that are queued or running go on."""
        self._queue.is_draining = True

    def close(self) -> None:
        """Cancel all requests and release the model, the drafters, the rows and the prefix cache. Their memory is free unless the caller
        holds them. One more step returns the events of the cancelled requests; new requests are refused. Raises EngineBusyError where
        a step calls it or another thread runs one."""
        self._check_outside("close")
        self.drain()
        self.dismiss()
        for request in self.places.requests:
            self.cancel(request.number)
        self._model, self.drafts, self._rows.cache = None, Drafts(), None
        self.factory.features = self.features = None
        self.policies = Policies()
        self.pipeline = Rounds(self.drafts, self.stats)
        self.write_out(CLOSE_SECONDS)
        self.texts = TextIndex(0)
        self.memory.close()
        self._awake.hold(False)
        device.release(self.memory)
        device.give_back()  # compiled functions of a model and the model hold each other

    def write_out(self, seconds: float) -> None:
        """Write what waits for the disk, for at most this number of seconds, and close the thread that writes. Nothing is written after
        this call."""
        until = time.monotonic() + seconds
        while self.texts.has_work and time.monotonic() < until:
            self.texts.work()  # what is indexed goes to the disk
        self.prefix.close(max(0.0, until - time.monotonic()))
        self._file_thread.close()
        self._file_thread.join(max(0.0, until - time.monotonic()))

    def dismiss(self) -> None:
        """Let the other ranks drop their engines, and refuse new requests. Does nothing where the model runs in this process alone."""
        ranks, self.ranks = self.ranks, Alone()
        if ranks.size > 1:
            self.drain()
            self.prefix.is_on = False  # what is left of rows is not kept: drafters would have to run
            ranks.end()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> Model:
        """Return the target model. Raises EngineStoppedError after `close`."""
        if self._model is None:
            raise EngineStoppedError("The engine has been closed.")
        return self._model

    def follow(self, costs: CostModel) -> None:
        """Let requests with policy "auto" decide by these costs from now on. Without this call the policy begins with guessed costs,
        which measured rounds replace."""
        self.policies.follow(Controller(costs))
        if self.health is not None:
            self.health.counts = costs.judged

    @property
    def prefill_chunk(self) -> int:
        """Return the number of prompt tokens that are read between two rounds. It may be set between two steps. Setting raises
        ConfigError for an invalid number and among ranks, EngineBusyError during a step."""
        return self.memory.full_chunk

    @prefill_chunk.setter
    def prefill_chunk(self, num_tokens: int) -> None:
        if num_tokens != self.memory.full_chunk:
            self._check_outside("change how prompts are read")
            self._check_alone(
                "How prompts are read is chosen at the start where a model is divided among ranks."
            )
            self.config = replace(self.config, prefill_chunk=num_tokens)
            self.memory.read_by(num_tokens)

    @property
    def is_idle(self) -> bool:
        """Return whether no request waits, is read, decodes or is parked. Events of cancelled requests may still be left for the next
        step."""
        return not (self.places.is_busy or self._queue or self.places.parked)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that have no place: queued ones, and parked ones, which have begun and are paused while other
        clients have their turn."""
        return len(self._queue) + len(self.places.parked)

    @property
    def num_running(self) -> int:
        """Return the number of requests whose prompt is being read or that decode."""
        return len(self._prefills) + len(self._rows)

    def step(self) -> list[Event]:
        """Read at most one chunk of prompts, run one round over all rows, and remove the rows that ended. Return the events of submitted
        requests since the last step.

        An error that concerns one request ends that request with a FinishEvent. An error in a forward of several rows ends those. Raises
        EngineBusyError where a drafter, a logits processor or a sampler calls it during a step.
        """
        self._advance()
        events, self._outbox = self._outbox, []
        return events

    def _advance(self) -> None:
        self._check_outside("step")
        if os.getpid() != self._process:
            raise EngineStoppedError(
                "This process was forked from the one that loaded the engine, and MLX's threads are not in it: load a model here."
            )
        if (why := device.worn_out()) is not None:
            raise EngineStoppedError(why)
        self._stepping = threading.get_ident()
        try:
            with device.private_kernels():
                self._expire()
                self._admit()
                self._read()
                self._round()
                self._retire()
                self.prefix.work()
                self.texts.work()
        except BaseException as error:
            with suppress(RankError):
                self.ranks.fail(error)
            raise
        finally:
            self._stepping = None
            self._awake.hold(bool(self.num_waiting or self.num_running))

    def _expire(self) -> None:
        """Apply the decisions about this step: queue the requests that rank 0 has received, end those whose deadline has passed, and
        remove those that have ended."""
        orders = self.ranks.step(self.places, self._unread, self._checksum)
        for given in orders.submitted:
            self.enqueue(self.factory.new_request(**given))
        self._paused = orders.paused
        self.places.step += 1
        self.places.end(orders.endings)
        self._retire()

    def _decide_alike(self) -> None:
        """Prepare the engine to make the same decisions as the engines of the other ranks. Raises RankError where ranks differ, and
        ConfigError for an option that ranks cannot have."""
        for name in ("prefix_disk", "past_texts_disk"):
            if getattr(self.config, name):
                raise ConfigError(
                    f"A model that is divided among ranks keeps no files of earlier texts; leave {name} out."
                )
        self.factory.constraints.clock = LateClock()
        self.drafts.may_fail = False
        self.memory.agree(self.ranks.begin(self.memory.left))
        if self.drafts.drafters:
            self.follow(guessed_costs(self.model, self.drafts.drafters))

    def _checksum(self) -> int:
        """Return a checksum over the texts of running requests, the prompts being read and the counts of the engine. Ranks compare it to
        find out whether they differ."""
        texts = [(r.number, len(r.history), r.history[-1]) for r in self.places.running]
        read = [p.num_done for p in self._prefills]
        counts = self.stats.num_rounds, self.stats.num_verified, self.prefix.tree.nbytes
        return crc32(repr((texts, read, counts)).encode())

    def _check_alone(self, sentence: str) -> None:
        """Raise ConfigError, with this sentence, where several ranks run the model."""
        if self.ranks.size > 1:
            raise ConfigError(sentence)

    def _check_outside(self, what: str) -> None:
        if self._stepping is None:
            return
        if self._stepping != threading.get_ident():
            raise EngineBusyError(
                f"The engine cannot {what} while another thread uses it; mlxspec.AsyncEngine and mlxspec.engine.worker.Worker may be "
                "asked from several."
            )
        raise EngineBusyError(
            f"The engine cannot {what} within one of its own steps: a drafter, a logits processor or a sampler called it."
        )

    def _tell(self, events: Iterable[Event]) -> None:
        for event in events:
            self._inboxes.get(event.request, self._outbox).append(event)

    def _admit(self) -> None:
        """Give free places to the waiting requests whose turn it is, reserve their memory and begin to read their prompts."""
        most = min(self.config.max_rows, self._widest or MAX_ROWS)
        for request in self.places.admit(
            most,
            self._paused,
            self.memory.has_room,
            lambda: self.model.make_cache(1, kv_bits=self.config.kv_bits),
            is_on_way=self.pipeline.is_on_way,
        ):
            try:
                self.memory.reserve(request)
                self._begin(request)
            except BaseException as error:
                self._fail([request], error)
                self._leave(request)
                if not isinstance(error, Exception):
                    raise

    def _begin(self, request: Request) -> None:
        """Begin to read a request's prompt, and begin a row for it in its drafters."""
        self.prefix.limit(self.memory.for_store)
        if request.spec.drafters:
            policy = self.policies.of(request.number, request.spec)
            begun = self.drafts.begin(
                request.number, request.history, request.spec, request.sampler, policy, request.seen
            )
            request.stats.notices = begun.notices
        self._prefills.add(
            Prefill(
                request,
                self.model,
                self.drafts,
                self.prefix,
                watch=self.memory.watch,
                kv_bits=self.config.kv_bits,
            )
        )

    def _read(self) -> None:
        """Read a chunk of prompts. Does nothing while a drafted round is launched and not read, because rows cannot join then."""
        if not self._prefills or self.pipeline.is_open:
            return
        for prefill, end in self._prefills.pieces(self.memory.chunk, is_busy=bool(self._rows)):
            self.pipeline.share()
            if end is not None:
                self._read_piece(prefill, end)

    def _read_piece(self, prefill: Prefill, end: int) -> None:
        """Read a prompt up to token `end`. After the prompt's last piece, the answer's first token is sampled and the row joins the
        decoding rows."""
        request = prefill.request
        try:
            self._tell(prefill.advance(end))
            if not prefill.is_done:
                return
            self._tell(prefill.first_token())
        except BaseException as error:
            self._fail([request], error)
            if not isinstance(error, Exception):
                self._retire()
                raise
        self._prefills.remove(prefill)
        if request.finish_reason is not None:
            self._leave(request)
        else:
            self._rows.join(request, prefill.cache)

    def _round(self) -> None:
        """Run one round over the decoding rows, if there are any."""
        rows, cache = self._rows.requests, self._rows.cache
        if not rows or cache is None:
            return
        for request in rows:
            if request.wants_more:
                self.memory.grow(request)
                self.prefix.limit(self.memory.for_store)
        started = time.perf_counter()
        before = self.stats.draft_seconds, self.stats.verify_seconds
        self.factory.constraints.clock.begin(sum(r.params.has_grammar for r in rows))
        times = None
        try:
            may_follow = not self._prefills and not self.places.awaits_read
            events, times = self.pipeline.advance(rows, self.model, cache, may_follow=may_follow)
            self._tell(events)
        except BaseException as error:
            self.pipeline.end()
            self._fail(self._rows.lose_all(), error)
            if not isinstance(error, Exception):
                self._retire()
                raise
        self._charge(time.perf_counter() - started, before)
        if times is not None:
            times.count(rows, self.stats.plain)
            self.ranks.learn(times, self.drafts)

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        """End these requests with `error`. Raises RankError where the other ranks may not have met the same error."""
        self.ranks.fail(error)
        for request in requests:
            request.fail(error)

    def _charge(self, seconds: float, before: tuple[float, float]) -> None:
        """Add a round's time to the statistics of the engine and of every row. seconds: that the round took. before: the engine's total
        seconds of drafting and of verifying before the round."""
        self.stats.round_seconds += seconds
        drafting, verifying = self.stats.draft_seconds - before[0], self.stats.verify_seconds - before[1]
        for request in self._rows:
            request.stats.decode_seconds += seconds
            request.stats.draft_seconds += drafting
            request.stats.verify_seconds += verifying

    @by_name
    def cancel(self, number: int) -> bool:
        """End the request of this number at any stage; return whether it was running. Its row is removed at once, or, in a call from
        within a step, at that step's end. The next step returns its FinishEvent."""
        for request in self.places.requests:
            if request.number == number and request.finish_reason is None:
                request.finish_reason = "cancelled"
                self._retire_soon()
                return True
        return False

    def _retire_soon(self) -> None:
        """Remove a request that a caller has ended: at once between two steps, among ranks with the next step."""
        if self._stepping is None and self.ranks.size == 1:
            self._retire()

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """Return a report on each Metal kernel that the loaded models need: whether it is in use, and if not, why."""
        return needed()

    @by_name
    def probe(self, widths: Sequence[int] | None = None) -> ProbeReport:
        """Test for each width whether verifying that number of tokens at once gives the same bits as plain steps on this machine. Return
        the report, which is also kept in `stats.probe`.

        widths: tokens of a round; None: every width that drafts may have, up to a limit. Raises EngineBusyError where a step calls it or
        another thread runs one.
        """
        self._check_outside("probe")
        for width in widths or ():
            check_number("a width", width, 2, self.max_context, integer=True)
        every = self.probed_widths if widths is None else widths
        self.stats.probe = probe(self.model, every, kv_bits=self.config.kv_bits)
        return self.stats.probe

    @cached_property
    def weights_digest(self) -> str | None:
        """Return a digest of the model's loaded weights and configuration, 64 hexadecimal digits; None where the model is divided among
        ranks. The first call reads all weights, so it must be made in the engine's thread."""
        return None if self.ranks.size > 1 else fingerprint(self.model)

    @property
    def probed_widths(self) -> range:
        """Return the widths, in tokens over all rows, that the exactness probe tests: those that rounds of this engine may have, up to a
        limit."""
        widest = max(self.drafts.longest_draft(self.spec) + 1, self.config.max_rows)
        return range(2, min(PROBE_AT_MOST, widest) + 1)

    @property
    def exact_width(self) -> int | None:
        """Return the largest number of tokens of a round such that this width and all smaller ones gave the bits of plain steps in the
        probe; None where no probe has run."""
        return None if self.stats.probe is None else self.stats.probe.exact_width

    def keep_kv_in(self, bits: int) -> None:
        """Store the target's keys and values in this number of bits from now on (EngineConfig.kv_bits). Drops the prefix cache's entries
        in memory. Raises ConfigError where the model or the engine's options do not allow it, and EngineBusyError while there are
        requests; nothing has changed then."""
        if bits == self.config.kv_bits:
            return
        self._check_alone(
            f"kv_bits is chosen at the start where a model is divided among ranks; it is {self.config.kv_bits}."
        )
        config = replace(self.config, kv_bits=bits)
        check_kv_bits(self.model.make_cache(0).layers, bits, "This model", "kv_bits")
        if self.prefix.disk is not None or config.exact:
            which = "exact" if config.exact else "prefix_disk"
            raise ConfigError(
                f"An engine with {which} keeps the kv_bits it was made with, {self.config.kv_bits}; give kv_bits with {which}."
            )
        if any(True for _ in self.places.requests):
            raise EngineBusyError(f"kv_bits cannot become {bits} while requests run; end them first.")
        self.prefix.tree.clear()
        self.config = self.memory.config = config
        self.stats.probe = None
        self.prefix.space(stride_of(self.model.make_cache(0, kv_bits=bits)))

    def _exact_width(self) -> int:
        """Make every operation compute with the bits of a single row from now on, run the probe, and return the widest round, in tokens
        over all rows, with the bits of plain steps."""
        exactness.demand()
        return self.probe().exact_width

    @property
    def nbytes(self) -> int:
        """Return the bytes of the state of all rows, the target's and the drafters'."""
        drafters = sum(d.nbytes for d in self.drafts.drafters.values())
        return self._prefills.nbytes + self._rows.nbytes + drafters

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters that requests may choose by `SamplingParams.adapters`."""
        return self.factory.adapters

    @property
    def max_context(self) -> int:
        return min(self.config.max_context or self.model.max_context, self.model.max_context)

    def _new_request(
        self, prompt: Prompt, params: SamplingParams | None, spec: SpecConfig | None, **more: Any
    ) -> Request:
        self._queue.check_open()
        if getattr(self.model, "reads_both_ways", False):
            raise ConfigError(f"{self.name} reads in both directions: it makes embeddings, and no answers.")
        request = self.factory.new_request(prompt, params, spec, **more)
        if request.params.has_hooks:
            self._check_alone(
                "Logits processors and samplers cannot be given to a model that is divided among ranks."
            )
        self.memory.check(request)
        if request.spec.policy == "auto" and request.spec.drafters and self.policies.auto is None:
            self.follow(guessed_costs(self.model, self.drafts.drafters))
        return request

    def _retire(self) -> None:
        """Remove all requests that have ended: waiting, being read, or decoding."""
        for request in self.places.take_ended():
            self._leave(request)
        leaving = [r for r in self._rows if r.finish_reason is not None]
        if not leaving:
            return
        if self._rows.cache is not None:
            self.pipeline.drop(self._rows.cache)
        self._keep_answers(leaving)
        self._rows.leave(leaving)
        if not self._rows:
            self.pipeline.end()
        for request in leaving:
            self._leave(request)

    def _keep_answers(self, leaving: Sequence[Request]) -> None:
        """Store the rows of finished requests in the prefix cache. Skipped under `exact`, because a round rounds otherwise than the
        reading of a prompt."""
        cache = self._rows.cache
        if cache is None or self.config.exact:
            return
        for request in leaving:
            row = self._rows.requests.index(request)
            tokens = request.tokens_in_cache(cache.lengths[row])
            if request.error is None and tokens is not None and request.tail is not None:
                hidden, place = request.tail
                self.prefix.keep(request, tokens, cache, row, self.drafts, hidden[place : place + 1])

    def _leave(self, request: Request) -> None:
        """Release everything that an ended request holds, complete its statistics, and send its FinishEvent. No other method sends a
        FinishEvent."""
        request.count_asked(self.drafts.asked(request.number))
        if self.health is not None:
            said = self.health.heard(request.stats)
            request.stats.notices += said
            self.notices += tuple(said)
        request.stats.notices += self.stores_off
        request.stats.exact_width = None if request.params.adapters else self.exact_width
        self.drafts.close(request.number)
        self.memory.release(request)
        self.prefix.limit(self.memory.for_store)
        reason = request.finish_reason or "error"
        with suppress(Exception):  # its text may be what failed
            self._tell(request.rest())
        self._tell([FinishEvent(request=request.number, reason=reason, error=request.error)])


def _check_layers(drafts: Drafts, model: Model) -> None:
    """Raise ConfigError for a drafter that needs layers which the model does not have."""
    for name, drafter in drafts.drafters.items():
        beyond = [i for i in drafter.needs.layers if i >= model.num_layers]
        if beyond:
            raise ConfigError(
                f"The drafter {name} reads layer {beyond[0]} of the model, whose last one is {model.num_layers - 1}."
            )


__all__ = ["Engine", "FinishEvent", "Prompt", "Result", "TokensEvent"]
