"""Rounds and drafts that nobody asked for, on junk: what they take is measured by them, and what compiles at first compiles in them.

Knows an engine and clocks; keeps no figures and decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import mlx.core as mx

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.ngram_rows import NgramDrafter, NgramRow
from mlxspec.engine.engine import Engine
from mlxspec.models.base import Model
from mlxspec.platform import device
from mlxspec.sampling.sampler import BatchSampler, RowSampler
from mlxspec.speculation.widths import DEPTHS

WIDTHS = tuple(1 + depth for depth in DEPTHS[:9])
PROMPT = 2  # tokens
_ANSWER = 4096  # tokens: more than all rounds together give
WARM = 2  # rounds of a new width compile, and so does the first that undoes one
_CATCH_UP = (1, 2, 3, 4, 5, 2)  # tokens a drafter has not run, as rounds leave them behind
_DEPTH = 4
_NAME = "ngram-simple"


class _Worthless(NgramRow):
    """Drafts so many times one token. width: how many tokens a round is to verify."""

    def __init__(self, width: list[int]) -> None:
        self._width = width

    def extend(self, tokens: Sequence[int]) -> None:
        """It does not listen."""

    def draft(self, limit: int) -> Draft:
        length = min(limit, self._width[0] - 1)
        return Draft(length, [0] * length)

    def truncate(self, length: int) -> None:
        """Nothing to cut."""

    @property
    def nbytes(self) -> int:
        return 0


class _WorthlessDrafter(NgramDrafter):
    name = _NAME

    def __init__(self) -> None:
        self.width = [1]
        super().__init__(lambda: _Worthless(self.width))


class Rounds:
    """Of a row of its own. drafts: whether rounds have drafts at all; plain ones without run ahead of the host, as they do where nothing is
    drafted."""

    def __init__(self, model: Model, config: EngineConfig, *, drafts: bool) -> None:
        self._junk = _WorthlessDrafter()
        spec = SpecConfig(drafters=(_NAME,), ngram_m=WIDTHS[-1]) if drafts else SpecConfig()
        self._engine = Engine(
            model, drafters=[self._junk], spec=spec, config=replace(config, prefix_budget=0)
        )
        room = model.max_context - PROMPT - 2
        params = SamplingParams(max_tokens=max(1, min(room, _ANSWER)), ignore_eos=True)
        self._engine.submit([i % model.vocab_size for i in range(1, PROMPT + 1)], params)
        self._engine.step()

    @property
    def is_over(self) -> bool:
        """The row has come to its end."""
        return self._engine.is_idle

    def run(self, width: int) -> float:
        """Seconds of a round that verifies so many tokens."""
        self._junk.width[0] = width
        return _seconds_of(self._engine.step)


class Drafts:
    """Of one drafter, for a row of its own; `close` it. Raises whatever the drafter does."""

    def __init__(self, drafter: ModelDrafter, model: Model) -> None:
        self._drafter, self._model = drafter, model
        self._row, self._history = -1, list[int]()
        self._sampler = RowSampler(SamplingParams(), [1], model.vocab_size)
        drafter.begin(self._row)

    def run(self, num_known: int, depth: int) -> float:
        """Seconds of a draft of `depth` tokens, behind so many tokens more that the drafter has not run."""
        if not self._history:
            num_known += self._drafter.skips
        start, vocab_size = len(self._history), self._model.vocab_size
        tokens = [(start + i) % vocab_size for i in range(num_known)]
        self._history.extend(tokens)
        hidden = None
        if self._drafter.needs.hidden:
            hidden = mx.zeros((num_known, self._model.hidden_size), self._model.dtype)
        self._drafter.observe(self._row, tokens, hidden)
        ask = Ask(self._row, self._history, depth, self._sampler)

        def work() -> None:
            made = self._drafter.propose([ask], BatchSampler([self._sampler], vocab_size))[0]
            mx.eval(made.tokens, made.confidences)

        return _seconds_of(work)

    def close(self) -> None:
        self._drafter.close(self._row)


def rehearse(engine: Engine) -> Iterator[None]:
    """What the first answers would else wait for while it compiles, round by round, so that requests may come in between: plain rounds,
    and drafts and rounds with drafts where the engine chooses them itself."""
    plain = Rounds(engine.model, engine.config, drafts=False)
    yield from _run(plain, 1)
    if engine.spec.policy != "auto" or not engine.spec.drafters:
        return
    for drafter in engine.chain.drafters.values():
        if isinstance(drafter, ModelDrafter):
            with device.private_kernels():
                _draft(drafter, engine.model)
            yield
    rounds = Rounds(engine.model, engine.config, drafts=True)
    for width in WIDTHS:
        yield from _run(rounds, width)


def rehearse_for(engine: Engine, seconds: float) -> None:
    """As much of `rehearse` as begins within so many seconds."""
    ends = time.perf_counter() + seconds
    with suppress(Exception):  # where it fails requests will tell
        for _ in rehearse(engine):
            if time.perf_counter() > ends:
                return


def _run(rounds: Rounds, width: int) -> Iterator[None]:
    for _ in range(WARM):
        if not rounds.is_over:
            rounds.run(width)
        yield


def _draft(drafter: ModelDrafter, model: Model) -> None:
    drafts = Drafts(drafter, model)
    try:
        for num_known in _CATCH_UP:
            drafts.run(num_known, 1)
        drafts.run(1, _DEPTH)
    finally:
        drafts.close()


def _seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
