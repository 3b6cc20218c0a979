"""Measures at load what rounds cost here: real rounds of every width with worthless drafts, and what each model drafter takes.

Whole rounds are timed, host work included, because whole rounds are what the controller weighs. Kept in the user's cache folder by
machine, versions and model, so that the next load starts from them. Knows the engine and clocks; decides nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxspec import __version__, device, folders
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.ngram_rows import NgramDrafter, NgramRow
from mlxspec.engine.engine import Engine
from mlxspec.models.base import Model
from mlxspec.sampling.sampler import BatchSampler, RowSampler
from mlxspec.speculation.controller import DEPTHS
from mlxspec.speculation.cost import CostModel, DraftCost, read_costs, write_costs

WIDTHS = tuple(1 + depth for depth in DEPTHS[:9])
_PROMPT, _QUEUE = 48, 32  # tokens
_ANSWER = 4096  # tokens: more than all rounds together give
_SECONDS = 1.0  # for rounds, as far as a few of each width fit into it
_FIRST = (
    2,
    5,
    17,
)  # widths without which there is no curve; the others are timed while there are seconds left
_COMPILING = 2  # rounds of a new width compile, and so does the first that undoes one
_MOST = 8  # rounds of each width
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


def calibrate(model: Model, drafters: Mapping[str, Drafter], config: EngineConfig) -> CostModel:
    """Costs of this model on this machine, for short contexts. Takes about two seconds, longer where a round takes longer than 30 ms."""
    with device.private_kernels():
        verify = _rounds(model, config)
        return CostModel({0: verify}, _draft_costs(drafters.values(), model, verify[1]))


def kept_costs(model: Model, drafters: Mapping[str, Drafter], config: EngineConfig, name: str) -> CostModel:
    """Costs from the cache folder; what is not there is measured now and put there."""
    path = _path(model, config, name)
    found = read_costs(path)
    if found is None:
        return measured_costs(model, drafters, config, name)[0]
    missing = [d for d in drafters.values() if isinstance(d, ModelDrafter) and d.name not in found.drafts]
    if missing:
        with device.private_kernels():
            found.drafts |= _draft_costs(missing, model, found.curve(0).seconds(1))
        write_costs(path, found)
    return found


def measured_costs(
    model: Model, drafters: Mapping[str, Drafter], config: EngineConfig, name: str
) -> tuple[CostModel, Path]:
    """Costs measured now, in place of what the cache folder has; and the file they are in."""
    path, found = _path(model, config, name), calibrate(model, drafters, config)
    before = read_costs(path)
    if before is not None:
        found.drafts = before.drafts | found.drafts
    write_costs(path, found)
    return found, path


def _draft_costs(drafters: Iterable[Drafter], model: Model, plain: float) -> dict[str, DraftCost]:
    return {d.name: _draft_cost(d, model, plain) for d in drafters if isinstance(d, ModelDrafter)}


def _path(model: Model, config: EngineConfig, name: str) -> Path:
    report = device.report()
    parameters: object = getattr(model, "parameters", dict)()
    described = [
        __version__,
        version("mlx"),
        report.backend,
        report.device,
        report.blas,
        report.compile_enabled,
        name,
        config.rollback,
        [(key, list(value.shape), str(value.dtype)) for key, value in tree_flatten(parameters)],
    ]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
    return folders.private_folder("costs")[0] / f"{digest}.json"


def _rounds(model: Model, config: EngineConfig) -> dict[int, float]:
    """Width -> seconds of a round. Plain ones run ahead of the host, as they do where nothing is drafted."""
    junk = _WorthlessDrafter()
    room = model.max_context - _PROMPT - 2
    widths = [w for w in WIDTHS if w <= room]
    fixed = SpecConfig(drafters=(_NAME,), ngram_m=WIDTHS[-1])
    params = SamplingParams(max_tokens=max(1, min(room, _ANSWER)), ignore_eos=True)
    prompt = [i % model.vocab_size for i in range(1, _PROMPT + 1)]
    engines = {}
    for name, spec in (("plain", SpecConfig()), ("drafts", fixed)):
        alone = replace(config, prefix_budget=0)
        engines[name] = Engine(model, drafters=[junk], spec=spec, config=alone)
        engines[name].submit(prompt, params)
        engines[name].step()
    found: dict[int, float] = {}
    ends = time.perf_counter() + _SECONDS
    for width in (1, *sorted(widths, key=lambda w: (w not in _FIRST, w))):
        if len(found) > len(_FIRST) and time.perf_counter() > ends:
            break  # a slow machine: the others lie on lines between these, and are refined when they are met
        engine = engines["plain" if width == 1 else "drafts"]
        junk.width[0] = width
        taken: list[float] = []
        while len(taken) < _MOST and not engine.is_idle:
            taken.append(_seconds(engine.step))
            if len(taken) > _COMPILING + 1 and time.perf_counter() > ends:
                break
        if len(taken) > _COMPILING:
            found[width] = _low(taken[_COMPILING:])
    return _rising(found)


def _low(times: Sequence[float]) -> float:
    """The lower quartile: whatever else a machine does makes single rounds slower, never faster."""
    return sorted(times)[len(times) // 4]


def _rising(found: Mapping[int, float]) -> dict[int, float]:
    """No width is dearer than a wider one: where it seems so, something else was slow."""
    out, most = {}, float("inf")
    for width in sorted(found, reverse=True):
        most = out[width] = min(most, found[width])
    return out


def _draft_cost(drafter: ModelDrafter, model: Model, plain: float) -> DraftCost:
    """By drafting for a row of its own. A drafter that cannot is taken to cost a fifth of a plain step a token, and learns from there."""
    row = -1
    try:
        sampler = RowSampler(SamplingParams(), [1], model.vocab_size)
        history: list[int] = []

        def draft(num_known: int, depth: int) -> float:
            tokens = [(len(history) + i) % model.vocab_size for i in range(num_known)]
            history.extend(tokens)
            hidden = mx.zeros((num_known, model.hidden_size)) if drafter.needs.hidden else None
            drafter.observe(row, tokens, hidden)
            ask = Ask(row, history, depth, sampler)

            def work() -> None:
                made = drafter.propose([ask], BatchSampler([sampler], model.vocab_size))[0]
                mx.eval(made.tokens, made.confidences)

            return _seconds(work)

        drafter.begin(row)
        draft(_QUEUE, 4)
        times = [(draft(2, 1), draft(2, 4), draft(_QUEUE, 1)) for _ in range(6)]
        one, four, late = (_low([t[i] for t in times[1:]]) for i in range(3))
        step = max((four - one) / 3, 0.1 * one)
        waiting = max((late - one) / (_QUEUE - 2), 0.0)
        return DraftCost(call=max(one - step - waiting, 0.0), step=step, queued=waiting)
    except Exception:  # whatever it is, the drafter will say so when it drafts for a request
        return DraftCost(step=plain / 5)
    finally:
        drafter.close(row)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
