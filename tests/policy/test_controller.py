"""The controller's choices where the right one is known, and what it may never do."""

from __future__ import annotations

import pytest

from mlxspec.policy.acceptance import FIRST_CHANCE, Offer
from mlxspec.policy.controller import (
    LENGTH,
    PLAIN,
    PROBE_COST,
    PROBE_GAP,
    PRUDENCE,
    Choice,
    Controller,
    Decision,
    PolicyRow,
)
from mlxspec.policy.costs import FADE, DraftCost
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


def test_unknown_costs_are_not_invented() -> None:
    control = controller(FLAT)
    assert control.costs.draft("mtp", "greedy", 1.0).seconds(3, 9) == 0.0
    assert control.choose([opened()], [[]], [MODELS])[0].gain == pytest.approx(
        sum(FIRST_CHANCE**i for i in range(1, 8)), rel=0.01
    )


def test_the_usual_length_goes_towards_that_of_answers() -> None:
    control = controller(FLAT)
    for num_tokens in (1000, 1):
        control.costs.lengths.clear()
        control.ended(opened(), num_tokens)
        assert control.costs.lengths[""] == pytest.approx(LENGTH + FADE * (num_tokens - LENGTH))


def test_the_drafter_that_was_asked_least_lately_is_probed() -> None:
    control = controller(LINEAR, mtp=HEAD, eagle3=HEAD)
    for name, asked_at in (("mtp", -100.0), ("eagle3", -50.0)):
        control.costs.accepted("", name).asked_at = asked_at
    for models in ({"mtp": (8, 1), "eagle3": (8, 1)}, {"eagle3": (8, 1), "mtp": (8, 1)}):
        (choice,) = control.choose([opened()], [[]], [models])
        assert (choice.model, choice.probe) == ("mtp", True)
