"""Runs rounds and drafts of an artificial row without an engine, to measure their time and to compile what compiles at first use.

A bare round does what a round of an engine does on the device and on the host around it: one forward, sampling, accepting, committing.
What an engine's round does besides (asking drafters, texts, events) it leaves out; rounds of requests teach that later. Knows a model,
a cache and tokens; knows no engine and no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlxspec.cache.rollback import rollback
from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.drafters.base import Ask
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model
from mlxspec.platform import device
from mlxspec.platform.host import numbers
from mlxspec.policy import clock
from mlxspec.policy.cost import DEPTHS
from mlxspec.sampling.acceptance import match
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

WIDTHS = tuple(1 + depth for depth in DEPTHS[:9])
_ORDER = (1, 5, 2, 17)  # widths without which a curve is a guess come first
PROMPT = 2  # tokens
WARM = 2  # rounds of a new width compile, and so does the first that undoes one
_DRAFTED = 0  # the token that is drafted at all places


def widths(model: Model, ends: Sequence[int] = ()) -> list[int]:
    """Widths of rounds that are timed and compiled beforehand, the most telling first: both sides of each step of the model's curve, and
    WIDTHS. ends: as Curve has them."""
    sides = (width for end in ends for width in (end, end + 1) if width <= WIDTHS[-1])
    room = model.max_context - PROMPT - 2
    return [w for w in dict.fromkeys((*_ORDER, *sides, *WIDTHS)) if w == 1 or w <= room]


class BareRounds:
    """Of a row of its own. drafts: whether rounds have drafts at all; plain ones without are launched before the one in front of them is
    read, as an engine does where nothing is drafted. layers: those whose residual streams the engine's rounds give, see `Needs`."""

    def __init__(
        self, model: Model, config: EngineConfig, *, drafts: bool, layers: tuple[int, ...] = ()
    ) -> None:
        self._model, self._drafts, self._layers = model, drafts, layers
        by_steps = config.exact or model.dtype != mx.float32
        how = rollback(config.rollback, config.num_states or WIDTHS[-1], exact=by_steps)
        self._cache = model.make_cache(1, how, kv_bits=config.kv_bits)
        prompt = [i % model.vocab_size for i in range(1, PROMPT + 1)]
        self._sampler = BatchSampler(
            [RowSampler(SamplingParams(), prompt, model.vocab_size)], model.vocab_size
        )
        self._length = PROMPT
        out = model.forward(_array(prompt), FlatRows((PROMPT,)), self._cache, facts=True, logits_at="last")
        self._cache.commit()
        self._newest = self._sampled(out.logits, 1)  # (1,), not in the cache
        mx.eval(self._newest, self._cache.arrays)
        self._unread: mx.array | None = None  # what the plain round on its way samples

    @property
    def is_over(self) -> bool:
        """The row has come to the end of the model's context."""
        return self._length + WIDTHS[-1] + 2 > self._model.max_context

    def run(self, width: int) -> float:
        """Seconds of a round that verifies so many tokens."""
        return _seconds_of(lambda: self._verify(width) if self._drafts else self._follow())

    def _follow(self) -> None:
        """A plain round is put on its way behind the one that is, which is read then."""
        current = self._plain(self._newest) if self._unread is None else self._unread
        self._unread = self._plain(current)
        self._newest = current
        mx.eval(current)
        numbers(current).tolist()

    def _plain(self, newest: mx.array) -> mx.array:
        out = self._model.forward(newest, FlatRows((1,)), self._cache, facts=True, taps=self._layers)
        sampled = self._sampled(out.logits, 1)
        mx.async_eval(sampled)
        self._cache.commit()
        self._length += 1
        return sampled

    @device.idle()
    def _verify(self, width: int) -> None:
        given = [*numbers(self._newest).tolist(), *[_DRAFTED] * (width - 1)]
        tokens = _array(given)
        device.start(tokens)
        rows = FlatRows((width,))
        out = self._model.forward(tokens, rows, self._cache, facts=width == 1, taps=self._layers)
        sampled = self._sampled(out.logits, width)
        mx.async_eval(sampled)
        if width == 1:
            self._cache.commit()
        mx.eval(sampled)
        chosen = numbers(sampled).tolist()
        accepted = match(given[1:], chosen)
        if width > 1:
            self._cache.commit([accepted + 1])
            if not self._cache.defers:  # as an engine's round does
                self._cache.flush()
                device.start(*self._cache.states)
        self._length += accepted + 1
        self._newest = _array(chosen[accepted : accepted + 1])

    def _sampled(self, logits: mx.array | None, width: int) -> mx.array:
        if logits is None:
            raise ValueError("a verify needs logits at every position")
        return self._sampler.sample(logits, [0] * width, range(self._length, self._length + width))


class BareDrafts:
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
        if self._drafter.needs.wants_hidden:
            width = self._drafter.needs.width * self._model.hidden_size
            hidden = mx.zeros((num_known, width), self._model.dtype)
        self._drafter.observe(self._row, tokens, hidden)
        ask = Ask(self._row, self._history, depth, self._sampler)

        def work() -> None:
            made = self._drafter.propose([ask], BatchSampler([self._sampler], vocab_size))[0]
            mx.eval(made.tokens, made.confidences)

        return _seconds_of(work)

    def close(self) -> None:
        """Forget the row."""
        self._drafter.close(self._row)


def _array(tokens: list[int]) -> mx.array:
    return mx.array(np.asarray(tokens, np.int32))


def _seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    started = clock.now()
    work()
    return clock.now() - started
