"""Measures at load what rounds cost here: real rounds of every width with worthless drafts, and what each model drafter takes.

Whole rounds are timed, host work included, because whole rounds are what the controller weighs. Kept in a file (cost_file.py), so that
the next load starts from them. Knows the engine and clocks; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median

from mlxspec import device
from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.engine.cost_file import CostFile, models_of
from mlxspec.engine.rehearsal import PROMPT, WARM, WIDTHS, Drafts, Rounds
from mlxspec.models.base import Model
from mlxspec.speculation.cost import CostModel, Curve, DraftCost

READY = 2.0  # seconds in which a small model is loaded and measured
SHARE = 0.05  # of the time it took to load, for larger ones
_PATIENT = 60.0  # seconds, where measuring is what was asked for: all widths fit, or something is wrong
_ORDER = (1, 5, 2, 17)  # widths without which a curve is a guess come first
_QUEUE = 32  # tokens that a drafter is behind
_FOR_ROUNDS = 0.75  # of the seconds; the others are for drafts
_MOST = 5  # rounds of each width that count
_PLAIN = 3  # plain rounds that such a round is weighed by
LIKELY = Curve({1: 1.0, 2: 1.2, 4: 1.65, 8: 2.7, 17: 4.5})  # in plain rounds, until one of that width has run
LIKELY_DRAFT = 0.2  # plain rounds a token
# of a plain round of several rows, on a CPU: one row's draft keeps the rounds of all from running ahead, which there hides most of what
# the host does, and rows of several widths have to be taken apart
_PAUSE = 0.3


def allowance(load_seconds: float) -> float:
    """Seconds that measuring may take behind a load of so many: loading and measuring are through in READY, or measuring takes SHARE of
    what loading took."""
    return max(READY - load_seconds, SHARE * load_seconds)


class Budget:
    """Seconds that may be spent on measuring. What is begun cannot be stopped, so nothing is begun that is not expected to end in time."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.perf_counter() + seconds

    def allows(self, seconds: float) -> bool:
        return time.perf_counter() + seconds <= self._ends

    def part(self, share: float) -> Budget:
        """That share of what is left, beginning now."""
        return Budget(share * (self._ends - time.perf_counter()))


def calibrate(
    model: Model, drafters: Mapping[str, Drafter], config: EngineConfig, seconds: float = READY
) -> CostModel:
    """Costs of this model on this machine, for short contexts, measured within `seconds` as far as they go. What they do not reach is
    guessed, and learned when it is met; only the first plain round runs at any price."""
    return _with_guesses(_measure(model, drafters, config, Budget(seconds), None), drafters)


def kept_costs(
    model: Model, drafters: Mapping[str, Drafter], config: EngineConfig, name: str, seconds: float = READY
) -> CostModel:
    """Costs from the cache folder. What is not there is measured within `seconds` and put there, so what one load has no time for the
    next ones add, and what rounds teach until the process ends."""
    file = CostFile.of(model, drafters, config, name)
    known = file.read()
    missing = [d for d in models_of(drafters) if known is None or d not in known.drafts]
    if known is None or missing or not set(_widths(model)) <= known.measured:
        known = _measure(model, drafters, config, Budget(seconds), known)
        file.write(known)
    file.follow(known)
    return _with_guesses(known, drafters)


def measured_costs(
    model: Model, drafters: Mapping[str, Drafter], config: EngineConfig, name: str
) -> tuple[CostModel, Path]:
    """Costs measured now, in place of what the cache folder has; and the file they are in."""
    file = CostFile.of(model, drafters, config, name)
    found, before = _measure(model, drafters, config, Budget(_PATIENT), None), file.read()
    if before is not None:
        found.drafts = before.drafts | found.drafts
    file.write(found)
    return _with_guesses(found, drafters), file.path


def _with_guesses(costs: CostModel, drafters: Mapping[str, Drafter]) -> CostModel:
    """The same, with a cost for every model drafter and for the pause that drafts are to several rows: guesses are not kept."""
    guess = DraftCost(step=LIKELY_DRAFT * costs.curve(0).seconds(1))
    costs.drafts = dict.fromkeys(models_of(drafters), guess) | costs.drafts
    costs.pause = None if device.has_gpu() else _PAUSE
    return costs


def _measure(
    model: Model,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    budget: Budget,
    known: CostModel | None,
) -> CostModel:
    """What `known` lacks, as far as the budget goes, in its measure of a plain round."""
    if known is not None and 1 not in known.measured:
        known = CostModel({0: {1: known.curve(0).seconds(1)}}, known.drafts, measured=())
    done = known.measured if known is not None else frozenset[int]()
    with device.private_kernels():
        verify: dict[int, float] = {}
        warm: set[int] = set()
        if known is None or not set(_widths(model)) <= done:
            verify, warm = _rounds(model, config, budget.part(_FOR_ROUNDS), done)
        plain = known.curve(0).seconds(1) if known is not None and done else verify[1]
        found: dict[str, DraftCost] = {}
        for name, drafter in drafters.items():
            if isinstance(drafter, ModelDrafter) and (known is None or name not in known.drafts):
                cost = _draft_cost(drafter, model, plain, budget)
                found |= {} if cost is None else {name: cost}
    if known is not None:
        factor, before = plain / verify.get(1, plain), known.curve(0)
        verify = {w: factor * s for w, s in verify.items()} | {w: before.seconds(w) for w in done}
        found = known.drafts | found
    return CostModel({0: _with_likely(verify)}, found, measured=warm | done)


def _with_likely(verify: Mapping[int, float]) -> dict[int, float]:
    """A curve where there is only its first point."""
    return dict(verify) if len(verify) > 1 else {w: verify[1] * cost for w, cost in LIKELY.knots().items()}


def _widths(model: Model) -> list[int]:
    """Those that are measured, the most telling first."""
    room = model.max_context - PROMPT - 2
    rest = (w for w in WIDTHS if w not in _ORDER)
    return [w for w in (*_ORDER, *rest) if w == 1 or w <= room]


def _rounds(
    model: Model, config: EngineConfig, budget: Budget, done: Collection[int] = ()
) -> tuple[dict[int, float], set[int]]:
    """Width -> seconds of a round, of plain ones and of those not in `done` that the budget has room for; and which of them were warm.

    Plain ones run ahead of the host, as they do where nothing is drafted. Once each width is warm they take turns, and each turn is
    weighed by its own plain rounds: a machine that is slow for a while would otherwise make one width look dear, for good.
    """
    plain = Rounds(model, config, drafts=False)
    taken = _run(plain, 1, budget, 0.0, WARM + _PLAIN)
    warm, plains = {1} if len(taken) > WARM else set[int](), [_low(taken[WARM:] or taken)]
    found = {1: plains[0]}
    wanted = [w for w in _widths(model) if w not in done and w != 1]
    if not wanted or not budget.allows(2 * _likely(PROMPT) * plains[0]):
        return found, warm
    drafted = Rounds(model, config, drafts=True)
    costs: dict[int, list[float]] = {}  # in plain rounds
    for turn in range(_MOST):
        if turn:
            taken = _run(plain, 1, budget, plains[-1], 1 + _PLAIN)
            if len(taken) < 2:  # the first was under way while others were timed
                break
            plains.append(_low(taken[1:]))
        for width in wanted:
            new = 1 if turn else 1 + WARM
            likely = costs[width][-1] if width in costs else _likely(width)
            taken = _run(drafted, width, budget, likely * plains[-1], new)
            if len(taken) == new:  # a round that compiled says nothing of those that follow
                costs.setdefault(width, []).append(taken[-1] / plains[-1])
    found[1] = _low(plains)
    found |= {w: found[1] * median(c) for w, c in costs.items()}
    return _rising(found), warm | set(costs)


def _run(rounds: Rounds, width: int, budget: Budget, likely: float, most: int) -> list[float]:
    """Seconds of up to so many rounds: fewer where the budget ends before, none where not even the first is
    likely to end in time. likely: seconds of the first, 0 to run it at any price."""
    taken: list[float] = []
    while len(taken) < most and not rounds.is_over:
        if (taken or likely) and not budget.allows(taken[-1] if taken else likely):
            break
        taken.append(rounds.run(width))
    return taken


def _likely(width: int) -> float:
    """Plain rounds."""
    return LIKELY.seconds(width)


def _low(times: Sequence[float]) -> float:
    """The lower quartile: whatever else a machine does makes single rounds slower, never faster."""
    return sorted(times)[len(times) // 4]


def _rising(found: Mapping[int, float]) -> dict[int, float]:
    """No width is dearer than a wider one: where it seems so, something else was slow."""
    out, most = {}, float("inf")
    for width in sorted(found, reverse=True):
        most = out[width] = min(most, found[width])
    return out


def _draft_cost(drafter: ModelDrafter, model: Model, plain: float, budget: Budget) -> DraftCost | None:
    """By drafting for a row of its own; None where there is no time for that, or the drafter cannot."""
    drafts = None
    try:
        drafts = Drafts(drafter, model)
        if not budget.allows(LIKELY_DRAFT * (4 + 1 + 4 + 1) * plain):
            return None
        drafts.run(_QUEUE, 4)
        times: list[tuple[float, float, float]] = []
        while len(times) < 6 and (not times or budget.allows(sum(times[-1]))):
            times.append((drafts.run(2, 1), drafts.run(2, 4), drafts.run(_QUEUE, 1)))
        one, four, late = (_low([t[i] for t in times[1:] or times]) for i in range(3))
        step = max((four - one) / 3, 0.1 * one)
        waiting = max((late - one) / (_QUEUE - 2), 0.0)
        return DraftCost(call=max(one - step - waiting, 0.0), step=step, queued=waiting)
    except Exception:  # whatever it is, the drafter will say so when it drafts for a request
        return None
    finally:
        if drafts is not None:
            drafts.close()
