"""Runs rounds of an artificial request while an engine is idle, so that the first answers do not wait for compilation; and, at a user's
request, so often that the cost model learns what each round takes.

The request goes through the engine as any other, so its rounds are those that answers run: launched ahead, host included. A policy of its
own makes its drafts, by a script. The rounds teach the costs of policy auto by the same code as every round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxspec.config import SamplingParams
from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.policy import LearnedRound, Policy, RowChoice, RowTexts
from mlxspec.drafters.row import DraftRow
from mlxspec.engine.engine import Engine
from mlxspec.engine.measure import guessed_costs
from mlxspec.engine.probe import ProbeReport, probing
from mlxspec.engine.uncounted import uncounted
from mlxspec.errors import RankError
from mlxspec.kernels import gdn_prefill, launch, products, races, wide
from mlxspec.kernels.conv_ops import GdnShape
from mlxspec.kernels.flat import LADDER
from mlxspec.kernels.quantized_weight import QuantizedWeight, dtype_of_rows
from mlxspec.models import tune
from mlxspec.models.runners import retrace
from mlxspec.platform import device, kept_json
from mlxspec.policy.cost_file import CostFile, described
from mlxspec.policy.costs import GREEDY, CostModel, DraftCall, bucket
from mlxspec.sampling.sampler import BatchSampler

IDLE_SECONDS = 0.2  # that a rehearsal takes after an answer: a request waits for one piece of it at most
_PROMPT = [1, 2]
_FORMAT = 1  # of what a probe found; raised where forwards begin to compute otherwise
_WIDEST = 16  # tokens of a round
_DEPTH = 3  # tokens of models' drafts
_TURNS = 2  # the first run of a shape compiles, and so does the first that undoes one
_MEASURED = 8  # turns of each round where costs are measured


class Step(NamedTuple):
    """A round of an artificial request. drafter: the drafter's name, None for a plain round. depth: tokens of the draft; 0: a plain
    round."""

    drafter: str | None = None
    depth: int = 0


_PLAIN = Step()


class Zeros(Drafter):
    """A drafter whose drafts are the token 0, repeated up to the requested length."""

    name, max_draft = "zeros", _WIDEST - 1

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [Draft.of([0] * ask.limit) for ask in asks]


class Script(Policy):
    """A policy that makes the row of an artificial request run given rounds, and teaches their times to `costs`. steps: the rounds. A
    draft of zeros is verified. A model's draft is made but not verified, so that its time is not mixed with a verify's."""

    runs_ahead = False

    def __init__(self, costs: CostModel, steps: Sequence[Step]) -> None:
        self._costs, self._steps = costs, list(reversed(steps))
        self._drafter: str | None = None  # in this round, until its draft is here
        self._follows_drafts = False

    def begin(self, row: DraftRow) -> None:
        row.add(Zeros())

    @property
    def is_done(self) -> bool:
        """Return whether all steps have been taken."""
        return not self._steps

    def rests(self, rows: Sequence[DraftRow], texts: RowTexts) -> bool:
        if not self._steps or self._steps[-1].depth:
            return False
        self._steps.pop()
        return True

    def choose(self, rows: Sequence[DraftRow], offers: Sequence[Mapping[str, Draft]]) -> list[RowChoice]:
        draft = offers[0].get(self._drafter or "")
        if draft is not None:
            name, self._drafter = self._drafter, None
            return [RowChoice(drafter=name, length=draft.length if name == Zeros.name else 0)]
        step = self._steps.pop() if self._steps else _PLAIN
        self._drafter = step.drafter if step.depth else None
        return [RowChoice(drafter=self._drafter, length=step.depth)]

    def learn(self, done: LearnedRound) -> None:
        calls = [DraftCall(c.name, GREEDY, c.depth, c.queued, len(c.rows)) for c in done.calls]
        is_plain = not calls and done.num_tokens == done.num_rows
        self._costs.learn(
            self._costs.curve(bucket(len(done.rows[0].history)), done.num_rows),
            done.num_tokens,
            calls,
            done.seconds,
            is_plain=is_plain,
            follows_drafts=self._follows_drafts,
            is_ahead=done.ahead,
            is_warm=done.is_warm,
        )
        self._follows_drafts = not is_plain


def steps_of(engine: Engine, turns: int = _TURNS) -> list[Step]:
    """Return the rounds for `rehearse`: those that answers of this engine run and that this process has not run yet. They are plain
    rounds and, where the engine chooses the drafter, rounds of each width and drafts of each model. turns: how often each is run."""
    if engine.spec.policy == "auto" and engine.spec.drafters:
        return drafting_steps(engine, turns, 1 + engine.drafts.longest_draft(engine.spec))
    return [] if (1, 1) in engine.policies.costs.ran else _plain(turns)


def drafting_steps(engine: Engine, turns: int, widest: int = _WIDEST) -> list[Step]:
    """Return the rounds whose costs policy "auto" needs and that this process has not run yet, whatever policy the engine has. turns:
    how often each is run. widest: most tokens of a round."""
    costs = engine.policies.costs
    steps: list[Step] = []
    for width in [w for w in LADDER if 1 < w <= min(_WIDEST, widest) and (1, w) not in costs.ran]:
        steps += [Step(Zeros.name, width - 1)] * turns
    for name, drafter in engine.drafts.drafters.items():
        if (
            isinstance(drafter, ModelDrafter)
            and name in engine.spec.drafters
            and costs.is_guess(name, GREEDY)
        ):
            depth = min(_DEPTH, drafter.max_draft or _DEPTH)
            steps += [Step(name, 1), Step(name, depth)] * 2 * turns
    return [*_plain(turns), *steps, *_plain(turns)] if steps else []


def _plain(turns: int) -> list[Step]:
    return [_PLAIN] * (turns + 1)


def rehearse(engine: Engine, steps: Sequence[Step] | None = None) -> Generator[None]:
    """Run rounds of an artificial request while the engine is idle, so that later answers do not wait for compilation. A generator that
    yields after each piece: first races of kernels, then the rounds in `steps` (None: those of `steps_of`), which use the kernels
    that won, then the exactness probe, unless its result on this machine is known. Closing the generator ends the artificial request,
    which leaves nothing in the engine's statistics and prefix cache. Ranks do not rehearse."""
    if engine.ranks.size > 1:
        return
    yield from _race(engine)
    yield from _rounds(engine, steps_of(engine) if steps is None else steps)
    if engine.exact_width is None:
        found = yield from probing(engine.model, engine.probed_widths, kv_bits=engine.config.kv_bits)
        engine.stats.probe = found
        kept_json.write(_widths_file(engine), asdict(found))


def known_widths(engine: Engine) -> ProbeReport | None:
    """Return the report of the exactness probe that an earlier process kept for this model and the kernels that are in use now; None
    where there is none."""
    return ProbeReport.read(kept_json.read(_widths_file(engine)))


def _widths_file(engine: Engine) -> Path:
    made = [_FORMAT, mx.__version__, [r.name for r in engine.kernels if r.in_use], launch.speedups()]
    model = described(engine.model, engine.config, engine.name)
    texts = (launch.source_of(name).encode() for name in launch.raced())
    return kept_json.kept_file("widths", [made, list(engine.probed_widths), model], *texts)


def _rounds(engine: Engine, steps: Sequence[Step]) -> Iterator[None]:
    if not steps:
        return
    if engine.max_context < len(_PROMPT) + 2 + sum(1 + step.depth for step in steps):
        return
    script, was_on = Script(engine.policies.costs, steps), engine.prefix.is_on
    params = SamplingParams(max_tokens=len(steps) * (1 + _WIDEST), ignore_eos=True)
    names = tuple(n for n in engine.spec.drafters if isinstance(engine.drafts.drafters.get(n), ModelDrafter))
    spec = replace(engine.spec, drafters=names or engine.spec.drafters)
    engine.prefix.is_on = False
    try:
        with uncounted(engine, _PROMPT, params, spec=spec) as request:
            engine.policies.lead(request.number, script)
            while not script.is_done and request.finish_reason is None:
                with device.private_kernels():
                    engine.step()
                yield
    finally:
        engine.prefix.is_on = was_on


def rehearse_for(engine: Engine, seconds: float) -> None:
    """Run pieces of `rehearse` until it ends or this number of seconds has passed. An error ends the rehearsal only; RankError is
    raised."""
    ends, running = time.perf_counter() + seconds, rehearse(engine)
    try:
        for _ in running:
            if time.perf_counter() > ends:
                return
    except RankError:
        raise
    except Exception:  # where it fails requests will tell
        return
    finally:
        running.close()


def measure(engine: Engine) -> Path:
    """Measure what each kind of round and draft costs on this machine, over many of them, and return the file that keeps the costs.
    Requests with policy "auto" use them from now on."""
    drafters = engine.drafts.drafters
    engine.follow(guessed_costs(engine.model, drafters))
    steps = drafting_steps(engine, _MEASURED)
    for _ in rehearse(engine, steps):
        pass
    file = CostFile.of(engine.model, drafters, engine.config, engine.name)
    file.write(engine.policies.costs)
    file.follow(engine.policies.costs)
    return file.path


def _race(engine: Engine) -> Iterator[None]:
    """Run the missing races of kernels, of quantized products and of the recurrence of prompts. Yields after each."""
    races_left: list[Callable[[], object]] = [
        partial(products.race, num_rows, weight, dtype) for weight, dtype, num_rows in unraced(engine)
    ]
    races_left += [partial(gdn_prefill.race, *each) for each in unraced_prompts(engine)]
    if not races_left:
        return
    try:
        for race in races_left:
            with device.private_kernels():
                race()
            yield
    finally:
        races.save()
        retrace()
        engine.stats.probe = None  # it was of other kernels


def unraced_prompts(engine: Engine) -> list[tuple[GdnShape, mx.Dtype, int]]:
    """Return the recurrences, as shape, dtype and number of tokens of a prompt, for which no race of mlxspec's kernel against MLX's
    operation on this GPU is on record."""
    if device.gpu_generation() is None or engine.ranks.size > 1:
        return []
    return [(*of, num) for of in tune.recurrences(engine.model) for num in gdn_prefill.unraced(*of)]


def unraced(engine: Engine) -> list[tuple[QuantizedWeight, mx.Dtype, int]]:
    """Return the quantized products, as weight, dtype and number of rows, of which no race on this GPU is on record, and for which
    mlxspec's kernel or unpacking the weight once may be faster than MLX's. On an M1 or M2 MLX reads the weights once for each row; on
    later GPUs it reads them twice from 6 rows on."""
    if device.gpu_generation() is None or engine.ranks.size > 1:
        return []  # MLX may compile a product for CUDA for a long time; ranks must choose the same kernels
    found = []
    for weight in tune.raced_weights(*modules_of(engine)):
        dtype = dtype_of_rows(weight, engine.model.dtype)
        found += [(weight, dtype, num_rows) for num_rows in products.unraced(weight, dtype)]
    for weight in tune.wide_weights(engine.model, engine.drafts.drafters.values()):
        dtype = dtype_of_rows(weight, engine.model.dtype)
        found += [(weight, dtype, num_rows) for num_rows in wide.unraced(weight, dtype)]
    return found


def modules_of(engine: Engine) -> list[nn.Module]:
    """Return the modules that rounds run: the target, its drafters' modules, and the rows of a language-model head that drafters propose
    from."""
    modules: list[object] = [engine.model]
    for drafter in engine.drafts.drafters.values():
        if isinstance(drafter, ModelDrafter):
            modules += [*(drafter.modules or ()), None if drafter.reduced is None else drafter.reduced.head]
    modules = [getattr(m, "module", m) for m in modules]  # of a model by mlx-lm's code
    return [m for m in modules if isinstance(m, nn.Module)]


def unraced_notice(engine: Engine) -> tuple[str, ...]:
    """Return a notice, in a tuple, where races are missing, so that drafting may be slower than it could be; else an empty tuple."""
    num = len({id(weight) for weight, _, _ in unraced(engine)})
    if not num:
        return ()
    return (
        f"{num} kinds of quantized products of this model have not been raced on this GPU, so reading prompts and verifying drafts "
        "may take longer than they could; `mlxspec chat` and `mlxspec serve` run these races once, while they wait for a request.",
    )
