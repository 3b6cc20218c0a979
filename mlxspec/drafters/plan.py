"""The round being planned, as policies and the chain of drafters see it: its rows, how much each may verify, and their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlxspec.drafters.base import Ask, Unread
from mlxspec.drafters.chain_row import ChainRow


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """Every row has a room and a history.

    rows: those that may draft, in the order of the round. rooms: by row, how many drafted tokens it may verify. histories: by row, all its
    known tokens. unread: the round behind which this one is planned, where the host has not read it; rooms hold then however many of its
    tokens are accepted. longest: drafted tokens of a row that can be taken back.
    """

    rows: tuple[ChainRow, ...]
    rooms: Mapping[int, int]
    histories: Mapping[int, Sequence[int]]
    vocab_size: int
    longest: int
    unread: Unread | None = None

    def of(self, rows: Sequence[ChainRow]) -> RoundPlan:
        """The same round with some of its rows."""
        return self if tuple(rows) == self.rows else replace(self, rows=tuple(rows))

    def at(self, places: Sequence[int]) -> RoundPlan:
        """The same round with the rows at these places."""
        unread = None if self.unread is None else self.unread.select(places)
        return replace(self, rows=tuple(self.rows[i] for i in places), unread=unread)

    def ask(self, row: ChainRow, limit: int) -> Ask:
        """What a drafter is asked for a row: at most `limit` tokens, none behind one that it is less sure of than p_min. Behind an unread
        round nobody waits for confidences."""
        p_min = row.spec.p_min
        stops = None if not p_min or self.unread is not None else lambda sure: sure[-1] < p_min
        return Ask(row.row, self.histories[row.row], limit, row.sampler, stops)
