"""Rows come and go between rounds and change nothing for the others; what fails fails alone and leaves nothing behind."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine, Result
from mlxspec.events import FinishEvent, PrefillEvent, TokensEvent
from tests import tiny_models
from tests.engine import equality
from tests.engine.equality import ALL, PLAIN, asked, prompts, same, spec

NUM = 12
SPECS = [spec(*ALL), PLAIN, spec("mtp"), spec("draft-model", n_max=2), spec("ngram-simple")]


@cache
def wanted() -> tuple[list, list, list[Result]]:
    some, params = prompts(NUM, 77), asked(3, NUM)
    plain = equality.engine([])
    return some, params, [plain.generate(p, s) for p, s in zip(some, params, strict=True)]


def check(request, number: int, what: str) -> None:
    some, params, plain = wanted()
    tokens = tuple(request.history[len(request.prompt) :])
    result = Result(
        text=request.answer.text, tokens=tokens, finish_reason=request.finish_reason, stats=request.stats
    )
    same(plain[number], result, some[number], params[number], what)


@pytest.mark.parametrize("specs", [[PLAIN], SPECS], ids=["plain", "drafted"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_that_are_cancelled_change_nothing_for_the_rest(seed: int, specs: list[SpecConfig]) -> None:
    engine, rng = equality.engine(max_rows=4), np.random.default_rng(seed)
    some, params, _ = wanted()
    requests = [
        engine.submit(some[n], params[n], spec=specs[int(rng.integers(len(specs)))]) for n in range(NUM)
    ]
    doomed = rng.permutation(NUM)[:5].tolist()
    while not engine.is_idle:
        engine.step()
        if doomed and rng.random() < 0.3:
            request = requests[doomed.pop()]
            was_running = request.finish_reason is None
            assert engine.cancel(request.number) == was_running
            assert not engine.cancel(request.number)
    for number, request in enumerate(requests):
        if request.finish_reason != "cancelled":
            check(request, number, f"beside cancelled ones, seed {seed}")
    assert sum(r.finish_reason == "cancelled" for r in requests) >= 1
    assert engine.nbytes == 0


def test_streams_side_by_side_each_get_their_own_events() -> None:
    """Whoever's turn it is advances every row; nobody's text is lost."""
    engine = equality.engine()
    some, params, plain = wanted()
    streams = {n: engine.stream(some[n], params[n], spec=SPECS[n % len(SPECS)]) for n in range(4)}
    texts, tokens, ends = dict.fromkeys(streams, ""), dict.fromkeys(streams, ()), {}
    rng = np.random.default_rng(0)
    while streams:
        number = rng.choice(sorted(streams))
        event = next(streams[number], None)
        if event is None:
            del streams[number]
        elif isinstance(event, FinishEvent):
            ends[number] = event.reason
        elif isinstance(event, TokensEvent):
            texts[number] += event.text
            tokens[number] += event.tokens
    for number in texts:
        assert (tokens[number], texts[number], ends[number]) == (
            plain[number].tokens,
            plain[number].text,
            plain[number].finish_reason,
        )
    assert engine.is_idle


def test_closing_a_stream_cancels_its_request_only() -> None:
    engine = equality.engine()
    some, params, plain = wanted()
    other = engine.submit(some[1], params[1], spec=spec("mtp"))
    stream = engine.stream(some[0], params[0], spec=spec("mtp"))
    assert isinstance(next(stream), PrefillEvent)
    assert isinstance(next(stream), TokensEvent)
    stream.close()
    assert len(engine.places.rows) == 1
    while not engine.is_idle:
        engine.step()
    assert tuple(other.history[len(some[1]) :]) == plain[1].tokens
    engine.stream(some[0]).close()  # never begun
    assert engine.is_idle


def test_a_stream_whose_request_is_cancelled_says_so() -> None:
    engine = equality.engine()
    stream = engine.stream([1, 2], SamplingParams(max_tokens=50, ignore_eos=True))
    first = next(stream)
    engine.cancel(first.request)
    *_, last = stream
    assert isinstance(last, FinishEvent)
    assert last.reason == "cancelled"


# ---- failures of the target


class Failing:
    """The tiny target, whose forward fails at some call."""

    def __init__(self, at: int) -> None:
        self._inner, self._left = tiny_models.target(), at

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def forward(self, *args, **kwargs):
        self._left -= 1
        if self._left == 0:
            raise MemoryError("no memory for that")
        return self._inner.forward(*args, **kwargs)


@pytest.mark.parametrize("drafters", [(), ("ngram-simple",)], ids=["plain", "drafted"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 8])
def test_a_failing_forward_leaves_an_engine_that_works(at: int, drafters: tuple[str, ...]) -> None:
    some, params, plain = wanted()
    engine = Engine(Failing(at), tiny_models.tokenizer(), drafters=equality.engine().drafts.drafters.values())
    results = engine.generate(some[:3], [params[1]] * 3, spec=spec(*drafters))
    failed = [r for r in results if r.finish_reason == "error"]
    assert len(failed) >= 1
    assert {r.error for r in failed} == {"MemoryError: no memory for that."}
    for number, result in enumerate(results):
        if result.finish_reason != "error":
            assert number == 1 or at <= 3  # a prompt's failure is its own; a round's is that of its rows
    assert engine.is_idle
    assert engine.nbytes == 0
    result = engine.generate(some[1], params[1], spec=spec(*drafters))
    same(plain[1], result, some[1], params[1], "after a failure")


def test_a_long_prompt_comes_in_chunks_and_changes_nothing_for_others() -> None:
    long = (np.arange(300) * 7 % tiny_models.EOS).tolist()
    params = SamplingParams(max_tokens=15, temperature=0.6, seed=2, ignore_eos=True)
    whole = equality.engine([]).generate(long, params)
    small = equality.engine(prefill_chunk=64)
    some, all_params, plain = wanted()
    results = small.generate(
        [some[0], long, some[2]], [all_params[0], params, all_params[2]], spec=spec(*ALL)
    )
    same(whole, results[1], long, params, "in chunks")
    for number, result in ((0, results[0]), (2, results[2])):
        same(plain[number], result, some[number], all_params[number], "beside a long prompt")
