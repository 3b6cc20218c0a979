"""The sums of one row's account and of the bank, and what they promise of an answer."""

from __future__ import annotations

import pytest

from mlxspec.policy.account import CAP, EARN, FULL, GROWTH, LEAST, MOST, Account, Bank


@pytest.mark.parametrize(
    ("start", "num_tokens", "least"),
    [(MOST, 32, 0.90), (MOST, 96, 0.945), (MOST, 1000, 0.98), (LEAST, 32, 0.95), (LEAST, 96, 0.97)],
)
def test_answers_lose_little(start: float, num_tokens: int, least: float) -> None:
    """Plain decoding's time over the most that the theorem lets an answer take: start + GROWTH t later in t plain rounds."""
    assert num_tokens / ((num_tokens + start) / (1.0 - GROWTH)) >= least


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
    bank = Bank(0.0)
    bank.settle(100.0, 0.0)
    assert bank.balance == pytest.approx(100.0 * EARN)
    bank = Bank()
    assert bank.start == MOST
    bank.settle(1.0, -100.0)
    assert (bank.balance, bank.start) == (0.0, LEAST)
    bank.settle(1.0, 2.0)
    assert LEAST < bank.start < MOST
    bank.settle(1.0, 100.0)
    assert bank.balance == FULL
