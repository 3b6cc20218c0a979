"""The controller's choices where the right one is known, and what it may never do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches

from mlxspec.kernels.flat import LADDER
from mlxspec.policy.acceptance import FIRST_CHANCE, PROBED, Offer
from mlxspec.policy.account import LEAST, MOST
from mlxspec.policy.controller import (
    MARGIN,
    PLAIN,
    PROBE_COST,
    PROBE_GAP,
    PRUDENCE,
    Choice,
    Controller,
    Decision,
    PolicyRow,
)
from mlxspec.policy.costs import SOON, STALE, CostModel, DraftCost
from tests.known_costs import known_costs

FLAT = {1: 1.0, 2: 1.0}
LINEAR = {1: 1.0, 2: 2.0}
APPLE = {1: 1.0, 2: 1.1, 4: 1.5, 8: 2.7}
HEAD = DraftCost(step=0.08, queued=0.01)


def controller(widths: dict[int, float], **drafts: DraftCost) -> Controller:
    return Controller(known_costs(widths, {n.replace("_", "-"): d for n, d in drafts.items()}))


def taught(control: Controller, row: PolicyRow, offer: Offer, matched: int, times: int = 40) -> None:
    """The drafter's drafts have fared like this for a while."""
    for _ in range(times):
        if offer.drafter == "mtp":
            drafted(control, row, offer)
        control.learn(row, offer, matched, min(matched + 1, offer.length))


def drafted(control: Controller, row: PolicyRow, offer: Offer, choice: Choice | None = None) -> None:
    """A model has drafted."""
    control.asked(row, choice or Choice(model=offer.drafter, depth=offer.length))


MODELS = {"mtp": (8, 1)}
ASKED = Choice(model="mtp", depth=8)
RICH = 16.0  # plain rounds in an account
UNTOUCHED = MOST - LEAST  # of them, that rows which decode together leave alone


def spent(control: Controller, row: PolicyRow, num_tokens: int, seconds: float) -> None:
    """A round of this row alone."""
    control.spent([(row, num_tokens)], 1, 1, seconds, is_ahead=True)


def opened(kind: str = "", bucket: int = 0, balance: float = RICH) -> PolicyRow:
    """A row that has gained, so that its account is not what decides."""
    row = PolicyRow(kind, bucket, balance)
    return row


def cut(control: Controller, rows: list[PolicyRow], drafts: list[Offer | None]) -> list[int]:
    """How much of these drafts is verified: of lookups' as they are chosen, of models' as they are trimmed."""
    lookups = [[d] if d is not None and d.drafter != "mtp" else [] for d in drafts]
    choices = [
        ASKED if d is not None and d.drafter == "mtp" else c
        for c, d in zip(control.choose(rows, lookups, [{}] * len(rows)), drafts, strict=True)
    ]
    return control.trim(rows, drafts, choices).widths


def decided(control: Controller, row: PolicyRow, offer: Offer) -> Decision:
    """A round of a row with one lookup's offer."""
    return control.trim([row], [offer], control.choose([row], [[offer]], [{}]))


def test_with_nothing_offered_decoding_is_plain() -> None:
    control = controller(FLAT)
    assert control.choose([opened()], [[]], [{}]) == [PLAIN]


@catches(
    "drafts are weighed in seconds of which none has been measured",
    "mlxspec.policy.costs:Curve.__init__",
    lambda right: (
        lambda self, *args, **more: (right(self, *args, **more), vars(self).update(is_timed=True))[0]
    ),
)
def test_nobody_drafts_until_a_plain_round_has_been_timed() -> None:
    """Else a machine's seconds would be weighed against the guess of a second a plain round, and no draft would seem to lose."""
    costs = CostModel()
    control, offer = Controller(costs), Offer("ngram-simple", 16)
    row = control.row("greedy")
    taught(control, row, offer, 16)
    assert control.choose([row], [[offer]], [{}]) == [PLAIN]
    for _ in range(2):  # one that compiles teaches nothing
        control.spent([(row, 1)], 1, 1, 0.02, is_warm=False)
        assert control.choose([row], [[offer]], [{}]) == [PLAIN]
    control.spent([(row, 1)], 1, 1, 0.02)
    assert costs.curve(0).plain == pytest.approx(0.02)
    assert control.choose([row], [[offer]], [{}])[0].offer == 0
    assert control.choose([row, control.row("greedy")], [[offer], []], [{}, {}])[0].offer == 0


@catches(
    "a plain round is timed once for all",
    "mlxspec.policy.costs:Curve.is_stale",
    lambda right: property(lambda self: False),
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_behind_many_rounds_with_drafts_a_plain_one_is_timed(is_kept: bool) -> None:
    """What it takes is the unit of the accounts, and the machine may have got another speed."""
    control, offer = controller(FLAT), Offer("ngram-simple", 16)
    row = opened()
    taught(control, row, offer, 16)
    if is_kept:  # by another process
        control.costs.curve(0).keep()
    for _ in range(SOON if is_kept else STALE):
        decision = decided(control, row, offer)
        assert decision.widths != [0]
        control.spent([(row, 16)], 1, 16, 1.0, decision, is_ahead=True)
    for is_ahead in (
        False,
        True,
    ):  # the first one cannot run ahead of the host, so it tells nothing of others
        assert decided(control, row, offer).widths == [0]
        control.spent([(row, 1)], 1, 1, 1.0, is_ahead=is_ahead)
    assert decided(control, row, offer).widths != [0]


def test_where_verifying_is_free_the_whole_lookup_is_verified() -> None:
    control = controller(FLAT)
    row, offer = opened(), Offer("ngram-simple", 16)
    taught(control, row, offer, 16)
    assert control.choose([row], [[offer]], [{}])[0].offer == 0
    assert cut(control, [row], [offer]) == [15]  # a round of 16 tokens


def test_where_every_token_costs_a_step_nothing_is_ever_verified() -> None:
    control = controller(LINEAR, mtp=HEAD)
    row, offer = opened(), Offer("ngram-simple", 16)
    taught(control, row, offer, 16)
    taught(control, row, Offer("mtp", 8, [0.99] * 8), 8)
    assert control.choose([row], [[offer]], [MODELS])[0] == PLAIN
    assert cut(control, [row], [offer]) == [0]


def test_lookups_that_fail_are_left_alone_and_tried_again_when_they_would_have_held() -> None:
    control = controller(APPLE)
    row, offer = opened(), Offer("ngram-simple", 8)
    taught(control, row, offer, 0)
    assert control.choose([row], [[offer]], [{}]) == [PLAIN]
    taught(control, row, offer, 8, times=6)  # never verified: the text alone showed it
    assert control.choose([row], [[offer]], [{}])[0].offer == 0


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("balance", [0.0, 0.7, 2.4, 8.0])
def test_no_more_is_verified_than_the_account_pays_for_at_worst(num_rows: int, balance: float) -> None:
    """However sure a lookup is, and whatever it has gained: its worst case is a round in which nothing of it is accepted."""
    control, offer = controller({1: 1.0, 2: 1.6, 17: 3.3, 24: 5.0}), Offer("ngram-simple", 16)
    rows = [opened() for _ in range(num_rows)]
    for row in rows:
        taught(control, row, offer, 16)
        row.account.balance = balance + UNTOUCHED * (num_rows > 1)
    widths = cut(control, rows, [offer] * num_rows)
    curve = control.curve(rows)
    plain = curve.seconds(num_rows)
    assert curve.seconds(num_rows + sum(widths)) - plain <= balance * plain + 1e-9
    assert (sum(widths) > 0) == (balance > 0.6)
    for row in rows:
        row.account.reserved = 0.0
    chosen = control.choose(rows, [[offer]] * num_rows, [{}] * num_rows)
    assert any(c.offer is not None for c in chosen) == (balance > 0.6)


@catches(
    "the richest row's account pays for all",
    "mlxspec.policy.controller:Controller._available",
    lambda right: (
        lambda self, rows, curve: max(r.account.available(is_alone=False) for r in rows) * curve.plain
    ),
)
def test_the_poorest_row_decides_what_a_round_may_lose() -> None:
    """All rows wait for a round that fails, so a row that has gained does not spend what another has not."""
    control, offer = controller({1: 1.0, 2: 1.6, 17: 3.3, 24: 5.0}), Offer("ngram-simple", 16)
    for balances, drafts in (((8.0, 8.0), True), ((8.0, 0.05), False), ((0.05, 8.0), False)):
        rows = [opened(balance=balance + UNTOUCHED) for balance in balances]
        for row in rows:
            taught(control, row, offer, 16)
        assert (sum(cut(control, rows, [offer, offer])) > 0) == drafts, balances


@catches(
    "what one row verifies is not taken from what is left for the next",
    "mlxspec.policy.controller:Controller._share",
    lambda right: (
        lambda self, rows, reaches, curve, left, drafting=0.0: right(
            self, rows, reaches, curve, len(rows) * left, drafting
        )
    ),
    case="[0.7",
)
@pytest.mark.parametrize("num_rows", [2, 4])
@pytest.mark.parametrize("balance", [0.7, 2.4, 8.0])
def test_models_drafts_of_a_round_share_what_the_accounts_pay_for(num_rows: int, balance: float) -> None:
    """Rows are cut one by one."""
    control = controller({1: 1.0, 2: 1.6, 17: 3.3, 24: 5.0}, mtp=DraftCost())
    rows = [
        opened("constrained" if i % 2 else "sampled", balance=balance + UNTOUCHED) for i in range(num_rows)
    ]
    offer, choice = Offer("mtp", 16, [0.99] * 16), Choice(model="mtp", depth=16)
    decision = control.trim(rows, [offer] * num_rows, [choice] * num_rows)
    assert sum(decision.widths) > 0
    assert decision.worst is not None
    assert decision.worst <= balance + 1e-9


def test_a_good_head_is_asked_deeply_a_poor_one_not() -> None:
    for matched, sure, drafts in ((8, 0.97, True), (0, 0.3, False)):
        control = controller(APPLE, mtp=HEAD)
        row = opened()
        taught(control, row, Offer("mtp", 8, [sure] * 8), matched)
        choice = control.choose([row], [[]], [MODELS])[0]
        assert (choice.model == "mtp" and choice.depth >= 3) == drafts


def test_the_price_of_drafting_counts() -> None:
    offer = Offer("mtp", 8, [0.8] * 8)
    for step, drafts in ((0.05, True), (0.9, False)):
        control = controller(APPLE, mtp=DraftCost(step=step))
        row = opened()
        taught(control, row, offer, 4)
        assert (control.choose([row], [[]], [MODELS])[0].model is not None) == drafts


def test_catching_up_is_charged_to_who_needs_it() -> None:
    control = controller(APPLE, mtp=DraftCost(step=0.05, queued=0.05))
    row = opened()
    taught(control, row, Offer("mtp", 8, [0.8] * 8), 4)
    assert control.choose([row], [[]], [{"mtp": (8, 2)}])[0].model == "mtp"
    assert control.choose([row], [[]], [{"mtp": (8, 2000)}])[0].model is None


def test_a_drafter_too_far_behind_to_be_paid_for_is_not_asked() -> None:
    control = controller(FLAT, mtp=DraftCost(step=0.1, queued=0.1))
    row = opened()
    taught(control, row, Offer("mtp", 8, [0.97] * 8), 8)
    for queued, asked in ((1, True), (10, True), (10_000, False)):
        assert (control.choose([row], [[]], [{"mtp": (8, queued)}])[0].model is not None) == asked


def test_a_short_account_makes_drafts_shorter() -> None:
    control = controller({1: 1.0, 2: 1.1, 9: 3.0}, mtp=DraftCost(step=0.2))
    row = opened()
    taught(control, row, Offer("mtp", 8, [0.97] * 8), 8)
    depths = []
    for balance in (0.1, 0.4, 1.0, 8.0):
        row.account.balance = balance
        depths.append(control.choose([row], [[]], [MODELS])[0].depth)
    assert depths[0] == 0 < depths[1] < depths[2] < depths[3]


def test_a_draft_is_cut_where_it_becomes_doubtful() -> None:
    control = controller(APPLE, mtp=HEAD)
    row = opened()
    control.choose([row], [[]], [MODELS])
    assert cut(control, [row], [Offer("mtp", 4, [0.97, 0.97, 0.05, 0.97])]) == [2]
    assert cut(control, [row], [Offer("mtp", 3, [0.05, 0.97, 0.97])]) == [0]


def test_limits_of_room_are_kept() -> None:
    control = controller(FLAT, mtp=HEAD)
    row = opened()
    taught(control, row, Offer("mtp", 8, [0.97] * 8), 8)
    assert control.choose([row], [[]], [{"mtp": (2, 1)}])[0].depth <= 2
    assert control.choose([row], [[]], [{"mtp": (0, 1)}])[0] == PLAIN


@settings(deadline=None)
@given(
    drafts=st.lists(st.lists(st.floats(0.05, 1.0), max_size=70), min_size=2, max_size=6),
    slope=st.floats(0.01, 1.5),
)
def test_several_rows_have_few_widths(drafts: list[list[float]], slope: float) -> None:
    """A round verifies one of a few numbers of drafted tokens, and no more than are expected to pay."""
    control = controller({1: 1.0, 2: 1.0 + slope})
    rows = [opened() for _ in drafts]
    offers = [Offer("mtp", len(d), d) if d else None for d in drafts]
    for row in rows:
        drafted(control, row, Offer("mtp", 1, [0.9]))
    widths = cut(control, rows, offers)
    rate, expected = len(rows) / control.curve(rows).seconds(len(rows)), 0.0
    for row, width, draft in zip(rows, widths, drafts, strict=True):
        assert width <= len(draft)
        if width:
            expected += sum(control.reaches(row, Offer("mtp", len(draft), draft))[:width])
    assert sum(widths) in {0, *LADDER}
    assert expected >= 0.99 * rate * slope * sum(widths)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_what_a_model_drafts_for_one_of_several_rows_is_verified_where_it_pays(length: int) -> None:
    control = controller({1: 1.0, 2: 1.05})
    control.costs.pause = 0.3
    rows = [opened() for _ in range(3)]
    for row in rows:
        drafted(control, row, Offer("mtp", length, [0.98] * length))
    # any drafts of three rows cost three tenths of a round, which is about a token
    pays = length > 1
    assert cut(control, rows, [Offer("mtp", length, [0.98] * length), None, None]) == [pays * length, 0, 0]


def _alike(right: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def shared(
        self: Controller, rows: list[PolicyRow], reaches: list[list[float]], *more: object
    ) -> list[int]:
        num = sum(right(self, rows, reaches, *more)) // len(rows)
        return [min(num, len(reach)) for reach in reaches]

    return shared


@catches(
    "all rows get as much",
    "mlxspec.policy.controller:Controller._share",
    _alike,
)
@given(
    reaches=st.lists(st.lists(st.floats(0.05, 1.0), max_size=4).map(sorted), min_size=2, max_size=3),
    steps=st.lists(st.floats(0.0, 1.5), min_size=12, max_size=12),
)
def test_no_other_shares_give_more_tokens_a_second(reaches: list[list[float]], steps: list[float]) -> None:
    """Against every way to share a round of one of the widths."""
    num_rows = len(reaches)
    chances = [reach[::-1] for reach in reaches]
    costs = known_costs({1: 1.0})
    costs.know({num_rows + i: 1.0 + sum(steps[:i]) for i in range(13)}, {}, num_rows=num_rows)
    control = Controller(costs)
    rows = [opened() for _ in reaches]
    curve = control.curve(rows)

    def pace(taken: Sequence[int]) -> float:
        accepted = sum(sum(reach[:num]) for reach, num in zip(chances, taken, strict=True))
        longer = curve.seconds(num_rows + sum(taken)) - curve.plain
        return (1.0 if sum(taken) else MARGIN) * (num_rows + accepted) / (curve.plain + PRUDENCE * longer)

    found = control._share(rows, chances, curve, 1e9)
    every = product(*(range(len(reach) + 1) for reach in chances))
    assert pace(found) >= (1 - 1e-9) * max(pace(taken) for taken in every if sum(taken) in {0, *LADDER})


def test_rows_share_a_verify_by_what_their_tokens_promise() -> None:
    control = controller({1: 1.0, 2: 1.0, 6: 1.4, 7: 5.0, 8: 9.0})  # beyond 6 tokens in all it is dear
    rows = [opened() for _ in range(2)]
    good, bad = Offer("ngram-simple", 8, [0.97] * 8), Offer("ngram-simple", 8, [0.4] * 8)
    widths = cut(control, rows, [good, bad])
    assert sum(widths) <= 5  # of two rows
    assert widths[0] > widths[1]


def test_probes_become_rare() -> None:
    """A drafter that never pays is asked at first, then ever less often, over many rows; none of its drafts is verified."""
    control = controller(LINEAR, mtp=HEAD)
    probed: list[int] = []
    row = control.row("")
    for place in range(4000):
        if place % 400 == 399:
            row = control.row("")
        (choice,) = control.choose([row], [[]], [MODELS])
        drafts: list[Offer | None] = [None]
        if choice.model:
            assert choice.probe
            assert choice.price <= PROBE_COST
            probed.append(place)
            drafts = [draft := Offer("mtp", choice.depth, [0.3] * choice.depth)]
            drafted(control, row, draft, choice)
        decision = control.trim([row], drafts, [choice])
        assert decision.widths == [0]
        control.spent([(row, 1)], 1, 1, 1.0 + choice.price, decision)
    gaps = [b - a for a, b in zip(probed, probed[1:], strict=False)]
    assert 8 <= len(probed) <= 20
    assert gaps == sorted(gaps)
    assert max(gaps) == PROBE_GAP


@catches(
    "probes stay rare behind drafts that were asked for what they gain",
    "mlxspec.policy.controller:Controller.asked",
    lambda right: lambda self, row, choice: right(self, row, choice._replace(probe=True)),
)
def test_a_drafter_that_was_asked_for_its_gain_is_probed_as_at_first() -> None:
    control = controller(LINEAR, mtp=HEAD)
    row, table = opened(), control.costs.accepted("", "mtp")
    for _ in range(9):
        control.asked(row, Choice(model="mtp", depth=3, probe=True))
    assert table.gap == PROBE_GAP
    control.asked(row, Choice(model="mtp", depth=3))
    assert table.gap == PROBED


def test_a_drafter_that_has_much_to_catch_up_on_is_not_probed() -> None:
    """The price is more than a probe may cost."""
    control = controller(LINEAR, mtp=DraftCost(step=0.3, queued=0.1))
    row = control.row("")
    assert control.choose([row], [[]], [{"mtp": (8, 60)}]) == [PLAIN]
    assert control.choose([row], [[]], [{"mtp": (8, 1)}])[0].probe


def test_a_probe_whose_tokens_come_costs_the_less() -> None:
    """By what came of it, not by how sure the drafter was."""
    paid = []
    longer = HEAD.seconds(3, 1) + controller(APPLE).costs.curve(0).seconds(4) - 1.0
    for num_tokens in (1, 4):
        control = controller(APPLE, mtp=HEAD)
        row = opened()
        taught(control, row, Offer("mtp", 3, [0.05] * 3), 0)
        row.account.balance, control.costs.accepted("", "mtp").asked_at = 3.0, -1e9
        (choice,) = control.choose([row], [[]], [{"mtp": (3, 1)}])
        assert choice.probe
        draft = Offer("mtp", 3, [0.98] * 3)
        drafted(control, row, draft, choice)
        decision = control.trim([row], [draft], [choice])
        before = row.account.balance
        control.spent([(row, num_tokens)], 1, 1 + decision.widths[0], 1.0 + longer, decision)
        paid.append(before - row.account.balance)
    assert paid[0] - paid[1] == pytest.approx(3.0)


def test_a_decision_needs_no_outcome_of_rounds_on_their_way() -> None:
    """Decided behind a round that has not been read, with what it may lose reserved: the same as if that had been lost, no more."""
    control = controller({1: 1.0, 2: 1.4, 9: 3.2})
    offer = Offer("ngram-simple", 8)
    late, told = opened(balance=1.5), opened(balance=1.5)
    for row in (late, told):
        taught(control, row, offer, 8)
    first = decided(control, late, offer)
    assert first.worst
    behind = decided(control, late, offer)
    other = decided(control, told, offer)
    assert other[:2] == first[:2]
    told.account.settle(0.0, -first.worst, first.worst)
    assert decided(control, told, offer).widths == behind.widths
    for decision in (first, behind):  # told in their order, whenever that is
        control.spent([(late, 9)], 1, 9, 1.0 + (decision.worst or 0.0), decision)
    assert late.account.reserved == pytest.approx(0.0)


def test_leaving_plain_decoding_must_be_paid_with_what_cannot_run_ahead_behind_it() -> None:
    """The plain round behind drafts takes longer, once for a stretch of drafts."""
    control = controller({1: 1.0, 2: 1.3, 9: 3.2})
    row, offer = opened(), Offer("ngram-simple", 1)
    taught(control, row, offer, 1)
    for _ in range(60):
        control.spent([(row, 2)], 1, 2, 1.3, decided(control, row, offer))
        control.spent([(row, 1)], 1, 1, 1.9, is_ahead=False)
        row.is_drafting = False
    assert control.curve([row]).pause == pytest.approx(0.9, rel=0.05)
    row.account.balance = RICH
    worst = [decided(control, row, offer).worst for _ in range(2)]
    longer = PRUDENCE * 0.3
    assert worst == [pytest.approx(longer + control.curve([row]).pause), pytest.approx(longer)]
    row.account.balance, row.account.reserved = 1.1, 0.0
    assert control.choose([row], [[offer]], [{}])[0].offer == 0
    control.trim([row], [None], [PLAIN])
    assert control.choose([row], [[offer]], [{}]) == [PLAIN]


# ---- several drafters that run a model

TWO = {"mtp": HEAD, "eagle3": DraftCost(step=0.1, queued=0.01)}


def test_a_drafter_that_is_good_where_the_other_fails_takes_over() -> None:
    control = Controller(known_costs(APPLE, TWO))
    row, chosen = opened(), []
    for _ in range(60):
        row.account.balance = RICH
        (choice,) = control.choose([row], [[]], [dict.fromkeys(TWO, (8, 1))])
        chosen.append(choice.model)
        if choice.model is not None:
            sure = 0.95 if choice.model == "eagle3" else 0.1
            offer = Offer(choice.model, choice.depth, [sure] * choice.depth)
            drafted(control, row, offer, choice)
            control.learn(row, offer, choice.depth if sure > 0.5 else 0, choice.depth)
        spent(control, row, 4, 2.0)
    assert chosen[-10:].count("eagle3") >= 8


# ---- when a draft stops, and shapes that have not run


@catches("drafts never stop", "mlxspec.policy.controller:Controller.stops", lambda right: lambda *_: False)
def test_a_draft_stops_where_its_next_token_is_not_expected_to_pay() -> None:
    control = controller(APPLE, mtp=HEAD)
    row = opened()
    assert not control.stops(row, "mtp", [0.99, 0.99])
    assert control.stops(row, "mtp", [0.99, 0.05])
    dear = controller(APPLE, mtp=DraftCost(step=0.9))
    assert dear.stops(row, "mtp", [0.8])


@catches(
    "a width that has never run costs what others do",
    "mlxspec.policy.controller:Controller._compiling",
    lambda right: lambda *_: 0.0,
)
def test_a_width_that_has_never_run_is_charged_for_compiling() -> None:
    control, offer = controller(FLAT), Offer("ngram-simple", 16)
    row = opened()
    taught(control, row, offer, 16)
    for width in (1, 4):
        control.costs.compiled(1, width, None)
    for _ in range(2):
        control.costs.compiled(1, 1, 40.0)
    assert control.choose([row], [[offer]], [{}])[0].depth == 3
    row.room, control.costs.lengths[""] = 10_000, 10_000.0  # enough rounds to share it
    assert control.choose([row], [[offer]], [{}])[0].depth > 3


def test_what_was_learned_survives_the_row_within_its_kind() -> None:
    control = controller(APPLE, mtp=HEAD)
    row = opened("greedy", 0)
    taught(control, row, Offer("mtp", 8, [0.9] * 8), 0)
    choice = control.choose([opened("greedy", 0)], [[]], [MODELS])[0]
    assert choice.gain < 0.1
    assert control.choose([opened("sampled", 0)], [[]], [MODELS])[0].model == "mtp"


def test_costs_of_long_contexts_are_their_own() -> None:
    control, offer = controller(FLAT), Offer("ngram-simple", 8)
    for width in (2, 3, 4, 6, 8):
        for _ in range(100):
            control.costs.curve(2).refine(width, float(width))
            control.costs.curve(2).refine(1, 1.0)
    for bucket, verified in ((0, 7), (2, 0)):
        row = opened(str(bucket), bucket)
        taught(control, row, offer, 8)
        assert cut(control, [row], [offer]) == [verified]


curves = st.lists(st.floats(0.0, 1.5), min_size=7, max_size=7).map(
    lambda steps: {i + 1: 1.0 + sum(steps[:i]) for i in range(8)}
)


@settings(max_examples=40)
@given(
    curves,
    st.lists(st.tuples(st.integers(1, 16), st.integers(0, 16), st.booleans()), max_size=30),
    st.integers(1, 3),
)
def test_widths_never_exceed_drafts_and_one_that_cannot_pay_is_never_verified(
    widths: dict[int, float], rounds: list[tuple[int, int, bool]], num_rows: int
) -> None:
    control = controller(widths, mtp=HEAD)
    rows = [opened() for _ in range(num_rows)]
    for length, matched, sure in rounds:
        offers = [Offer("ngram-simple", length, [0.9] * length if sure else None) for _ in rows]
        for choice in control.choose(rows, [[o] for o in offers], [MODELS] * num_rows):
            assert choice.depth <= (length if choice.model is None else 8)
            assert choice.offer in (None, 0)
        found = cut(control, rows, list(offers))
        assert all(0 <= w <= length for w in found)
        curve = control.curve(rows)
        gained = curve.seconds(num_rows + sum(found)) / curve.seconds(num_rows)
        assert gained <= (num_rows + sum(found)) / num_rows + 1e-9  # not even if everything stood
        for row, offer in zip(rows, offers, strict=True):
            control.learn(row, offer, min(matched, length), length)
            spent(control, row, 1, 1.0)


def test_unknown_costs_are_not_invented() -> None:
    control = controller(FLAT)
    assert control.costs.draft("mtp", "greedy", 1.0).seconds(3, 9) == 0.0
    assert control.choose([opened()], [[]], [MODELS])[0].gain == pytest.approx(
        sum(FIRST_CHANCE**i for i in range(1, 8)), rel=0.01
    )


@catches("the first row decides", "mlxspec.policy.controller:dearest", lambda _: lambda rows: rows[0].kind)
def test_a_round_costs_what_its_dearest_row_does() -> None:
    """Each kind of sampling has curves of its own; a kind that nobody knows counts as greedy."""
    control = controller(APPLE)
    greedy, sampled, other = (control.row(kind) for kind in ("greedy", "sampled", "unknown"))
    assert control.curve([sampled]) is control.costs.curve(0, 1, "sampled")
    assert control.curve([sampled]) is not control.curve([greedy])
    assert control.curve([other]) is control.curve([greedy])
    assert control.curve([greedy, sampled]) is control.costs.curve(0, 2, "sampled")
    assert control.curve([greedy, other]) is control.costs.curve(0, 2)
