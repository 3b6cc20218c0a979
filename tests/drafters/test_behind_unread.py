"""What a drafter makes behind an unread round leaves no trace but cells that need not be made again, whatever its rows hear next, and
drafts for some of its rows only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.cache import attention
from mlxspec.config import SamplingParams
from mlxspec.drafters.base import Ask, Draft, Unread
from mlxspec.drafters.mtp import Mtp
from mlxspec.platform import device
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests import tiny_models

WIDTH = 3  # tokens of the unread round
LENGTHS = {4: 5, 7: 9, 9: 2}  # row -> tokens of its prompt


class Told:
    """A head and what its rows were told: the same tokens and hiddens for everybody who is told the same."""

    def __init__(self) -> None:
        self.head = Mtp(tiny_models.mtp_head(), 2048)
        self.histories: dict[int, list[int]] = {}
        self.rng = np.random.default_rng(11)

    def hiddens(self, num: int) -> mx.array:
        return mx.array(self.rng.standard_normal((num, 64)).astype(np.float32))

    def tokens(self, num: int) -> list[int]:
        return self.rng.integers(0, tiny_models.EOS, num).tolist()

    def hear(self, row: int, tokens: list[int], hidden: mx.array) -> None:
        self.histories.setdefault(row, []).extend(tokens)
        self.head.hear(row, tokens, hidden)

    def asks(self, rows: list[int]) -> tuple[list[Ask], BatchSampler]:
        samplers = [RowSampler(SamplingParams(), [1], tiny_models.VOCAB) for _ in rows]
        asks = [Ask(r, list(self.histories[r]), 2, s) for r, s in zip(rows, samplers, strict=True)]
        return asks, BatchSampler(samplers, tiny_models.VOCAB)

    def drafts(self, rows: list[int]) -> list[tuple[list[int], list[float]]]:
        return [_read(d) for d in self.head.draft(*self.asks(rows))]


def _read(draft: Draft) -> tuple[list[int], list[float]]:
    return np.array(draft.tokens).tolist(), np.array(draft.confidences).tolist()


def _same(found: list[tuple[list[int], list[float]]], wanted: list[tuple[list[int], list[float]]]) -> None:
    for (tokens, sure), (right, right_sure) in zip(found, wanted, strict=True):
        assert tokens == right
        np.testing.assert_allclose(sure, right_sure, atol=1e-4)


def played(
    rows: list[int], *, behind: bool, num_more: int = 0, drops: bool = True, others: int = 0
) -> list[tuple[list[int], list[float]]]:
    """Rows are begun, drafted for once, and a round of `rows` is read, of which they took 1, 2, ... tokens; then more tokens come. behind:
    whether drafts were made before that round was read. others: above 0, rows are told other tokens than the round's. Returns the drafts
    that were made before, or what is drafted next where they are dropped."""
    told = Told()
    for row, length in LENGTHS.items():
        told.head.begin(row)
        told.hear(row, told.tokens(length), told.hiddens(length))
    told.drafts(list(LENGTHS))
    taken = {row: 1 + i % WIDTH for i, row in enumerate(rows)}
    chosen = {row: told.tokens(WIDTH) for row in rows}
    hidden = {row: told.hiddens(WIDTH) for row in rows}
    if behind:
        unread = Unread(
            mx.array([chosen[r] for r in rows], mx.int32),
            mx.array([taken[r] for r in rows], mx.int32),
            mx.concatenate([hidden[r] for r in rows]),
        )
        made = told.head.draft_behind(*told.asks(rows), unread)
        assert made is not None
        if not drops:
            return list(map(_read, made))
    for row in rows:
        heard = [(token + others) % tiny_models.EOS for token in chosen[row][: taken[row]]]
        told.hear(row, heard, hidden[row][: taken[row]])
    for _ in range(num_more):
        for row in rows:
            told.hear(row, told.tokens(2), told.hiddens(2))
    return told.drafts(rows)


def _misplaced(right: Any) -> Any:
    return lambda self, row, num: right(self, row, num + 1)


@catches(
    "a row takes a cell more than it was told of",
    "mlxspec.drafters.behind_unread:extend",
    _misplaced,
    case="all",
    errors=(ValueError,),
)
@pytest.mark.parametrize("num_more", [0, 1, 2], ids=["at once", "one more", "two more"])
@pytest.mark.parametrize("rows", [[4, 7, 9], [7], [9, 4]], ids=["all", "one", "two in another order"])
def test_drafts_that_are_dropped_leave_no_trace(rows: list[int], num_more: int) -> None:
    found = played(rows, behind=True, num_more=num_more)
    _same(found, played(rows, behind=False, num_more=num_more))


@pytest.mark.parametrize(
    "rows", [[4, 7, 9], [7], [9, 7]], ids=["all", "one, not all", "in another order, not all"]
)
def test_drafts_behind_an_unread_round_are_those_of_a_round_that_was_read(rows: list[int]) -> None:
    """Rows that do not ask, such as parked ones, keep their cells and get none."""
    _same(played(rows, behind=True, drops=False), played(rows, behind=False))


@pytest.mark.parametrize("rows", [[4, 7, 9], [9, 7]], ids=["all", "not all"])
def test_drafts_written_into_tails_behind_an_unread_round_are_the_same(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a fork writes no long keys and values in place."""
    wanted = played(rows, behind=False)
    monkeypatch.setattr(attention, "_WORTH_A_TAIL", 0)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    _same(played(rows, behind=True, drops=False), wanted)


@pytest.mark.parametrize("rows", [[4, 7, 9], [9, 7]], ids=["all", "in another order, not all"])
def test_a_row_that_waits_for_a_tag_may_be_told_other_tokens(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowSampler, "is_waiting", True)
    _same(played(rows, behind=True, others=1), played(rows, behind=False, others=1))


@pytest.mark.parametrize("num_queued", [1, 300])
def test_a_long_queue_behind_an_unread_round_is_one_array(
    num_queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the host knows are joined on the host: on a GPU each array of a concatenation is a launch."""
    told = Told()
    for row in (4, 7):
        told.head.begin(row)
        told.hear(row, told.tokens(num_queued), told.hiddens(num_queued))
    unread = Unread(mx.array([[1, 2, 3]] * 2), mx.array([1, 2], mx.int32), told.hiddens(6))
    parts: list[int] = []
    concatenate = mx.concatenate
    monkeypatch.setattr(
        mx, "concatenate", lambda of, *a, **k: parts.append(len(of)) or concatenate(of, *a, **k)
    )
    assert told.head.draft_behind(*told.asks([4, 7]), unread) is not None
    assert max(parts) <= 4
