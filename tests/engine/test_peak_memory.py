"""Rounds behind a long text copy no keys and values: the peak of memory stays below one layer's buffer of keys above what was held before.

On a CPU an array that nobody else holds is written in place as on a GPU. On a GPU more can hold one: MLX keeps the inputs of every command
buffer that is not finished. So the same tests say more on a Mac, where the workflow runs them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from tests import tiny_models

LENGTH, NEW = 2048, 32
CONFIG = replace(tiny_models.config(max_context=4096), num_heads=8, num_kv_heads=4, head_dim=128)
BUFFER = LENGTH * 4 * 128 * 4  # bytes of one attention layer's keys
WAYS = {
    "plain": SpecConfig(policy="fixed"),
    "1": SpecConfig(drafters=("mtp",), policy="fixed", n_max=1),
    "4": SpecConfig(drafters=("mtp",), policy="fixed", n_max=4),
    "7": SpecConfig(drafters=("mtp",), policy="fixed", n_max=7),
}


@cache
def models():
    target = tiny_models.make(CONFIG)
    return target, tiny_models.make_mtp(CONFIG, target)


def decoding(way: str, *, ahead: bool) -> Engine:
    """An engine with one row behind LENGTH tokens that decodes."""
    target, head = models()
    engine = Engine(
        target,
        drafters=[Mtp(head, target.max_context)],
        config=EngineConfig(prefix_budget=0, prefill_chunk=256),
    )
    engine.pipeline.overlaps = ahead
    prompt = [3 + 7 * i % 90 for i in range(LENGTH)]
    engine.submit(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True), spec=WAYS[way])
    while not engine.places.rows:
        engine.step()
    engine.step()  # the first round reads what the drafter has missed
    return engine


def peak(engine: Engine) -> int:
    """Bytes above what is held now that the rest of the answer takes."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    while not engine.is_idle:
        engine.step()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_rounds_copy_no_keys_and_values(way: str, ahead: bool) -> None:
    engine = decoding(way, ahead=ahead)
    assert peak(engine) < BUFFER


def test_a_copy_would_be_seen() -> None:
    engine = decoding("4", ahead=False)
    assert engine.places.rows.cache is not None
    held = [array[:, :, :1] for array in engine.places.rows.cache.arrays if array.shape[2] >= LENGTH]
    mx.eval(held)  # views of the buffers: now nobody writes into them in place
    assert len(held) == 2
    assert peak(engine) > 2 * BUFFER
