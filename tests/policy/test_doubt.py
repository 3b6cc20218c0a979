"""Which rounds that are far off count: a sequence of rounds and the verdicts on them, and when plain rounds are asked for."""

from __future__ import annotations

from planting import catches

from mlxspec.policy.doubt import Doubt

LATE = 1.0  # logarithm of a ratio: far beyond what rounds are off by


def late(doubt: Doubt, kind: str, *, is_plain: bool = False) -> bool:
    """Judge a late round of a kind that has run often. Returns whether it counts as much as it was off."""
    return doubt.judge((kind,), LATE, LATE, is_plain=is_plain, is_new=False).is_sure


def usual(doubt: Doubt) -> None:
    assert doubt.judge(("usual",), 0.0, 0.0, is_plain=False, is_new=False).teaches


def never_sure(right: object) -> object:
    def judge(self: Doubt, kind: tuple[object, ...], *args: object, **named: object) -> object:
        found = right(self, kind, *args, **named)  # type: ignore[operator]
        if kind in self._far:
            self._far[kind] = self._far[kind][0], self._num_usual
        return found

    return judge


@catches("rounds in a row that are late never count", "mlxspec.policy.doubt:Doubt.judge", never_sure)
def test_the_third_late_round_of_a_kind_counts_and_the_second_behind_a_usual_one() -> None:
    doubt = Doubt()
    assert [late(doubt, "a") for _ in range(3)] == [False, False, True]
    doubt = Doubt()
    assert not late(doubt, "a")
    usual(doubt)
    assert late(doubt, "a")


def keeps_the_last(_: object) -> object:
    return lambda self: self._far.clear()


@catches("a settled machine is still in doubt", "mlxspec.policy.doubt:Doubt.settle", keeps_the_last)
def test_two_late_rounds_in_a_row_are_a_doubt_and_none_behind_a_settlement() -> None:
    doubt = Doubt()
    late(doubt, "a")
    assert not doubt.is_open
    late(doubt, "b")
    assert doubt.is_open
    doubt.judge(("plain",), 0.0, 0.0, is_plain=True, is_new=False)
    assert not doubt.is_open
    doubt = Doubt()
    late(doubt, "a")
    doubt.settle()
    late(doubt, "b")
    assert not doubt.is_open
