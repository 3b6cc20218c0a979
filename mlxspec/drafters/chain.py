"""The chain of an engine's drafters: tells them the known tokens of each row, asks them for drafts, and checks the drafts.

The chain passes known tokens on to the drafters, asks them for drafts, checks the drafts and cuts them to the row's limits (n_max, n_min,
p_min). It does not choose between drafters: a policy does (mlxspec.policy), and the policy decides who is asked and when. A drafter
that fails ends for the rows it was asked about; a wrong draft ends its drafter for that draft's row. The row gets a notice with the
drafter's name, and the request goes on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache, Snapshot
from mlxspec.config import SpecConfig
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter, DrafterFailed, Heard
from mlxspec.drafters.chain_row import AskedDrafter, ChainRow
from mlxspec.drafters.checked import History, check_description, check_snapshot, checked, is_ours, reason
from mlxspec.drafters.forced import Forced
from mlxspec.drafters.lookup import EarlierRow, Lookup, PredictedRow
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.plan import RoundPlan
from mlxspec.drafters.streams import Streams
from mlxspec.drafters.submitted import submitted, submitted_on_host
from mlxspec.drafters.text_index import TextIndex
from mlxspec.models.image_rows import SeenImages
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

_log = logging.getLogger("mlxspec")

_LONGEST = 63  # tokens of a draft from a text that is known: with the row's own a width that compiles
T = TypeVar("T")
_Submit = Callable[[Sequence[Draft], Sequence["ChainRow"]], list[Draft]]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One row's winning draft, cut to what is verified; drafter None and length 0 for a plain round. beside: what whoever drafted reads
    with the round. decided: what the row's policy is given again when the round's turn has come to be read; never, if it is dropped."""

    drafter: str | None = None
    draft: Draft = NO_DRAFT
    beside: tuple[mx.array, ...] = ()
    decided: object = None


class Chain:
    """Drafters by name. Each row's own list says in which order they are asked for it; what is forced comes before all of them, then what
    its request predicted, then what was said before.

    streams: what the target shows to them, of which each is given its own columns. may_fail: a drafter that fails costs its rows that
    drafter only. Not among ranks: it may have failed on this one alone. is_warm: whether no draft has compiled anything since somebody set
    it to True.
    """

    def __init__(
        self, drafters: Iterable[Drafter], hidden_size: int = 0, texts: TextIndex | None = None
    ) -> None:
        """hidden_size: the target's; needed where a drafter needs layers. texts: earlier ones, for `suffix`. Raises ConfigError for a
        drafter of one's own that does not describe itself as it must."""
        self.drafters = {d.name: d for d in drafters}
        for drafter in self.drafters.values():
            check_description(drafter)
        self.streams = Streams.of(self.drafters.values(), hidden_size)
        self.may_fail = self.is_warm = True
        self._forced, self._texts = Forced(), texts or TextIndex(0)
        self._predicted, self._suffix = (Lookup(name, most=_LONGEST) for name in ("predicted", "suffix"))
        self._rows: dict[int, ChainRow] = {}

    @property
    def needs_hidden(self) -> bool:
        """Whether any drafter in use by any row wants hiddens."""
        return any(d.needs.wants_hidden for r in self._rows.values() for d in self.drafters_of(r))

    def begin(
        self,
        row: int,
        spec: SpecConfig,
        sampler: RowSampler,
        seen: SeenImages | None = None,
        num_prompt: int = 0,
    ) -> ChainRow:
        """A new row, known to its drafters from here on. seen: the images of its prompt; num_prompt: its tokens."""
        state = self._rows[row] = ChainRow(row=row, spec=spec, sampler=sampler)
        if state.predicted:
            self._predicted.open(row, PredictedRow(state.predicted, num_prompt, self._texts.segment_of))
        if self._suffix.name in spec.drafters:
            self._suffix.open(row, EarlierRow(self._texts, spec.owner, num_prompt))
        for drafter in self.drafters_of(state):
            self._guard(drafter, [state], partial(drafter.begin, row))
        if seen is not None:
            for drafter in self.drafters_of(state):
                self._guard(drafter, [state], partial(drafter.see, row, seen))
        return state

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> ChainRow:
        """The row's text goes on with `tokens`. Its drafters hear them at the next `tell`."""
        state = self._rows[row]
        state.unheard.append((tokens, hidden))
        return state

    def tell(self, state: ChainRow) -> Sequence[int]:
        """The row's drafters hear what they have not heard. Returns those tokens. Several rounds told at once cost little more than one."""
        unheard, state.unheard = state.unheard, []
        if not unheard:
            return ()
        together = unheard[0][0] if len(unheard) == 1 else [t for tokens, _ in unheard for t in tokens]
        for drafter in self.drafters_of(state):
            try:
                if drafter.needs.wants_hidden:
                    drafter.observe_rounds(state.row, self._given(drafter, unheard))
                else:
                    drafter.observe(state.row, together, None)
            except Exception as error:  # as in `_guard`, which would cost more than most drafters' work
                self._fail(drafter, [state], error)
        return together

    def _given(self, drafter: Drafter, heard: Sequence[Heard]) -> Sequence[Heard]:
        """These tokens, with the hiddens that this drafter is given."""
        if not self.streams.layers:
            return heard
        return [(tokens, self._shown(drafter, hidden)) for tokens, hidden in heard]

    def _shown(self, drafter: Drafter, seen: mx.array | None) -> mx.array | None:
        """This drafter's columns of the hiddens that the target showed."""
        return self.streams.given(drafter.needs, seen) if self.streams.layers else seen

    def prime(self, state: ChainRow) -> None:
        """The row's answer begins: its drafters run what they have queued."""
        for drafter in self.drafters_of(state):
            self._guard(drafter, [state], partial(drafter.prime, state.row))

    def snapshot(self, state: ChainRow, length: int, starts: Mapping[str, int]) -> dict[str, Snapshot]:
        """Snapshots of the row's first `length` tokens by its drafters, by name. starts: from which token on each, all of them if
        absent."""
        found = {}
        for drafter in self.drafters_of(state):
            work = partial(_snapshot, drafter, state.row, length, starts.get(drafter.name, 0))
            kept = self._guard(drafter, [state], work)
            if kept is not None:
                found[drafter.name] = kept
        return found

    def resume(self, state: ChainRow, tokens: Sequence[int], kept: Mapping[str, Snapshot]) -> None:
        """The row begins with `tokens`, which the drafters have not heard; kept: what they once gave behind all or some of those."""
        for drafter in self.drafters_of(state):
            found = kept.get(drafter.name)
            self._guard(drafter, [state], partial(drafter.resume, state.row, tokens, found))

    def attach(self, cache: ModelCache, order: Sequence[int]) -> None:
        """The target's cache and whose its rows are, for drafters that read it in this round's proposals."""
        for drafter in self.drafters.values():
            if drafter.needs.cache:
                drafter.attach(cache, order)

    def asked(self, row: int) -> Mapping[str, AskedDrafter]:
        """The row's record of each drafter, by name."""
        return self._rows[row].asked if row in self._rows else {}

    def close(self, row: int) -> None:
        """The row is gone."""
        self._rows.pop(row, None)
        for drafter in (self._predicted, self._suffix, *self.drafters.values()):
            try:
                drafter.close(row)
            except Exception as error:  # the row is gone either way, and its request must end
                _log.warning("The drafter %s failed at the end of a request: %s", drafter.name, reason(error))

    def longest_draft(self, spec: SpecConfig) -> int:
        """Tokens of the longest draft under `spec`, by the drafters it names or, if none, any."""
        names = [n for n in spec.drafters or self.drafters if n in self.drafters]
        return max((_limit(self.drafters[n], spec) for n in names), default=0)

    def state(self, row: int) -> ChainRow:
        """The state of an open row."""
        return self._rows[row]

    def lookups_of(self, state: ChainRow) -> Sequence[tuple[Drafter, int]]:
        """The row's drafters that run no model, and the longest draft of each that it takes."""
        self.drafters_of(state)
        return state.lookups

    def may_look_up(self, state: ChainRow) -> bool:
        """Whether asking those of them could give anything. They have been told of all the text."""
        for drafter, _ in self.lookups_of(state):
            try:
                if drafter.may_draft(state.row):
                    return True
            except Exception as error:
                self._fail(drafter, [state], error)
        return False

    def limit(self, drafter: Drafter, state: ChainRow) -> int:
        """The longest draft the row takes of this drafter."""
        return _limit(drafter, state.spec)

    def ask(self, drafter: Drafter, asks: Sequence[Ask], plan: RoundPlan) -> dict[int, Proposal]:
        """Proposals of one drafter for the round being planned, for the rows for which it has any, cut to what their limits allow."""
        found = self._found(drafter, asks, plan, submitted)
        return {
            ask.row: Proposal(drafter=drafter.name, draft=draft)
            for ask, draft in zip(asks, found, strict=bool(found))
            if draft.length
        }

    def ask_all(
        self, drafter: Drafter, asks: Sequence[Ask], plan: RoundPlan, *, looks: bool = True
    ) -> list[Draft]:
        """One draft an ask, within the row's own limits and with its confidences; empty where there is none. looks: evaluated and on the
        host."""
        found = self._found(drafter, asks, plan, submitted_on_host if looks else submitted)
        return found or [NO_DRAFT] * len(asks)

    def _found(self, drafter: Drafter, asks: Sequence[Ask], plan: RoundPlan, submit: _Submit) -> list[Draft]:
        """What one drafter proposes and what of it is submitted; nothing if it fails."""
        started, unread, vocab_size = time.perf_counter(), plan.unread, plan.vocab_size
        if isinstance(drafter, ModelDrafter):
            drafter.is_warm = True
        states = [self._rows[a.row] for a in asks]
        sampler = BatchSampler([a.sampler for a in asks], vocab_size)
        if not is_ours(drafter):
            asks = [a._replace(history=History(a.history)) for a in asks]

        def work() -> list[Draft]:
            if unread is None:
                drafts: object = drafter.propose(asks, sampler)
            else:
                hidden = self._shown(drafter, unread.hidden)
                own = unread if hidden is None else unread._replace(hidden=hidden)
                drafts = drafter.propose_behind(asks, sampler, own)
            if drafts is None and unread is not None:
                return []
            found: list[Draft] = []
            for state, draft in zip(
                states, checked(drafts, asks, vocab_size, is_ours=is_ours(drafter)), strict=True
            ):
                if isinstance(draft, DrafterFailed):
                    self._fail(drafter, [state], draft)
                found.append(NO_DRAFT if isinstance(draft, DrafterFailed) else draft)
            if all(d is NO_DRAFT for d in found):
                return [NO_DRAFT] * len(asks)
            return submit(found, states)

        found = self._guard(drafter, states, work) or []
        self.is_warm = self.is_warm and getattr(drafter, "is_warm", True)
        if unread is not None and not found:
            return []
        for state, draft in zip(states, found, strict=bool(found)):
            if draft.ended is not None:
                self._end(drafter, state, draft.ended)
        taken = time.perf_counter() - started
        for state in states:
            asked = state.asked[drafter.name]
            asked.calls += 1
            asked.seconds += taken
        return found

    def drafters_of(self, state: ChainRow) -> tuple[Drafter, ...]:
        """Who may draft for a row, in its order."""
        if state.queue is None or state.is_bound != state.sampler.is_bound:
            state.is_bound = state.sampler.is_bound
            brought: list[Drafter] = [self._forced] if state.is_bound else []
            brought += [self._predicted] if state.predicted else []
            brought += [self._suffix] if self._suffix.name in state.spec.drafters else []
            named = [self.drafters[n] for n in state.spec.drafters if n in self.drafters]
            queue = brought + named if state.spec.drafters else []
            state.queue = tuple(d for d in queue if d.name not in state.ended)
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
        if not self.may_fail and not isinstance(error, DrafterFailed):
            raise error
        for state in states:
            self._end(drafter, state, reason(error))
            with suppress(Exception):  # it has ended for the row either way
                drafter.close(state.row)

    def _end(self, drafter: Drafter, state: ChainRow, why: str) -> None:
        state.end(drafter.name)
        state.notices.append(f"{drafter.name} drafting ended: {why}")


def _snapshot(drafter: Drafter, row: int, length: int, start: int) -> Snapshot | None:
    found = drafter.snapshot(row, length, start)
    if found is not None and not is_ours(drafter):
        check_snapshot(found, length, start)
    return found


def _limit(drafter: Drafter, spec: SpecConfig) -> int:
    if drafter.max_draft is not None:
        asked = spec.n_max if isinstance(drafter, ModelDrafter) else None  # of what runs a model
        return drafter.max_draft if asked is None else min(drafter.max_draft, asked)
    return spec.model_depth if isinstance(drafter, ModelDrafter) else spec.ngram_m
