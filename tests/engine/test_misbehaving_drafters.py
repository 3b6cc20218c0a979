"""What drafters of one's own draft and raise cannot hurt: every row says what plain decoding says, and a notice names the drafter.

Each misbehaviour is a drafter that behaves (it drafts by oracle, right and wrong tokens in turn) until its second call of a kind, and then
does one thing that it must not. Beside the rows it drafts for others decode plainly, and one is drafted for by n-gram lookup.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

import mlxspec
from mlxspec.cache.snapshot import Snapshot
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter, DrafterFailed, Needs, Unread
from mlxspec.drafters.checked import checked, is_ours
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine.api import Result
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError
from mlxspec.policy.controller import Controller
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests.engine import equality
from tests.known_costs import known_costs
from tests.tiny_models import VOCAB

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], list(range(20, 60)), [7, 8, 9] * 6, [30, 31]]
SPECS = [("own",), ("own", "ngram-simple"), ("ngram-simple",), ()]
MIXED = [
    SamplingParams(max_tokens=18, ignore_eos=True),
    SamplingParams(
        max_tokens=18, ignore_eos=True, temperature=0.9, seed=4, frequency_penalty=0.3, logit_bias={5: 2.0}
    ),
    SamplingParams(max_tokens=18, ignore_eos=True),
    SamplingParams(max_tokens=18, ignore_eos=True, temperature=1.0, seed=9, presence_penalty=0.5),
]
# rounds overlap where no row's logits depend on tokens that nobody has read; a row that ends by itself drops the round behind
PARAMS = {
    "mixed": MIXED,
    "overlapped": [
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.3 * i, seed=i, stop=("WZ",) * (i == 3))
        for i in range(4)
    ],
}
NEXT = [[*p[::-1], 11, 12] for p in PROMPTS]  # what is asked of the engine afterwards: it must be as it was


class Own(Drafter):
    """Drafts two right tokens and a wrong one, behind unread rounds only wrong ones.

    at: the method in whose second call, and every one behind it, `do` is done with the method's arguments (from the first call on where
    few come). What `do` returns takes the place of what the method would, unless it is GO_ON.
    """

    name = "own"
    max_draft = 6

    def __init__(self, at: str = "", do: Callable | None = None, needs: Needs | None = None) -> None:
        self._at, self._do, self._calls, self.kept = at, do, 0, []
        self.needs = needs or Needs()
        self.engine: Engine | None = None

    def _may(self, what: str, *args) -> object:
        if what != self._at or self._do is None:
            return GO_ON
        self._calls += 1
        return self._do(self, *args) if self._calls > (what != "snapshot") else GO_ON

    def begin(self, row):
        self._may("begin", row)

    def hear(self, row, tokens, hidden):
        self._may("hear", row, tokens, hidden)

    def draft(self, asks, sampler):
        found = self._may("draft", asks, sampler)
        return [right(a) for a in asks] if found is GO_ON else found

    def may_draft(self, row):
        found = self._may("may_draft", row)
        return True if found is GO_ON else found

    def draft_behind(self, asks, sampler, unread):
        found = self._may("draft_behind", asks, sampler, unread)
        if found is not GO_ON:
            return found
        return [Draft(a.limit, mx.full((a.limit,), 5, mx.int32)) for a in asks]

    def prime(self, row):
        self._may("prime", row)

    def snapshot(self, row, length, start):
        found = self._may("snapshot", row, length, start)
        return None if found is GO_ON else found

    def resume(self, row, tokens, state):
        self._may("resume", row, tokens, state)

    def forget(self, row):
        self._may("forget", row)


GO_ON = object()


@cache
def texts() -> list[list[int]]:
    return [[*p, *r.tokens] for scene in PARAMS for p, r in zip(PROMPTS, plain(scene)[0], strict=True)]


def right(ask: Ask) -> Draft:
    history = list(ask.history)
    text = next((t for t in texts() if t[: len(history)] == history), None)
    if text is None:
        return NO_DRAFT
    tokens = text[len(history) : len(history) + 2]
    return Draft.of([*tokens, 3][: ask.limit])


def asked(
    engine: Engine, prompts: Sequence[list[int]], specs: Sequence[tuple[str, ...]], scene: str, **more
) -> list[Result]:
    requests = [
        engine.submit(p, s, spec=SpecConfig(drafters=d, **{"policy": "fixed", "ngram_n": 3, **more}))
        for p, s, d in zip(prompts, PARAMS[scene], specs, strict=True)
    ]
    for _ in range(400):
        engine.step()
        if engine.is_idle:
            return [Result.of(r) for r in requests]
    raise AssertionError("the engine did not come to an end")


@cache
def plain(scene: str) -> tuple[list[Result], list[Result]]:
    engine = equality.engine([])
    return asked(engine, PROMPTS, [()] * 4, scene), asked(engine, NEXT, [()] * 4, scene)


def same(found: Sequence[Result], wanted: Sequence[Result], scene: str) -> None:
    for got, right_, prompt, params in zip(found, wanted, PROMPTS, PARAMS[scene], strict=True):
        assert got.error is None
        equality.same(right_, got, prompt, params, "a misbehaving drafter")


def made(drafter: Own, policy: str) -> Engine:
    engine = equality.engine([drafter, ngram_lookup("ngram-simple", 3, 12)])
    if policy == "auto":
        engine.policies.follow(Controller(known_costs({1: 1.0, 2: 1.0})))
    drafter.engine = engine
    return engine


# ---- what is done


def drafts(make: Callable[[Ask], object]) -> Callable:
    """Give this for the first row, and right drafts for the others."""

    def do(self: Own, asks: Sequence[Ask], sampler: BatchSampler) -> list:
        return [right(a) if a.row else make(a) for a in asks]

    do.is_of_one_row = True  # type: ignore[attr-defined]
    return do


def raises(error: BaseException | type[BaseException]) -> Callable:
    def do(self: Own, *args: object) -> object:
        raise error

    return do


def device(tokens, *more, dtype=mx.int32, length=None) -> Callable:
    return drafts(lambda a: Draft(a.limit if length is None else length, mx.array(tokens(a), dtype), *more))


def shared(self: Own, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
    """One object for all rows, changed behind the engine's back; then an error."""
    if self.kept:
        self.kept[0].tokens[:] = [10**6] * 9
        raise RuntimeError("and off")
    draft = Draft.of([5, 6][: min(a.limit for a in asks)])
    self.kept.append(draft)
    return [draft] * len(asks)


def kept_array(self: Own, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
    """An array that is assigned to once it has been handed over."""
    if self.kept:
        self.kept[0][0] = 10**6
        raise RuntimeError("and off")
    tokens = mx.array([5])
    self.kept.append(tokens)
    return [Draft(1, tokens)] * len(asks)


def calls(act: Callable[[Engine], object]) -> Callable:
    def do(self: Own, *args: object) -> object:
        assert self.engine is not None
        act(self.engine)
        return GO_ON

    return do


def spoil(x: mx.array | None) -> None:
    if x is not None:
        x[...] = 0


def generator(self: Own, asks: Sequence[Ask], sampler: BatchSampler) -> object:
    return (right(a) for a in asks)


def behind(make: Callable[[Sequence[Ask], Unread], object]) -> Callable:
    return lambda self, asks, sampler, unread: make(asks, unread)


class Evil(list):
    def __len__(self) -> int:
        raise RuntimeError("no length")


def odd(field: str, value: Callable[[int], object]) -> Callable:
    """A right draft of n tokens of which one field is value(n)."""

    def make(a: Ask) -> Draft:
        draft = right(a)
        return draft._replace(**{field: value(draft.length)}) if draft.length else draft

    return drafts(make)


NAN, INF = float("nan"), float("inf")

# name -> at which method, what is done
WAYS: dict[str, tuple[str, Callable]] = {
    # what is given for a list of drafts
    "returns None": ("draft", lambda self, asks, sampler: None),
    "returns a number": ("draft", lambda self, asks, sampler: 7),
    "returns a generator": ("draft", generator),
    "returns a dictionary": ("draft", lambda self, asks, sampler: {a.row: right(a) for a in asks}),
    "returns too few drafts": ("draft", lambda self, asks, sampler: []),
    "returns too many drafts": ("draft", lambda self, asks, sampler: [NO_DRAFT] * (len(asks) + 1)),
    "returns a list without a length": ("draft", lambda self, asks, sampler: Evil([NO_DRAFT])),
    "returns lists for drafts": ("draft", drafts(lambda a: [5])),
    "returns None for a draft": ("draft", drafts(lambda a: None)),
    "returns a tuple that looks like a draft": ("draft", drafts(lambda a: tuple(right(a)))),
    # host drafts
    "drafts too much": ("draft", drafts(lambda a: Draft.of([5] * (a.limit + 1)))),
    "drafts a hundred thousand tokens": ("draft", drafts(lambda a: Draft.of([5] * 100_000))),
    "drafts endlessly": ("draft", drafts(lambda a: Draft(1, itertools.repeat(5)))),
    "drafts a generator": ("draft", drafts(lambda a: Draft(1, (t for t in [5])))),
    "drafts ids out of range": ("draft", drafts(lambda a: Draft.of([VOCAB]))),
    "drafts negative ids": ("draft", drafts(lambda a: Draft.of([-1]))),
    "drafts ids of ten thousand digits": ("draft", drafts(lambda a: Draft.of([10**10_000]))),
    "drafts strings": ("draft", drafts(lambda a: Draft.of(["a"]))),
    "drafts floats": ("draft", drafts(lambda a: Draft.of([5.0]))),
    "drafts truth": ("draft", drafts(lambda a: Draft.of([True]))),
    "drafts arrays for tokens": ("draft", drafts(lambda a: Draft.of([mx.array(5)]))),
    "drafts text": ("draft", drafts(lambda a: Draft(1, "a"))),
    "gives a length that is too long": ("draft", drafts(lambda a: Draft(3, [5]))),
    "gives a negative length": ("draft", drafts(lambda a: Draft(-1, []))),
    "gives no number for a length": ("draft", drafts(lambda a: Draft("1", [5]))),
    "gives a fraction for a length": ("draft", drafts(lambda a: Draft(1.0, [5]))),
    # device drafts
    "drafts ids out of range on the device": ("draft", device(lambda a: [10**6] * a.limit)),
    "drafts negative ids on the device": ("draft", device(lambda a: [-7] * a.limit)),
    "drafts too few tokens on the device": ("draft", device(lambda a: [5], length=2)),
    "drafts too many tokens on the device": ("draft", device(lambda a: [5] * 40, length=1)),
    "drafts a matrix": ("draft", device(lambda a: [[5]], length=1)),
    "drafts a scalar": ("draft", device(lambda a: 5, length=1)),
    "drafts floats on the device": ("draft", device(lambda a: [5.0], length=1, dtype=mx.float32)),
    "drafts truth on the device": ("draft", device(lambda a: [True], length=1, dtype=mx.bool_)),
    "drafts NumPy floats": ("draft", drafts(lambda a: Draft(1, np.array([5.0])))),
    # what goes with a draft
    "confidences of nothing": ("draft", odd("confidences", lambda n: [])),
    "confidences that are NaN": ("draft", odd("confidences", lambda n: [NAN] * n)),
    "confidences that are infinite": ("draft", odd("confidences", lambda n: [INF] * n)),
    "confidences below 0": ("draft", odd("confidences", lambda n: [-0.5] * n)),
    "confidences above 1": ("draft", odd("confidences", lambda n: mx.array([7.0] * n))),
    "confidences that are text": ("draft", odd("confidences", lambda n: "abc"[:n])),
    "confidences in a matrix": ("draft", odd("confidences", lambda n: mx.ones((n, 1)))),
    "confidences that are NaN on the device": ("draft", odd("confidences", lambda n: mx.array([NAN] * n))),
    "a backing below 0": ("draft", odd("backing", lambda n: -5)),
    "a backing that is NaN": ("draft", odd("backing", lambda n: NAN)),
    "a backing that is text": ("draft", odd("backing", lambda n: "many")),
    "ends with a number": ("draft", odd("ended", lambda n: 5)),
    "ends with a page of text": ("draft", odd("ended", lambda n: "no more\n" * 9000)),
    # drafts and arrays that change
    "shares one draft and changes it": ("draft", shared),
    "assigns to an array it drafted": ("draft", kept_array),
    # errors of every kind, everywhere
    "raises an Exception in draft": ("draft", raises(ValueError("no"))),
    "raises StopIteration": ("draft", raises(StopIteration)),
    "raises a book": ("draft", raises(RuntimeError("word\n" * 9000))),
    "recurses": ("draft", lambda self, *args: self._do(self, *args)),
    **{
        f"raises in {where}": (where, raises(RuntimeError("no")))
        for where in ("begin", "hear", "prime", "draft_behind", "snapshot")
    },
    "keeps what is no snapshot": ("snapshot", lambda self, *args: {"a": 1}),
    "keeps a snapshot of another text": (
        "snapshot",
        lambda self, row, length, start: Snapshot(1, [[]], [], 0),
    ),
    "keeps a snapshot without stretches": (
        "snapshot",
        lambda self, row, length, start: Snapshot(length, [], [], start),
    ),
    "keeps keys of another length": (
        "snapshot",
        lambda self, row, length, start: Snapshot(
            length, [[(mx.zeros((1, 1, 3, 2)), mx.zeros((1, 1, 3, 2)))]], [], start
        ),
    ),
    # the engine it serves
    "steps the engine": ("draft", calls(lambda e: e.step())),
    "steps the engine when it observes": ("hear", calls(lambda e: e.step())),
    "generates": (
        "draft",
        calls(lambda e: e.generate([1, 2], SamplingParams(max_tokens=2), spec=SpecConfig())),
    ),
    "streams": (
        "draft",
        calls(lambda e: list(e.stream([1], SamplingParams(max_tokens=2), spec=SpecConfig()))),
    ),
    "closes the engine": ("draft", calls(lambda e: e.close())),
    "probes the engine": ("draft", calls(lambda e: e.probe())),
    # drafts behind an unread round
    "drafts ids out of range behind an unread round": (
        "draft_behind",
        behind(lambda asks, unread: [Draft(a.limit, mx.array([10**6] * a.limit)) for a in asks]),
    ),
    "gives too few drafts behind an unread round": ("draft_behind", behind(lambda asks, unread: asks[1:])),
}
SOME = [name for i, name in enumerate(WAYS) if i % 9 == 0]
# called only where rounds overlap: the controller reads each round before it drafts, and other methods' calls are all the same to it
OVERLAPPED = ("draft_behind",)
CASES = [
    pytest.param(name, policy, marks=[] if name in SOME else [pytest.mark.slow], id=f"{name}, {policy}")
    for name, (at, _) in WAYS.items()
    for policy in ("fixed", "auto")
    if policy == "fixed" or at not in (*OVERLAPPED, "prime")
]


@catches(
    "confidences are not checked",
    "mlxspec.drafters.checked:_confidences",
    lambda right: lambda given, length: given,
    case="confidences that are NaN, auto",
)
@catches(
    "drafted ids are not checked",
    "mlxspec.drafters.checked:_checked",
    lambda right: lambda draft, *_: draft,
    case="drafts negative ids on the device, fixed",
)
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_every_row_says_what_plain_decoding_says(name: str, policy: str) -> None:
    at, do = WAYS[name]
    own = Own(at, do)
    engine, scene = made(own, policy), "overlapped" if at in OVERLAPPED else "mixed"
    specs = SPECS if scene == "mixed" else [("own",)] * 4
    found = asked(engine, PROMPTS, specs, scene, policy=policy)
    same(found, plain(scene)[0], scene)
    notices = [n for r in found for n in r.stats.notices]
    assert notices, "nobody was told"
    for notice in notices:
        assert notice.startswith("own drafting ended: ")
        assert len(notice) < 400
        assert "\n" not in notice
    for result, drafters in zip(found, specs, strict=True):
        assert not result.stats.notices or "own" in drafters
        assert len(result.stats.notices) <= 1
    if getattr(do, "is_of_one_row", False):
        assert not found[1].stats.notices
        assert found[1].stats.drafters["own"].num_drafted > 5
    # and the engine is none the worse for it
    own._at = ""
    after = asked(engine, NEXT, [("own", "ngram-simple")] * 4, scene, policy=policy)
    same(after, plain(scene)[1], scene)
    assert not any(r.stats.notices for r in after)
    engine.prefix.tree.check()


def test_there_are_thirty_ways_to_misbehave() -> None:
    assert len(WAYS) >= 30


# ---- prefix hits, ends and rows beside others


def test_what_is_raised_behind_a_prefix_hit_or_at_the_end_ends_no_row() -> None:
    for at in ("resume", "forget"):
        own = Own()
        engine = made(own, "fixed")
        asked(engine, PROMPTS, [("own",)] * 4, "mixed")
        own._at, own._do, own._calls = at, raises(RuntimeError("no")), 1
        found = asked(engine, PROMPTS, [("own",)] * 4, "mixed")
        same(found, plain("mixed")[0], "mixed")
        assert [bool(r.stats.num_cached) for r in found] == [False, True, False, False]
        told = [n for r in found for n in r.stats.notices]
        assert told == (["own drafting ended: RuntimeError: no"] if at == "resume" else [])


def test_a_drafter_that_fails_and_cannot_be_closed_ends_for_its_rows_only() -> None:
    class Stuck(Own):
        def forget(self, row):
            raise ValueError("nor this")

    own = Stuck("draft", raises(ValueError("not this")))
    found = asked(made(own, "fixed"), PROMPTS, SPECS, "mixed", policy="fixed")
    same(found, plain("mixed")[0], "mixed")
    assert [r.stats.notices for r in found] == [["own drafting ended: ValueError: not this"]] * 2 + [[], []]


def test_a_row_without_a_draft_behind_an_unread_round_waits_for_its_tokens() -> None:
    """Empty drafts are allowed: the round behind is then launched once the rows' tokens are known."""
    asked_behind: list[int] = []

    class Sparse(Own):
        def draft_behind(self, asks, sampler, unread):
            asked_behind.append(len(asks))
            return [NO_DRAFT, *(Draft(a.limit, mx.full((a.limit,), 5, mx.int32)) for a in asks[1:])]

    found = asked(made(Sparse(), "fixed"), PROMPTS, [("own",)] * 4, "overlapped")
    same(found, plain("overlapped")[0], "overlapped")
    assert not any(r.stats.notices for r in found)
    assert asked_behind


def test_a_slow_drafter_changes_nothing() -> None:
    own = Own("draft", lambda self, *args: (time.sleep(0.002), GO_ON)[1])
    found = asked(made(own, "fixed"), PROMPTS, SPECS, "mixed", policy="fixed")
    same(found, plain("mixed")[0], "mixed")
    assert not any(r.stats.notices for r in found)


@pytest.mark.parametrize("exit_", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_not_swallowed(exit_: type[BaseException]) -> None:
    engine = made(Own("draft", raises(exit_)), "fixed")
    with pytest.raises(exit_):
        asked(engine, PROMPTS, SPECS, "mixed", policy="fixed")


@pytest.mark.parametrize("at", ["draft", "hear", "begin", "prime"])
def test_rows_may_be_cancelled_and_requests_queued_from_within_a_step(at: str) -> None:
    late: list = []

    def do(self: Own, *args: object) -> object:
        assert self.engine is not None
        self.engine.cancel(1)
        if not late:
            late.append(self.engine.submit(PROMPTS[2], MIXED[2], spec=SpecConfig()))
        return GO_ON

    found = asked(made(Own(at, do), "fixed"), PROMPTS, [("own",)] * 4, "mixed", policy="fixed")
    assert found[1].finish_reason == "cancelled"
    wanted = plain("mixed")[0]
    assert found[1].tokens == wanted[1].tokens[: len(found[1].tokens)]
    for i in (0, 2, 3):
        assert found[i].tokens == wanted[i].tokens
    assert Result.of(late[0]).tokens == wanted[2].tokens
    assert not any(r.stats.notices for r in found)


# ---- what a drafter says of itself, and what it is given


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_draft", 0, "at least 1"),
        ("max_draft", -3, "at least 1"),
        ("max_draft", "8", "whole number"),
        ("max_draft", NAN, "whole number"),
        ("max_draft", True, "whole number"),
        ("__hash__", None, "eq=False"),
        ("needs", None, "Needs"),
        ("needs", "hidden", "Needs"),
        ("needs", Needs(cache=True), "not lent"),
    ],
    ids=[str(i) for i in range(9)],
)
def test_a_drafter_that_describes_itself_wrongly_is_refused_before_loading(
    field: str, value: object, says: str
) -> None:
    class Odd(Drafter):
        name = "odd"

        def draft(self, asks, sampler):
            return [NO_DRAFT] * len(asks)

    setattr(Odd, field, value)
    with pytest.raises(ConfigError, match=says):
        mlxspec.load("/there-is-no-model-here", drafters=[Odd()])


def test_a_drafter_may_have_any_name_that_is_allowed() -> None:
    """Its part of a stored beginning is not taken for the target's own, whatever it is called."""

    class Namesake(Own):
        name = "target"

        def snapshot(self, row, length, start):
            return Snapshot(length, [[]], [(mx.zeros((1, 1)),)], start)

    engine = made(Namesake(), "fixed")
    for _ in range(2):
        found = asked(engine, PROMPTS, [("target",)] * 4, "mixed")
        same(found, plain("mixed")[0], "mixed")
    assert found[1].stats.num_cached


@catches(
    "drafts on the device may have any shape",
    "mlxspec.drafters.checked:_checked",
    lambda right: lambda draft, *_: draft,
)
@catches(
    "a drafter is trusted for the package that its class is in",
    "mlxspec.drafters.checked:is_ours",
    lambda right: lambda drafter: type(drafter).__module__.startswith("mlxspec."),
)
def test_ids_of_a_table_are_checked_wherever_its_class_is() -> None:
    """An id out of range that is on the device would end the process."""

    class Table(Drafter):
        name = "table"

        def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
            return [Draft(1, mx.array([10**8])) for _ in asks]

    Table.__module__ = "mlxspec.drafters.table"
    asks = [Ask(0, [1], 3, RowSampler(SamplingParams(), [1], VOCAB))]
    (found,) = checked(Table().draft(asks, None), asks, VOCAB, is_ours=is_ours(Table()))  # type: ignore[arg-type]
    assert isinstance(found, DrafterFailed)


def test_shape_and_type_of_a_models_device_drafts_are_checked_without_evaluating_them() -> None:
    asks = [Ask(0, [1], 3, RowSampler(SamplingParams(), [1], VOCAB))] * 4
    lazy = mx.array([1, 2, 3]) + 1
    drafts = [
        Draft(3, lazy),
        Draft(2, lazy),
        Draft(3, lazy.astype(mx.float32)),
        Draft(3, lazy[:, None]),
    ]
    found = checked(drafts, asks, VOCAB, is_ours=True)
    assert found[0] is drafts[0]
    assert [isinstance(d, DrafterFailed) for d in found] == [False, True, True, True]
