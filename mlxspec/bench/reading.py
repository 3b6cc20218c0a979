"""Measures how fast prompts are read up to the first token, and the peak of MLX's memory meanwhile. Prints nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlxspec.bench.prompts import encode
from mlxspec.bench.tasks import TASKS
from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.platform import device


class Reading(NamedTuple):
    """The measurement of a prompt that was read. seconds: the median of its turns. peak_bytes: of MLX's memory, weights included."""

    num_tokens: int
    seconds: float
    peak_bytes: int


def read(
    engine: Engine, lengths: Sequence[int], repeat: int, beside: Path | None = None
) -> dict[str, list[Reading]]:
    """Read prompts of these numbers of tokens without the prefix cache, with the drafters of the engine's requests, and close the
    engine. beside: a folder whose model plain mlx-lm then reads them with, None for no comparison. Returns the readings of each
    program."""
    ids = encode(engine, "\n".join(task.prompt for task in TASKS))
    prompts = [(ids * (num // len(ids) + 1))[:num] for num in lengths]
    params, engine.prefix.is_on = SamplingParams(max_tokens=1, ignore_eos=True), False
    found = {"mlxspec": [_timed(p, repeat, partial(engine.generate, p, params)) for p in prompts]}
    engine.close()
    if beside is not None:
        from mlx_lm import load, stream_generate

        device.prefill_threads()
        model, tokenizer, *_ = load(str(beside))

        def answer(prompt: list[int]) -> None:
            for _ in stream_generate(model, tokenizer, prompt, max_tokens=1):
                pass

        found["mlx-lm"] = [_timed(p, repeat, partial(answer, p)) for p in prompts]
    return found


def _timed(prompt: Sequence[int], repeat: int, work: Callable[[], object]) -> Reading:
    """Time `work` in `repeat` turns after a first one in which shapes compile, and return the reading."""
    seconds = list[float]()
    for _ in range(repeat + 1):
        mx.clear_cache()
        mx.reset_peak_memory()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return Reading(len(prompt), statistics.median(seconds[1:]), mx.get_peak_memory())
