"""Measures how long rounds and drafts take on this machine: bare rounds of every width with meaningless drafts, and drafts of each model
drafter.

A bare round does what a round of an engine does on the device and on the host around it: one forward, sampling, accepting, committing.
Nothing begins that is not expected to end within the seconds that measuring may take; what has no place in them is guessed and learned from
answers. Costs are kept in a file (policy/cost_file.py), so what one load has no time for the next ones add. Knows a model, its drafters and
a clock; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.cache.rollback import capacity
from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.drafters.base import Ask, Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.streams import Streams
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model
from mlxspec.models.reads import plateau_ends, reads
from mlxspec.platform import device
from mlxspec.platform.host import numbers
from mlxspec.policy.cost_file import CostFile, known_costs, models_of
from mlxspec.policy.costs import DEPTHS, CostModel, Curve, DraftCost
from mlxspec.sampling.acceptance import match
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

Clock = Callable[
    [], float
]  # seconds; among ranks rank 0's, so that all measure the same rounds and come to the same costs

READY = 2.0  # seconds in which a small model is loaded and measured
SHARE = 0.05  # of the time it took to load, for larger ones
PATIENT = 60.0  # seconds, where measuring is what was asked for
WIDTHS = tuple(1 + depth for depth in DEPTHS[:9])
PROMPT = 2  # tokens
_MOST_BEHIND = 6  # widths that every other is compiled behind
WARM = 2  # rounds of a new width compile, and so does the first that undoes one
LIKELY = Curve({1: 1.0, 2: 1.2, 4: 1.65, 8: 2.7, 17: 4.5})  # in plain rounds, until one of that width has run
_ORDER = (1, 5, 2, 17)  # widths without which a curve is a guess come first
_FOR_ROUNDS = 0.75  # of the seconds; the others are for drafts
_TURNS, _PLAIN, _DRAFTS = (
    5,
    3,
    5,
)  # measured rounds of a width, plain rounds that each is weighed by, measured drafts
_QUEUE, _FOUR = 32, 4  # tokens that a drafter is behind, and of the longer drafts
_QUEUED = 0.1  # of a drafted token: what a known one takes that is run beside others
_LEAST = 1e-6  # seconds that anything takes
# what chat and serve take from Qwen's and Gemma's generation_config, nearly; and of how many positions choosing is timed
_RECOMMENDED, _POSITIONS = SamplingParams(temperature=1.0, top_k=20, top_p=0.95), 4
# of a plain round of several rows where there is no GPU: one row's draft keeps the rounds of all from running ahead, which there hides
# most of what the host does, and rows of several widths have to be taken apart
_PAUSE = 0.3


def now() -> float:
    """This process's clock."""
    return time.perf_counter()


def allowance(load_seconds: float) -> float:
    """Seconds that measuring may take behind a load of so many: loading and measuring are through in READY, or measuring takes SHARE of
    what loading took."""
    return max(READY - load_seconds, SHARE * load_seconds)


def widths(model: Model, ends: Sequence[int] = ()) -> list[int]:
    """Widths of rounds that are timed and compiled beforehand, the most telling first: both sides of each step of the model's curve, and
    WIDTHS. ends: as Curve has them."""
    sides = (width for end in ends for width in (end, end + 1) if width <= WIDTHS[-1])
    room = min(model.max_context - PROMPT - 2, WIDTHS[-1])
    return [w for w in dict.fromkeys((*_ORDER, *sides, *WIDTHS)) if w == 1 or w <= room]


class BareRounds:
    """Of a row of its own. drafts: whether rounds have drafts at all; plain ones without are launched before the one in front of them is
    read, as an engine does. layers: those whose residual streams the engine's rounds give."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        drafts: bool,
        layers: tuple[int, ...] = (),
        clock: Clock = now,
    ) -> None:
        self._model, self._drafts, self._layers, self._clock = model, drafts, layers, clock
        self._cache = model.make_cache(1, kv_bits=config.kv_bits)
        prompt = [i % model.vocab_size for i in range(1, PROMPT + 1)]
        row = RowSampler(SamplingParams(), prompt, model.vocab_size)
        self._sampler, self._length = BatchSampler([row], model.vocab_size), PROMPT
        out = model.forward(_array(prompt), FlatRows((PROMPT,)), self._cache, certain=True, logits_at="last")
        self._cache.commit()
        self._newest = self._sampled(out.logits, 1)  # (1,), not in the cache
        mx.eval(self._newest, self._cache.arrays)
        self._unread: mx.array | None = None  # what the plain round on its way samples

    @property
    def is_over(self) -> bool:
        """The row has come to the end of the model's context."""
        return self._length + WIDTHS[-1] + 2 > self._model.max_context

    def behind(self, widths: Sequence[int]) -> list[int]:
        """Those of these widths that leave rounds behind them different shapes: such a round is compiled for each. None where nothing of a
        round is left for the next one."""
        if not (self._cache.defers and self._cache.has_recurrent):
            return []
        left = {capacity(w) if w > 1 else 0: w for w in widths}
        return list(left.values())[:_MOST_BEHIND]

    def run(self, width: int) -> float:
        """Seconds of a round that verifies so many tokens."""
        started = self._clock()
        if self._drafts:
            self._verify(width)
        else:  # a plain round is put on its way behind the one that is, which is read then
            self._newest = self._plain(self._newest) if self._unread is None else self._unread
            self._unread = self._plain(self._newest)
            mx.eval(self._newest)
            numbers(self._newest).tolist()
        return self._clock() - started

    def _plain(self, newest: mx.array) -> mx.array:
        out = self._model.forward(newest, FlatRows((1,)), self._cache, certain=True, taps=self._layers)
        sampled = self._sampled(out.logits, 1)
        mx.async_eval(sampled)
        self._cache.commit()
        self._length += 1
        return sampled

    @device.idle()
    def _verify(self, width: int) -> None:
        given = [*numbers(self._newest).tolist(), *[0] * (width - 1)]
        tokens = _array(given)
        device.start(tokens)
        plain = width == 1
        out = self._model.forward(tokens, FlatRows((width,)), self._cache, certain=plain, taps=self._layers)
        sampled = self._sampled(out.logits, width)
        mx.async_eval(sampled)
        if plain:
            self._cache.commit()
        mx.eval(sampled)
        chosen = numbers(sampled).tolist()
        accepted = match(given[1:], chosen)
        if not plain:
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
    """Of one drafter, for a row of its own; `close` it. It keeps the drafter's limits: a draft is no longer than the longest, and a row
    that would come to the end of the context begins anew. Raises whatever the drafter does, and RuntimeError for a shorter draft."""

    def __init__(self, drafter: ModelDrafter, model: Model, clock: Clock = now) -> None:
        self._drafter, self._model, self._clock = drafter, model, clock
        self._row, self._history = -1, list[int]()
        self._sampler = RowSampler(SamplingParams(), [1], model.vocab_size)
        drafter.begin(self._row)

    def run(self, num_known: int, depth: int) -> float:
        """Seconds of a draft of `depth` tokens or the drafter's longest, behind so many tokens more that the drafter has not run."""
        drafter = self._drafter
        depth = deepest(drafter, depth)
        if self._history and len(self._history) + num_known + depth >= drafter.max_context:
            self.close()
            self._history = []
            drafter.begin(self._row)
        if not self._history:
            num_known += drafter.skips
        start, size, needs = len(self._history), self._model.vocab_size, self._drafter.needs
        tokens = [(start + i) % size for i in range(num_known)]
        self._history.extend(tokens)
        hidden = None
        if needs.wants_hidden:
            hidden = mx.zeros((num_known, needs.width * self._model.hidden_size), self._model.dtype)
        self._drafter.observe(self._row, tokens, hidden)
        started = self._clock()
        ask = Ask(self._row, self._history, depth, self._sampler)
        made = self._drafter.propose([ask], BatchSampler([self._sampler], size))[0]
        mx.eval(made.tokens, made.confidences)
        taken = self._clock() - started
        if made.length < depth:
            raise RuntimeError(made.ended or f"a draft of {depth} tokens has {made.length}")
        return taken

    def close(self) -> None:
        """Forget the row."""
        self._drafter.close(self._row)


def deepest(drafter: ModelDrafter, depth: int) -> int:
    """Tokens of the draft that one of `depth` tokens comes to."""
    return depth if drafter.max_draft is None else min(depth, drafter.max_draft)


def measure(
    model: Model,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    seconds: float = READY,
    *,
    known: CostModel | None = None,
    clock: Clock = now,
) -> CostModel:
    """Costs of this model on this machine, for short contexts: `known` and what it lacks, as far as the seconds go, and guesses for the
    rest."""
    ends_at, ends = clock() + seconds, plateau_ends(model, exact=config.exact)
    done = frozenset[int]() if known is None else known.measured
    likely, layers = likely_rounds(model), Streams.of(drafters.values(), model.hidden_size).layers
    with device.private_kernels():
        plain = known.curve(0).seconds(1) if known is not None and done else _likely_plain(model, clock)
        rounds_end = clock() + _FOR_ROUNDS * (ends_at - clock())
        found: dict[int, float] = {}
        if not _is_complete(model, ends, done) and clock() < rounds_end:
            found = _rounds(model, config, layers, ends, done, likely, plain, rounds_end, clock)
        factor = plain / found.get(1, plain) if 1 in done else 1.0
        plain = plain if 1 in done else found.get(1, plain)
        if known is not None:  # guesses among these keep their ratio to plain rounds
            was = known.curve(0).seconds(1)
            scale = 1.0 if 1 in done else found.get(1, was) / was
            points = {w: s if w in done else scale * s for w, s in known.curve(0).knots().items()}
        else:
            points = {} if len(found) > 1 else {w: plain * s for w, s in likely.knots().items()}
        points |= {w: factor * s for w, s in found.items() if w not in done}
        pause = 0.0 if device.has_gpu() else _PAUSE
        costs = CostModel({0: points}, {}, pause=pause) if known is None else known
        costs.know(points, done | set(found), ends)
        if found and (costs.is_doubted or not costs.choosing):
            costs.choosing = choosing(model, ends_at, clock) or costs.choosing
        for name in _unmeasured(drafters, costs):
            drafter = drafters[name]
            if isinstance(drafter, ModelDrafter):
                cost, is_measured = _draft_cost(drafter, model, plain, ends_at, clock)
                if is_measured:
                    costs.know_draft(name, cost)
                else:
                    costs.guess_draft(name, costs.drafts.get(name, cost))
    return costs


def _unmeasured(drafters: Mapping[str, Drafter], costs: CostModel) -> list[str]:
    return [d for d in models_of(drafters) if d not in costs.drafts or costs.is_guess(d)]


def _is_complete(model: Model, ends: Sequence[int], done: frozenset[int]) -> bool:
    return set(widths(model, ends)) <= done


def guessed_costs(model: Model, drafters: Mapping[str, Drafter], clock: Clock = now) -> CostModel:
    """Costs of a model that nobody has measured, guessed from bytes and from how long its head takes. Answers replace them."""
    return measure(model, drafters, EngineConfig(), 0.0, clock=clock)


def kept_costs(
    model: Model,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    name: str,
    seconds: float = READY,
) -> CostModel:
    """Costs from the cache folder. What is not there is measured within `seconds` and put there, and what rounds teach until the process
    ends."""
    file = CostFile.of(model, drafters, config, name)
    return _completed(known_costs(file.data()), model, drafters, config, file, seconds, now)


def shared_costs(
    model: Model,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    file: CostFile | None,
    share: Callable[[list[Any]], list[Any]],
    seconds: float,
    clock: Clock,
) -> CostModel:
    """`kept_costs` among ranks: the file is rank 0's, None elsewhere, and all measure by rank 0's clock. share: gives every rank the value
    that rank 0 gave."""
    data, seconds = share([None if file is None else file.data(), seconds])
    return _completed(known_costs(data), model, drafters, config, file, seconds, clock)


def measured_costs(
    model: Model, drafters: Mapping[str, Drafter], config: EngineConfig, name: str
) -> tuple[CostModel, Path]:
    """Costs measured now, in place of what the cache folder has; and the file they are in."""
    file = CostFile.of(model, drafters, config, name)
    found = measure(model, drafters, config, PATIENT)
    file.write(found)
    return found, file.path


def _completed(
    known: CostModel | None,
    model: Model,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    file: CostFile | None,
    seconds: float,
    clock: Clock,
) -> CostModel:
    """What is known, with what it lacks measured within `seconds` or guessed. file: where it is kept, by rank 0 alone among ranks."""
    ends = plateau_ends(model, exact=config.exact)
    if known is None or _unmeasured(drafters, known) or not _is_complete(model, ends, known.measured):
        known = measure(model, drafters, config, seconds, known=known, clock=clock)
        if file is not None:
            file.write(known)
    known.pause = 0.0 if device.has_gpu() else _PAUSE
    if file is not None:
        file.follow(known)
    return known


def likely_draft(drafter: ModelDrafter, model: Model) -> DraftCost:
    """A guess in plain rounds, from bytes and layers. A drafted token takes its share of the bytes that a plain round reads (the drafter's
    layers and the language-model head over all that the target reads for a token), or its share of the layers where the host is what
    a round waits for, whichever is more; waiting for the draft costs as much as a layer."""
    target, own = reads(model), drafter.reads
    layer = 1.0 / (target.layers + 1)  # the head is one more
    step = min(1.0, max(own.bytes() / max(1.0, target.bytes()), (own.layers + 1) * layer))
    if drafter.drafts_at_once:
        return DraftCost(call=layer + step, queued=_QUEUED * step)
    return DraftCost(call=layer, step=step, queued=_QUEUED * step)


def likely_rounds(model: Model) -> Curve:
    """A guess of what widths cost in plain rounds: LIKELY, and the bytes of the further experts that so many tokens need."""
    read = reads(model)
    plain = max(1.0, read.bytes())
    return Curve({w: s + (read.bytes(w) - read.bytes()) / plain for w, s in LIKELY.knots().items()})


def _likely_plain(model: Model, clock: Clock = now) -> float:
    """Seconds of a plain round, by how long the head takes for its share of the bytes."""
    read, taken = reads(model), 0.0
    # in another dtype MLX would convert all weights of the head
    hidden = mx.zeros((1, model.hidden_size), model.dtype)
    for _ in range(2):  # the first one is also the first to read these weights
        started = clock()
        mx.eval(model.head(hidden))
        taken = clock() - started
    return max(taken, _LEAST) * read.bytes() / max(1, read.head)


def _rounds(
    model: Model,
    config: EngineConfig,
    layers: tuple[int, ...],
    ends: Sequence[int],
    done: frozenset[int],
    likely: Curve,
    plain: float,
    ends_at: float,
    clock: Clock,
) -> dict[int, float]:
    """Width -> seconds of warm rounds, of plain ones and of those not done that there is time for. Once each width is warm they take turns,
    and each turn is weighed by its own plain rounds: a machine that is slow for a while makes no width look dear."""
    cold, last = plain, dict[int, float]()

    def run(rounds: BareRounds, width: int, num: int) -> list[float]:
        """Seconds of so many rounds, fewer where the next one is not expected to end in time."""
        nonlocal cold
        taken: list[float] = []
        while len(taken) < num and not rounds.is_over:
            expected = last.get(width, likely.seconds(width) * plain + cold)
            if clock() + expected > ends_at:
                break
            taken.append(rounds.run(width))
            if len(taken) > WARM and width not in last:
                cold = max(0.0, taken[0] - taken[-1])
            if len(taken) > 1 or width in last:
                last[width] = min(last.get(width, taken[-1]), taken[-1])
        return taken

    if clock() + (likely.seconds(PROMPT) + 3.0) * plain + 2.0 * cold > ends_at:
        return {}
    began = clock()
    rounds = BareRounds(model, config, drafts=False, layers=layers, clock=clock)
    beginning = clock() - began
    taken = run(rounds, 1, WARM + _PLAIN)
    if len(taken) <= WARM:
        return {}
    plains = [_low(taken[WARM:])]
    plain = plains[0]
    wanted = [w for w in widths(model, ends) if w not in done and w != 1]
    costs: dict[int, list[float]] = {}  # in plain rounds
    if wanted and clock() + beginning + likely.seconds(wanted[0]) * plain + cold <= ends_at:
        drafted = BareRounds(model, config, drafts=True, layers=layers, clock=clock)
        for turn in range(_TURNS):
            taken = run(rounds, 1, 1 + _PLAIN) if turn else []
            if turn and len(taken) < 2:  # the first was under way while others were timed
                break
            plains += [_low(taken[1:])] if turn else []
            for width in wanted:
                num = 1 if turn else WARM + 2  # one that was stalled says nothing, nor does one that compiled
                taken = run(drafted, width, num)
                if len(taken) == num:
                    costs.setdefault(width, []).append(min(taken[-2:]) / plains[-1])
    found = {1: _low(plains)}
    least = float("inf")  # no width is dearer than a wider one: where it seems so, something else was slow
    for width in sorted(costs, reverse=True):
        least = found[width] = min(least, found[1] * median(costs[width]))
    return found


def choosing(model: Model, ends_at: float, clock: Clock = now) -> dict[str, float]:
    """By kind of sampling: seconds that a position takes longer than a greedy one; empty where there is no time to find out. What a grammar
    adds depends on the grammar, and rounds tell."""
    size, taken = model.vocab_size, dict[str, list[float]]()
    logits = mx.random.normal((_POSITIONS, size), key=mx.random.key(0)).astype(model.dtype)
    mx.eval(logits)
    for turn in range(WARM + _DRAFTS):
        for kind, params in (("greedy", SamplingParams()), ("sampled", _RECOMMENDED)):
            started = clock()
            if started + 2 * sum(t[-1] for t in taken.values()) > ends_at:
                return {}
            sampler = BatchSampler([RowSampler(params, [1], size)], size)
            mx.eval(sampler.sample(logits, [0] * _POSITIONS, range(turn, turn + _POSITIONS)))
            taken.setdefault(kind, []).append(clock() - started)
    greedy, sampled = (_low(times[WARM:]) for times in taken.values())
    more = max(0.0, sampled - greedy) / _POSITIONS
    return {"sampled": more}


def _low(times: Sequence[float]) -> float:
    """The lower quartile: whatever else a machine does makes single rounds slower, never faster."""
    return sorted(times)[len(times) // 4]


def _draft_cost(
    drafter: ModelDrafter, model: Model, plain: float, ends_at: float, clock: Clock
) -> tuple[DraftCost, bool]:
    """By drafting for a row of its own, as far as there is time; else by bytes. Also whether it was measured: each part was timed twice and
    the shorter time counts. plain: seconds of a plain round."""
    found, drafts = likely_draft(drafter, model).times(plain), None
    try:
        first = found.seconds(1, 1)
        if clock() + 3.0 * first > ends_at:  # one that compiles, and one that does not
            return found, False
        drafts = BareDrafts(drafter, model, clock)
        cold = drafts.run(1, 1)
        if clock() + cold > ends_at:
            return found, False
        one = drafts.run(1, 1)
        found = found.times(min(one, cold) / first)
        turn = found.seconds(1, 2) + found.seconds(_FOUR, 2) + found.seconds(1, _QUEUE) + cold
        times: list[tuple[float, float, float]] = []
        while len(times) <= _DRAFTS and clock() + turn <= ends_at:
            times.append((drafts.run(2, 1), drafts.run(2, _FOUR), drafts.run(_QUEUE, 1)))
            turn = min(map(sum, times))
        if len(times) <= 2:  # the first compiles
            return found, False
        one, four, late = (_low([t[i] for t in times[1:]]) for i in range(3))
        step = max(
            (four - one) / max(1, deepest(drafter, _FOUR) - 1),
            0.0 if drafter.drafts_at_once else _QUEUED * one,
        )
        waiting = max((late - one) / (_QUEUE - 2), 0.0)
        return DraftCost(call=max(one - step - waiting, 0.0), step=step, queued=waiting), True
    except Exception:  # whatever it is, the drafter will say so when it drafts for a request
        return found, False
    finally:
        if drafts is not None:
            drafts.close()


def _array(tokens: list[int]) -> mx.array:
    return mx.array(np.asarray(tokens, np.int32))
