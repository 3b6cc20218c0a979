"""The engine: requests come in, rounds run over all rows that decode, events come out.

    step():  admit()   new rows: prefill, first token, join
             launch()  draft, and put one target forward over all rows on its way
             read()    accept -> commit -> observe -> events
             retire()  rows that ended leave

Batch-native: one chat and eight rows take the same path. Rows join and leave between rounds and change nothing for the others. Not
thread-safe: one thread owns an engine. Knows tokens in, events out; knows no files, no terminal, no HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from mlxspec import device
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.rollback import rollback
from mlxspec.config import MAX_ROWS, EngineConfig, SamplingParams, SpecConfig, shown
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.chain import Chain
from mlxspec.engine.answers import Answers, Prompt, Result
from mlxspec.engine.prefill import prefill
from mlxspec.engine.probe import PROBE_AT_MOST, probe
from mlxspec.engine.request import Request
from mlxspec.engine.round import Round, launch, launch_behind, read
from mlxspec.engine.stats import EngineStats
from mlxspec.engine.verdict import ProbeReport
from mlxspec.errors import ConfigError, ContextOverflowError
from mlxspec.events import Event, FinishEvent, TokensEvent
from mlxspec.kernels.launch import KernelReport, needed
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.base import Model
from mlxspec.sampling.constraints import ConstraintMaker
from mlxspec.speculation.controller import Controller


class Engine(Answers):
    """A loaded model with its drafters.

    Attributes: model, tokenizer (None: token ids only), chain (the drafters), config, spec (default for requests), stats, notices (whole
    sentences on what was found at loading).
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
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.notices = tuple(notices)
        self.config = config or EngineConfig()
        self.chain = Chain(drafters)
        self.spec = spec if spec is not None else SpecConfig(drafters=tuple(self.chain.drafters))
        self.stats = EngineStats()
        self._constraints = ConstraintMaker(tokenizer, model.vocab_size)
        self._check_spec(self.spec)
        num_states = self.config.num_states or max(2, self.chain.longest_draft(self.spec) + 1)
        self._rollback = rollback(self.config.rollback, num_states)
        self._widest = self._exact_width() if self.config.exact else None
        self._rows: list[Request] = []
        self._cache: ModelCache | None = None
        self._ahead: Round | None = (
            None  # launched and not read; its rows' tokens are in the cache but not in their histories
        )
        self._num_requests = 0

    # --- for a scheduler

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, spec: SpecConfig | None = None
    ) -> Request:
        """Queue a request. Raises ConfigError or ContextOverflowError; nothing is queued then."""
        request = self._make(prompt, params, spec)
        self._waiting.append(request)
        return request

    def prepare_auto(self, *, keep: bool = False) -> None:
        """Measure what rounds and drafts cost here, which policy auto decides by; the first such request does it otherwise. keep: use and
        keep figures in the user's cache folder."""
        if self.chain.auto is None:
            from mlxspec.engine import calibrate  # builds on this module

            args = self.model, self.chain.drafters, self.config
            costs = calibrate.kept_costs(*args, self.name) if keep else calibrate.calibrate(*args)
            self.chain.follow(Controller(costs))

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._rows

    def step(self) -> list[Event]:
        """Admit what fits, run one round, let ended rows go."""
        with device.private_kernels():
            events = self._admit()
            if self._rows and self._cache is not None:
                started = time.perf_counter()
                running = list(self._rows)
                events += self._round(self._cache)
                self._charge(running, time.perf_counter() - started)
                self._retire()
        self._tell(events)
        return events

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.request in self._inboxes:
                self._inboxes[event.request].append(event)

    def _round(self, cache: ModelCache) -> list[Event]:
        started, ahead = time.perf_counter(), self._ahead is not None
        current, self._ahead = (
            self._ahead or launch(self._rows, self.model, cache, self.chain, self.stats, widest=self._widest),
            None,
        )
        try:
            self._ahead = launch_behind(current, self._rows, self.model, cache, self.chain)
            events = read(current, cache, self.chain, self.stats)
        except BaseException as error:
            self._fail(error)
            raise
        seconds = time.perf_counter() - started
        self.chain.took(
            [r.number for r in current.requests if r.spec.drafters],
            current.rows.num_tokens,
            seconds,
            ahead=ahead,
        )
        return events

    def _charge(self, running: Sequence[Request], seconds: float) -> None:
        self.stats.round_seconds += seconds
        for request in running:
            request.stats.decode_seconds += seconds

    def _fail(self, error: BaseException) -> None:
        """Nothing is known of what the device did with the rows: they end."""
        self._ahead = None
        why = str(error) or type(error).__name__
        for request in self._rows:
            if request.finish_reason is None:
                request.finish_reason = "error"
                self._tell([FinishEvent(request=request.number, reason="error", error=why)])
        self._retire()

    def cancel(self, number: int) -> bool:
        """End a request at any stage; False if it is not running. Its row leaves at once."""
        for request in [*self._waiting, *self._rows]:
            if request.number == number and request.finish_reason is None:
                request.finish_reason = "cancelled"
                self._tell([FinishEvent(request=number, reason="cancelled")])
                self._waiting = deque(r for r in self._waiting if r.number != number)
                self._retire()
                return True
        return False

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """Which Metal kernels this process uses, and why not the others."""
        return needed()

    def probe(self, widths: Sequence[int] | None = None) -> ProbeReport:
        """Whether verifying so many tokens at once changes numbers on this machine; kept in `stats.probe`.

        widths: None for every one that drafts may have, up to a limit.
        """
        if widths is None:
            widths = range(2, min(PROBE_AT_MOST, self.chain.longest_draft(self.spec) + 1) + 1)
        self.stats.probe = probe(self.model, widths, rollback=self._rollback)
        return self.stats.probe

    def _exact_width(self) -> int:
        """The widest round with the bits of plain steps; rows count as tokens of it."""
        widths = max(self.chain.longest_draft(self.spec) + 1, self.config.max_rows)
        return self.probe(range(2, min(PROBE_AT_MOST, widths) + 1)).exact_width

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' state: the target's and the drafters'."""
        own = 0 if self._cache is None else self._cache.nbytes
        return own + sum(d.nbytes for d in self.chain.drafters.values())

    @property
    def max_context(self) -> int:
        return min(self.config.max_context or self.model.max_context, self.model.max_context)

    def _make(self, prompt: Prompt, params: SamplingParams | None, spec: SpecConfig | None) -> Request:
        params = SamplingParams() if params is None else params
        spec = self.spec if spec is None else spec
        if not isinstance(params, SamplingParams) or not isinstance(spec, SpecConfig):
            raise ConfigError("Options of a request are given as SamplingParams and SpecConfig.")
        self._check_spec(spec)
        if self.tokenizer is None and params.stop:
            raise ConfigError("Without a tokenizer there are no stop strings.")
        tokens = self._tokens(prompt)
        if len(tokens) >= self.max_context:
            raise ContextOverflowError(len(tokens), self.max_context)
        if spec.policy == "auto" and spec.drafters:
            self.prepare_auto()
        number, self._num_requests = self._num_requests, self._num_requests + 1
        return Request(
            number,
            tokens,
            params,
            spec,
            max_context=self.max_context,
            vocab_size=self.model.vocab_size,
            tokenizer=self.tokenizer,
            maker=self._constraints,
        )

    def _tokens(self, prompt: Prompt) -> list[int]:
        """Checked ids of a prompt."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("Without a tokenizer a prompt must be token ids.")
            prompt = self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise ConfigError(f"A prompt is a string or a list of token ids, not {type(prompt).__name__}.")
        if not prompt:
            raise ConfigError("The prompt is empty.")
        size = self.model.vocab_size
        bad = [t for t in prompt if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < size]
        if bad:
            raise ConfigError(
                f"The prompt holds {shown(bad[0])}, which is no token id of this model (0 to {size - 1})."
            )
        return [int(t) for t in prompt]

    def _check_spec(self, spec: SpecConfig) -> None:
        for name in spec.drafters:
            if name != "forced" and name not in self.chain.drafters:
                there = ", ".join(self.chain.drafters) or "none"
                raise ConfigError(f"The drafter {name} was not loaded with this model; loaded are: {there}.")

    def _admit(self) -> list[Event]:
        events: list[Event] = []
        while self._waiting and len(self._rows) < min(self.config.max_rows, self._widest or MAX_ROWS):
            request = self._waiting.popleft()
            try:
                if request.spec.drafters:
                    request.stats.notices = self.chain.begin(
                        request.number, request.spec, request.sampler
                    ).notices
                cache, new = prefill(
                    request, self.model, self.chain, self.config.prefill_chunk, self._rollback
                )
                self._tell_of_cut_drafts(request, cache.max_rollback)
            except BaseException:
                device.decode_threads()
                self.chain.close(request.number)
                request.finish_reason = "error"
                raise
            events += new
            if request.finish_reason is not None:
                self.chain.close(request.number)
                continue
            if self._cache is None:
                self._cache = cache
            else:
                self._cache.join(cache)
            self._rows.append(request)
        return events

    def _tell_of_cut_drafts(self, request: Request, limit: int | None) -> None:
        if limit is not None and request.spec.drafters and self.chain.longest_draft(request.spec) > limit:
            request.stats.notices.append(
                f"drafts are cut to {limit} token{'s' * (limit > 1)}: rollback by snapshots keeps {limit + 1} states"
            )

    def _retire(self) -> None:
        staying = [i for i, r in enumerate(self._rows) if r.finish_reason is None]
        if len(staying) == len(self._rows):
            return
        for request in self._rows:
            if request.finish_reason is not None:
                self.chain.close(request.number)
        if not staying:
            self._cache = self._ahead = None
        elif self._cache is not None:
            self._cache.select(staying)
        self._rows = [self._rows[i] for i in staying]


__all__ = ["Engine", "FinishEvent", "Prompt", "Result", "TokensEvent"]
