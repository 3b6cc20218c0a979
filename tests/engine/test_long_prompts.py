"""Prompts of up to 100k tokens: progress and cancelling by the chunk, and how many states are kept of one."""

from __future__ import annotations

import mlx.core as mx
import pytest
from published_shapes import CONFIGS

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.model_based import QUEUE_AT_MOST
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.engine.prefix.rows import STATE_SHARE, STRIDE, Prefix, stride_of
from mlxspec.events import FinishEvent, PrefillEvent
from mlxspec.models.registry import architecture
from tests import long_text, tiny_models

CHUNK = 512
FEW = SamplingParams(max_tokens=4, ignore_eos=True)
PLAIN = SpecConfig(policy="fixed")


def engine_of(stack: str, **config) -> tuple[Engine, Mtp]:
    target, head = long_text.models(stack)
    mtp = Mtp(head, long_text.MAX_CONTEXT)
    made = EngineConfig(prefill_chunk=CHUNK, **config)
    return Engine(target, tiny_models.tokenizer(), drafters=[mtp], config=made), mtp


def read(length: int, stop_at: int | None = None, **config) -> tuple[Engine, list[int], int]:
    """Tokens that were through after each step, and how many steps it took from the cancelling to the end."""
    made, _ = engine_of("recurrent", **config)
    request = made.submit(long_text.text(length), FEW, spec=PLAIN)
    places: list[int] = []
    behind = 0
    while not made.is_idle or request.finish_reason is None:
        for event in made.step():
            if isinstance(event, PrefillEvent):
                assert event.num_total == length
                places.append(event.num_done)
            behind += isinstance(event, FinishEvent)
        if stop_at is not None and places and places[-1] >= stop_at and request.finish_reason is None:
            assert made.cancel(request.number)
            assert made.is_idle
            assert made.memory.reserved == 0
            break
    return made, places, behind


@pytest.mark.parametrize("length", [6000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_progress_is_told_at_each_chunk(length: int) -> None:
    made, places, ended = read(length)
    assert ended == 1
    assert places[-1] == length
    steps = [b - a for a, b in zip([0, *places], places, strict=False)]
    assert max(steps) <= CHUNK
    assert len(places) <= -(-length // CHUNK) + length // made.prefix.stride
    made.prefix.tree.check()


@pytest.mark.parametrize("length", [6000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_cancelled_prompt_ends_within_a_chunk(length: int) -> None:
    made, places, _ = read(length, stop_at=length // 2)
    assert places[-1] < length // 2 + CHUNK
    assert [e.reason for e in made.step() if isinstance(e, FinishEvent)] == ["cancelled"]
    assert made.nbytes == 0


@pytest.mark.slow
def test_states_of_100k_tokens_stay_within_the_stores_budget() -> None:
    """One state a stride and one at the end; under a small budget those that fit."""
    length = 100_000
    made, _, _ = read(length)
    assert made.prefix.stride == STRIDE  # without keys and values each state saves reading
    assert len(made.prefix.tree.states) <= length // STRIDE + 2
    states = made.prefix.tree.states
    state = max(n.state_bytes for n in states)
    room = (
        made.prefix.tree.nbytes - (len(states) - 10) * state
    )  # what leads to the end, which drafters need, and ten states
    tight, places, _ = read(length, prefix_budget=room)
    assert places[-1] == length
    assert 1 <= len(tight.prefix.tree.states) <= 11
    assert tight.prefix.tree.nbytes <= tight.prefix.tree.budget
    tight.prefix.tree.check()


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.5-9B", "Qwen3.5-27B"])
def test_states_of_100k_tokens_take_a_third_of_a_prompts_bytes_at_most(name: str) -> None:
    """At published shapes, by sizes alone: nothing is allocated."""
    config = CONFIGS[name][1]
    kind = architecture(config)
    model = kind.build(kind.parse(config))
    model.set_dtype(mx.bfloat16)
    cache = model.make_cache(0)
    per_token, state = cache.snapshot_bytes()
    stops = Prefix(1 << 40, stride=stride_of(cache)).stops((), 100_000)
    assert STRIDE <= stops[0] <= 8 * STRIDE
    assert len(stops) * state * STATE_SHARE <= 100_000 * per_token
    assert len(stops) * state <= (len(stops) * state + 100_000 * per_token) / 3


@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_the_mtp_head_reads_a_long_prompt_in_pieces(policy: str) -> None:
    """What waits for it never grows beyond a piece and a chunk, whether it drafts or not."""
    made, mtp = engine_of("hybrid", prefix_budget=0)
    request = made.submit(long_text.text(1700), FEW, spec=SpecConfig(drafters=("mtp",), policy=policy))
    most = 0
    while not made.is_idle:
        made.step()
        state = mtp._rows.get(request.number)
        waiting = made.drafts._rows.get(request.number)
        held = 0 if state is None else len(state.tokens)
        held += 0 if waiting is None else sum(len(tokens) for tokens, _ in waiting.unheard)
        most = max(most, held)
    assert request.finish_reason == "length"
    assert 0 < most <= QUEUE_AT_MOST + CHUNK
