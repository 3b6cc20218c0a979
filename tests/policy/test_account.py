"""No rows are later than plain decoding by more than their account began with and has earned, whatever an adversary makes of their drafts.

The adversary owns the drafters. It has several of each kind, all of which were always right for earlier rows if it is warm; it decides
how sure they are of each draft, and it sees the account and the price of a round before it decides how many tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planting import catches
from simulation.machines import MACHINES
from simulation.requests import Machine

from mlxspec.policy.acceptance import MODEL_DEPTH, Offer
from mlxspec.policy.account import CAP, FULL, GROWTH, LEAST, MOST, Account, Bank
from mlxspec.policy.controller import Controller, Decision
from mlxspec.policy.costs import MAX_TOKENS, CostModel, DraftCall
from tests.known_costs import known_costs

ROUNDING = 1e-6  # plain rounds
HEADS = ("head 1", "head 2", "head 3", "head 4")
LOOKUPS = ("lookup 1", "lookup 2", "lookup 3", "lookup 4")
SURE = (0.99, 0.97, 0.92, 0.85)

# of the account, what the round costs if nothing is accepted (both in plain rounds) and a number of verified tokens: how many are accepted
Judge = Callable[[float, float, int], int]


def never(balance: float, price: float, verified: int) -> int:
    return 0


def always(balance: float, price: float, verified: int) -> int:
    return verified


def full(balance: float, price: float, verified: int) -> int:
    """Lets the account fill up, then lets everything fail that it pays for."""
    return verified if balance < 0.9 * CAP else 0


def dear(balance: float, price: float, verified: int) -> int:
    """Keeps its credit by cheap rounds and lets the dear ones fail."""
    return verified if price < 0.4 * balance else 0


class Group:
    """Rows that decode together on a machine whose costs are known exactly. late: plain rounds that the group is behind plain decoding,
    below 0 ahead. elapsed: plain rounds of time. lag: rounds that have been decided and not read when the next one is decided."""

    def __init__(self, control: Controller, num_rows: int, machine: Machine, lag: int = 0) -> None:
        self.control, self.machine, self.curve, self.lag = control, machine, machine.curve(num_rows), lag
        self.rows = [control.row("") for _ in range(num_rows)]
        self.start = self.rows[0].account.balance if num_rows == 1 else LEAST
        self.queued = [dict.fromkeys(HEADS, 1) for _ in self.rows]  # by head, how many tokens it has not run
        self.late = self.elapsed = self.least = 0.0
        self.drafted = self.num_rounds = 0
        self.flying: list[tuple[list[Offer | None], Decision, float, list[int]]] = []

    def round(self, judge: Judge, heads: tuple[str, ...] = HEADS) -> None:
        """One is decided, and the oldest is read."""
        control, rows, num_rows = self.control, self.rows, len(self.rows)
        plain = self.curve.seconds(num_rows)
        self.num_rounds += 1
        sure = SURE[self.num_rounds % len(SURE)]
        offers = [Offer(n, 16, None, 60 >> (self.num_rounds + i) % 6) for i, n in enumerate(LOOKUPS)]
        models = [{n: (MODEL_DEPTH, queued[n]) for n in heads} for queued in self.queued]
        choices = control.choose(rows, [offers] * num_rows, models)
        drafts = [offers[c.offer] if c.offer is not None else None for c in choices]
        seconds, calls = 0.0, list[DraftCall]()
        for name in {c.model for c in choices if c.model}:
            asked = [i for i, c in enumerate(choices) if c.model == name]
            depth, queued = max(choices[i].depth for i in asked), sum(self.queued[i][name] for i in asked)
            seconds += self.machine.drafts["mtp"].seconds(depth, queued, len(asked))
            calls.append(DraftCall(name, "", depth, queued, len(asked)))
            for i in asked:
                drafts[i] = Offer(name, choices[i].depth, [sure] * choices[i].depth)
                control.asked(rows[i], choices[i])
                self.queued[i][name] = 0
        available = min(r.account.available(is_alone=num_rows == 1) for r in rows)
        decision = control.trim(rows, drafts, choices)
        decision = decision._replace(calls=tuple(calls))
        seconds += self.curve.seconds(num_rows + sum(decision.widths))
        assert seconds / plain - 1.0 <= (decision.worst or 0.0) + ROUNDING
        accepted = [judge(available, seconds / plain - 1.0, width) for width in decision.widths]
        for queued_, num in zip(self.queued, accepted, strict=True):
            for name in HEADS:
                queued_[name] += 1 + num
        self.flying.append((drafts, decision, seconds, accepted))
        if len(self.flying) > self.lag:
            self.read()

    def read(self) -> None:
        drafts, decision, seconds, accepted = self.flying.pop(0)
        num_rows, parts = len(self.rows), []
        for row, draft, num in zip(self.rows, drafts, accepted, strict=True):
            if draft is not None:
                self.control.learn(row, draft, num, min(draft.length, num + 1))
            parts.append((row, 1 + num))
        width = num_rows + sum(decision.widths)
        self.control.spent(parts, num_rows, width, seconds, decision, is_ahead=True)
        plain = self.curve.seconds(num_rows)
        self.drafted += sum(decision.widths)
        self.elapsed += seconds / plain
        self.late += seconds / plain - sum(num for _, num in parts) / num_rows
        self.least = min(self.least, self.late - GROWTH * self.elapsed)


def check(
    machine: Machine, num_rows: int, judges: list[tuple[int, Judge]], *, is_warm: bool, lag: int = 0
) -> Group:
    """Plays these judges behind each other, each for so many rounds, and holds the theorem after every round. Returns the group."""
    control = Controller(costs_of(machine, num_rows))
    for name in HEADS * is_warm:
        before = Group(control, num_rows, machine)
        for _ in range(20):
            before.round(always, (name,))
    group = Group(control, num_rows, machine, lag)
    for num_rounds, judge in judges:
        for _ in range(num_rounds):
            group.round(judge)
            assert group.late <= group.start + GROWTH * group.elapsed + ROUNDING
            # what was gained may be lost again up to the cap only
            assert group.late - GROWTH * group.elapsed - group.least <= CAP + ROUNDING
            assert all(r.account.available(is_alone=num_rows == 1) >= -ROUNDING for r in group.rows)
    return group


def costs_of(machine: Machine, num_rows: int) -> CostModel:
    """The machine's own costs, of one row and of several."""
    costs = known_costs(machine.curve().known, dict.fromkeys(HEADS, machine.drafts["mtp"]))
    if num_rows > 1:
        true = machine.curve(num_rows)
        costs.know({w: true.seconds(w) for w in range(num_rows, MAX_TOKENS + 1)}, {}, num_rows=num_rows)
    return costs


PLAYS: tuple[list[tuple[int, Judge]], ...] = (
    [(100, never)],
    [(80, full), (40, never)],
    [(100, dear)],
    [(20, always), (80, never)],
)


@catches(
    "a round need not be paid for beforehand",
    "mlxspec.policy.controller:Controller._available",
    lambda right: lambda *_: 1e9,
    case="CPU",  # where verifying costs nothing there is little to lose
)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_nothing_is_lost_beyond_what_was_granted(machine: Machine, num_rows: int, is_warm: bool) -> None:
    for play in PLAYS:
        check(machine, num_rows, play, is_warm=is_warm)


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_rounds_decided_before_the_last_ones_were_read_keep_the_bound(
    machine: Machine, num_rows: int, lag: int
) -> None:
    """As on a device that runs ahead of the host: a decision reserves its worst case, and needs no outcome of what is on its way."""
    groups = [check(machine, num_rows, play, is_warm=True, lag=lag) for play in PLAYS]
    if machine.name == "flat":
        assert groups[1].drafted > 0


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "least"),
    [(1, 32, 0.90), (1, 96, 0.945), (1, 1000, 0.98), (4, 32, 0.95), (4, 96, 0.97)],
)
def test_answers_lose_little(num_rows: int, num_tokens: int, least: float) -> None:
    """However wrong all drafts are, whoever drafts: plain decoding's time over the time it took."""
    for machine in MACHINES:
        for is_warm in (False, True):
            group = check(machine, num_rows, [(num_tokens, never)], is_warm=is_warm)
            assert num_tokens / group.elapsed >= least, (machine.name, is_warm)


def test_many_short_answers_that_lose_get_no_credit_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 answers of 32 tokens, after 20 rounds in which each head was right: all of them together lose what the bank holds and, each, what
    an answer begins with where it is empty."""
    machine = next(m for m in MACHINES if m.name == "CPU")
    control = Controller(costs_of(machine, 1))
    before = Group(control, 1, machine)
    for _ in range(20):
        before.round(always, ("head 1",))
    late = []
    for _ in range(32):
        group = Group(control, 1, machine)
        for _ in range(32):
            group.round(never)
        late.append(group.late)
    assert late[0] > LEAST < MOST
    assert sum(late) <= FULL + 32 * (LEAST + GROWTH * 40)
    assert 1024 / (1024 + sum(late)) > 0.95
    assert max(late[16:]) <= LEAST + GROWTH * 40 + ROUNDING


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
@settings(deadline=None, max_examples=15)
@given(
    num_rows=st.sampled_from([1, 4]),
    is_warm=st.booleans(),
    accepted=st.lists(st.integers(0, 16), min_size=1, max_size=60),
)
@example(num_rows=1, is_warm=True, accepted=[0])
def test_no_acceptance_breaks_the_bound(
    machine: Machine, num_rows: int, is_warm: bool, accepted: list[int]
) -> None:
    """Any number of accepted tokens a round."""
    judges = [(1, lambda _, __, verified, n=n: min(n, verified)) for n in accepted]
    check(machine, num_rows, judges, is_warm=is_warm)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_rows", [1, 4])
def test_the_adversary_gets_nearly_all_that_there_is(num_rows: int) -> None:
    """The bound would hold as well if nothing were ever drafted, and a weak adversary would not find a bound that is broken."""
    found = [check(m, num_rows, [(300, never)], is_warm=True) for m in MACHINES]
    assert max(g.late / (g.start + GROWTH * g.elapsed) for g in found) > 0.9
    good = [check(m, num_rows, [(60, always)], is_warm=False) for m in MACHINES]
    assert sum(group.late for group in good) < -100
    assert all(group.late <= MOST for group in good)


# ---- an account by itself


def test_an_account_earns_pays_and_is_capped() -> None:
    found = Account(2.0)
    found.settle(100.0)
    assert found.balance == pytest.approx(2.0 + 100.0 * GROWTH)
    found.reserve(2.5)
    assert found.available(is_alone=True) == pytest.approx(found.balance - 2.5)
    assert found.available(is_alone=False) == pytest.approx(found.balance - 2.5 - (MOST - LEAST))
    found.settle(0.0, -2.0, 2.5)
    assert found.balance == found.available(is_alone=True) == pytest.approx(100.0 * GROWTH)
    found.settle(10.0, 90.0)
    assert found.balance == CAP


def test_a_bank_gives_what_it_holds() -> None:
    bank = Bank()
    assert bank.start == MOST
    bank.settle(1.0, -100.0)
    assert (bank.balance, bank.start) == (0.0, LEAST)
    bank.settle(1.0, 2.0)
    assert LEAST < bank.start < MOST
    bank.settle(1.0, 100.0)
    assert bank.balance == FULL


@given(
    st.lists(
        st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.floats(0.0, 1.0), st.floats(0.0, 40.0)),
        max_size=60,
    )
)
def test_rows_that_join_and_leave_keep_the_bound(rounds: list[tuple[list[bool], float, float]]) -> None:
    """Each round has some of three rows; its worst case is a share of what they have, and it may gain all the same."""
    accounts = [Account() for _ in range(3)]
    late, elapsed = [0.0] * 3, [0.0] * 3
    for present, share, gained in rounds:
        rows = [i for i, here in enumerate(present) if here]
        worst = share * min(accounts[i].available(is_alone=True) for i in rows) if rows else 0.0
        for i in rows:
            accounts[i].reserve(worst)
            accounts[i].settle(1.0 + worst, gained - worst, worst)
            late[i] += worst - gained
            elapsed[i] += 1.0 + worst
            assert accounts[i].balance >= -ROUNDING
            assert late[i] <= MOST + GROWTH * elapsed[i] + ROUNDING


# ---- faults of the account that the adversary must find


def _pays_nothing(settle: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rounds, gained=0.0, worst=0.0: settle(self, rounds, max(gained, 0.0), worst)


def _reserves_nothing(settle: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rounds, gained=0.0, worst=0.0: (
        setattr(self, "reserved", 0.0),
        settle(self, rounds, gained),
    )


@pytest.mark.parametrize(
    ("fault", "lag"),
    [(_pays_nothing, 0), (_reserves_nothing, 3)],
    ids=["losses are free", "nothing stays reserved"],
)
def test_a_broken_account_is_found(
    fault: Callable[..., Callable[..., None]], lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Account, "settle", fault(Account.settle))
    with pytest.raises(AssertionError):
        [check(machine, 1, play, is_warm=True, lag=lag) for machine in MACHINES for play in PLAYS]
