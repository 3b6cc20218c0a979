"""Rounds with MTP drafts that are launched before the one before them has been read: nothing is waited for in between, and texts, caches
and drafters are those of rounds that wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.cache import attention as caches
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.recurrent import RecurrentLayerCache
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters import model_based
from mlxspec.engine import pipeline
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.pipeline import Pipeline
from mlxspec.kernels import attention
from mlxspec.models import row_attention
from tests import tiny_models
from tests.engine import equality
from tests.engine.equality import prompts, same, spec

MTP = spec("mtp", n_max=3)
PROMPTS = prompts(6, 3)


def engine(*, overlaps: bool = True, model=None, **config) -> Engine:
    made = equality.engine(["mtp"], model=model, **config)
    made.pipeline.overlaps = overlaps
    return made


@cache
def bare() -> Engine:
    return equality.engine([], prefix_budget=0)


plainly: dict[str, Result] = {}


def plain(number: int, params: SamplingParams) -> Result:
    key = f"{number} {params}"
    if key not in plainly:
        plainly[key] = bare().generate(PROMPTS[number], params)
    return plainly[key]


def asked(number: int, max_tokens: int = 40, **more) -> SamplingParams:
    more = {"ignore_eos": True, **more}
    return SamplingParams(max_tokens=max_tokens, temperature=0.8 * (number % 2), seed=number, **more)


def check(number: int, params: SamplingParams, got: Result, what: str) -> None:
    same(plain(number, params), got, PROMPTS[number], params, what)
    assert not got.stats.notices, got.stats.notices


def finished(own: Engine) -> None:
    while not own.is_idle:
        own.step()
    own.step()


# ---- where the device alone knows how far rows are


@pytest.mark.parametrize("num_rows", [1, 3])
def test_places_the_device_computes_are_numbers_of_4_bytes(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger ones MLX's Metal backend reused for its offsets, and before 0.32.2 read them too early (mlx #3880)."""
    seen: list[int] = []

    def watch(name: str, place: int) -> None:
        real = getattr(mx, name)

        def watched(*args, **kwargs):
            seen.append(args[place].nbytes)
            return real(*args, **kwargs)

        monkeypatch.setattr(mx, name, watched)

    watch("slice_update", 2)
    watch("slice", 1)
    own = engine()
    results = own.generate(PROMPTS[:num_rows], [asked(i) for i in range(num_rows)], spec=MTP)
    for i, result in enumerate(results):
        check(i, asked(i), result, "watched")
    assert seen
    assert set(seen) == {4}


# ---- nothing is waited for


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that makes the host wait for an array, in order; tests add what else they want to see."""
    log: list[str] = []

    def watch(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args, **kwargs):
            arrays = [a for a in args if isinstance(a, mx.array) or (name == "eval" and a)]
            if arrays:
                log.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, names in ((mx, ("eval", "synchronize")), (np, ("asarray", "array"))):
        for name in names:
            watch(owner, name)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__array__"):
        if hasattr(mx.array, name):
            watch(mx.array, name)
    return log


@pytest.mark.parametrize(("num_rows", "temperature"), [(1, 0.0), (3, 0.8)])
def test_whenever_the_host_waits_another_round_is_queued(
    waits: list[str], num_rows: int, temperature: float
) -> None:
    own = engine()
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=1, ignore_eos=True)
    own.generate(PROMPTS[:num_rows], params, spec=MTP)
    real = own.model.forward

    class Watched:
        def __getattr__(self, name: str):
            return getattr(tiny_models.target(), name)

        def forward(self, tokens, rows, cache, **more):
            out = real(tokens, rows, cache, **more)
            if not more.get("certain"):
                waits.append("queued")
            return out

    for prompt in PROMPTS[:num_rows]:
        own.submit(prompt, params, spec=MTP)
    while own.num_running < num_rows or own.places.prefills:
        own.step()
    own._model = Watched()
    before, synchronised = own.stats.num_rounds, own.stats.num_synchronised
    waits.clear()
    for _ in range(6):
        waits.append("step")
        own.step()
    assert own.num_running == num_rows
    assert own.stats.num_rounds - before == 6
    assert own.stats.num_synchronised == synchronised
    # each step queues a round, then reads the one before it: one evaluation, and two looks at what it gave, which is evaluated by then
    steps = " ".join(waits).split("step")[1:]
    assert [s.split() for s in steps] == [["queued", "eval", *["eval", "asarray"] * 2]] * 6
    own.cancel(own.places.rows[0].number)
    own._model = tiny_models.target()
    finished(own)


def test_a_drafted_round_that_is_read_first_counts_as_a_wait() -> None:
    own = engine(overlaps=False)
    own.generate(PROMPTS[0], asked(0), spec=MTP)
    assert own.stats.num_synchronised == own.stats.num_rounds > 5
    ahead = engine()
    ahead.generate(PROMPTS[0], asked(0), spec=MTP)
    assert ahead.stats.num_rounds == own.stats.num_rounds
    # only those near the end, where drafts are shorter
    assert 0 < ahead.stats.num_synchronised <= 8
    assert ahead.stats.num_unread == 0


# ---- the same text


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_texts_are_those_of_plain_decoding(depth: int) -> None:
    own = engine()
    wish = spec("mtp", n_max=depth)
    for number in (0, 3):
        check(number, asked(number), own.generate(PROMPTS[number], asked(number), spec=wish), f"row {number}")
    assert own.stats.num_synchronised < own.stats.num_rounds / 2
    numbers = range(2, 6)
    params = [asked(n, 30 + 5 * n) for n in numbers]
    results = own.generate([PROMPTS[n] for n in numbers], params, spec=wish)
    for number, wanted, got in zip(numbers, params, results, strict=True):
        check(number, wanted, got, f"row {number} of four")
    assert own.nbytes == own.prefix.tree.nbytes == 0 or own.places.rows.cache is None


def test_an_answer_that_ends_inside_a_round_drops_the_next_and_harms_nobody() -> None:
    """Ends that only the text tells: what the device ran behind them is never seen."""
    own = engine()
    numbers, params = range(1, 5), []
    for n in numbers:
        text = plain(n, asked(n, 50)).text
        params.append(asked(n, 50, stop=(text[15 + 4 * n : 18 + 4 * n],)))
    for number, wanted in list(zip(numbers, params, strict=True))[:2]:
        check(number, wanted, own.generate(PROMPTS[number], wanted, spec=MTP), f"row {number} alone")
    results = own.generate([PROMPTS[n] for n in numbers], params, spec=MTP)
    for number, wanted, got in zip(numbers, params, results, strict=True):
        assert got.finish_reason == "stop"
        check(number, wanted, got, f"row {number} of four")
    assert own.stats.num_unread >= 4


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))])
def test_rows_that_come_and_go_while_rounds_overlap(seed: int) -> None:
    own, rng = engine(max_rows=4), np.random.default_rng(seed)
    order = [int(n) for n in rng.permutation([*range(6), *range(6)])]
    requests, cancelled = [], 0
    while order or not own.is_idle:
        if order and rng.random() < 0.25:
            number = order.pop()
            requests.append((number, own.submit(PROMPTS[number], asked(number), spec=MTP)))
        own.step()
        running = [r for _, r in requests if r.finish_reason is None]
        if running and rng.random() < 0.04:
            cancelled += own.cancel(running[int(rng.integers(len(running)))].number)
    for number, request in requests:
        tokens = tuple(request.history[len(request.prompt) :])
        wanted = plain(number, asked(number))
        if request.finish_reason == "cancelled":
            assert equality.excused or wanted.tokens[: len(tokens)] == tokens
            continue
        got = Result(
            text=request.answer.text, tokens=tokens, finish_reason=request.finish_reason, stats=request.stats
        )
        check(number, asked(number), got, f"seed {seed}")
    assert own.stats.num_synchronised < own.stats.num_rounds
    assert own.nbytes == 0


def test_up_to_the_end_of_the_context() -> None:
    config = {"max_context": 64, "prefix_budget": 0}
    wanted = equality.engine([], **config).generate(PROMPTS[1], asked(1, 500))
    own = engine(**config)
    got = own.generate(PROMPTS[1], asked(1, 500), spec=MTP)
    assert (wanted.finish_reason, len(PROMPTS[1]) + len(wanted.tokens)) == ("length", 64)
    same(wanted, got, PROMPTS[1], asked(1, 500), "to the end")
    assert own.stats.num_synchronised < own.stats.num_rounds


# ---- the same caches and drafters


def kept(cache: ModelCache, lengths: Sequence[int]) -> list[np.ndarray]:
    """What stands, of all rows and layers, of so many tokens of each row."""
    cache.flush()
    found = []
    for layer in cache.layers:
        for row, length in enumerate(lengths):
            if isinstance(layer, RecurrentLayerCache):
                found += [np.asarray(layer.current.state[row]), np.asarray(layer.current.window[row])]
            else:
                found += [np.asarray(x[row][0, :, :length]) for x in (layer.keys, layer.values)]
    return found


@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_a_dropped_round_leaves_what_waiting_rounds_leave(num_steps: int) -> None:
    """Both ways stop after as many rounds, the round on its way is dropped, and both go on."""
    engines = [engine(overlaps=overlaps) for overlaps in (True, False)]
    requests = [[own.submit(PROMPTS[n], asked(n, 50), spec=MTP) for n in (1, 4, 5)] for own in engines]
    for own in engines:
        while own.places.prefills or not own.places.rows:
            own.step()
        for _ in range(num_steps):
            own.step()
    ahead, waiting = engines
    assert [r.history for r in requests[0]] == [r.history for r in requests[1]]
    assert ahead.pipeline.is_open
    assert not waiting.pipeline.is_open
    ahead.pipeline.drop(ahead.places.rows.cache)
    heads = [own.drafts.drafters["mtp"] for own in engines]
    assert ahead.places.rows.cache.lengths == waiting.places.rows.cache.lengths
    assert heads[0]._order == heads[1]._order
    for place, name in enumerate(heads[0]._order):
        one, other = (head._rows[name] for head in heads)
        made = heads[0]._cache.lengths[place] - heads[1]._cache.lengths[place]
        assert made >= 0  # cells made before the round was read; elsewhere their tokens wait
        assert one.tokens == other.tokens[made:]
        assert sum(h.shape[0] for h in one.hidden) == len(one.tokens)
    lengths = heads[1]._cache.lengths
    found = [
        [*kept(own.places.rows.cache, own.places.rows.cache.lengths), *kept(head._cache, lengths)]
        for own, head in zip(engines, heads, strict=True)
    ]
    for got, wanted in zip(*found, strict=True):
        if equality.EXACT:
            assert np.array_equal(got, wanted)
        else:
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    for own in engines:
        finished(own)
    assert [r.history for r in requests[0]] == [r.history for r in requests[1]]
    assert ahead.stats.num_unread == 1


def test_what_the_prefix_store_keeps_behind_an_answer_is_the_text() -> None:
    """An answer that ended inside a round, and a second question behind it."""
    text = plain(4, asked(4, 60)).text
    stopped = asked(4, 60, stop=(text[30:33],))
    stories = []
    for overlaps in (True, False):
        own = engine(overlaps=overlaps)
        first = own.generate(PROMPTS[4], stopped, spec=MTP)
        more = [*PROMPTS[4], *first.tokens[:-2], 3, 1, 4]
        again = own.generate(more, asked(4), spec=MTP)
        stories.append((first.tokens, again.tokens, again.stats.num_cached))
        cold = equality.engine([]).generate(more, asked(4))
        same(cold, again, more, asked(4), f"overlaps {overlaps}")
    assert stories[0] == stories[1]


# ---- beside rows that are parked


@catches(
    "rows keep cells of rejected tokens",
    "mlxspec.drafters.behind_unread:extend",
    lambda right: lambda cache, row, num: right(cache, row, num + 1),
)
def test_a_head_keeps_the_cells_of_parked_rows_while_it_drafts_behind_unread_rounds() -> None:
    """And those of the other rows are where they are if rounds wait."""
    given = [[5, 6, 7], list(range(20, 60)), [9, 8, 7] * 9]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=i) for i in range(len(given))]
    engines = [engine(overlaps=overlaps, max_rows=2, prefix_budget=0) for overlaps in (True, False)]
    cells: list[dict[int, tuple[int, np.ndarray]]] = []
    for own in engines:
        many = [own.submit(p, s, spec=MTP, client="many") for p, s in zip(given, params[:2], strict=False)]
        while own.num_running < 2 or own.places.prefills:
            own.step()
        own.rest(frozenset({many[0].number}))
        few = own.submit(given[2], params[2], spec=MTP, client="few")
        while few.num_generated < 15:
            own.step()
        assert list(own.places.rows.parked) == many[:1]
        assert own.pipeline.is_open == (own is engines[0])
        own.pipeline.drop(own.places.rows.cache)
        head = own.drafts.drafters["mtp"]
        keys = head._cache.layers[0].keys
        rows = zip(head._order, head._cache.lengths, strict=True)
        cells.append({r: (n, np.asarray(keys[i][0, :, :n])) for i, (r, n) in enumerate(rows)})
        own.rest(frozenset())
        finished(own)
    assert cells[0].keys() == cells[1].keys() == {0, 1, 2}
    for row, (length, found) in cells[0].items():
        num = min(length, cells[1][row][0])
        assert num >= len(given[row])
        np.testing.assert_allclose(found[:, :num], cells[1][row][1][:, :num], rtol=1e-4, atol=1e-4)


# ---- where rounds have to wait, and what fails


@pytest.mark.parametrize(
    ("params", "wish"),
    [
        ({"repetition_penalty": 1.2}, MTP),
        ({"logit_bias": {5: 3.0}}, MTP),
        ({"bad_words": ("a",)}, MTP),
        ({}, spec("mtp", n_max=3, p_min=0.2)),
        ({}, spec("mtp", n_max=3, n_min=1)),
    ],
    ids=str,
)
def test_what_must_be_seen_is_waited_for(params: dict, wish: SpecConfig) -> None:
    own = engine()
    given = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, **params)
    own.generate(PROMPTS[2], given, spec=wish)
    assert own.stats.num_synchronised == own.stats.num_rounds - own.stats.num_plain_rounds > 0 or (
        own.stats.num_synchronised == own.stats.num_rounds
    )


def test_exact_texts_are_not_drafted_ahead() -> None:
    assert not equality.engine(["mtp"], exact=True).pipeline.overlaps


def test_logprobs_are_those_of_plain_decoding() -> None:
    given = asked(2, 20, logprobs=True, top_logprobs=2)
    own = engine()
    got = own.generate(PROMPTS[2], given, spec=MTP)
    check(2, given, got, "with log-probabilities")
    assert own.stats.num_synchronised < own.stats.num_rounds


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_forward_that_fails_ends_its_rows_and_the_engine_goes_on(at: int) -> None:
    own, left = engine(), [at]

    class Failing:
        def __getattr__(self, name: str):
            return getattr(tiny_models.target(), name)

        def forward(self, tokens, rows, cache, **more):
            if not more.get("certain"):
                left[0] -= 1
                if left[0] == 0:
                    raise MemoryError("no memory for that")
            return tiny_models.target().forward(tokens, rows, cache, **more)

    own._model = Failing()
    results = own.generate(PROMPTS[:2], asked(0), spec=MTP)
    assert {r.error for r in results} == {"MemoryError: no memory for that."}
    assert own.pipeline.next is None
    assert own.nbytes == 0
    check(1, asked(1), own.generate(PROMPTS[1], asked(1), spec=MTP), "after a failure")


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_head_that_fails_ends_for_its_rows_and_the_text_goes_on(when: str) -> None:
    own = engine()
    drafter = own.drafts.drafters["mtp"]
    real, left = drafter._go_on, [4]

    def failing(*args):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("no head")
        return real(*args)

    def failing_before(*args):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("no head")
        return run(*args)

    run = drafter._run
    if when == "behind":
        drafter._go_on = failing
    else:
        drafter._run = failing_before
    got = own.generate(PROMPTS[3], asked(3), spec=MTP)
    same(plain(3, asked(3)), got, PROMPTS[3], asked(3), "without a head")
    assert got.stats.notices == ["mtp drafting ended: RuntimeError: no head"]
    assert left[0] == 0
    check(2, asked(2), own.generate(PROMPTS[2], asked(2), spec=MTP), "after a failure")


# ---- rounds that are built ahead and begun on later, as they would copy many keys and values


@pytest.mark.parametrize("holds", [False, True])
def test_a_round_that_would_copy_much_is_handed_over_when_the_one_before_is_through(
    holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_COPIED_AT_MOST", -1 if holds else 1 << 30)
    order: list[str] = []

    def noted(where: object, name: str, called: Callable[..., Any]) -> None:
        def call(*args: Any, **options: Any) -> Any:
            order.append(f"{name} begins")
            found = called(*args, **options)
            order.append(f"{name} ends")
            return found

        monkeypatch.setattr(where, name, call)

    noted(mx, "async_eval", mx.async_eval)
    noted(Pipeline, "_launch_behind", Pipeline._launch_behind)
    own = engine(prefix_budget=0)
    requests = [own.submit(PROMPTS[i], asked(i), spec=MTP) for i in range(2)]
    finished(own)
    assert own.stats.num_rounds > own.stats.num_synchronised  # rounds overlapped
    handed, building = 0, False
    for what in order:
        if what.startswith("_launch_behind"):
            building = what.endswith("begins")
        handed += building and what == "async_eval begins"
    assert (handed == 0) == holds
    for i, request in enumerate(requests):
        assert tuple(request.history[len(PROMPTS[i]) :]) == plain(i, asked(i)).tokens, f"request {i}"


def test_large_models_never_hold_rounds_back() -> None:
    """Where MLX itself waits, a round's keys are free when the next one comes to them."""
    for num_bytes, holds in ((pipeline._NO_COPIES - 1, True), (pipeline._NO_COPIES, False)):
        made = Pipeline(None, None, widest=None, overlaps=True, num_bytes=num_bytes)  # type: ignore[arg-type]
        assert made._copies == holds


# ---- drafts in tails


@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_on_a_gpu_are_kept_in_tails(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say what drafts in buffers say, also behind rounds that nobody has read."""
    tailed: list[int] = []
    real = attention.attend_tailed

    def noted(queries: mx.array, *args: Any) -> mx.array:
        tailed.append(queries.shape[2])
        return real(queries, *args)

    def drafted() -> tuple[list[tuple[int, ...]], int]:
        own = engine(overlaps=overlaps, prefix_budget=0)
        requests = [own.submit(PROMPTS[i], asked(i), spec=MTP) for i in range(2)]
        finished(own)
        return [tuple(r.history) for r in requests], sum(r.stats.num_accepted for r in requests)

    in_buffers = drafted()
    assert not tailed
    monkeypatch.setattr(caches, "_WORTH_A_TAIL", 0)
    monkeypatch.setattr(model_based.device, "has_gpu", lambda: True)
    monkeypatch.setattr(row_attention, "attend_tailed", noted)
    in_tails = drafted()
    assert tailed
    assert set(tailed) == {1}
    assert in_tails[0] == in_buffers[0]
    assert abs(in_tails[1] - in_buffers[1]) <= 2  # sums are rounded otherwise
