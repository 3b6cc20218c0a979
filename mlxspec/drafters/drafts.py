"""The drafters of an engine, the rows they draft for, and the policies that choose between them.

Tells drafters the known tokens of each row, asks those that a policy chooses, checks their drafts and cuts them to the row's limits (n_max,
n_min, p_min). What is forced comes before all drafters of a row, then what its request predicted, then what was said before. Each row has
one policy; rows of several may share a round, and each policy sees its own rows.

A drafter that fails ends for the rows it was asked about; a wrong draft ends its drafter for that draft's row. The row gets a notice with
the drafter's name, and the request goes on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.snapshot import Snapshot
from mlxspec.config import SpecConfig
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter, DrafterFailed, Unread
from mlxspec.drafters.checked import History, check_description, check_snapshot, checked, is_ours, reason
from mlxspec.drafters.forced import Forced
from mlxspec.drafters.lookup import EarlierRow, Lookup, PredictedRow
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.policy import LearnedRound, ModelCall, Policy, RoundPlan, RowChoice
from mlxspec.drafters.row import AskedDrafter, DraftRow, WaitingDraft, longest
from mlxspec.drafters.streams import Streams
from mlxspec.drafters.submitted import submitted, submitted_on_host
from mlxspec.drafters.text_index import TextIndex
from mlxspec.models.image_rows import SeenImages
from mlxspec.platform import device
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

_log = logging.getLogger("mlxspec")

_LONGEST = 63  # tokens of a draft from a text that is known: with the row's own a width that compiles
T = TypeVar("T")


class Drafts:
    """The drafters of one engine and the rows that they draft for.

    drafters: by name. vocab_size: the target's. streams: the target's hidden states and layer outputs, of which each drafter is given the
    columns it needs. may_fail: whether a failing drafter only ends for its rows; False among ranks, because it may have failed on one rank
    alone. is_warm: whether no draft has compiled anything since a caller set it to True.
    """

    def __init__(
        self,
        drafters: Iterable[Drafter] = (),
        vocab_size: int = 0,
        hidden_size: int = 0,
        texts: TextIndex | None = None,
    ) -> None:
        """Hold `drafters`. hidden_size: the target's; needed where a drafter needs layers. texts: earlier texts, for the drafter `suffix`.
        Raises ConfigError for a caller's own drafter that does not describe itself correctly."""
        self.drafters = {d.name: d for d in drafters}
        for drafter in self.drafters.values():
            check_description(drafter)
        self.vocab_size = vocab_size
        self.streams = Streams.of(self.drafters.values(), hidden_size)
        self.may_fail = self.is_warm = True
        self._forced, self._texts = Forced(), texts or TextIndex(0)
        self._predicted, self._suffix = (Lookup(name, most=_LONGEST) for name in ("predicted", "suffix"))
        self._rows: dict[int, DraftRow] = {}
        self._policies: dict[int, Policy] = {}  # by row

    # --- rows

    def begin(
        self,
        number: int,
        history: Sequence[int],
        spec: SpecConfig,
        sampler: RowSampler,
        policy: Policy,
        seen: SeenImages | None = None,
    ) -> DraftRow:
        """Begin a row and return its record. `policy` chooses among the drafters that `spec` names. history: the row's tokens, so far the
        prompt's, which grows with the row. seen: its images."""
        named: list[Drafter] = []
        predicted = () if isinstance(spec.predicted, str) else spec.predicted  # an engine makes ids of a text
        if predicted:
            self._predicted.open(number, PredictedRow(predicted, len(history), self._texts.segment_of))
            named.append(self._predicted)
        if self._suffix.name in spec.drafters:
            self._suffix.open(number, EarlierRow(self._texts, spec.owner, len(history)))
            named.append(self._suffix)
        named += [self.drafters[n] for n in spec.drafters if n in self.drafters]
        row = self._rows[number] = DraftRow(
            number=number,
            history=history,
            spec=spec,
            sampler=sampler,
            named=tuple(named if spec.drafters else ()),
            forced=self._forced,
        )
        self._each(row, lambda drafter: drafter.begin(number))
        if seen is not None:
            self._each(row, lambda drafter: drafter.see(number, seen))
        self._policies[number] = policy
        for each in set(self._policies.values()):
            each.wake()
        policy.begin(row)
        return row

    def row(self, number: int) -> DraftRow:
        """Return the record of the row with this number, which has begun."""
        return self._rows[number]

    def hear(self, number: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """Give new tokens of a row to its drafters, at once or, where the row is at rest, before they are next asked for a draft. hidden:
        as `Drafter.hear` has it, for all streams."""
        row = self._rows[number]
        row.unheard.append((tokens, hidden))
        row.emitted += len(tokens)
        row.decoded += len(tokens)
        if not self._policies[number].is_resting or row.waiting:
            self.tell(row)

    def tell(self, row: DraftRow) -> None:
        """Give the row's drafters the tokens that they have not received, and compare waiting drafts with these tokens. Several rounds at
        once cost little more than one."""
        unheard, row.unheard = row.unheard, []
        if not unheard:
            return
        together = unheard[0][0] if len(unheard) == 1 else [t for tokens, _ in unheard for t in tokens]

        def told(drafter: Drafter) -> None:
            if not drafter.needs.wants_hidden:
                drafter.hear(row.number, together, None)
                return
            for tokens, hidden in unheard:
                drafter.hear(row.number, tokens, self._shown(drafter, hidden))

        self._each(row, told)
        if row.waiting:
            self._judge(row, together)

    def _judge(self, row: DraftRow, tokens: Sequence[int]) -> None:
        """Compare the row's waiting drafts with its new tokens, and record how many were right."""
        waiting, row.waiting = row.waiting, []
        for draft, heard, lasts in waiting:
            read = draft.read()
            heard.extend(tokens[: read.length - len(heard)])
            pairs = enumerate(zip(heard, read.tokens, strict=False))
            matched = next((i for i, (came, drafted) in pairs if came != drafted), len(heard))
            if lasts and matched == len(heard) < read.length:
                row.waiting.append(WaitingDraft(read, heard, lasts))
                continue
            self._policies[row.number].judge(row, read, matched, len(heard))
            asked = row.asked[read.drafter]
            asked.judged += 1
            asked.right += matched > 0

    def _shown(self, drafter: Drafter, seen: mx.array | None) -> mx.array | None:
        """Return the columns of the target's hidden states that this drafter needs, None where it needs none."""
        return self.streams.given(drafter.needs, seen) if self.streams.layers else seen

    @property
    def needs_hidden(self) -> bool:
        """Return whether any drafter in use by any row needs hidden states."""
        return any(d.needs.wants_hidden for row in self._rows.values() for d, _ in row.limits)

    def prime(self, number: int) -> None:
        """Let the row's drafters run the tokens that they have queued, because its answer begins."""
        row = self._rows[number]
        self.tell(row)
        row.emitted = row.decoded = 0
        self._each(row, lambda drafter: drafter.prime(number))

    def snapshot(self, number: int, length: int, starts: Mapping[str, int]) -> dict[str, Snapshot]:
        """Return the snapshots of the row's drafters after its first `length` tokens, by drafter name. starts: by name, the first token
        whose keys and values a snapshot holds, 0 if absent."""
        row = self._rows[number]
        self.tell(row)
        found = self._each(row, lambda d: _snapshot(d, number, length, starts.get(d.name, 0)))
        return {name: kept for name, kept in found.items() if kept is not None}

    def resume(self, number: int, tokens: Sequence[int], kept: Mapping[str, Snapshot]) -> None:
        """Let a row's drafters start after `tokens`, which they have not received. kept: by name, the snapshots that they once returned
        after all or some of these tokens."""
        self._each(self._rows[number], lambda d: d.resume(number, tokens, kept.get(d.name)))

    def asked(self, number: int) -> Mapping[str, AskedDrafter]:
        """Return, by drafter name, how often and how long the drafter was called for a row, and how many of its drafts began right.
        number: the row's number. Returns an empty mapping for an unknown row."""
        return self._rows[number].asked if number in self._rows else {}

    def close(self, number: int) -> None:
        """Release everything that is held for a row."""
        row = self._rows.pop(number, None)
        if row is not None:
            self._policies.pop(number).end(row)
        for drafter in (self._predicted, self._suffix, *self.drafters.values()):
            try:
                drafter.forget(number)
            except Exception as error:  # the row is gone either way, and its request must end
                _log.warning("The drafter %s failed at the end of a request: %s", drafter.name, reason(error))

    def longest_draft(self, spec: SpecConfig) -> int:
        """Return the number of tokens of the longest draft under `spec`, by the drafters that it names or, if it names none, by any."""
        names = [n for n in spec.drafters or self.drafters if n in self.drafters]
        return max((longest(self.drafters[n], spec) for n in names), default=0)

    # --- rounds

    def propose(self, rooms: Mapping[int, int], unread: Unread | None = None) -> RoundPlan | None:
        """Plan a round and return the plan. rooms: by row number, how many drafted tokens may be verified; rows with 0 are included,
        because they share the round. unread: the round before, of these rows in their order, if the host has not read it; rooms then
        hold however many of its tokens are accepted. Returns None where that round has to be read first: several policies, tokens that a
        limit or grammar must see, an n-gram draft that is chosen, or a drafter with nothing to propose."""
        plans = []
        for policy, rows in self._by_policy(rooms):
            for row in rows:
                row.room, row.is_ahead = rooms[row.number], unread is not None
            is_alone, is_blind = len(rows) == len(rooms), all(row.is_blind for row in rows)
            if unread is not None and not (policy.runs_ahead and is_alone and is_blind):
                return None
            plan = self._plan(policy, rows, unread)
            if plan is None:
                return None
            plans.append(plan)
        if len(plans) == 1:
            return plans[0]
        return RoundPlan(
            drafts={n: d for p in plans for n, d in p.drafts.items()},
            choices={n: c for p in plans for n, c in p.choices.items()},
            calls=[call for p in plans for call in p.calls],
        )

    def _plan(self, policy: Policy, rows: Sequence[DraftRow], unread: Unread | None) -> RoundPlan | None:
        """Let the policy choose and its chosen drafters draft until every choice is of a draft that exists; return the plan, or None as
        `propose` does."""
        offers = self.look_up(rows) if policy.looks_up else [{} for _ in rows]
        looks = policy.looks_up and not (policy.runs_ahead and all(row.is_blind for row in rows))
        calls = list[ModelCall]()
        while True:
            choices = policy.choose(rows, offers)
            wanted: dict[str, list[int]] = {}
            for i, choice in enumerate(choices):
                if choice.drafter is not None and choice.drafter not in offers[i] and rows[i].room:
                    wanted.setdefault(choice.drafter, []).append(i)
            if not wanted:
                break
            for name, places in wanted.items():
                own = None if unread is None else unread.select(places)
                some = [rows[i] for i in places]
                made, call = self._ask(name, some, [choices[i] for i in places], own, looks=looks)
                if unread is not None and not all(draft.length for draft in made):
                    return None
                calls += [call] if call.depth else []
                for i, draft in zip(places, made, strict=True):
                    offers[i][name] = draft
        found, names = dict[int, Draft](), dict[int, RowChoice]()
        for row, choice, given in zip(rows, choices, offers, strict=True):
            names[row.number] = choice
            taken = given.get(choice.drafter or "")
            if taken is None:
                continue
            if unread is not None and taken.drafter in row.offers:
                return None
            found[row.number] = taken._replace(
                width=min(choice.length, taken.length),
                confidences=taken.confidences if policy.looks_up else None,
            )
        return RoundPlan(drafts=found, choices=names, calls=calls)

    def look_up(self, rows: Sequence[DraftRow]) -> list[dict[str, Draft]]:
        """Return the non-empty drafts of drafters without a model, by name, for each row. They are compared with the row's later tokens
        whether they are used or not."""
        asks: dict[Drafter, list[DraftRow]] = {}
        for row in rows:
            self.tell(row)
            if row.offered_at == len(row.history):
                continue
            row.offered_at, row.offers = len(row.history), {}
            for drafter, most in row.limits:
                if not isinstance(drafter, ModelDrafter) and min(row.room, most) > 0:
                    asks.setdefault(drafter, []).append(row)
        for drafter, some in asks.items():
            choices = [RowChoice(length=min(row.room, longest(drafter, row.spec))) for row in some]
            for row, draft in zip(some, self._ask(drafter.name, some, choices, looks=True)[0], strict=True):
                if draft.length:
                    row.offers[drafter.name] = draft
                    row.waiting.append(WaitingDraft(draft, [], lasts=False))
        return [dict(row.offers) for row in rows]

    def may_look_up(self, row: DraftRow) -> bool:
        """Return whether a drafter without a model might return a draft for the row, whose drafters have received all of its tokens."""
        lookups = [d for d, _ in row.limits if not isinstance(d, ModelDrafter)]
        return any(self._each(row, lambda d: d.may_draft(row.number), lookups).values())

    def _ask(
        self,
        name: str,
        rows: Sequence[DraftRow],
        choices: Sequence[RowChoice],
        unread: Unread | None = None,
        *,
        looks: bool,
    ) -> tuple[list[Draft], ModelCall]:
        """Return one draft for each row, cut to what its limits allow and possibly empty, and the call that was made of a model. looks:
        read drafts from the device at once; after an unread round confidences are not waited for."""
        started = time.perf_counter()
        drafter = next(d for d, _ in rows[0].limits if d.name == name)
        asks = [
            Ask(r.number, r.history, c.length, r.sampler, _stops(r, c, unread))
            for r, c in zip(rows, choices, strict=True)
        ]
        queued = 0
        if isinstance(drafter, ModelDrafter):
            drafter.is_warm = True
            queued = sum(drafter.num_queued(row.number) + (unread is not None) for row in rows)
        if not is_ours(drafter):
            asks = [a._replace(history=History(a.history)) for a in asks]
        found = self._guard(drafter, rows, partial(self._asked_for, drafter, rows, asks, unread, looks))
        self.is_warm = self.is_warm and getattr(drafter, "is_warm", True)
        taken = time.perf_counter() - started
        made = [NO_DRAFT] * len(rows)
        if found is not None:
            made = [d._replace(drafter=name) if d.length else d for d in found]
            for row, draft in zip(rows, found, strict=True):
                if draft.ended is not None:
                    row.end(name, draft.ended)
        if found is not None or unread is None:
            for row in rows:
                row.asked[name].calls += 1
                row.asked[name].seconds += taken
        depth = max(d.length for d in made) if isinstance(drafter, ModelDrafter) else 0
        return made, ModelCall(name, depth, queued, rows)

    def _asked_for(
        self,
        drafter: Drafter,
        rows: Sequence[DraftRow],
        asks: Sequence[Ask],
        unread: Unread | None,
        looks: bool,
    ) -> list[Draft] | None:
        """Return one draft for each row from a drafter, checked and cut to the tokens that are verified; None where the drafter cannot
        draft before `unread` has been read. unread: the round whose result is still on the device, None where there is none. looks:
        tokens and confidences are read from the device and returned as lists; otherwise they may stay on the device."""
        sampler = BatchSampler([a.sampler for a in asks], self.vocab_size)
        if unread is None:
            drafts: object = drafter.draft(asks, sampler)
        else:
            hidden = self._shown(drafter, unread.hidden)
            own = unread if hidden is None else unread._replace(hidden=hidden)
            drafts = drafter.draft_behind(asks, sampler, own)
            if drafts is None:
                return None
        found: list[Draft] = []
        for row, draft in zip(
            rows, checked(drafts, asks, self.vocab_size, is_ours=is_ours(drafter)), strict=True
        ):
            if isinstance(draft, DrafterFailed):
                self._fail(drafter, [row], draft)
            found.append(NO_DRAFT if isinstance(draft, DrafterFailed) else draft)
        if all(d is NO_DRAFT for d in found):
            return found
        return (submitted_on_host if looks else submitted)(found, rows)

    def attach(self, cache: ModelCache, order: Sequence[int]) -> None:
        """Give the target's cache to drafters that read it while they draft for this round. order: row numbers in the order of the cache's
        rows."""
        for drafter in self.drafters.values():
            if drafter.needs.cache:
                drafter.attach(cache, order)

    def take_up(self, plan: RoundPlan) -> None:
        """Note that a round is read next, so its models' drafts are compared with the text. Never called for a round that is dropped."""
        for number, draft in plan.drafts.items():
            row = self._rows.get(number)
            if row is None or not self._policies[number].looks_up:
                continue
            if draft.length and draft.drafter not in row.offers:
                row.waiting.append(WaitingDraft(draft, [], plan.choices[number].is_probe))

    def rests(self, rooms: Mapping[int, int]) -> bool:
        """Return whether the next round is plain for all these rows, so that it need not wait for the tokens of this one."""
        found = self._by_policy(rooms)
        if len(found) != 1:
            return False
        policy, rows = found[0]
        for row in rows:
            row.room, row.is_ahead = rooms[row.number], False
        return policy.rests(rows, self)

    def learn(
        self,
        plan: RoundPlan,
        numbers: Sequence[int],
        num_tokens: int,
        seconds: float,
        *,
        ahead: bool,
        is_warm: bool,
    ) -> None:
        """Give the policies the duration of a round over these rows, of which some may have ended or never have drafted. The parameters are
        those of `LearnedRound`."""
        for policy, rows in self._by_policy([n for n in numbers if n in self._rows]):
            choices = [plan.choices.get(row.number) for row in rows]
            calls = [call for call in plan.calls if self._policies.get(call.rows[0].number) is policy]
            policy.learn(
                LearnedRound(rows, choices, calls, len(numbers), num_tokens, seconds, ahead, is_warm)
            )

    def _by_policy(self, numbers: Iterable[int]) -> list[tuple[Policy, list[DraftRow]]]:
        """Return each policy with the rows that follow it, in their order."""
        found: dict[Policy, list[DraftRow]] = {}
        for number in numbers:
            found.setdefault(self._policies[number], []).append(self._rows[number])
        return list(found.items())

    # --- failures

    def _each(
        self, row: DraftRow, event: Callable[[Drafter], T], drafters: Iterable[Drafter] | None = None
    ) -> dict[str, T]:
        """Call `event` for each of the row's drafters, or for `drafters`, and return the results by name. A drafter that fails ends for the
        row."""
        found = {}
        for drafter in [d for d, _ in row.limits] if drafters is None else drafters:
            try:
                found[drafter.name] = event(drafter)
            except Exception as error:  # whatever a drafter does must not end a request
                self._fail(drafter, [row], error)
        return found

    def _guard(self, drafter: Drafter, rows: Sequence[DraftRow], work: Callable[[], T]) -> T | None:
        """Run `work` and return its result. If it fails, the drafter ends for these rows with a notice, and None is returned."""
        try:
            return work()
        except Exception as error:  # likewise
            self._fail(drafter, rows, error)
            return None

    def _fail(self, drafter: Drafter, rows: Sequence[DraftRow], error: Exception) -> None:
        device.note_failure(error)
        if not self.may_fail and not isinstance(error, DrafterFailed):
            raise error
        for row in rows:
            row.end(drafter.name, reason(error))
            with suppress(Exception):  # it has ended for the row either way
                drafter.forget(row.number)


def _stops(
    row: DraftRow, choice: RowChoice, unread: Unread | None
) -> Callable[[Sequence[float]], bool] | None:
    """Return the function that decides after which token a token-by-token draft ends: at a confidence below p_min, or as the policy
    decides. None where nothing ends the draft early."""
    p_min, stops = row.spec.p_min, choice.stops
    if unread is not None or not p_min:
        return stops
    if stops is None:
        return lambda sure: sure[-1] < p_min
    return lambda sure: sure[-1] < p_min or stops(sure)


def _snapshot(drafter: Drafter, row: int, length: int, start: int) -> Snapshot | None:
    found = drafter.snapshot(row, length, start)
    if found is not None and not is_ours(drafter):
        check_snapshot(found, length, start)
    return found
