"""No rows are later than plain decoding by more than their credit and `earn` of their time, whatever an adversary makes of their drafts.

The adversary owns the drafters. It has several of each kind, all of which were always right for earlier rows if it is warm; it decides
how sure they are of each draft, and it sees the account and the price of a round before it decides how many tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulation.machines import MACHINES
from simulation.requests import Machine

from mlxspec.errors import ConfigError
from mlxspec.policy.account import Account, balance
from mlxspec.policy.constants import Constants
from mlxspec.policy.controller import Controller, Offer
from mlxspec.policy.cost import CostModel
from mlxspec.policy.row import RowControl

CONSTANTS = Constants()
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
    return verified if balance < 0.9 * CONSTANTS.cap else 0


def dear(balance: float, price: float, verified: int) -> int:
    """Keeps its credit by cheap rounds and lets the dear ones fail."""
    return verified if price < 0.4 * balance else 0


class Row:
    """queued: by head, how many tokens it has not run."""

    def __init__(self, control: RowControl) -> None:
        self.control, self.queued = control, dict.fromkeys(HEADS, 1)


class Group:
    """Rows that decode together on a machine whose costs are known exactly. late: plain rounds that the group is behind plain decoding,
    below 0 ahead. elapsed: plain rounds of time."""

    def __init__(self, control: Controller, num_rows: int, machine: Machine) -> None:
        self.control, self.machine, self.curve = control, machine, machine.curve(num_rows)
        self.rows = [Row(control.open("", 0)) for _ in range(num_rows)]
        self.late = self.elapsed = self.least = 0.0
        self.drafted = self.num_rounds = 0

    def round(self, judge: Judge, heads: tuple[str, ...] = HEADS) -> None:
        control, rows, curve = self.control, self.rows, self.curve
        controls, num_rows, plain = [r.control for r in rows], len(rows), curve.seconds(len(rows))
        self.num_rounds += 1
        sure = SURE[self.num_rounds % len(SURE)]
        offers = [Offer(n, 16, None, 60 >> (self.num_rounds + i) % 6) for i, n in enumerate(LOOKUPS)]
        models = [{n: (8, r.queued[n]) for n in heads} for r in rows]
        choices = control.choose(controls, [offers] * num_rows, models)
        drafts = [offers[c.offer] if c.offer is not None else None for c in choices]
        seconds = 0.0
        for name in {c.model for c in choices if c.model}:
            asked = [i for i, c in enumerate(choices) if c.model == name]
            depth, queued = max(choices[i].depth for i in asked), sum(rows[i].queued[name] for i in asked)
            taken = self.machine.drafts["mtp"].seconds(depth, queued, len(asked))
            seconds += taken
            for i in asked:
                draft = drafts[i] = Offer(name, choices[i].depth, [sure] * choices[i].depth)
                control.drafted(controls[i], draft, num_rows, choices[i])
                rows[i].queued[name] = 0
        now = balance([r.account for r in controls])
        widths = control.trim(controls, drafts)
        seconds += curve.seconds(num_rows + sum(widths))
        parts = []
        for row, draft, width in zip(rows, drafts, widths, strict=True):
            accepted = judge(now, seconds / plain - 1.0, width)
            for name in HEADS:
                row.queued[name] += 1 + accepted
            if draft is not None:
                control.learn(row.control, draft, accepted, min(draft.length, accepted + 1))
            parts.append((row.control, 1 + accepted, draft is not None and draft.drafter in LOOKUPS))
        control.spent(parts, num_rows, seconds)
        self.drafted += sum(widths)
        self.elapsed += seconds / plain
        self.late += seconds / plain - sum(num for _, num, _ in parts) / num_rows
        self.least = min(self.least, self.late - CONSTANTS.earn * self.elapsed)

    def close(self) -> None:
        for row in self.rows:
            self.control.close(row.control)


def check(machine: Machine, num_rows: int, judges: list[tuple[int, Judge]], *, is_warm: bool) -> Group:
    """Plays these judges behind each other, each for so many rounds, and holds the theorem after every round. Returns the group."""
    several = {} if num_rows == 1 else {(0, num_rows): machine.curve(num_rows)}
    drafts = dict.fromkeys(HEADS, machine.drafts["mtp"])
    control = Controller(CostModel({0: machine.curve().knots()}, drafts, several=several))
    for name in HEADS * is_warm:
        before = Group(control, num_rows, machine)
        for _ in range(20):
            before.round(always, (name,))
        before.close()
    group = Group(control, num_rows, machine)
    for num_rounds, judge in judges:
        for _ in range(num_rounds):
            group.round(judge)
            earned = CONSTANTS.earn * group.elapsed
            assert group.late <= CONSTANTS.credit + earned + ROUNDING
            # what was gained may be lost again up to the cap only
            assert group.late - earned - group.least <= CONSTANTS.cap + ROUNDING
    return group


PLAYS: tuple[list[tuple[int, Judge]], ...] = (
    [(100, never)],
    [(80, full), (40, never)],
    [(100, dear)],
    [(20, always), (80, never)],
)


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_nothing_is_lost_beyond_credit_and_share(machine: Machine, num_rows: int, is_warm: bool) -> None:
    for play in PLAYS:
        check(machine, num_rows, play, is_warm=is_warm)


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
    lost = {m.name: check(m, num_rows, [(100, never)], is_warm=True).late for m in MACHINES}
    assert max(lost.values()) > 0.9 * CONSTANTS.credit, lost
    good = [check(m, num_rows, [(60, always)], is_warm=False) for m in MACHINES]
    assert sum(group.late for group in good) < -100
    assert all(group.late <= CONSTANTS.credit for group in good)


# ---- an account by itself


def test_an_account_earns_pays_and_is_capped() -> None:
    account = Account(replace(CONSTANTS, credit=1.5, earn=0.01, cap=4.0))
    account.add(100.0)
    assert account.balance == pytest.approx(2.5)
    account.add(0.0, -2.0)
    assert account.balance == pytest.approx(0.5)
    account.add(10.0, 90.0)
    assert account.balance == 4.0
    other = Account(replace(CONSTANTS, credit=1.0, cap=4.0))
    assert balance([account, other]) == 1.0


@given(
    st.lists(
        st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.floats(0.0, 1.0), st.floats(0.0, 40.0)),
        max_size=60,
    )
)
def test_rows_that_join_and_leave_keep_the_bound(rounds: list[tuple[list[bool], float, float]]) -> None:
    """Each round has some of three rows; its worst case is a share of what they have, and it may gain all the same."""
    accounts = [Account(CONSTANTS) for _ in range(3)]
    late, elapsed = [0.0] * 3, [0.0] * 3
    for present, share, gained in rounds:
        rows = [i for i, here in enumerate(present) if here]
        worst = share * balance([accounts[i] for i in rows]) if rows else 0.0
        for i in rows:
            accounts[i].add(1.0 + worst, gained - worst)
            late[i] += worst - gained
            elapsed[i] += 1.0 + worst
            assert accounts[i].balance >= -ROUNDING
            assert late[i] <= CONSTANTS.credit + CONSTANTS.earn * elapsed[i] + ROUNDING


@pytest.mark.parametrize("wrong", [{"credit": -1.0}, {"earn": float("nan")}, {"cap": 1.0}, {"fade": 1.5}])
def test_constants_check_themselves(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Constants(**wrong)


def test_every_constant_is_in_the_table_of_what_it_changes() -> None:
    root = Path(__file__).resolve().parents[2]
    table = (root / "docs" / "log" / "2026-11-23-policy-constants.md").read_text(encoding="utf-8")
    names = [field.name for field in fields(Constants)]
    assert len(names) <= 20
    for name in names:
        assert f"| `{name}` | {getattr(CONSTANTS, name):g} " in table, name
