"""Runs rounds of an artificial row before the first request, so that the first answers do not wait for compilation.

It runs round by round, so that requests may come in between. Knows an engine's parts; keeps no figures and decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import mlx.core as mx
import mlx.nn as nn

from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.engine.engine import Engine
from mlxspec.engine.measure import WARM, BareDrafts, BareRounds, widths
from mlxspec.engine.request import described
from mlxspec.errors import RankError
from mlxspec.kernels import qmv_rows, races
from mlxspec.models import tune
from mlxspec.models.base import Model
from mlxspec.models.reads import plateau_ends
from mlxspec.models.runners import retrace
from mlxspec.platform import device

_CATCH_UP = (1, 2, 3, 4, 5, 2)  # tokens a drafter has not run, as rounds leave them behind
_DEPTH = 4
_READS_ROW_BY_ROW = (13, 14)  # generations of GPUs: M1, M2


def rehearse(engine: Engine) -> Iterator[None]:
    """All pieces, on all ranks."""
    running = pieces(engine)
    while True:
        engine.group.rehearses()
        try:
            if next(running, running) is running:
                return
        except Exception as error:
            if not engine.group.is_alone:
                raise RankError(f"Rank 0 cannot go on: {described(error).rstrip('.')}.") from error
            raise
        yield


def pieces(engine: Engine) -> Iterator[None]:
    """Plain rounds; and drafts and rounds with drafts where the engine chooses them itself. Before them races, where our kernel is likely
    to win some: widths that it wins are then rehearsed with it."""
    yield from _race(engine)
    plain = _begun(engine, drafts=False)
    yield from _run(plain, 1)
    if engine.spec.policy != "auto" or not engine.spec.drafters:
        return
    for drafter in engine.chain.drafters.values():
        if isinstance(drafter, ModelDrafter) and not drafter.needs.cache:
            with device.private_kernels():
                _draft(drafter, engine.model)
            yield
    rounds = _begun(engine, drafts=True)
    ends = plateau_ends(engine.model, exact=engine.config.exact)
    yield from _verifies(rounds, widths(engine.model, ends))


def _verifies(rounds: BareRounds, of: Sequence[int]) -> Iterator[None]:
    """Rounds of these widths, each behind every other kind of round."""
    for width in of:
        yield from _run(rounds, width)
    for before in rounds.behind(of):
        for width in of:
            yield from _run(rounds, before, width)


def _race(engine: Engine) -> Iterator[None]:
    """Quantized products of a few rows, one number of rows at a time."""
    races_left = unraced(engine)
    if not races_left:
        return
    try:
        for weight, dtype, num_rows in races_left:
            with device.private_kernels():
                qmv_rows.race(num_rows, weight, dtype)
            yield
    finally:
        with suppress(OSError):  # a cache folder that cannot be written: they are run again next time
            races.save()
        retrace()


def unraced(engine: Engine) -> list[tuple[qmv_rows.QuantizedWeight, mx.Dtype, int]]:
    """Products of a weight with so many rows that our kernel is likely to win, and of which no race is on record. On an M1 or M2 MLX reads
    the weights once for each row, our kernel once for all of them."""
    if device.gpu_generation() not in _READS_ROW_BY_ROW or not engine.group.is_alone:
        return []  # ranks must choose the same kernels
    found = []
    for weight in tune.raced_weights(*modules_of(engine)):
        dtype = qmv_rows.dtype_of_rows(weight, engine.model.dtype)
        found += [(weight, dtype, num_rows) for num_rows in qmv_rows.unraced(weight, dtype)]
    return found


def modules_of(engine: Engine) -> list[nn.Module]:
    """What rounds run: the model, its drafters' modules and the rows of a head that they propose from."""
    modules: list[object] = [engine.model]
    for drafter in engine.chain.drafters.values():
        if isinstance(drafter, ModelDrafter):
            modules += [*(drafter.modules or ()), None if drafter.reduced is None else drafter.reduced.head]
    return [m for m in modules if isinstance(m, nn.Module)]


def unraced_notice(engine: Engine) -> tuple[str, ...]:
    """A sentence where drafts may be slower than they could be because nobody has run races yet."""
    num = len({id(weight) for weight, _, _ in unraced(engine)})
    if not num:
        return ()
    return (
        f"{num} kinds of quantized products of this model have not been raced on this GPU, so verifying drafts may take longer than it "
        "could; `mlxspec chat` and `mlxspec serve` run these races once, while they wait for a request.",
    )


def rehearse_for(engine: Engine, seconds: float) -> None:
    """As much of `rehearse` as begins within so many seconds."""
    ends = time.perf_counter() + seconds
    try:
        for _ in rehearse(engine):
            if time.perf_counter() > ends:
                return
    except RankError:
        raise
    except Exception:  # where it fails requests will tell
        return


def _begun(engine: Engine, *, drafts: bool) -> BareRounds:
    with device.private_kernels():
        layers = engine.chain.streams.layers
        return BareRounds(engine.model, engine.config, drafts=drafts, layers=layers)


def _run(rounds: BareRounds, *of: int) -> Iterator[None]:
    """Of these widths; of one, so many that nothing is new."""
    for width in of * WARM if len(of) == 1 else of:
        if not rounds.is_over:
            with device.private_kernels():
                rounds.run(width)
        yield


def _draft(drafter: ModelDrafter, model: Model) -> None:
    drafts = BareDrafts(drafter, model)
    try:
        for num_known in _CATCH_UP:
            drafts.run(num_known, 1)
        drafts.run(1, _DEPTH)
    finally:
        drafts.close()
