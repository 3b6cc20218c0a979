"""The memory budget: who is refused, who waits, what the prefix cache gives back, and that all of it returns in the end."""

from __future__ import annotations

import gc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.checkpoints.memory import chunk_of
from mlxspec.config import MAX_CONTEXT, EngineConfig, SamplingParams
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine import memory
from mlxspec.engine import request as requests_module
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.load import load
from mlxspec.engine.record import record
from mlxspec.errors import EngineStoppedError, MemoryBudgetError
from mlxspec.events import FinishEvent
from mlxspec.platform import device
from tests import tiny_models
from tests.engine import equality, images
from tests.engine.equality import ALL, same, spec
from tests.engine.memory_faults import without_own_row

MIB = 1 << 20
FEW = SamplingParams(max_tokens=8, ignore_eos=True)


def words(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, tiny_models.EOS, num).tolist()


def least(**config) -> int:
    """Bytes with which one short request just fits."""
    made = equality.engine(**config)
    request = made.submit([1, 2, 3], FEW)
    found = made.memory.weights + made.memory.needed(request)
    return found + made.memory.activations(memory.SMALLEST_CHUNK, 11)


def test_what_can_never_fit_is_refused_with_figures_and_the_setting() -> None:
    tight = equality.engine(memory_budget=least() + MIB)
    assert tight.generate([1, 2, 3], FEW).finish_reason == "length"
    with pytest.raises(MemoryBudgetError, match=r"weights take .* MiB.* memory_budget is .* MiB: raise it"):
        equality.engine(memory_budget=tight.memory.weights)
    with pytest.raises(MemoryBudgetError, match=r"1903 tokens .* MiB .* memory_budget is .* MiB"):
        tight.submit([1, 2, 3], SamplingParams(max_tokens=1900))
    with pytest.raises(MemoryBudgetError):
        tight.generate([[1, 2], words(1500, 0)], FEW)
    assert tight.is_idle
    assert tight.memory.reserved == 0


def test_the_longest_row_is_the_longest_that_is_not_refused() -> None:
    """A prefix cache is left its room."""
    for extra, who in ((MIB, ()), (MIB, ALL), (3 * MIB, ALL), (1 << 33, ALL)):
        tight = equality.engine(memory_budget=least() + extra, prefix_budget=0)
        most = tight.memory.most_tokens(spec(*who))
        assert most <= tight.max_context
        for length in {most, min(most + 1, tight.max_context)}:
            params = SamplingParams(max_tokens=length - 3, ignore_eos=True)
            if length == most:
                tight.cancel(tight.submit([1, 2, 3], params, spec=spec(*who)).number)
            else:
                with pytest.raises(MemoryBudgetError):
                    tight.submit([1, 2, 3], params, spec=spec(*who))
        shared = equality.engine(memory_budget=least() + extra, prefix_budget=MIB // 2)
        assert shared.memory.most_tokens(spec(*who)) < most or most == tight.max_context


@catches(
    "a row that joins takes no part in rounds", "mlxspec.engine.memory:EngineMemory.has_room", without_own_row
)
def test_a_request_has_room_to_the_last_byte_and_counts_as_a_row() -> None:
    made = equality.engine([], prefix_budget=0)
    first, second = (made.submit([1, 2, 3], FEW) for _ in range(2))
    made.step()
    assert made.num_running == 2
    third, held = made.submit([1, 2, 3], FEW), made.memory
    running = held.activations(memory.SMALLEST_CHUNK, 11, rows=3)
    assert running > held.activations(memory.SMALLEST_CHUNK, 11, rows=2)
    held.budget = held.weights + 3 * held.needed(third) + running
    assert held.has_room(third)
    held.budget -= 1
    assert not held.has_room(third)
    for request in (first, second, third):
        made.cancel(request.number)
    assert held.has_room(third)  # alone it always has


@catches(
    "reading an image takes no memory",
    "mlxspec.engine.memory:EngineMemory._of_tower",
    lambda right: lambda self, request: 0,
)
def test_reading_an_image_is_counted() -> None:
    """What the tower takes while it runs is left free: an image that can never be read is refused, one that cannot be now waits."""
    per_token = 32 * MIB
    given = images.prompt([1, 2, 3], images.image(2, 3, 1), [4])

    def made(budget: int | None = None, scratch: int = per_token) -> Engine:
        vision = images.vision(scratch=scratch)
        return equality.engine([], vision=vision, prefix_budget=0, memory_budget=budget)

    free = made(scratch=0)
    row = free.memory.needed(free.submit(given, FEW))
    assert free.features is not None
    # a part of the budget, of 32, is for rows of images that no request has
    least = -(-(free.memory.weights - free.features.budget + row + 6 * per_token) * 32 // 31)
    assert free.memory.scratch < 6 * per_token
    with pytest.raises(MemoryBudgetError):
        made(least - MIB // 2).submit(given, FEW)
    tight = made(least + 64)
    tight.submit(given, FEW)
    second = tight.submit(given, FEW)
    tight.step()
    assert tight.memory.scratch == 6 * per_token
    assert tight.num_waiting == 1
    while not tight.is_idle:
        tight.step()
    assert second.finish_reason == "length"
    assert tight.memory.reserved == 0
    assert tight.memory.scratch < 6 * per_token


OPEN = SamplingParams(max_tokens=MAX_CONTEXT, ignore_eos=True)


@pytest.fixture
def steps_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, requests_module):
        monkeypatch.setattr(module, "STEP", 32)


@catches(
    "the budget is not looked at", "mlxspec.engine.memory:EngineMemory._fits", lambda right: lambda *_: True
)
def test_an_answer_without_a_limit_ends_where_memory_does_and_says_so(steps_of_32: None) -> None:
    """Another request gets its place meanwhile; the record of what ended so is of an answer of that length, which is proved."""
    plain = equality.engine([]).generate([1, 2, 3], SamplingParams(max_tokens=197, ignore_eos=True))
    made = equality.engine(max_context=200, prefix_budget=0)
    request = made.submit([1, 2, 3], OPEN, spec=spec())
    other = made.submit([4, 5], replace(FEW, max_tokens=160), spec=spec())
    made.step()
    running = made.memory.activations(memory.SMALLEST_CHUNK, 200, rows=2)
    one_step = made.memory.row(67, request.spec) - made.memory.row(35, request.spec)
    made.memory.budget = made.memory.weights + made.memory.reserved + running + one_step * 3 // 2
    while not made.is_idle:
        made.step()
        assert made.memory.weights + made.memory.reserved <= made.memory.budget
    assert other.num_generated == 160
    assert request.finish_reason == "length"
    assert 32 <= request.num_generated < 160
    assert request.stats.notices == [requests_module.SHORT_OF_MEMORY]
    found = Result.of(request)
    assert found.tokens == plain.tokens[: len(found.tokens)]
    kept = record(request, "tiny", 16, None)
    assert kept["params"]["max_tokens"] == len(found.tokens)
    made.memory.budget *= 2
    assert made.prove([1, 2, 3], found, OPEN).difference is None


def test_the_store_gives_way_before_anybody_waits() -> None:
    long = SamplingParams(max_tokens=1700, ignore_eos=True)
    loose = equality.engine(prefill_chunk=32).memory
    request = equality.engine(prefill_chunk=32).submit(words(10, 99), long, spec=spec(*ALL))
    alone = loose.weights + loose.needed(request) + loose.activations(memory.SMALLEST_CHUNK, 1710)
    tight = equality.engine(memory_budget=alone + MIB, prefix_budget=3 * MIB, prefill_chunk=32)
    tight.prefix.near = 1
    for i in range(12):
        tight.generate(words(40, i), FEW, spec=spec(*ALL))
    before = tight.prefix.tree.nbytes
    assert MIB < before <= 3 * MIB
    request = tight.submit(words(10, 99), long, spec=spec(*ALL))
    tight.step()
    assert tight.num_running == 1
    assert tight.prefix.tree.nbytes < before
    tight.cancel(request.number)
    tight.prefix.tree.check()


def test_pieces_shrink_near_the_limit_and_change_nothing() -> None:
    text = words(150, 7)
    plain = equality.engine([]).generate(text, FEW)
    tight = equality.engine(prefill_chunk=128, prefix_budget=0)
    request = tight.submit(text, FEW, spec=spec())
    needed = tight.memory.weights + tight.memory.needed(request)
    tight.memory.budget = needed + tight.memory.activations(memory.SMALLEST_CHUNK, 158)
    tight.step()
    assert tight.memory.chunk == memory.SMALLEST_CHUNK
    assert next(iter(tight.places.prefills)).num_done == memory.SMALLEST_CHUNK
    while not tight.is_idle:
        tight.step()
    same(plain, Result.of(request), text, FEW, "in small pieces")


@pytest.mark.slow
def test_200_mixed_requests_stay_within_the_budget_and_give_it_back() -> None:
    """By what MLX holds: the budget less the weights, which the tests share, bounds what comes on top."""
    made = equality.engine(max_rows=4, prefill_chunk=64, prefix_budget=2 * MIB)
    made.prefix.near = 8
    rng, stems = np.random.default_rng(0), [words(60, i) for i in range(4)]
    gc.collect()
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    limit = 0
    for number in range(200):
        stem = stems[int(rng.integers(4))][: int(rng.integers(1, 61))]
        params = SamplingParams(max_tokens=int(rng.integers(1, 5)), ignore_eos=True, seed=number)
        request = made.submit([*stem, *words(2, number)], params, spec=spec(*ALL) if number % 2 else spec())
        if rng.random() < 0.5:
            made.step()
        if rng.random() < 0.1:
            made.cancel(request.number)
        room = made.memory.activations(64, 70) + 2 * MIB
        limit = max(limit, made.memory.reserved + room)
    while not made.is_idle:
        made.step()
    made.prefix.tree.check()
    assert mx.get_peak_memory() - start <= limit
    assert made.prefix.tree.nbytes <= 2 * MIB
    assert made.nbytes == made.memory.reserved == 0
    made.prefix.limit(0)
    del request
    gc.collect()
    constants = (
        MIB if device.compile_enabled() else 0
    )  # of prompts' shapes that are kept compiled, 64 at most
    assert mx.get_active_memory() <= start * 1.05 + constants


def test_closing_returns_what_was_taken() -> None:
    gc.collect()
    mx.clear_cache()
    start = mx.get_active_memory()
    model = tiny_models.make(tiny_models.config(), 3)
    head = tiny_models.make_mtp(tiny_models.config(), model)
    small = tiny_models.make(tiny_models.config(), 4)
    drafters = [Mtp(head, model.max_context), DraftModel(small, model.vocab_size)]
    made = Engine(model, tiny_models.tokenizer(), drafters=drafters, config=EngineConfig(prefix_budget=MIB))
    del model, head, small, drafters
    taken = mx.get_active_memory() - start
    made.generate(words(50, 1), FEW)
    waiting = made.submit(words(50, 2), FEW)
    made.step()
    made.close()
    made.close()
    gc.collect()
    assert mx.get_active_memory() - start < taken / 20
    assert [e.reason for e in made.step() if isinstance(e, FinishEvent)] == ["cancelled"]
    assert waiting.finish_reason == "cancelled"
    for use in (lambda: made.submit([1], FEW), lambda: made.generate([1], FEW), lambda: made.model):
        with pytest.raises(EngineStoppedError):
            use()


def test_a_mac_keeps_memory_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never above the recommended working set, nor above what leaves the system its part."""
    gib = 1 << 30
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    for total, recommended, wanted in ((64, 48, 48), (16, 15, 12), (128, 126, 128 * 85 // 100)):
        info = {"max_recommended_working_set_size": recommended * gib, "memory_size": total * gib}
        monkeypatch.setattr(memory.mx, "device_info", lambda info=info: info)
        assert memory.default_budget() // gib == wanted


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What a Mac on which 100 bytes are recommended is asked for."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(device, "backend", lambda: "metal")
    monkeypatch.setattr(device, "_claims", type(device._claims)())
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 100})
    for name in ("set_wired_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, lambda nbytes, name=name: found.append((name, nbytes)))
    monkeypatch.setattr(mx, "synchronize", lambda: found.append(("synchronize", 0)))
    return found


class Owner:
    pass


def shares(wired: int, cache: int) -> list[tuple[str, int]]:
    """What runs has ended before memory may be unwired."""
    return [("synchronize", 0), ("set_wired_limit", wired), ("set_cache_limit", cache)]


def test_a_mac_gives_what_engines_claim_and_never_above_the_recommended(asked: list[tuple[str, int]]) -> None:
    one, other = Owner(), Owner()
    for owner, budget, total in ((one, 30, 30), (other, 50, 80), (other, 500, 100)):
        device.claim(owner, budget, 7)
        assert asked[-3:] == shares(total, 7 if owner is one else 14)
    device.release(other)
    assert asked[-3:] == shares(30, 7)
    device.release(other)
    assert len(asked) == 12
    device.claim(other, 1, 1)
    del one, owner  # collected, never released
    device.release(other)
    assert asked[-3:] == shares(0, 100)


def test_memory_is_given_back_when_the_device_has_ended(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "clear_cache", lambda: asked.append(("clear_cache", 0)))
    device.give_back()
    assert asked == [("synchronize", 0), ("clear_cache", 0)]


def test_before_macos_15_the_rest_is_asked_for_all_the_same(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> None:
        raise RuntimeError("[metal::set_wired_limit] needs macOS 15")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    owner = Owner()
    device.claim(owner, 40, 8)
    assert asked == [shares(40, 8)[0], shares(40, 8)[2]]


def test_scratch_is_claimed_for_the_contexts_that_are_here(asked: list[tuple[str, int]], monkeypatch) -> None:
    """Not for the longest context that the model could have."""
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1 << 50})
    model = tiny_models.small(max_context=1 << 18)
    made = Engine(model, config=EngineConfig(memory_budget=64 << 30))
    held = made.memory
    usual = held.activations(made.memory.full_chunk, 8192)
    assert held.scratch == usual < held.activations(made.memory.full_chunk, 1 << 18)
    device.claim(held, held.budget, held.scratch)
    short, long = (made._new_request(words(n, 0), FEW, None) for n in (3000, 100_000))
    for request, length in ((short, 8192), (long, 1 << 17)):
        held.reserve(request)
        assert held.scratch == held.activations(made.memory.full_chunk, length)
        assert asked[-1] == ("set_cache_limit", held.scratch)
    num_asked = len(asked)
    held.release(short)
    assert len(asked) == num_asked
    held.release(long)
    assert asked[-1] == ("set_cache_limit", usual)
    made.close()


def test_a_prompt_that_is_cancelled_counts_what_was_read_of_it() -> None:
    made = equality.engine(prefill_chunk=32)
    request = made.submit(words(200, 1), FEW)
    while not request.stats.num_read:
        made.step()
    made.cancel(request.number)
    made.step()
    stats = request.stats
    assert stats.num_read == 32
    assert stats.prefill_speed == pytest.approx(32 / stats.prefill_seconds)
    whole = made.generate(words(200, 1), FEW).stats
    assert whole.num_read == 200 - whole.num_cached
    assert whole.prefill_speed == pytest.approx(whole.num_read / whole.prefill_seconds)


def test_a_closed_engine_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_claims", type(device._claims)())
    made = load("demo", draft="off")
    ((budget, scratch),) = device._claims.values()
    assert budget == made.memory.budget > scratch > 0
    made.close()
    assert not device._claims


@pytest.mark.parametrize(("has_gpu", "chunk"), [(False, 512), (True, 2048)])
def test_a_gpu_reads_prompts_in_larger_chunks(has_gpu: bool, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda: has_gpu)
    assert chunk_of(EngineConfig()) == chunk
    assert chunk_of(EngineConfig(prefill_chunk=100)) == 100
    if not has_gpu:
        assert equality.engine(prefill_chunk=64).memory.full_chunk == 64


def test_logits_of_a_verify_are_counted() -> None:
    """With a large vocabulary they, and what sampling makes of them, are most of what a round takes: for every row that may be verified."""
    vocab = 40_000
    model = tiny_models.make(tiny_models.config(vocab=vocab))
    config = EngineConfig(prefix_budget=0, prefill_chunk=32)
    made = Engine(
        model, tiny_models.tokenizer(), drafters=[ngram_lookup("ngram-simple", 3, 12)], config=config
    )
    asked = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": True, "seed": 1}
    params = SamplingParams(max_tokens=40, ignore_eos=True, **asked)
    few = made.memory.activations(32, 200, rows=1)
    assert few >= 4 * 16 * vocab
    assert made.memory.activations(32, 200, rows=4) >= few + 3 * 4 * 16 * vocab
    rows = [
        made.submit([*words(9, i), *words(9, i), *words(3, i)], params, spec=spec("ngram-simple"))
        for i in (1, 2)
    ]
    while made.num_running < 2 or made.places.prefills:
        made.step()
    gc.collect()
    mx.clear_cache()
    start, limit = (
        mx.get_active_memory() - made.nbytes,
        made.memory.reserved + made.memory.activations(32, 80),
    )
    mx.reset_peak_memory()
    while not made.is_idle:
        made.step()
    peak = mx.get_peak_memory() - start
    assert 4 * 2 * vocab < peak <= limit
    assert max(r.stats.num_drafted for r in rows) > 0


def test_an_answer_takes_no_more_than_the_context_has() -> None:
    engine = equality.engine()
    most = engine.max_context - 3
    sizes = [
        engine.memory.needed(engine.submit([1, 2, 3], SamplingParams(max_tokens=num)))
        for num in (most, 50 * most)
    ]
    assert sizes[0] == sizes[1]


def test_prompts_wait_up_to_the_last_token_of_their_share() -> None:
    made = equality.engine().memory
    most = made.left // memory._WAITING_SHARE // memory.TOKEN_BYTES
    made.budget = made.weights + most * memory.TOKEN_BYTES * memory._WAITING_SHARE
    assert made.may_wait(most)
    assert not made.may_wait(most + 1)


@catches(
    "another model takes what is not there",
    "mlxspec.engine.memory:EngineMemory.hold",
    lambda _: lambda self, num_bytes: setattr(self, "weights", self.weights + num_bytes),
)
def test_a_model_beside_this_one_must_leave_it_something() -> None:
    made = equality.engine().memory
    before = made.weights
    made.hold(1000)
    assert made.weights == before + 1000
    with pytest.raises(MemoryBudgetError):
        made.hold(made.left)
