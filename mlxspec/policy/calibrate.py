"""Measures what rounds cost here: bare rounds of every width with worthless drafts, and what each model drafter takes.

`load` calls it. What was measured is kept in a file (cost_file.py), so that the next load starts from it. Knows a model, its drafters and
clocks; knows no engine and decides nothing.

What measuring may take. Measuring gets a budget of seconds: READY less the time the load took, or SHARE of the load where that is more.
Nothing begins that is not expected to end within it. The first expectation of all comes from bytes: the language-model head is timed by
itself, and a plain round takes as much longer as it reads more bytes. After that every measurement corrects the next expectation, and
what the first run of a shape took longer than the second is expected of the first run of other shapes. The budget can be exceeded by what
one such expectation is wrong by, and by the product with the head, which nothing is known before.

What has no place in the budget is guessed (`likely`) and learned from answers, where the controller tries drafts within a row's credit: the
first measured drafts and rounds replace a guess. That is why a load is never prolonged to measure a slow model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.streams import Streams
from mlxspec.models.base import Model
from mlxspec.models.reads import plateau_ends, reads
from mlxspec.platform import device
from mlxspec.policy import clock
from mlxspec.policy.bare_rounds import PROMPT, WARM, BareDrafts, BareRounds, widths
from mlxspec.policy.cost import CostModel, Curve, DraftCost
from mlxspec.policy.cost_file import CostFile, models_of

READY = 2.0  # seconds in which a small model is loaded and measured
SHARE = 0.05  # of the time it took to load, for larger ones
_PATIENT = 60.0  # seconds, where measuring is what was asked for: all widths fit, or something is wrong
_QUEUE = 32  # tokens that a drafter is behind
_FOR_ROUNDS = 0.75  # of the seconds; the others are for drafts
_MOST = 5  # rounds of each width that count
_PLAIN = 3  # plain rounds that such a round is weighed by
LIKELY = Curve({1: 1.0, 2: 1.2, 4: 1.65, 8: 2.7, 17: 4.5})  # in plain rounds, until one of that width has run
_LEAST = 1e-6  # seconds that anything takes
_DRAFTS = 6  # drafts of each kind at most, the first of which compiles
_FOUR = 4  # tokens of the longer ones
_QUARTERS = 4  # of times that are ordered by length; the end of the first one counts
_QUEUED = 0.1  # of a drafted token: what a known one takes that is run beside others
# of a plain round of several rows where there is no GPU: one row's draft keeps the rounds of all from running ahead, which there hides
# most of what the host does, and rows of several widths have to be taken apart
_PAUSE = 0.3


def allowance(load_seconds: float) -> float:
    """Seconds that measuring may take behind a load of so many: loading and measuring are through in READY, or measuring takes SHARE of
    what loading took."""
    return max(READY - load_seconds, SHARE * load_seconds)


class _Budget:
    """Seconds that may be spent on measuring. What is begun cannot be stopped, so nothing is begun that is not expected to end in time."""

    def __init__(self, seconds: float) -> None:
        self._ends = clock.now() + seconds

    def allows(self, seconds: float) -> bool:
        return clock.now() + seconds <= self._ends

    def part(self, share: float) -> _Budget:
        """That share of what is left, beginning now."""
        return _Budget(share * (self._ends - clock.now()))


def calibrate(
    model: Model, drafters: Mapping[str, Drafter], config: EngineConfig, seconds: float = READY
) -> CostModel:
    """Costs of this model on this machine, for short contexts, measured within `seconds` as far as they go. What they do not reach is
    guessed, and learned when it is met."""
    return _with_guesses(_measure(model, drafters, config, _Budget(seconds), None), drafters, model)


def guessed_costs(model: Model, drafters: Mapping[str, Drafter]) -> CostModel:
    """Costs of a model that nobody has calibrated, guessed from bytes and from how long its head takes. Answers replace them."""
    return _with_guesses(_measure(model, drafters, EngineConfig(), _Budget(0.0), None), drafters, model)


def kept_costs(
    model: Model, drafters: Mapping[str, Drafter], config: EngineConfig, name: str, seconds: float = READY
) -> CostModel:
    """Costs from the cache folder. What is not there is measured within `seconds` and put there, so what one load has no time for the
    next ones add, and what rounds teach until the process ends."""
    file = CostFile.of(model, drafters, config, name)
    return _completed(file.read(), model, drafters, config, file, seconds)


def shared_costs(
    model: Model,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    file: CostFile | None,
    share: Callable[[list[Any]], list[Any]],
    seconds: float,
) -> CostModel:
    """`kept_costs` among ranks: the file is rank 0's, None elsewhere, and all measure by rank 0's clock. share: gives every rank the value
    that rank 0 gave."""
    before = None if file is None else file.read()
    given, seconds = share([None if before is None else before.as_data(), seconds])
    known = None if given is None else CostModel.from_data(given)
    return _completed(known, model, drafters, config, file, seconds)


def _completed(
    known: CostModel | None,
    model: Model,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    file: CostFile | None,
    seconds: float,
) -> CostModel:
    """What is known, with what it lacks measured within `seconds` or guessed. file: where it is kept, by rank 0 alone among ranks."""
    missing = [d for d in models_of(drafters) if known is None or d not in known.drafts]
    ends = plateau_ends(model, exact=config.exact)
    if known is None or missing or not set(widths(model, ends)) <= known.measured:
        known = _measure(model, drafters, config, _Budget(seconds), known)
        if file is not None:
            file.write(known)
    if file is not None:
        file.follow(known)
    return _with_guesses(known, drafters, model)


def measured_costs(
    model: Model, drafters: Mapping[str, Drafter], config: EngineConfig, name: str
) -> tuple[CostModel, Path]:
    """Costs measured now, in place of what the cache folder has; and the file they are in."""
    file = CostFile.of(model, drafters, config, name)
    found, before = _measure(model, drafters, config, _Budget(_PATIENT), None), file.read()
    if before is not None:
        found.drafts = before.drafts | found.drafts
    file.write(found)
    return _with_guesses(found, drafters, model), file.path


def likely_draft(drafter: ModelDrafter, model: Model) -> DraftCost:
    """A guess in plain rounds, from bytes and layers. A drafted token takes its share of the bytes that a plain round reads (the drafter's
    layers and the language-model head over all that the target reads for a token), or its share of the layers where the host is what
    a round waits for, whichever is more; waiting for the draft costs as much as a layer."""
    target, own = reads(model), drafter.reads
    step = own.bytes() / max(1.0, target.bytes())
    layer = 1.0 / (target.layers + 1)  # the head is one more
    step = min(1.0, max(step, (own.layers + 1) * layer))
    if drafter.drafts_at_once:
        return DraftCost(call=layer + step, queued=_QUEUED * step)
    return DraftCost(call=layer, step=step, queued=_QUEUED * step)


def likely_rounds(model: Model) -> Curve:
    """A guess of what widths cost in plain rounds: LIKELY, and the bytes of the further experts that so many tokens need."""
    read = reads(model)
    plain = max(1.0, read.bytes())
    return Curve({w: s + (read.bytes(w) - read.bytes()) / plain for w, s in LIKELY.knots().items()})


def _with_guesses(costs: CostModel, drafters: Mapping[str, Drafter], model: Model) -> CostModel:
    """The same, with a cost for every model drafter and for the pause that drafts are to several rows."""
    plain = costs.curve(0).seconds(1)
    for name in models_of(drafters):
        drafter = drafters[name]
        if name not in costs.drafts and isinstance(drafter, ModelDrafter):
            costs.guess_draft(name, likely_draft(drafter, model).times(plain))
    costs.pause = None if device.has_gpu() else _PAUSE
    return costs


def _measure(
    model: Model,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    budget: _Budget,
    known: CostModel | None,
) -> CostModel:
    """What `known` lacks, as far as the budget goes, in its measure of a plain round."""
    if known is not None and 1 not in known.measured:
        known = None if not known.drafts else known
    done = known.measured if known is not None else frozenset[int]()
    likely, ends = likely_rounds(model), plateau_ends(model, exact=config.exact)
    wanted = [w for w in widths(model, ends) if w not in done]
    with device.private_kernels():
        verify, warm = dict[int, float](), set[int]()
        plain = known.curve(0).seconds(1) if 1 in done and known is not None else _likely_plain(model)
        if wanted:
            layers = Streams.of(drafters.values(), model.hidden_size).layers
            verify, warm = _rounds(model, config, budget.part(_FOR_ROUNDS), wanted, plain, likely, layers)
        if 1 not in done:
            plain = verify.get(1, plain)
        found: dict[str, DraftCost] = {}
        guesses: dict[str, DraftCost] = {}
        for name, drafter in drafters.items():
            if isinstance(drafter, ModelDrafter) and (known is None or name not in known.drafts):
                cost = _draft_cost(drafter, model, plain, budget)
                if cost is not None:
                    (found if cost[1] else guesses)[name] = cost[0]
    if known is not None:
        factor, before = plain / verify.get(1, plain), known.curve(0)
        verify = {w: factor * s for w, s in verify.items()} | {w: before.seconds(w) for w in done}
        found = known.drafts | found
    if (
        known is not None and done and 1 not in verify
    ):  # rounds have taught wider ones only: their curve has a guess of a plain one
        points = known.curve(0).knots()
    else:
        points = verify if len(verify) > 1 else {w: plain * s for w, s in likely.knots().items()}
    costs = CostModel({0: points | verify}, found, measured=warm | done, ends=ends)
    for name, guess in guesses.items():
        costs.guess_draft(name, guess)
    return costs


def _likely_plain(model: Model) -> float:
    """Seconds of a plain round, by how long the head takes for its share of the bytes."""
    read = reads(model)
    hidden = mx.zeros(
        (1, model.hidden_size), model.dtype
    )  # in another dtype MLX would convert all weights of the head
    taken = 0.0
    for _ in range(2):  # the first one is also the first to read these weights
        started = clock.now()
        mx.eval(model.head(hidden))
        taken = clock.now() - started
    return max(taken, _LEAST) * read.bytes() / max(1, read.head)


class _Expected:
    """What the next run of a width takes, in seconds: a guess, or the shortest so far. The first run of a shape compiles, and takes as much
    longer as the last first run did, at first as long again."""

    def __init__(self, plain: float, likely: Curve) -> None:
        self.plain, self._likely = plain, likely
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._cold: float | None = None

    def seconds(self, width: int) -> float:
        last, first = self._last.get(width), self._first.get(width)
        if last is not None:
            return last
        if first is not None:
            return first  # the second one compiles too, where it undoes the first
        guess = self._likely.seconds(width) * self.plain
        return guess + (guess if self._cold is None else self._cold)

    def took(self, width: int, seconds: float) -> None:
        if width not in self._first:
            self._first[width] = seconds
            return
        if width not in self._last:
            self._cold = max(self._cold or 0.0, self._first[width] - seconds)
        self._last[width] = min(self._last.get(width, seconds), seconds)  # a machine can stall, not hurry


def _rounds(
    model: Model,
    config: EngineConfig,
    budget: _Budget,
    wanted: Sequence[int],
    plain_seconds: float,
    likely: Curve,
    layers: tuple[int, ...],
) -> tuple[dict[int, float], set[int]]:
    """Width -> seconds of a round, of plain ones and of `wanted` ones that the budget has room for; and which of them were warm.

    plain_seconds: what a plain round is expected to take. Plain ones run ahead of the host, as they do where nothing is drafted. Once each
    width is warm they take turns, and each turn is weighed by its own plain rounds: a machine that is slow for a while would otherwise make
    one width look dear, for good.
    """
    expected = _Expected(plain_seconds, likely)
    first = expected.seconds(1)
    if not budget.allows(expected.seconds(PROMPT) + 2 * first):  # the prompt comes with a round
        return {}, set()
    began = clock.now()
    plain = BareRounds(model, config, drafts=False, layers=layers)
    beginning = clock.now() - began
    taken = _run(plain, 1, budget, expected, WARM + _PLAIN)
    if not taken:
        return {}, set()
    warm, plains = {1} if len(taken) > WARM + 1 else set[int](), [_low(taken[WARM:] or taken)]
    found = {1: plains[0]}
    wanted = [w for w in wanted if w != 1]
    expected.plain = plains[0]
    if not wanted or not budget.allows(beginning + expected.seconds(wanted[0])):
        return found, warm
    drafted = BareRounds(model, config, drafts=True, layers=layers)
    costs: dict[int, list[float]] = {}  # in plain rounds
    for turn in range(_MOST):
        if turn:
            taken = _run(plain, 1, budget, expected, 1 + _PLAIN)
            if len(taken) < 2:  # the first was under way while others were timed
                break
            plains.append(_low(taken[1:]))
        for width in wanted:
            new = 1 if turn else WARM + 2  # one that was stalled says nothing, nor does one that compiled
            taken = _run(drafted, width, budget, expected, new)
            if len(taken) == new:
                costs.setdefault(width, []).append(min(taken[-2:]) / plains[-1])
    found[1] = _low(plains)
    found |= {w: found[1] * median(c) for w, c in costs.items()}
    return _rising(found), warm | set(costs)


def _run(rounds: BareRounds, width: int, budget: _Budget, expected: _Expected, most: int) -> list[float]:
    """Seconds of up to so many rounds: fewer where the next one is not expected to end in time."""
    taken: list[float] = []
    while len(taken) < most and not rounds.is_over and budget.allows(expected.seconds(width)):
        taken.append(rounds.run(width))
        expected.took(width, taken[-1])
    return taken


def _low(times: Sequence[float]) -> float:
    """The lower quartile: whatever else a machine does makes single rounds slower, never faster."""
    return sorted(times)[len(times) // _QUARTERS]


def _rising(found: Mapping[int, float]) -> dict[int, float]:
    """No width is dearer than a wider one: where it seems so, something else was slow."""
    out, most = {}, float("inf")
    for width in sorted(found, reverse=True):
        most = out[width] = min(most, found[width])
    return out


def _draft_cost(
    drafter: ModelDrafter, model: Model, plain: float, budget: _Budget
) -> tuple[DraftCost, bool] | None:
    """By drafting for a row of its own: a single token first, which scales the guess, then more where there is time. None where there is no
    time for that, or the drafter cannot. plain: seconds of a plain round.

    Also whether it is known: each part of it was timed twice, and the shorter time counts. A single time may be that of a machine that
    stalled. What rests on it is a guess, which drafts replace and nobody keeps.
    """
    drafts = None
    likely = likely_draft(drafter, model).times(plain)
    try:
        first = likely.seconds(1, 1)
        if not budget.allows(2 * first + first):  # one that compiles, and one that does not
            return None
        drafts = BareDrafts(drafter, model)
        cold = drafts.run(1, 1)
        if not budget.allows(cold):
            return None
        one = drafts.run(1, 1)
        found, cold = likely.times(min(one, cold) / first), max(0.0, cold - one)
        if not budget.allows(found.seconds(_FOUR, _QUEUE) + cold):
            return found, False
        drafts.run(_QUEUE, _FOUR)
        times: list[tuple[float, float, float]] = []
        turn = found.seconds(1, 2) + found.seconds(_FOUR, 2) + found.seconds(1, _QUEUE) + cold
        while len(times) < _DRAFTS and budget.allows(turn):
            times.append((drafts.run(2, 1), drafts.run(2, _FOUR), drafts.run(_QUEUE, 1)))
            turn = min(map(sum, times))
        if len(times) <= 2:  # the first compiles
            return found, False
        one, four, late = (_low([t[i] for t in times[1:]]) for i in range(len(times[0])))
        step = max((four - one) / (_FOUR - 1), 0.0 if drafter.drafts_at_once else _QUEUED * one)
        waiting = max((late - one) / (_QUEUE - 2), 0.0)
        return DraftCost(call=max(one - step - waiting, 0.0), step=step, queued=waiting), True
    except Exception:  # whatever it is, the drafter will say so when it drafts for a request
        return None
    finally:
        if drafts is not None:
            drafts.close()
