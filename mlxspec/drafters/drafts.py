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
    """One engine's.

    drafters: by name. vocab_size: the target's. streams: what the target shows to drafters, of which each is given its own columns.
    may_fail: a drafter that fails costs its rows that drafter only. Not among ranks: it may have failed on this one alone. is_warm: whether
    no draft has compiled anything since somebody set it to True.
    """

    def __init__(
        self,
        drafters: Iterable[Drafter] = (),
        vocab_size: int = 0,
        hidden_size: int = 0,
        texts: TextIndex | None = None,
    ) -> None:
        """hidden_size: the target's; needed where a drafter needs layers. texts: earlier ones, for `suffix`. Raises ConfigError for a
        drafter of one's own that does not describe itself as it must."""
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
        """Begin a row, which its options' drafters draft for as `policy` chooses. history: its tokens, so far the prompt's. seen: its
        images."""
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
        """The row of this number, which has begun."""
        return self._rows[number]

    def hear(self, number: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """Go on with a row's text. Its drafters hear of it at once, or at rest before they are asked next."""
        row = self._rows[number]
        row.unheard.append((tokens, hidden))
        row.emitted += len(tokens)
        row.decoded += len(tokens)
        if not self._policies[number].is_resting or row.waiting:
            self.tell(row)

    def tell(self, row: DraftRow) -> None:
        """Tell the row's drafters what they have not heard, and judge the drafts that waited for it. Several rounds told at once cost
        little more than one."""
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
        """Compare the row's drafts with the tokens that have come."""
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
        """This drafter's columns of the hiddens that the target showed."""
        return self.streams.given(drafter.needs, seen) if self.streams.layers else seen

    @property
    def needs_hidden(self) -> bool:
        """Whether any drafter in use by any row wants hiddens."""
        return any(d.needs.wants_hidden for row in self._rows.values() for d, _ in row.limits)

    def prime(self, number: int) -> None:
        """Begin a row's answer: its drafters run what they have queued."""
        row = self._rows[number]
        self.tell(row)
        row.emitted = row.decoded = 0
        self._each(row, lambda drafter: drafter.prime(number))

    def snapshot(self, number: int, length: int, starts: Mapping[str, int]) -> dict[str, Snapshot]:
        """Return what drafters keep for the row's first `length` tokens, by name. starts: from which token on each, all of them if
        absent."""
        row = self._rows[number]
        self.tell(row)
        found = self._each(row, lambda d: _snapshot(d, number, length, starts.get(d.name, 0)))
        return {name: kept for name, kept in found.items() if kept is not None}

    def resume(self, number: int, tokens: Sequence[int], kept: Mapping[str, Snapshot]) -> None:
        """Begin a row with `tokens`, which its drafters have not heard; kept: what they once gave behind all or some of those."""
        self._each(self._rows[number], lambda d: d.resume(number, tokens, kept.get(d.name)))

    def asked(self, number: int) -> Mapping[str, AskedDrafter]:
        """The row's record of each drafter, by name."""
        return self._rows[number].asked if number in self._rows else {}

    def close(self, number: int) -> None:
        """Forget a row."""
        row = self._rows.pop(number, None)
        if row is not None:
            self._policies.pop(number).end(row)
        for drafter in (self._predicted, self._suffix, *self.drafters.values()):
            try:
                drafter.forget(number)
            except Exception as error:  # the row is gone either way, and its request must end
                _log.warning("The drafter %s failed at the end of a request: %s", drafter.name, reason(error))

    def longest_draft(self, spec: SpecConfig) -> int:
        """Tokens of the longest draft under `spec`, by the drafters it names or, if none, any."""
        names = [n for n in spec.drafters or self.drafters if n in self.drafters]
        return max((longest(self.drafters[n], spec) for n in names), default=0)

    # --- rounds

    def propose(self, rooms: Mapping[int, int], unread: Unread | None = None) -> RoundPlan | None:
        """Plan a round. rooms: by row, how many drafted tokens it may verify. A row that may verify none is named as well, because it waits
        for the round as the others do. unread: the round in front, of these rows in their order, if
        the host has not read it; rooms hold then however many of its tokens are accepted, and None is returned where it has to be read
        first: several policies, tokens that must be seen, a lookup that is chosen, a drafter that has nothing to say."""
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
        """Ask who is chosen until every choice is of a draft at hand."""
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
            draft = given.get(choice.drafter or "")
            if draft is None:
                continue
            if unread is not None and draft.drafter in row.offers:
                return None
            found[row.number] = draft._replace(
                width=min(choice.length, draft.length),
                confidences=draft.confidences if policy.looks_up else None,
            )
        return RoundPlan(drafts=found, choices=names, calls=calls)

    def look_up(self, rows: Sequence[DraftRow]) -> list[dict[str, Draft]]:
        """The drafts of drafters without a model, by row, empty ones left out. They are judged when the text has come, taken or not."""
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
        """Whether a drafter without a model could give anything for the row, which has been told of all its text."""
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
        """One draft a row, cut to what its limits allow, empty where there is none; and what was asked of a model. looks: drafts are read
        at once. Behind an unread round nobody waits for confidences."""
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
        """Return what a drafter gives, checked and cut; None where it cannot draft behind an unread round."""
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
        """Lend the target's cache to drafters that read it in this round's proposals. order: whose its rows are."""
        for drafter in self.drafters.values():
            if drafter.needs.cache:
                drafter.attach(cache, order)

    def take_up(self, plan: RoundPlan) -> None:
        """Take up a round that is read next: its models' drafts are compared with the text. Never called of a round that is dropped."""
        for number, draft in plan.drafts.items():
            row = self._rows.get(number)
            if row is None or not self._policies[number].looks_up:
                continue
            if draft.length and draft.drafter not in row.offers:
                row.waiting.append(WaitingDraft(draft, [], plan.choices[number].is_probe))

    def rests(self, rooms: Mapping[int, int]) -> bool:
        """Whether a plain round is next for all these rows, so that it need not wait for the tokens of this one."""
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
        """Tell the policies what a round over these rows took. Some may be gone or never have drafted. See `LearnedRound`."""
        for policy, rows in self._by_policy([n for n in numbers if n in self._rows]):
            choices = [plan.choices.get(row.number) for row in rows]
            calls = [call for call in plan.calls if self._policies.get(call.rows[0].number) is policy]
            policy.learn(
                LearnedRound(rows, choices, calls, len(numbers), num_tokens, seconds, ahead, is_warm)
            )

    def _by_policy(self, numbers: Iterable[int]) -> list[tuple[Policy, list[DraftRow]]]:
        """Each policy with those of the rows that follow it, in their order."""
        found: dict[Policy, list[DraftRow]] = {}
        for number in numbers:
            found.setdefault(self._policies[number], []).append(self._rows[number])
        return list(found.items())

    # --- failures

    def _each(
        self, row: DraftRow, event: Callable[[Drafter], T], drafters: Iterable[Drafter] | None = None
    ) -> dict[str, T]:
        """Tell an event to each of the row's drafters, or to these. Returns what they gave, by name. One that fails ends for the row."""
        found = {}
        for drafter in [d for d, _ in row.limits] if drafters is None else drafters:
            try:
                found[drafter.name] = event(drafter)
            except Exception as error:  # whatever a drafter does must not end a request
                self._fail(drafter, [row], error)
        return found

    def _guard(self, drafter: Drafter, rows: Sequence[DraftRow], work: Callable[[], T]) -> T | None:
        """Run `work`; if it fails, this drafter ends for these rows and says so."""
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
    """Return what ends a draft that is made token by token: a token that is less sure than p_min, or the policy."""
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
