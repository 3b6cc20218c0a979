"""Rows that follow the controller: the same text as plain decoding whatever it chooses, drafts where they pay, none where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import NO_DRAFT
from mlxspec.drafters.lookup import Lookup, NgramRow, ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine, Result
from mlxspec.events import TokensEvent
from mlxspec.platform.host import numbers
from mlxspec.policy import auto, costs
from mlxspec.policy.controller import Controller
from mlxspec.policy.costs import CostModel, DraftCost
from tests import tiny_models
from tests.engine import equality
from tests.known_costs import known_costs

FLAT, LINEAR = {1: 1.0, 2: 1.0}, {1: 1.0, 2: 2.0}
STILL = auto.REST - 1
NAMES = ("ngram-simple", "mtp", "draft-model")
PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3], list(range(30)), [7, 8, 9, 7, 8, 9, 7]]


def engine(widths: dict[int, float] = FLAT, *, policy: str = "auto", step: float = 0.001) -> Engine:
    made = equality.engine(NAMES, spec=SpecConfig(drafters=NAMES, policy=policy))
    costs = known_costs(
        widths,
        {"mtp": DraftCost(step=step), "draft-model": DraftCost(step=2 * step)},
    )
    # the machine at hand is not what is tested
    costs.took = lambda curve, width, calls, _: costs.seconds(curve, width, calls)  # type: ignore[method-assign]
    made.policies.follow(Controller(costs))
    return made


def asked_lately(made: Engine) -> None:
    """No probe of a drafter is due."""
    for name in ("mtp", "draft-model"):
        made.policies.costs.accepted("greedy", name).asked_at = 0


PARAMS = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True),
    "penalized": SamplingParams(max_tokens=30, repetition_penalty=1.2, ignore_eos=True),
}


@cache
def plain(kind: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """What plain decoding says to PROMPTS, together and each alone."""
    together = Engine(tiny_models.target()).generate(PROMPTS, PARAMS[kind])
    alone = [Engine(tiny_models.target()).generate(p, PARAMS[kind]) for p in PROMPTS]
    return [r.tokens for r in together], [r.tokens for r in alone]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize(
    "widths",
    [
        pytest.param(FLAT, marks=pytest.mark.slow),
        pytest.param(LINEAR, marks=pytest.mark.slow),
        {1: 1.0, 2: 1.2, 4: 1.4, 8: 2.5},
    ],
    ids=["flat", "linear", "between"],
)
def test_the_text_is_that_of_plain_decoding(kind: str, widths: dict[int, float]) -> None:
    together, alone = plain(kind)
    made = engine(widths)
    assert [r.tokens for r in made.generate(PROMPTS, PARAMS[kind])] == together
    assert [made.generate(p, PARAMS[kind]).tokens for p in PROMPTS] == alone
    assert made.is_idle


def test_where_verifying_is_free_much_is_drafted() -> None:
    result = engine(FLAT).generate(PROMPTS[0], PARAMS["greedy"])
    assert result.stats.num_accepted > 5
    assert result.stats.num_rounds < 35


def test_where_every_token_costs_a_step_rounds_are_plain_and_run_ahead() -> None:
    made = engine(LINEAR, step=0.5)
    lines: list[str] = []
    assert made.policies.auto is not None
    made.policies.auto.log = lines.append
    result = made.generate(PROMPTS[1], PARAMS["greedy"])
    assert result.stats.num_drafted == 0
    assert result.stats.num_rounds == 39
    assert len(lines) < 39  # rounds launched ahead are not deliberated one by one
    assert all("plain" in line or "verifies 0" in line for line in lines)


def test_a_long_prompt_that_no_model_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is in another context bucket than a row begins in."""
    monkeypatch.setattr(costs, "CONTEXTS", (8, 4096))
    made, plainly = engine(LINEAR, step=0.5), Engine(tiny_models.target())
    prompt = [i % 60 + 1 for i in range(40)]
    wanted = plainly.generate(prompt, PARAMS["greedy"]).tokens
    for _ in range(3):
        assert made.generate(prompt, PARAMS["greedy"]).tokens == wanted


def test_rows_of_both_policies_decode_together() -> None:
    made = engine(FLAT)
    specs = [
        SpecConfig(drafters=NAMES, policy="auto"),
        SpecConfig(drafters=("mtp",), policy="fixed"),
        SpecConfig(),
    ]
    requests = [made.submit(p, PARAMS["greedy"], spec=s) for p, s in zip(PROMPTS, specs, strict=True)]
    while not made.is_idle:
        made.step()
    wanted = Engine(tiny_models.target()).generate(PROMPTS, PARAMS["greedy"])
    assert [tuple(r.history[len(r.prompt) :]) for r in requests] == [r.tokens for r in wanted]


def test_rows_at_rest_do_not_keep_one_that_always_drafts_from_drafting() -> None:
    made = engine(LINEAR, step=0.5)
    resting = made.submit(PROMPTS[1], PARAMS["greedy"])
    for _ in range(12):
        made.step()
    fixed = made.submit(PROMPTS[0], PARAMS["greedy"], spec=SpecConfig(drafters=("mtp",), policy="fixed"))
    while not made.is_idle:
        made.step()
    assert Result.of(fixed).stats.drafters["mtp"].num_drafted > 0
    assert Result.of(resting).stats.num_decoded == Result.of(fixed).stats.num_decoded == 39


def test_at_rest_models_are_weighed_now_and_then() -> None:
    made = engine(LINEAR, step=0.5)
    assert made.policies.auto is not None
    control, weighed = made.policies.auto.control, []
    choose = control.choose
    control.choose = lambda *args, **more: (weighed.append(made.stats.num_rounds), choose(*args, **more))[1]  # type: ignore
    long = SamplingParams(max_tokens=100, ignore_eos=True, temperature=5.0)
    made.generate(PROMPTS[1], long, spec=SpecConfig(drafters=("mtp",), policy="auto"))
    gaps = [b - a for a, b in zip(weighed, weighed[1:], strict=False)]
    assert STILL <= max(gaps) <= STILL + 1
    assert len(weighed) < 100 / STILL + 3


def test_a_users_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft is longer than n_max, and none goes on from a token less probable than p_min."""
    made = engine(FLAT)
    spec = SpecConfig(drafters=("mtp",), policy="auto", n_max=2)
    result = made.generate(PROMPTS[0], PARAMS["greedy"], spec=spec)
    assert len(result.stats.drafters["mtp"].by_position) <= 2
    spec = SpecConfig(drafters=("mtp",), policy="auto", p_min=1.0)
    proposed: list[list[float]] = []
    propose = Mtp.draft

    def recorded(self: Mtp, asks, sampler):
        drafts = propose(self, asks, sampler)
        proposed.extend(numbers(d.confidences).tolist() for d in drafts if d.length)
        return drafts

    monkeypatch.setattr(Mtp, "draft", recorded)
    stats = made.generate(PROMPTS[1], PARAMS["sampled"], spec=spec).stats
    certain = [next((i for i, c in enumerate(sure) if c < 1.0), len(sure)) for sure in proposed]
    assert stats.num_drafted <= sum(certain) < sum(map(len, proposed))


def test_an_engine_that_nobody_calibrated_begins_with_guesses() -> None:
    target = tiny_models.target()
    made = Engine(
        target,
        drafters=[ngram_lookup("ngram-simple", 3, 12)],
        spec=SpecConfig(drafters=("ngram-simple",), policy="auto"),
    )
    assert made.policies.auto is None
    wanted = Engine(target).generate(PROMPTS[0], PARAMS["greedy"])
    assert made.generate(PROMPTS[0], PARAMS["greedy"]).tokens == wanted.tokens
    assert made.policies.auto is not None
    costs = made.policies.auto.control.costs
    assert costs.curve(0).num_rounds > 0  # answers have replaced guesses
    assert 0 < costs.curve(0).seconds(1) < 60  # a plain round of a tiny model, on however busy a machine


@pytest.mark.parametrize(("widths", "step"), [(FLAT, 0.001), (LINEAR, 0.5)], ids=["flat", "linear"])
def test_models_have_read_the_prompt_when_the_answer_begins(widths: dict[int, float], step: float) -> None:
    made = engine(widths, step=step)
    auto, seen = made.policies.auto, []
    assert auto is not None
    asked_lately(made)
    choose = auto.choose
    request = made.submit(PROMPTS[1], PARAMS["greedy"])
    heads = {n: made.drafts.drafters[n] for n in ("mtp", "draft-model")}
    auto.choose = (  # type: ignore[method-assign]
        lambda *a: seen.append({n: d.num_queued(request.number) for n, d in heads.items()}) or choose(*a)  # type: ignore
    )
    while not seen:
        made.step()
    assert seen[0] == {"mtp": 1, "draft-model": 1}
    made.cancel(request.number)
    made.step()
    assert made.is_idle


def test_statistics_tell_calls_times_and_what_plain_decoding_would_do() -> None:
    made = engine(FLAT)
    stats = made.generate(PROMPTS[0], PARAMS["greedy"]).stats
    lookup = stats.drafters["ngram-simple"]
    assert lookup.num_calls > 0
    assert all(d.num_calls >= d.num_rounds for d in stats.drafters.values())
    assert stats.num_accepted > 0
    assert 0 < lookup.seconds <= stats.draft_seconds
    assert stats.draft_seconds + stats.verify_seconds <= stats.decode_seconds
    assert stats.other_seconds > 0
    fixed = made.generate(
        PROMPTS[0], PARAMS["greedy"], spec=SpecConfig(drafters=("ngram-simple",), policy="fixed")
    ).stats
    assert fixed.drafters["ngram-simple"].num_calls >= fixed.drafters["ngram-simple"].num_rounds


def test_a_process_that_knows_no_costs_chooses_behind_its_first_plain_round() -> None:
    """That round tells how long the others take; a second one would be launched before it is read."""
    made, widths = engine(FLAT), list[int]()
    made.follow(CostModel(FLAT, {name: DraftCost(step=0.01) for name in ("mtp", "draft-model")}))
    learn = made.drafts.learn

    def seen(plan, rows, num_tokens, seconds, *, ahead, is_warm):  # type: ignore[no-untyped-def]
        widths.append(num_tokens)
        learn(plan, rows, num_tokens, 1.0, ahead=ahead, is_warm=True)

    made.drafts.learn = seen  # type: ignore[method-assign]
    made.generate(PROMPTS[0], PARAMS["greedy"])
    assert widths[0] == 1 < widths[1]


def test_events_tell_which_text_was_drafted() -> None:
    target = tiny_models.target()
    spec = SpecConfig(drafters=("ngram-simple",))
    made = Engine(target, tiny_models.tokenizer(), drafters=[ngram_lookup("ngram-simple", 3, 12)], spec=spec)
    events = [e for e in made.stream(PROMPTS[0], PARAMS["greedy"]) if isinstance(e, TokensEvent)]
    assert any(e.num_drafted for e in events)
    assert all(e.num_drafted_chars == e.num_drafted for e in events)  # a character a token


def test_at_rest_drafters_hear_several_rounds_at_once_and_each_is_asked_in_turn() -> None:
    heard: dict[int, list[int]] = {}
    calls: dict[int, int] = {}
    asked: dict[int, list[int]] = {}

    class Listener(Lookup):
        def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
            heard.setdefault(row, []).extend(tokens)
            calls[row] = calls.get(row, 0) + 1
            super().hear(row, tokens, hidden)

        def may_draft(self, row: int) -> bool:
            asked.setdefault(row, []).append(len(heard[row]))
            return super().may_draft(row)

    target = tiny_models.target()
    made = Engine(
        target,
        drafters=[Listener("ngram-simple", lambda: NgramRow("ngram-simple", 3, 12))],
        spec=SpecConfig(drafters=("ngram-simple",), policy="auto"),
    )
    made.policies.follow(Controller(known_costs(LINEAR)))
    made.policies.auto.control.costs.curve(0, 3).refine = lambda *args, **more: 0.0  # type: ignore[union-attr, method-assign]
    prompts = [list(range(i, i + 20)) for i in (0, 30, 60)]
    requests = [
        made.submit(p, SamplingParams(max_tokens=60, ignore_eos=True, temperature=5.0)) for p in prompts
    ]
    while not made.is_idle:
        made.step()
        for r in requests:
            behind = len(r.history) - len(heard.get(r.number, r.history))
            assert 0 <= behind <= 3 * STILL + 1
            assert r.history[: len(heard.get(r.number, []))] == heard.get(r.number, [])
    for r in requests:
        assert calls[r.number] < 45  # of 60 rounds
        turns = [b - a for a, b in zip(asked[r.number], asked[r.number][1:], strict=False)]
        assert turns
        assert max(turns) <= 3 * STILL + 1


def test_a_drafter_that_had_nothing_to_say_has_not_shown_what_a_draft_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal takes microseconds, and the first drafts replace a guess."""
    made, seen, asked = engine(), [], []
    assert made.policies.auto is not None
    # how long rounds take on this machine is not what is tested
    monkeypatch.setattr(
        made.policies.auto.control,
        "spent",
        lambda parts, num, width, seconds, decision=None, **_: seen.extend(
            decision.calls if decision else ()
        ),
    )
    made.generate(PROMPTS[1], PARAMS["greedy"])
    assert "mtp" in {call.name for call in seen}
    seen.clear()
    made.policies.auto.control.costs.acceptance.clear()  # as willing to ask as before

    def silent(self: Mtp, asks, sampler) -> list:
        asked.append(len(asks))
        return [NO_DRAFT] * len(asks)

    monkeypatch.setattr(Mtp, "draft", silent)
    made.generate(PROMPTS[1], PARAMS["greedy"])
    assert asked
    assert "mtp" not in {call.name for call in seen}


@catches(
    "rows with constraints are learned beside the others",
    "mlxspec.policy.auto:Auto.begin",
    lambda right: (
        lambda self, row: (
            right(self, row),
            vars(self)["_rows"].__setitem__(row.number, self.control.row("sampled")),
        )[0]
    ),
)
def test_rows_are_learned_by_how_they_are_sampled() -> None:
    """A grammar costs each round more, and drafts behind it fare otherwise."""
    spec = SpecConfig(drafters=("ngram-simple",), policy="auto")
    made = Engine(
        tiny_models.target(),
        tiny_models.tokenizer(),
        drafters=[ngram_lookup("ngram-simple", 3, 12)],
        spec=spec,
    )
    asked = {"greedy": {}, "sampled": {"temperature": 1.0}, "constrained": {"bad_words": ("zz",)}}
    for num, more in enumerate(asked.values()):
        made.generate(PROMPTS[0], SamplingParams(max_tokens=4 + num, ignore_eos=True, seed=1, **more))
        assert set(made.policies.costs.lengths) == set(list(asked)[: num + 1])


@catches(
    "a row at its last token pays for nothing",
    "mlxspec.drafters.drafts:Drafts.propose",
    lambda right: (
        lambda self, rooms, unread=None: right(self, {n: room for n, room in rooms.items() if room}, unread)
    ),
)
def test_rows_at_their_last_token_pay_for_the_round_that_they_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, together = engine(FLAT), list[tuple[int, int]]()
    policy = made.policies.auto
    assert policy is not None
    choose = policy.choose
    monkeypatch.setattr(
        policy,
        "choose",
        lambda rows, *more: (together.append((len(rows), made.num_running)), choose(rows, *more))[1],
    )
    lengths = (2, 30)
    requests = [
        made.submit(p, SamplingParams(max_tokens=n, ignore_eos=True))
        for p, n in zip(PROMPTS, lengths, strict=False)
    ]
    while not made.is_idle:
        made.step()
    assert [len(r.history) - len(r.prompt) for r in requests] == [*lengths]
    assert (2, 2) in together
    assert all(num == running for num, running in together)
