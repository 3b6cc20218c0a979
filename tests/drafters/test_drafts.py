"""Several drafters as one: who is asked when, what limits do, and that a drafter which fails costs its rows drafts only."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter, Needs
from mlxspec.drafters.drafts import Drafts
from mlxspec.drafters.row import DraftRow
from mlxspec.engine.engine import Engine
from mlxspec.policy.fixed import Fixed
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests import tiny_models

VOCAB = tiny_models.VOCAB


class Scripted(Drafter):
    """Proposes the same for everybody, writes down what it hears, and raises where it is told to."""

    def __init__(
        self,
        name: str,
        tokens: Sequence[int] = (),
        sure: Sequence[float] | None = None,
        *,
        rows: Sequence[int] | None = None,
        fail: str = "",
        fail_at: int = 0,
        hidden: bool = False,
    ) -> None:
        self.name, self.tokens, self.sure = name, list(tokens), sure
        self.needs = Needs(hidden=hidden)
        self._only, self._fail, self._fail_at, self._calls = rows, fail, fail_at, 0
        self.heard: dict[int, list[int]] = {}
        self.hiddens: dict[int, int] = {}
        self.asked: list[list[int]] = []
        self.closed: list[int] = []

    def _maybe_fail(self, where: str) -> None:
        if where == self._fail:
            self._calls += 1
            if self._calls > self._fail_at:
                raise RuntimeError(f"{where} went wrong")

    def begin(self, row: int) -> None:
        self._maybe_fail("begin")
        self.heard[row] = []

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        self._maybe_fail("hear")
        self.heard[row] += tokens
        assert (hidden is not None) == self.needs.hidden
        if hidden is not None:
            assert hidden.shape[0] == len(tokens)
            self.hiddens[row] = self.hiddens.get(row, 0) + hidden.shape[0]

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        self._maybe_fail("draft")
        self.asked.append([a.row for a in asks])
        drafts = []
        for ask in asks:
            if self._only is not None and ask.row not in self._only:
                drafts.append(NO_DRAFT)
                continue
            tokens = self.tokens[: ask.limit]
            sure = None if self.sure is None else mx.array(list(self.sure)[: ask.limit])
            drafts.append(Draft(len(tokens), tokens, sure) if tokens else NO_DRAFT)
        return drafts if self._fail != "too few" else drafts[:-1]

    def forget(self, row: int) -> None:
        self.closed.append(row)


HISTORY = [1, 2]


def begun(drafts: Drafts, specs: Sequence[SpecConfig]) -> list[DraftRow]:
    policy = Fixed()
    return [
        drafts.begin(r, HISTORY, s, RowSampler(SamplingParams(), [], VOCAB), policy)
        for r, s in enumerate(specs)
    ]


def propose(drafts: Drafts, num_rows: int, room: int = 20) -> dict[int, tuple[str | None, list[int]]]:
    plan = drafts.propose({r: room for r in range(num_rows) if drafts.row(r).limits})
    return {r: (d.drafter, list(d.tokens[: d.width])) for r, d in plan.drafts.items() if d.width}


def test_the_first_that_proposes_anything_wins_row_by_row() -> None:
    first, second = Scripted("ngram-simple", [1, 1], rows=[1]), Scripted("mtp", [2, 2, 2])
    drafts = Drafts([first, second], VOCAB)
    begun(drafts, [SpecConfig(drafters=("ngram-simple", "mtp"))] * 3)
    assert propose(drafts, 3) == {
        0: ("mtp", [2, 2, 2]),
        1: ("ngram-simple", [1, 1]),
        2: ("mtp", [2, 2, 2]),
    }
    assert (first.asked, second.asked) == ([[0, 1, 2]], [[0, 2]])


def test_each_row_has_its_own_order_and_its_own_drafters() -> None:
    ngram, mtp = Scripted("ngram-simple", [1]), Scripted("mtp", [2])
    drafts = Drafts([ngram, mtp], VOCAB)
    specs = [("mtp", "ngram-simple"), ("ngram-simple", "mtp"), ("ngram-simple",), ()]
    begun(drafts, [SpecConfig(drafters=d) for d in specs])
    assert propose(drafts, 4) == {0: ("mtp", [2]), 1: ("ngram-simple", [1]), 2: ("ngram-simple", [1])}


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({}, 5),
        ({"p_min": 0.5}, 3),
        ({"p_min": 0.5, "n_min": 3}, 3),
        ({"p_min": 0.5, "n_min": 4}, 0),
        ({"p_min": 0.99}, 0),
        ({"n_min": 5}, 5),
    ],
    ids=str,
)
def test_p_min_and_n_min_hold_where_there_are_probabilities(limits: dict, length: int) -> None:
    drafts = Drafts([Scripted("ngram-simple", [1, 2, 3, 4, 5], [0.9, 0.8, 0.7, 0.2, 0.9])], VOCAB)
    begun(drafts, [SpecConfig(drafters=("ngram-simple",), **limits)])
    wanted = {0: ("ngram-simple", [1, 2, 3, 4, 5][:length])} if length else {}
    assert propose(drafts, 1) == wanted


def test_who_is_not_sure_enough_leaves_the_round_to_the_next() -> None:
    doubtful, other = Scripted("mtp", [1, 2], [0.1, 0.1]), Scripted("ngram-simple", [3])
    drafts = Drafts([doubtful, other], VOCAB)
    begun(drafts, [SpecConfig(drafters=("mtp", "ngram-simple"), p_min=0.5)])
    assert propose(drafts, 1) == {0: ("ngram-simple", [3])}


def test_a_draft_never_exceeds_the_room_a_row_has() -> None:
    drafter = Scripted("ngram-simple", range(20))
    drafts = Drafts([drafter], VOCAB)
    begun(drafts, [SpecConfig(drafters=("ngram-simple",), ngram_m=9)] * 2)
    assert propose(drafts, 2, room=4)[0] == ("ngram-simple", [0, 1, 2, 3])
    assert len(propose(drafts, 2, room=40)[1][1]) == 9
    assert propose(drafts, 2, room=0) == {}
    assert drafter.asked == [[0, 1]] * 2


# ---- failure


@pytest.mark.parametrize("where", ["begin", "hear", "draft", "too few"])
def test_a_failure_ends_the_drafter_for_the_rows_it_was_asked_about(where: str) -> None:
    bad = Scripted("mtp", [1], fail=where, fail_at=0 if where in ("draft", "too few") else 1)
    drafts = Drafts([bad, Scripted("ngram-simple", [2])], VOCAB)
    both = SpecConfig(drafters=("mtp", "ngram-simple"))
    states = begun(drafts, [both, both])
    for row in range(2):
        drafts.hear(row, [1, 2], None)
    won = propose(drafts, 2)
    hit = [False, True] if where in ("begin", "hear") else [True, True]
    for row in range(2):
        assert won[row] == (("ngram-simple", [2]) if hit[row] else ("mtp", [1]))
        assert ("mtp" in states[row].ended) == hit[row]
        assert len(states[row].notices) == hit[row]
        assert (row in bad.closed) == hit[row]
    drafts.hear(1, [3], None)
    assert propose(drafts, 2)[1] == ("ngram-simple", [2])


@pytest.mark.parametrize("where", ["begin", "hear", "draft"])
@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_request_whose_drafter_fails_says_what_plain_decoding_says(where: str, fail_at: int) -> None:
    bad = Scripted("mtp", [1, 2], fail=where, fail_at=fail_at, hidden=True)
    other = Scripted("ngram-simple", [3], rows=[0, 2])
    engine = Engine(tiny_models.target(), drafters=[bad, other])
    prompts, params = [[1, 2, 3], [4] * 10, [7, 8]], SamplingParams(max_tokens=12, temperature=0.9, seed=5)
    wanted = Engine(tiny_models.target()).generate(prompts, params)
    got = engine.generate(prompts, params)
    assert [r.tokens for r in got] == [r.tokens for r in wanted]
    notices = [r.stats.notices for r in got]
    assert any(notices)
    assert all(n in ([], [f"mtp drafting ended: RuntimeError: {where} went wrong"]) for n in notices)
    if where == "begin":
        assert [bool(n) for n in notices] == [i >= fail_at for i in range(3)]
    assert engine.is_idle


def test_a_failing_drafter_gets_a_new_chance_with_the_next_request() -> None:
    bad = Scripted("mtp", [1], fail="begin", fail_at=0)
    engine = Engine(tiny_models.target(), drafters=[bad])
    assert engine.generate([1, 2], SamplingParams(max_tokens=3)).stats.notices
    bad._fail = ""
    result = engine.generate([1, 2], SamplingParams(max_tokens=3))
    assert not result.stats.notices
    assert result.stats.num_drafted


def test_everybody_hears_every_token_once_and_in_order() -> None:
    """Whoever drafted it; with a hidden for each where it is wanted. Rows that ended are closed."""
    ngram, mtp = Scripted("ngram-simple", [3, 4], rows=[0, 1]), Scripted("mtp", [5], hidden=True)
    engine = Engine(tiny_models.target(), drafters=[ngram, mtp])
    prompts = [[1, 2, 3], list(range(40)), [9]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 4, 14)]
    requests = [engine.submit(p, s) for p, s in zip(prompts, params, strict=True)]
    while not engine.is_idle:
        engine.step()
        for request in requests:
            if request.finish_reason is None:
                for drafter in (ngram, mtp):
                    assert drafter.heard[request.number] == request.history
                assert mtp.hiddens[request.number] == len(request.history)
    for drafter in (ngram, mtp):
        assert sorted(set(drafter.closed)) == [0, 1, 2]


@pytest.mark.parametrize("chunk", [16, 512])
def test_hiddens_are_those_the_tokens_were_sampled_from(chunk: int) -> None:
    """Over chunks of a prompt, rounds with drafts and rounds without: the drafter gets the target's hidden of the token before."""
    from mlxspec.config import EngineConfig
    from tests.drafters.test_drafter_models import true_hiddens

    class Listener(Scripted):
        def __init__(self) -> None:
            super().__init__("mtp", [1, 2], hidden=True)
            self.got: list[mx.array] = []

        def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
            super().hear(row, tokens, hidden)
            self.got.append(hidden)

    listener = Listener()
    engine = Engine(tiny_models.target(), drafters=[listener], config=EngineConfig(prefill_chunk=chunk))
    engine.generate([i % VOCAB for i in range(50)], SamplingParams(max_tokens=10, ignore_eos=True))
    wanted = true_hiddens(listener.heard[0])
    got = mx.concatenate(listener.got)
    assert got.shape == wanted.shape
    assert mx.abs(got - wanted).max().item() < 1e-4
