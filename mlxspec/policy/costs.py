"""The cost model: seconds of a round by its width, rows, context and kind of sampling; of a draft by drafter, depth and kind.

Starts from guesses by bytes and layers (models/reads.py), or from what an earlier process learned, and follows what the rounds of answers
take, the host's part included. Nothing is timed for it. Plain numbers; knows no drafter, no clock and no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log
from typing import Any, NamedTuple

from mlxspec.errors import ConfigError
from mlxspec.kernels.flat import LADDER
from mlxspec.policy.acceptance import TRUST, Acceptance, checked
from mlxspec.policy.doubt import CLIP, Doubt

STALE = 64  # rounds with drafts behind one another, until plain ones tell anew how long they take, which is what accounts count in
SOON = 8  # likewise of a process that knows it from another one
FORGET = 300  # rounds with drafts, after which what a width took is guessed again
MAX_TOKENS = LADDER[-1]  # widths the curve knows; beyond, the last slope goes on
# A guess of what widths cost in plain rounds, until rounds of other widths than 1 have run
LIKELY = {1: 1.0, 2: 1.2, 4: 1.65, 8: 2.7, 17: 4.5}
CONTEXTS = (1024, 4096, 16384, 65536)  # bucket b holds contexts up to CONTEXTS[b], the last bucket everything
FADE = 0.05  # share of what is known of a cost that one round replaces
GREEDY = "greedy"  # the kind of sampling that costs least. These cost a GPU dozens of launches more, in this order:
DEARER = ("sampled", "constrained")
_GUESSED = log(TRUST)  # logarithm of a ratio: no single round or draft moves guessed costs by more
_ROW = 0.25  # share of a draft that each further row costs
_STEEP = 4.0  # a guess that is off by one width is off by as much, up to this factor, at the widths beyond
_FORMAT = 11
_MOST_CURVES, _LEAST, _MOST = 200, 1e-9, MAX_TOKENS * 1e3  # in a file: curves, and seconds of a round

Guess = Callable[[int], float]  # width -> seconds, in any unit


def bucket(context: int) -> int:
    """Return the context bucket of a row of this number of tokens."""
    return bisect_left(CONTEXTS, context)


class Curve:
    """The seconds of one round by width: a plain round's seconds, and for each width a ratio to them, learned or guessed.

    A width that no round has had, or none for FORGET rounds with drafts, has a guessed ratio, corrected by what the nearest known widths
    turned out to be. Rounds of other widths do not change the plain round's seconds, which are the unit of accounts. pause: extra
    seconds of a plain round that could not run ahead of the host, as after a round with drafts. is_timed: a plain round has been timed;
    until then the seconds have no scale. age: rounds with drafts since a plain round was timed.
    """

    def __init__(
        self,
        guess: Mapping[int, float] | Guess,
        *,
        num_rows: int = 1,
        counts: Mapping[int, float] | None = None,
    ) -> None:
        """Start from a guess. guess: width -> seconds; linear between given widths, and beyond the last with its slope. num_rows: the
        width of a plain round. counts: the number of rounds that the guess of a width counts for, 0 for widths not given; None: TRUST
        for each width of `guess`. Raises ConfigError for seconds that are not positive."""
        self.num_rows, self.pause, self.age, self._is_kept = num_rows, 0.0, 0, False
        if not callable(guess):
            counts = dict.fromkeys(guess, TRUST) if counts is None else counts
            guess = _lines(guess)
        counts = counts or {}
        self.plain, self._plain_count = guess(num_rows), counts.get(num_rows, 0.0)
        self.is_timed = self._plain_count > 0
        self._guess = [guess(max(w, num_rows)) / self.plain for w in range(MAX_TOKENS + 1)]
        self._num = 0  # rounds with drafts
        # by width: the ratio, how many rounds have taught it, and when the last one was
        self._known = {w: (self._guess[w], c, 0) for w, c in counts.items() if w > num_rows and c}
        self._draw()

    def keep(self) -> None:
        """Mark the curve as learned by another process: the first plain round replaces its seconds, and is run soon."""
        self._is_kept, self.age = True, STALE - SOON

    @property
    def is_stale(self) -> bool:
        """Return whether a plain round should be run to time it again."""
        return self.age >= STALE

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of one round of `num_tokens` tokens."""
        if num_tokens <= MAX_TOKENS:
            return self.plain * self._ratio(num_tokens)
        before, last = self._ratio(MAX_TOKENS - 1), self._ratio(MAX_TOKENS)
        return self.plain * (last + (last - before) * (num_tokens - MAX_TOKENS))

    def most(self, num_tokens: int) -> float:
        """Return a pessimistic estimate of the seconds of one round of `num_tokens` tokens. For a width that rounds have taught it is
        `seconds`. For any other width it is the larger of `seconds` and the initial guess, so fast neighbouring widths cannot lower it
        below the guess. Beyond MAX_TOKENS it is `seconds`."""
        known = num_tokens in self._known or num_tokens > MAX_TOKENS
        return (
            self.seconds(num_tokens)
            if known
            else self.plain * max(self._ratio(num_tokens), self._guess[num_tokens])
        )

    def refine(self, num_tokens: int, seconds: float, *, is_sure: bool = False) -> None:
        """Learn that one round of `num_tokens` tokens took `seconds`. A single round changes a known ratio by CLIP at most, however late
        it was, unless `is_sure`. The first rounds of a guessed width replace the guess, and the first plain round of a process
        replaces another process's. A plain round has the more weight, the longer ago the last one was timed. A slower machine is
        slower at all widths."""
        if not self.num_rows <= num_tokens <= MAX_TOKENS or not 0 < seconds < inf:
            return
        off = log(seconds / self.seconds(num_tokens))
        if num_tokens == self.num_rows:
            count = max(min(self._plain_count, TRUST), self._plain_count * (1.0 - FADE) ** self.age)
            self.plain *= exp(learned(off, count, is_sure=is_sure or not self.is_timed or self._is_kept))
            self._plain_count, self.is_timed, self._is_kept, self.age = (
                min(count + 1.0, 1.0 / FADE),
                True,
                False,
                0,
            )
            return
        self.age, self._num = self.age + 1, self._num + 1
        ratio, count, _ = self._known.get(num_tokens, (self._ratio(num_tokens), 0.0, 0))
        ratio = max(_LEAST, ratio * exp(learned(off, count, is_sure=is_sure)))
        self._known[num_tokens] = ratio, count + 1.0, self._num
        # a width that seems dear is not run, so nothing else would put it right
        self._known = {w: known for w, known in self._known.items() if self._num - known[2] < FORGET}
        self._draw()

    def _draw(self) -> None:
        """Draw the curve anew through the plain round and the known widths. A wider round never costs less: where it seems so, something
        else made the narrower one slow."""
        least, known = inf, dict[int, float]()
        for width in sorted(self._known, reverse=True):
            least = known[width] = max(1.0, min(least, self._known[width][0]))
        self._points, self._steep = [(self.num_rows, 1.0), *sorted(known.items())], 1.0
        for width, ratio in self._points:
            if self._guess[width] > 1.0:
                self._steep = min(_STEEP, max(1.0 / _STEEP, (ratio - 1.0) / (self._guess[width] - 1.0)))

    def _ratio(self, width: int) -> float:
        """Return the plain rounds that a round of this width takes: between two known widths by the guess's shape, and beyond the last
        known width by the guess's slope, scaled by how steep the curve turned out to be before."""
        if width <= self.num_rows:
            return 1.0
        points, guess = self._points, self._guess
        place = bisect_left(points, (width, inf))
        left, at_left = points[place - 1]
        if place == len(points):
            return at_left + self._steep * (guess[width] - guess[left])
        right, at_right = points[place]
        rise = guess[right] - guess[left]
        part = (guess[width] - guess[left]) / rise if rise > 0 else (width - left) / (right - left)
        return at_left + (at_right - at_left) * part

    @property
    def num_rounds(self) -> float:
        """Return the weight, in rounds, of what the curve has learned: plain rounds fade and are capped, and forgotten widths do not
        count."""
        return self._plain_count + sum(count for _, count, _ in self._known.values())

    @property
    def known(self) -> dict[int, float]:
        """Return width -> seconds for a plain round and the widths that rounds have had."""
        return {w: self.seconds(w) for w in (self.num_rows, *sorted(self._known))}

    def known_until(self, widest: int) -> dict[int, float]:
        """Return the part of `known` up to this number of tokens."""
        return {width: seconds for width, seconds in self.known.items() if width <= widest}


def learned(off: float, count: float, *, is_sure: bool) -> float:
    """Return by how much a cost changes that has learned from `count` rounds or drafts, where the new one was off by `off`; all are
    logarithms. Among the first ones a faster one counts more: whatever else a machine does makes single rounds slower, never faster."""
    if is_sure:
        return off
    if count >= TRUST:
        return max(-CLIP, min(CLIP, off)) * max(FADE, 1.0 / (count + 1.0))
    return max(-_GUESSED, off) if off < 0 else min(_GUESSED, off) / (count + 2.0)


def _lines(points: Mapping[int, float]) -> Guess:
    """Return seconds by width on the lines through `points`. Before the first point all widths cost the same; beyond the last the slope
    continues and never falls; with a single point each token costs the same. Raises ConfigError where `points` are no costs."""
    if not points or not all(
        isinstance(w, int) and w >= 1 and isfinite(s) and s > 0 for w, s in points.items()
    ):
        raise ConfigError("A latency curve needs positive seconds by width.")
    known = sorted(points.items())
    if len(known) == 1:
        known += [(2 * known[0][0], 2 * known[0][1])]
    widths = [w for w, _ in known]

    def seconds_of(width: int) -> float:
        if width <= widths[0]:
            return known[0][1]
        i = min(bisect_left(widths, width), len(known) - 1)
        (w0, s0), (w1, s1) = known[i - 1], known[i]
        slope = (s1 - s0) / (w1 - w0)
        return s0 + (max(0.0, slope) if width > w1 else slope) * (width - w0)

    return seconds_of


def likely(width: int) -> float:
    """Return a guess of what a round of this width takes, in plain rounds."""
    return _LIKELY(width)


_LIKELY = _lines(LIKELY)


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """The seconds of one draft. call: for any draft; step: for each drafted token; queued: for each known token that the drafter has to
    run before, except the first, which the first step runs anyway; row: for each further row of the same call, as a share of at most
    1."""

    call: float = 0.0
    step: float = 0.0
    queued: float = 0.0
    row: float = _ROW

    def __post_init__(self) -> None:
        if not all(0 <= v <= _MOST for v in vars(self).values()) or self.row > 1:
            raise ConfigError(
                f"What a draft costs must be seconds from 0 to {_MOST:.0f}, and a row's share at most 1."
            )

    def times(self, factor: float) -> DraftCost:
        """Return a cost that is `factor` times as high."""
        return replace(self, call=factor * self.call, step=factor * self.step, queued=factor * self.queued)

    def seconds(self, depth: int, queued: int, num_rows: int = 1) -> float:
        """Return the seconds of drafts of `depth` tokens for `num_rows` rows in one call. queued: known tokens that the drafter has not
        run, all rows together."""
        waiting = self.queued * max(0, queued - num_rows)
        return (self.call + self.step * depth) * (1.0 + self.row * (num_rows - 1)) + waiting


_FREE = DraftCost()


class DraftCall(NamedTuple):
    """One call of a model drafter for several rows of a round. queued: as in `DraftCost.seconds`; kind: of the rows' sampling."""

    name: str
    kind: str
    depth: int
    queued: int
    num_rows: int


class CostModel:
    """All known costs, by context bucket, number of rows and kind of sampling, and the acceptance rates that are kept with them. A curve
    that no round has taught is guessed from the nearest curve that rounds have taught.

    drafts: seconds, by drafter and kind of sampling. guesses: plain rounds, by drafter, used until it has drafted. acceptance: by kind
    of request and drafter. lengths: by kind, tokens of an answer. bank: plain rounds that answers have gained. judged: by drafter, how
    many drafts were compared with the text and how many of them began right. pause: until rounds have been timed, the share of a plain
    round of several rows that drafts are assumed to cost in addition to their tokens. ran: rows and widths of rounds that this process
    has run; cold: assumed extra seconds of the first round of a shape. doubt: decides which rounds count.
    """

    def __init__(
        self,
        likely: Mapping[int, float] | None = None,
        guesses: Mapping[str, DraftCost] | None = None,
        *,
        pause: float = 0.0,
    ) -> None:
        """Start without any timed round. likely: width -> plain rounds, of one row. Raises ConfigError where `likely` holds no costs."""
        self._curves = {(0, 1, GREEDY): Curve(LIKELY if likely is None else likely, counts={})}
        self.drafts: dict[tuple[str, str], DraftCost] = {}
        self._num_drafts: dict[tuple[str, str], float] = {}
        self.guesses, self.pause = dict(guesses or {}), pause
        self.acceptance: dict[tuple[str, str], Acceptance] = {}
        self.lengths: dict[str, float] = {}
        self.judged: dict[str, tuple[int, int]] = {}
        self.bank: float | None = None
        self.ran: set[tuple[int, int]] = set()
        self.doubt = Doubt()
        self._compiling = [0.0, 0.0, 0.0]  # of the last shapes

    def compiled(self, num_rows: int, width: int, seconds: float | None) -> None:
        """Note that a round of this shape has run. seconds: by how much longer than usual it took where it compiled, None where nothing
        compiled."""
        self.ran.add((num_rows, width))
        if seconds is not None:
            self._compiling[:] = [*self._compiling[1:], max(0.0, seconds)]

    @property
    def cold(self) -> float:
        """Return the assumed extra seconds of the first round of a shape: the median of the last three, because one of them may have
        been held up."""
        return sorted(self._compiling)[1]

    def know(self, curve: Mapping[int, float], drafts: Mapping[str, DraftCost], *, num_rows: int = 1) -> None:
        """Set measured costs. curve: seconds of greedy rows' rounds by width; drafts: by drafter."""
        self._curves[0, num_rows, GREEDY] = Curve(curve, num_rows=num_rows)
        for name, cost in drafts.items():
            self.drafts[name, GREEDY], self._num_drafts[name, GREEDY] = cost, TRUST

    def curve(self, context_bucket: int, num_rows: int = 1, kind: str = GREEDY) -> Curve:
        """Return the curve of rounds of `num_rows` rows. It is guessed at the first request."""
        key = (context_bucket, num_rows, kind if kind in DEARER else GREEDY)
        found = self._curves.get(key)
        if found is None:
            found = self._curves[key] = self._guess(*key)
        return found

    def _guess(self, context_bucket: int, num_rows: int, kind: str) -> Curve:
        """Return a guessed curve: the nearest curve for this number of rows that rounds have taught, if there is one. Otherwise a round
        of several rows costs what a round of one row with as many tokens costs. With a pause, a plain round of several rows costs one
        row's round and, for each further row, what a further token adds to a wide round; drafted tokens add what they add to one
        row's round, and the pause."""
        taught = [key for key, c in self._curves.items() if key[1] == num_rows and c.num_rounds]
        if not taught and num_rows > 1:
            one = self.curve(context_bucket, 1, kind)
            plain = one.plain + one.seconds(1 + num_rows) - one.seconds(2)
            more = (1.0 + self.pause) * plain - one.plain

            def seconds(width: int) -> float:
                return plain if width <= num_rows else more + one.seconds(1 + width - num_rows)

            made, source = Curve(seconds if self.pause else one.seconds, num_rows=num_rows), one
        else:
            near = min(
                taught, key=lambda key: (key[2] != kind, abs(key[0] - context_bucket)), default=(0, 1, GREEDY)
            )
            source = self._curves[near]
            made = Curve(source.seconds, num_rows=num_rows, counts={num_rows: 1.0} if taught else {})
        made.pause, made.is_timed = source.pause, source.is_timed
        return made

    def accepted(self, kind: str, drafter: str) -> Acceptance:
        """Return what is known of a drafter's acceptance, a guess where it has not drafted yet."""
        found = self.acceptance.get((kind, drafter))
        if found is None:
            found = self.acceptance[kind, drafter] = Acceptance()
        return found

    def draft(self, name: str, kind: str, plain: float) -> DraftCost:
        """Return a drafter's cost in seconds for rows of this kind: as learned from them or from greedy rows, otherwise the guess for
        plain rounds of `plain` seconds, otherwise zero."""
        found = self.drafts.get((name, kind)) or self.drafts.get((name, GREEDY))
        if found is not None:
            return found
        guess = self.guesses.get(name)
        return _FREE if guess is None else guess.times(plain)

    def is_guess(self, name: str, kind: str) -> bool:
        """Return whether `draft` uses the drafter's entry in `guesses`: there is one, and no cost has been learned for rows of this kind
        or for greedy rows. kind: of sampling, "greedy", "sampled" or "constrained"."""
        return name in self.guesses and (name, kind) not in self.drafts and (name, GREEDY) not in self.drafts

    def seconds(self, curve: Curve, width: int, calls: Sequence[DraftCall]) -> float:
        """Return the expected seconds of a round of `width` tokens and of the drafts for it."""
        return curve.seconds(width) + sum(self._drafting(call, curve.plain) for call in calls)

    def learn(
        self,
        curve: Curve,
        width: int,
        calls: Sequence[DraftCall],
        seconds: float,
        *,
        is_plain: bool,
        follows_drafts: bool,
        is_ahead: bool,
        is_warm: bool,
        num_rounds: int = 1,
    ) -> float:
        """Learn from a round of `width` tokens that took `seconds`, from drafting to reading it, and return the seconds that count.

        is_plain: no drafter was asked for it; follows_drafts: one was asked for the round before. is_ahead: it was launched before the
        previous round was read; is_warm: nothing was compiled in it. num_rounds: the number of plain rounds that `seconds` cover. A
        plain round that follows drafts cannot run ahead: its extra time is a cost of those drafts. A round that something else held up
        counts as expected (`took`).
        """
        usual = 0.0 if is_warm else self.seconds(curve, width, calls)
        self.compiled(curve.num_rows, width, None if is_warm else seconds - usual)
        if not is_warm:
            return min(seconds, usual)
        if is_plain and width == curve.num_rows and follows_drafts and not is_ahead:
            longer = max(0.0, min(seconds - curve.plain, curve.plain))
            curve.pause += 2.0 * FADE * (longer - curve.pause)
            return curve.plain + curve.pause
        if is_plain or calls or width > curve.num_rows:
            return num_rounds * self.took(curve, width, calls, seconds / num_rounds)
        return seconds

    def took(self, curve: Curve, width: int, calls: Sequence[DraftCall], seconds: float) -> float:
        """Learn that a round took `seconds`, drafting and every wait included, and return the seconds that count: the expected ones
        where something else may have held it up (doubt.py)."""
        if not curve.is_timed:
            curve.refine(width, seconds)
            return seconds
        expected, is_plain = self.seconds(curve, width, calls), width == curve.num_rows and not calls
        off, more = log(max(_LEAST, seconds) / expected), max(0.0, curve.most(width) - curve.seconds(width))
        found = self.doubt.judge(
            (curve.num_rows, width, *(c.name for c in calls)),
            off,
            log(max(_LEAST, seconds) / (expected + more)),
            is_plain=is_plain,
            is_new=curve.num_rounds < TRUST,
        )
        seconds = expected * exp(found.off)
        if not found.teaches:
            return seconds
        if calls:
            self.drafted(curve, width, calls, seconds, is_sure=found.is_sure)
        elif is_plain and found.is_sure:
            self._scale(exp(found.off))
        else:
            curve.refine(width, seconds, is_sure=found.is_sure)
        return seconds

    @property
    def is_in_doubt(self) -> bool:
        """Return whether the next rounds should be plain: recent rounds took times far from those expected, so the machine's speed may
        have changed."""
        return self.doubt.is_open

    def _scale(self, factor: float) -> None:
        """Scale all costs: the machine has become `factor` times as slow."""
        for curve in self._curves.values():
            curve.plain, curve.pause = factor * curve.plain, factor * curve.pause
        for key, cost in self.drafts.items():
            self.drafts[key] = cost.times(factor)
        self.doubt.settle()

    def drafted(
        self, curve: Curve, width: int, calls: Sequence[DraftCall], seconds: float, *, is_sure: bool = False
    ) -> None:
        """Learn that a round for which models drafted took `seconds`, drafting and every wait included. The difference from what was
        expected is shared by the drafts and the width, in proportion; where no draft was verified, it is the drafts'."""
        verifying, drafting = curve.seconds(width), sum(self._drafting(c, curve.plain) for c in calls)
        if width > curve.num_rows:
            ratio = seconds / (verifying + drafting)
            curve.refine(width, ratio * verifying, is_sure=is_sure)
        else:
            ratio = max(_LEAST, seconds - verifying) / drafting if drafting > 0 else 1.0
        for call in calls:
            self._refine(call, ratio, curve.plain, is_sure=is_sure)

    def _drafting(self, call: DraftCall, plain: float) -> float:
        return self.draft(call.name, call.kind, plain).seconds(call.depth, call.queued, call.num_rows)

    def _refine(self, call: DraftCall, ratio: float, plain: float, *, is_sure: bool) -> None:
        """Move all costs of a drafter, for rows of this kind, towards `ratio` times the expected cost of one draft."""
        key = call.name, call.kind if call.kind in DEARER else GREEDY
        count = self._num_drafts.get(key, 0.0)
        self._num_drafts[key] = count + 1.0
        known = self.draft(call.name, call.kind, plain)
        self.drafts[key] = known.times(exp(learned(log(ratio), min(count, 9.0), is_sure=is_sure)))

    @property
    def num_learned(self) -> float:
        """Return the number of rounds and drafts that the cost model has learned from."""
        return sum(self._num_drafts.values()) + sum(curve.num_rounds for curve in self._curves.values())

    def as_data(self) -> dict[str, Any]:
        """Return what rounds and drafts have taught, without guesses, as plain JSON for `learn_from`."""
        curves = [
            {"bucket": b, "rows": rows, "kind": kind, "seconds": curve.known, "pause": curve.pause}
            for (b, rows, kind), curve in self._curves.items()
            if curve.num_rounds >= TRUST
        ]
        return {
            "format": _FORMAT,
            "curves": curves,
            "drafts": [[*key, vars(cost)] for key, cost in self.drafts.items()],
            "acceptance": [[*key, table.as_data()] for key, table in self.acceptance.items()],
            "lengths": self.lengths,
            "judged": self.judged,
            "bank": self.bank,
        }

    def learn_from(self, data: Any) -> None:
        """Take over what another process learned. Raises ConfigError for anything that `as_data` does not return; nothing has changed
        then."""
        try:
            if data["format"] != _FORMAT or len(data["curves"]) > _MOST_CURVES:
                raise ConfigError("These costs are of another version.")
            found = CostModel(pause=self.pause)
            for part in data["curves"]:
                points = {int(w): checked(s, _LEAST, _MOST) for w, s in part["seconds"].items()}
                place, rows, kind = int(part["bucket"]), int(part["rows"]), str(part["kind"])
                if rows not in points or max(points) > MAX_TOKENS:
                    raise ConfigError("These costs lack a plain round.")
                first = self._curves[0, 1, GREEDY]
                curve = found._curves[place, rows, kind] = Curve(
                    _beyond(points, first.seconds), num_rows=rows, counts=dict.fromkeys(points, TRUST)
                )
                curve.pause = checked(part["pause"], 0.0, _MOST)
                curve.keep()
            for name, kind, cost in data["drafts"]:
                found.drafts[str(name), str(kind)] = DraftCost(**{k: float(v) for k, v in cost.items()})
            found.acceptance = {(str(k), str(d)): Acceptance.from_data(a) for k, d, a in data["acceptance"]}
            found.lengths = {str(k): checked(n, 0.0) for k, n in data["lengths"].items()}
            found.judged = {str(d): (int(n), min(int(n), int(r))) for d, (n, r) in data["judged"].items()}
            found.bank = None if data["bank"] is None else checked(data["bank"], 0.0)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError("These costs cannot be read.") from error
        found._num_drafts = dict.fromkeys(found.drafts, TRUST)
        found._curves = self._curves | found._curves
        own = {"guesses": self.guesses, "ran": self.ran, "_compiling": self._compiling}
        vars(self).update(vars(found) | own)


def _beyond(points: Mapping[int, float], guess: Guess) -> Guess:
    """Return a function from width to seconds. It is piecewise linear through `points`. Beyond the last point it is `guess`, scaled to meet
    that point."""
    lines, last = _lines(points), max(points)
    return lambda width: lines(width) if width <= last else lines(last) * guess(width) / guess(last)
