"""Several drafters as one: facts go to all of them, and for each row the first that proposes anything wins the round, or whom the
controller chooses (auto.py), as the row's policy has it.

Knows the users' limits (n_max, n_min, p_min) and submits by them what is to be verified; knows no verdict. A drafter that fails
ends for the rows it was asked about, one whose draft is wrong for that draft's row, with a notice that names it; the request goes on
without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache, Snapshot
from mlxspec.config import SpecConfig
from mlxspec.drafters.auto import Auto
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter, Unread
from mlxspec.drafters.chain_row import ChainRow
from mlxspec.drafters.checked import checked
from mlxspec.drafters.forced import Forced
from mlxspec.drafters.guarded import DrafterFailed, Guarded, guarded, reason
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.submitted import Submitted, submitted, submitted_on_host
from mlxspec.sampling.sampler import BatchSampler, RowSampler
from mlxspec.speculation.controller import Controller
from mlxspec.speculation.verify import NOTHING, Submission

T = TypeVar("T")
_Submit = Callable[[Sequence[Draft], Sequence["ChainRow"]], Submitted]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One row's winning draft, cut to what is submitted; drafter None and length 0 for a plain round."""

    drafter: str | None = None
    draft: Draft = NO_DRAFT
    submission: Submission = NOTHING


class Chain:
    """Drafters by name. Each row's own list says in which order they are asked for it, and what is forced comes before all of them."""

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        """Drafters that mlxspec did not write are put into their guards. Raises ConfigError for one that cannot be."""
        self.drafters = {d.name: d for d in map(guarded, drafters)}
        self._forced = Forced()
        self._rows: dict[int, ChainRow] = {}
        self.auto: Auto | None = None

    @property
    def needs_hidden(self) -> bool:
        """Whether any drafter in use by any row wants hiddens."""
        return any(d.needs.hidden for r in self._rows.values() for d in self.drafters_of(r))

    def follow(self, control: Controller) -> None:
        """From now on rows whose policy is auto draft as the controller chooses. Without one they draft like all others."""
        self.auto = Auto(self, control)

    def begin(self, row: int, spec: SpecConfig, sampler: RowSampler) -> ChainRow:
        state = self._rows[row] = ChainRow(row=row, spec=spec, sampler=sampler)
        if self.auto is not None:
            self.auto.begin(state)
        for drafter in self.drafters_of(state):
            self._guard(drafter, [state], partial(drafter.begin, row))
        return state

    def observe(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        state = self._rows[row]
        state.unheard.append((tokens, hidden))
        if self.auto is None or not state.is_auto or not self.auto.advance(row, len(tokens)):
            self.tell(state)

    def tell(self, state: ChainRow) -> None:
        """A row's drafters hear what they have not: at rest they are told of several rounds at once, which costs little more than one."""
        unheard, state.unheard = state.unheard, []
        if not unheard:
            return
        together = unheard[0][0] if len(unheard) == 1 else [t for tokens, _ in unheard for t in tokens]
        if self.auto is not None and state.is_auto:
            self.auto.observe(state.row, together)
        for drafter in self.drafters_of(state):
            try:
                if drafter.needs.hidden:
                    drafter.observe_rounds(state.row, unheard)
                else:
                    drafter.observe(state.row, together, None)
            except Exception as error:  # as in `_guard`, which would cost more than most drafters' work
                self._fail(drafter, [state], error)

    def prime(self, row: int) -> None:
        """The row's answer begins: drafters that are likely to draft for it catch up on its prompt."""
        state = self._told(row)
        for drafter in self.drafters_of(state):
            if self.auto is None or not state.is_auto or self.auto.primes(state, drafter):
                self._guard(drafter, [state], partial(drafter.prime, row))

    def snapshot(self, row: int, length: int, starts: Mapping[str, int]) -> dict[str, Snapshot]:
        """What drafters keep for the row's first `length` tokens, by name. starts: from which token on each, all of them if absent."""
        state, found = self._told(row), {}
        for drafter in self.drafters_of(state):
            if self.auto is not None and state.is_auto and not self.auto.keeps(state, drafter):
                continue
            work = partial(drafter.snapshot, row, length, starts.get(drafter.name, 0))
            kept = self._guard(drafter, [state], work)
            if kept is not None:
                found[drafter.name] = kept
        return found

    def resume(
        self,
        row: int,
        tokens: Sequence[int],
        kept: Mapping[str, Snapshot],
        hiddens: Callable[[int], mx.array | None],
    ) -> None:
        """The row begins with `tokens`, which the drafters have not heard; kept: what they once gave behind all or some of those.
        hiddens(n): what the tokens behind the first n were sampled from, (len(tokens) - n, H), if that is known."""
        state = self._rows[row]
        for drafter in self.drafters_of(state):
            found = kept.get(drafter.name)
            known = 0 if found is None else found.length
            if (
                self.auto is not None
                and state.is_auto
                and not self.auto.resumes(state, drafter, len(tokens) - known)
            ):
                continue
            hidden = hiddens(known) if drafter.needs.every_hidden and known < len(tokens) else None
            self._guard(drafter, [state], partial(drafter.resume, row, tokens, found, hidden))

    def attach(self, cache: ModelCache, order: Sequence[int]) -> None:
        """The target's cache and whose its rows are, for drafters that read it in this round's proposals."""
        for drafter in self.drafters.values():
            if drafter.needs.cache:
                drafter.attach(cache, order)

    def truncate(self, row: int, length: int) -> None:
        state = self._told(row)
        if self.auto is not None and state.is_auto:
            self.auto.truncate(row)
        for drafter in self.drafters_of(state):
            self._guard(drafter, [state], partial(drafter.truncate, row, length))

    def asked(self, row: int) -> Mapping[str, tuple[int, float]]:
        """By drafter: how often it was asked for the row, and seconds."""
        return self._rows[row].asked if row in self._rows else {}

    def plain_seconds(self, row: int) -> float | None:
        """What a token of the row would have taken without drafts, by what the controller knows; None where it does not choose."""
        state = self._rows.get(row)
        return self.auto.plain_seconds(row) if self.auto and state and state.is_auto else None

    def close(self, row: int) -> None:
        self._rows.pop(row, None)
        if self.auto is not None:
            self.auto.close(row)
        for drafter in self.drafters.values():
            with suppress(Exception):  # the row is gone either way
                drafter.close(row)

    def longest_draft(self, spec: SpecConfig) -> int:
        """Tokens of the longest draft under `spec`, by the drafters it names or, if none, any."""
        names = [n for n in spec.drafters or self.drafters if n in self.drafters]
        return max((_limit(self.drafters[n], spec) for n in names), default=0)

    def cuts(self, spec: SpecConfig, limit: int | None) -> list[str]:
        """A sentence where drafts under `spec` may be longer than can be taken back, which is `limit` tokens (None: any)."""
        if limit is None or self.longest_draft(spec) <= limit or not spec.drafters:
            return []
        return [
            f"drafts are cut to {limit} token{'s' * (limit > 1)}: rollback by snapshots keeps {limit + 1} states"
        ]

    def propose(
        self, rooms: Mapping[int, int], histories: Mapping[int, Sequence[int]], vocab_size: int
    ) -> dict[int, Proposal]:
        """rooms: row -> how many drafted tokens it may verify. Rows without a proposal are absent."""
        won: dict[int, Proposal] = {}
        chosen = self._auto_rows(rooms)
        if self.auto is not None and chosen:
            won = {
                row: Proposal(drafter=name, draft=draft, submission=submission)
                for row, (name, draft, submission) in self.auto.propose(
                    chosen, rooms, histories, vocab_size
                ).items()
            }
        first_wins = rooms.keys() - {s.row for s in chosen}
        waiting = {row: list(self.drafters_of(self._rows[row])) for row in rooms if row in first_wins}
        while queues := [(row, queue) for row, queue in waiting.items() if queue and row not in won]:
            drafter = queues[0][1][0]
            asks = []
            for row, queue in queues:
                if queue[0] is not drafter:
                    continue
                queue.pop(0)
                state = self._rows[row]
                limit = min(rooms[row], _limit(drafter, state.spec))
                if limit > 0:
                    asks.append(Ask(row, histories[row], limit, state.sampler))
            if asks:
                won |= self._ask(drafter, asks, vocab_size)
        return won

    def propose_behind(
        self,
        rooms: Mapping[int, int],
        histories: Mapping[int, Sequence[int]],
        unread: Unread,
        vocab_size: int,
        longest: int,
    ) -> dict[int, Proposal]:
        """Drafts of one length (the drafter's own, or `longest`) behind tokens that only the device knows, for all rows of an unread round
        in its order; none where somebody must see those tokens first. rooms: what each may verify, whatever stands of them."""
        states = [self._rows[r] for r in rooms]
        ways = {self.drafters_of(s) for s in states}
        if len(ways) != 1 or self._auto_rows(rooms) or not all(s.is_blind for s in states):
            return {}
        drafters = ways.pop()
        limits = {min(longest, _limit(d, s.spec)) for s in states for d in drafters}
        if len(drafters) != 1 or len(limits) != 1 or not 1 <= min(limits) <= min(rooms.values()):
            return {}
        asks = [Ask(s.row, histories[s.row], min(limits), s.sampler) for s in states]
        won = self._ask(drafters[0], asks, vocab_size, unread)
        if 0 < len(won) < len(asks):
            # a draft was wrong, or empty: all rows are drafted for once their tokens are known
            self._finish(drafters[0], drafters[0].take_back)
            return {}
        return won

    def settle(self) -> None:
        """What `propose_behind` drafted behind has been observed."""
        for drafter in self.drafters.values():
            self._finish(drafter, drafter.settle)

    def take_back(self) -> None:
        """Nobody reads what came of the last `propose_behind`."""
        for drafter in self.drafters.values():
            self._finish(drafter, drafter.take_back)

    def _finish(self, drafter: Drafter, work: Callable[[], None]) -> None:
        """Run what concerns all rows of a drafter; if it fails, it ends for all of them."""
        try:
            work()
        except Exception as error:
            self._fail(drafter, [s for s in self._rows.values() if drafter in self.drafters_of(s)], error)

    def is_still(self, rows: Sequence[int]) -> bool:
        """Whether all these rows, which rested before, rest on, as far as that can be told at a glance. If not, ask `rests`."""
        states = [self._rows[r] for r in rows]
        return self.auto is not None and all(s.is_auto for s in states) and self.auto.is_still(states)

    def rests(
        self, rooms: Mapping[int, int], histories: Mapping[int, Sequence[int]], vocab_size: int
    ) -> bool:
        """Whether a plain round is next for all these rows, so that it need not wait for what they say now."""
        chosen = self._auto_rows(rooms)
        return (
            self.auto is not None
            and len(chosen) == len(rooms)
            and self.auto.rests(chosen, rooms, histories, vocab_size)
        )

    def took(
        self, rows: Sequence[int], num_tokens: int, seconds: float, *, ahead: bool, is_warm: bool
    ) -> None:
        """A round over these rows, some of which may be gone or never have drafted, has been read; what it cost teaches the controller.
        ahead, is_warm: as Auto.took has them."""
        chosen = self._auto_rows(r for r in rows if r in self._rows)
        if self.auto is not None and chosen:
            self.auto.took(chosen, len(rows), num_tokens, seconds, ahead=ahead, is_warm=is_warm)

    def _auto_rows(self, rows: Iterable[int]) -> list[ChainRow]:
        states = [self._rows[r] for r in rows]
        return [s for s in states if s.is_auto] if self.auto is not None else []

    def state(self, row: int) -> ChainRow:
        """What is known of an open row."""
        return self._rows[row]

    def lookups_of(self, state: ChainRow) -> Sequence[tuple[Drafter, int]]:
        """Those of them that run no model, and how long a draft of each the row takes."""
        self.drafters_of(state)
        return state.lookups

    def may_look_up(self, state: ChainRow) -> bool:
        """Whether asking those of them could give anything."""
        self.tell(state)
        for drafter, _ in self.lookups_of(state):
            try:
                if drafter.may_draft(state.row):
                    return True
            except Exception as error:
                self._fail(drafter, [state], error)
        return False

    def _told(self, row: int) -> ChainRow:
        state = self._rows[row]
        self.tell(state)
        return state

    def limit(self, drafter: Drafter, state: ChainRow) -> int:
        """The longest draft the row takes of this drafter."""
        return _limit(drafter, state.spec)

    def _ask(
        self, drafter: Drafter, asks: Sequence[Ask], vocab_size: int, unread: Unread | None = None
    ) -> dict[int, Proposal]:
        """Proposals of one drafter, for the rows for which it has any."""
        found = self._found(drafter, asks, vocab_size, submitted, unread)
        return {
            ask.row: Proposal(drafter=drafter.name, draft=draft, submission=submission)
            for ask, (draft, submission) in zip(asks, found, strict=bool(found))
            if draft.length
        }

    def ask_all(self, drafter: Drafter, asks: Sequence[Ask], vocab_size: int) -> list[Draft]:
        """One draft an ask, evaluated and on the host, within the row's own limits and with its confidences; empty where there is none."""
        found = self._found(drafter, asks, vocab_size, submitted_on_host)
        return [draft for draft, _ in found] or [NO_DRAFT] * len(asks)

    def _found(
        self,
        drafter: Drafter,
        asks: Sequence[Ask],
        vocab_size: int,
        submit: _Submit,
        unread: Unread | None = None,
    ) -> Submitted:
        """What one drafter proposes and what of it is submitted; nothing if it fails."""
        started = time.perf_counter()
        states = [self._rows[a.row] for a in asks]
        sampler = BatchSampler([a.sampler for a in asks], vocab_size)

        def work() -> Submitted:
            if unread is None:
                drafts: object = drafter.propose(asks, sampler)
            else:
                drafts = drafter.propose_behind(asks, sampler, unread)
            if drafts is None and unread is not None:
                return []
            found, wrong = checked(drafts, asks, vocab_size, is_ours=not isinstance(drafter, Guarded))
            for place, why in wrong.items():
                self._fail(drafter, [states[place]], DrafterFailed(why))
            if all(d is NO_DRAFT for d in found):
                return [(NO_DRAFT, NOTHING)] * len(asks)
            return submit(found, states)

        found = self._guard(drafter, states, work) or []
        if unread is not None and not found:
            return []
        for state, (draft, _) in zip(states, found, strict=bool(found)):
            if draft.ended is not None:
                self._end(drafter, state, draft.ended)
        taken = time.perf_counter() - started
        for state in states:
            calls, seconds = state.asked.get(drafter.name, (0, 0.0))
            state.asked[drafter.name] = calls + 1, seconds + taken
        return found

    def drafters_of(self, state: ChainRow) -> tuple[Drafter, ...]:
        """Who may draft for a row, in its order."""
        if state.queue is None:
            forced = bool(state.spec.drafters) and state.sampler.constraints is not None
            named = [self.drafters[n] for n in state.spec.drafters if n in self.drafters]
            state.queue = tuple(d for d in [self._forced] * forced + named if d.name not in state.ended)
            state.lookups = tuple(
                (d, _limit(d, state.spec)) for d in state.queue if not isinstance(d, ModelDrafter)
            )
        return state.queue

    def _guard(self, drafter: Drafter, states: Sequence[ChainRow], work: Callable[[], T]) -> T | None:
        """Run `work`; if it fails, this drafter ends for these rows and says so."""
        try:
            return work()
        except Exception as error:  # whatever a drafter does must not end a request
            self._fail(drafter, states, error)
            return None

    def _fail(self, drafter: Drafter, states: Sequence[ChainRow], error: Exception) -> None:
        why = str(error) if isinstance(error, DrafterFailed) else reason(error)
        for state in states:
            self._end(drafter, state, why)
            with suppress(Exception):  # it has ended for the row either way
                drafter.close(state.row)

    def _end(self, drafter: Drafter, state: ChainRow, why: str) -> None:
        state.end(drafter.name)
        state.notices.append(f"{drafter.name} drafting ended: {why}")


def _limit(drafter: Drafter, spec: SpecConfig) -> int:
    if isinstance(drafter, Forced):
        return drafter.longest
    if drafter.max_draft is not None:
        return drafter.max_draft
    return spec.model_depth if isinstance(drafter, ModelDrafter) else spec.ngram_m
