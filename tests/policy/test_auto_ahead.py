"""Rounds under policy auto are launched behind unread ones: nothing is waited for while a model drafts, a lookup waits for one round. What
is learned, paid and said is that of rounds that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters import drafts as drafts_module
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.drafts import Drafts
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine import pipeline as pipeline_module
from mlxspec.engine.engine import Engine, Result
from mlxspec.policy import account
from mlxspec.policy.acceptance import Acceptance
from mlxspec.policy.controller import PLAIN, PLAIN_ROUND
from mlxspec.policy.costs import DraftCost
from tests import tiny_models
from tests.engine.equality import prompts
from tests.known_costs import known_costs

CHEAP = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.2, 17: 1.6}  # seconds by width
PROMPTS = prompts(6, 3)
MODELS = ("mtp", "eagle3", "dflash")


def drafter(name: str) -> Drafter:
    target = tiny_models.target()
    if name == "mtp":
        return Mtp(tiny_models.mtp_head(), target.max_context)
    if name == "eagle3":
        return Eagle3(tiny_models.eagle3(), target.max_context)
    if name == "dflash":
        return DFlashDrafter(tiny_models.dflash(window=None), target.max_context)
    return ngram_lookup("ngram-simple", 3, 12)


def engine(*names: str, widths: dict[int, float] = CHEAP, step: float = 0.02, **config: Any) -> Engine:
    """A round takes what the costs say, whatever this machine takes."""
    spec = SpecConfig(drafters=names, policy="auto", n_max=3)
    made = Engine(tiny_models.target(), tiny_models.tokenizer(), drafters=[*map(drafter, names)], spec=spec)
    costs = known_costs(widths, {name: DraftCost(step=step) for name in names if name in MODELS})
    made.follow(costs)
    policy = made.policies.auto
    assert policy is not None
    policy.runs_ahead = True  # as on a GPU
    spent = policy.control.spent

    def by_costs(
        parts: Any, num_rows: int, width: int, seconds: float, decision: Any = PLAIN_ROUND, **more: Any
    ) -> None:
        curve = policy.control.curve([row for row, _ in parts], num_rows)
        taken = more.get("num_rounds", 1) * costs.seconds(curve, width, decision.calls)
        spent(parts, num_rows, width, taken, decision, **more)

    policy.control.spent = by_costs  # type: ignore[method-assign]
    return made


def asked(number: int, max_tokens: int = 40, **more: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.8 * (number % 2), seed=number, **{"ignore_eos": True, **more}
    )


def plain(number: int, params: SamplingParams) -> tuple[int, ...]:
    return Engine(tiny_models.target(), tiny_models.tokenizer()).generate(PROMPTS[number], params).tokens


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many drafts of models were read before they were verified, call by call."""
    found: list[int] = []
    real = drafts_module.submitted_on_host

    def seen(drafts: Any, states: Any) -> Any:
        lazy = sum(d.length > 0 and not isinstance(d.tokens, list) for d in drafts)
        found.extend([lazy] * (lazy > 0))
        return real(drafts, states)

    monkeypatch.setattr(drafts_module, "submitted_on_host", seen)
    return found


@catches(
    "every round of a model's drafts waits for the one before it",
    "mlxspec.drafters.drafts:Drafts.propose",
    lambda right: lambda self, rooms, unread=None: right(self, rooms) if unread is None else None,
)
@catches(
    "drafts are read before they are verified, to cut them",
    "mlxspec.drafters.row:DraftRow.is_blind",
    lambda right: property(lambda self: False),
)
@pytest.mark.parametrize("name", MODELS)
def test_while_a_model_drafts_nothing_is_waited_for(
    name: str, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "MOST", account.CAP)  # what drafts may lose is not what is tested
    own = engine(name)
    for number in (2, 3):
        stats = own.generate(PROMPTS[number], asked(number)).stats
        assert stats.num_drafted > 20
    assert not looked
    # the last ones, where a draft has no room
    assert own.stats.num_synchronised <= 8 < own.stats.num_rounds / 2


@pytest.mark.parametrize(
    "names", [("mtp",), ("dflash",), ("ngram-simple", "mtp"), ("eagle3", "mtp")], ids="+".join
)
def test_texts_are_those_of_plain_decoding(names: tuple[str, ...]) -> None:
    own = engine(*names)
    for number in (0, 3):
        assert own.generate(PROMPTS[number], asked(number)).tokens == plain(number, asked(number)), number
    numbers = range(2, 6)
    params = [asked(n, 24 + 5 * n) for n in numbers]
    results = own.generate([PROMPTS[n] for n in numbers], params)
    for number, wanted, got in zip(numbers, params, results, strict=True):
        assert got.tokens == plain(number, wanted), f"row {number} of four"
        assert not got.stats.notices


def _told_at_once(right: Callable[..., Any]) -> Callable[..., Any]:
    """What was drafted behind a round is compared with that round's own tokens."""

    def propose(self: Drafts, *args: Any, **options: Any) -> Any:
        found = right(self, *args, **options)
        if found is not None:
            self.take_up(found)
        return found

    return propose


@catches(
    "a draft is judged by the text of the round in front of it",
    "mlxspec.drafters.drafts:Drafts.propose",
    _told_at_once,
)
def test_a_draft_is_judged_by_the_text_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the controller learns of each draft is what was accepted of it."""
    monkeypatch.setattr(account, "MOST", account.CAP)  # what drafts may lose is not what is tested
    learned: list[
        tuple[bool, int]
    ] = []  # whether by the confidences that were read with the round, and how many were accepted
    own, real = engine("mtp"), Acceptance.count

    def count(self: Acceptance, table: Any, cells: Any, matched: int) -> None:
        if table is not self.depths:
            learned.append((table is self.sure, matched))
        real(self, table, cells, matched)

    monkeypatch.setattr(Acceptance, "count", count)
    stats = own.generate(PROMPTS[3], asked(3, 60)).stats
    assert own.stats.num_synchronised < own.stats.num_rounds / 2
    assert all(is_sure for is_sure, _ in learned)
    assert not stats.notices
    num_learned = sum(matched for _, matched in learned)
    assert (
        num_learned <= stats.num_accepted <= num_learned + 3
    )  # the answer's end may leave the last draft unjudged
    mtp = stats.drafters["mtp"]
    assert mtp.num_rounds > 20
    assert mtp.num_rounds - 1 <= mtp.num_judged <= mtp.num_rounds  # each draft once


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
def test_rows_that_come_and_go_while_rounds_overlap(seed: int) -> None:
    own, rng = engine("ngram-simple", "mtp"), np.random.default_rng(seed)
    order = [int(n) for n in rng.permutation([*range(6), *range(6)])]
    requests, cancelled = [], 0
    while order or not own.is_idle:
        if order and rng.random() < 0.25:
            number = order.pop()
            requests.append((number, own.submit(PROMPTS[number], asked(number))))
        own.step()
        running = [r for _, r in requests if r.finish_reason is None]
        if running and rng.random() < 0.04:
            cancelled += own.cancel(running[int(rng.integers(len(running)))].number)
    for number, request in requests:
        tokens = tuple(request.history[len(request.prompt) :])
        assert plain(number, asked(number))[: len(tokens)] == tokens, f"seed {seed}"
        assert len(tokens) == 40 or request.finish_reason == "cancelled"
    assert own.stats.num_synchronised < own.stats.num_rounds
    assert own.nbytes == 0


def test_a_probe_waits_for_the_round_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with the text behind it, so that text is read first. Here each draft behind an unread round is one."""
    own, found = engine("mtp"), list[object]()
    policy, right = own.policies.auto, Drafts.propose
    assert policy is not None

    def behind(self: Drafts, rooms: Any, unread: Any = None) -> Any:
        if unread is None:
            return right(self, rooms)
        choose = policy.control.choose
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                policy.control,
                "choose",
                lambda *given: [c._replace(probe=c != PLAIN) for c in choose(*given)],
            )
            made = right(self, rooms, unread)
        found.append(made if made is None or any(d.width for d in made.drafts.values()) else None)
        return made

    monkeypatch.setattr(Drafts, "propose", behind)
    assert own.generate(PROMPTS[3], asked(3)).tokens == plain(3, asked(3))
    assert found == [None] * len(found)
    assert len(found) > 5


def test_an_answer_that_ends_inside_a_round_drops_the_next() -> None:
    own = engine("mtp")
    for number in (1, 4):
        text = (
            Engine(tiny_models.target(), tiny_models.tokenizer())
            .generate(PROMPTS[number], asked(number))
            .text
        )
        stopped = asked(number, stop=(text[25:28],))
        assert own.generate(PROMPTS[number], stopped).tokens == plain(number, stopped)
    policy = own.policies.auto
    assert own.stats.num_unread > 0
    assert policy is not None
    assert not policy._rows


def test_where_nobody_drafts_any_more_rounds_are_plain_and_rest() -> None:
    """The round behind the last draft is plain and waits for it; those behind that one run ahead."""
    own = engine("mtp")
    request = own.submit(PROMPTS[2], asked(2, 100))
    while own.stats.num_rounds < 12:
        own.step()
    policy = own.policies.auto
    assert policy is not None
    assert own.pipeline.is_open
    policy.control.costs.drafts["mtp", "greedy"] = DraftCost(step=9.0)  # dear from here on
    before = own.stats.num_synchronised
    for _ in range(3):
        own.step()
    assert own.pipeline.next is not None
    assert not own.pipeline.is_open
    assert policy._still > 0
    assert own.stats.num_synchronised == before + 1
    while not own.is_idle:
        own.step()
    assert tuple(Result.of(request).tokens) == plain(2, asked(2, 100))


def test_what_was_run_for_a_dropped_round_is_queued_again() -> None:
    own = engine("mtp")
    requests = [own.submit(PROMPTS[n], asked(n, 60)) for n in (1, 4)]
    while not own.pipeline.is_open or own.stats.num_rounds < 8:
        own.step()
    policy, head = own.policies.auto, own.drafts.drafters["mtp"]
    own.cancel(requests[0].number)
    assert policy is not None
    assert not own.pipeline.is_open
    row = own.drafts.row(requests[1].number)
    assert head.num_queued(requests[1].number) > 0  # type: ignore[attr-defined]
    assert all(waiting.draft.is_read for waiting in row.waiting)
    while not own.is_idle:
        own.step()
    assert tuple(Result.of(requests[1]).tokens) == plain(4, asked(4, 60))


# ---- what the controller decides


def test_rounds_behind_unread_ones_stay_within_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is accepted of the round in front, a draft behind it has no token beyond the last one that is asked for."""
    own, right, found = engine("mtp"), Drafts.propose, list[int]()

    def propose(self: Drafts, rooms: Any, unread: Any = None) -> Any:
        if unread is not None:
            for number, room in rooms.items():
                left = len(PROMPTS[2]) + 40 - len(self.row(number).history)
                found.append(left - unread.width - room)
        return right(self, rooms, unread)

    monkeypatch.setattr(Drafts, "propose", propose)
    own.generate(PROMPTS[2], asked(2))
    assert len(found) > 5
    assert min(found) == 1  # the round's own token


def test_rounds_at_rest_stay_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    own, right, found = engine("mtp", step=9.0), pipeline_module.verify, list[int]()
    request = own.submit(PROMPTS[2], asked(2, 100))
    request.max_context = len(PROMPTS[2]) + 20

    def verify(rows: Any, *args: Any, ahead: Any = 0) -> Any:
        if ahead == 1:
            found.append(request.max_context - len(request.history) - 1)
        return right(rows, *args, ahead=ahead)

    monkeypatch.setattr(pipeline_module, "verify", verify)
    while not own.is_idle:
        own.step()
    assert len(found) > 5
    assert min(found) == 1
