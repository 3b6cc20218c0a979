"""The cost model: seconds of a round by its width, rows, context and kind of sampling; of a draft by drafter, depth and kind.

Starts from what was measured when the model was loaded (or kept from an earlier load) and follows what rounds really take. Only ratios
matter to whoever asks, so a whole curve moves with the machine's speed, and each width besides on its own. Plain numbers; knows no
drafter, no clock and no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, inf, isfinite, log
from statistics import median
from typing import Any

from mlxspec.errors import ConfigError
from mlxspec.policy.acceptance import TRUST, Acceptance

MAX_TOKENS = 384  # widths the curve knows; beyond, the last slope goes on
KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 24, 32, 48, 64, 96, 128, 192, 256, MAX_TOKENS)
# lengths that a draft is cut to, besides those that fill a plateau: each width of a round is compiled once
DEPTHS = (1, 2, 3, 4, 5, 7, 11, 16, 32, 63)
CONTEXTS = (1024, 4096, 16384, 65536)  # bucket b holds contexts up to CONTEXTS[b], the last bucket everything
FADE = 0.05  # share of what is known of a cost that one round replaces
ENOUGH = 2 * TRUST  # rounds or drafts from which on what they taught is kept for the next process
_CLIP = 0.15  # logarithm of a ratio: no single round or draft moves known costs by more, however late it was
_GUESSED = log(TRUST)  # likewise for guessed costs
_ROW = 0.25  # share of a draft that each further row costs, until somebody says otherwise
GREEDY = "greedy"  # the kind of sampling measured at load. These cost a GPU dozens of launches more, in this order; the rest do not:
DEARER = ("sampled", "constrained")
_FORMAT = 8
_MOST_CURVES, _LEAST, _MOST = 200, 1e-9, MAX_TOKENS * 1e3  # in a file: curves, and seconds of a round


def bucket(context: int) -> int:
    """Which context bucket a row of so many tokens is in."""
    return bisect_left(CONTEXTS, context)


class Curve:
    """Seconds of one target forward by number of tokens: lines between known widths, of which each is moved by its own rounds.

    depths: the lengths that drafts of one row are cut to: DEPTHS, and those with which a round is as wide as a plateau. pause: seconds that
    a plain round takes longer where it could not run ahead of the host, as behind a round with drafts. num_rounds: that corrected it.
    """

    def __init__(
        self,
        points: Mapping[int, float],
        *,
        ends: Collection[int] = (),
        measured: Collection[int] | None = None,
    ) -> None:
        """points: width -> seconds, at least width 1, with which alone every token costs as much as the first. ends: widths behind which
        time takes a step, the ends of plateaus. measured: which points are no guesses, by default all. The first rounds of a guessed width
        replace the guess. Raises ConfigError for anything else."""
        if 1 not in points or not all(
            isinstance(w, int) and w >= 1 and isfinite(s) and s > 0 for w, s in points.items()
        ):
            raise ConfigError("A latency curve needs positive seconds by width, width 1 among them.")
        self.ends = tuple(sorted(end for end in ends if 1 < end < MAX_TOKENS))
        self.depths = tuple(sorted({*DEPTHS, *(end - 1 for end in self.ends)}))
        self._points = {*KNOTS, *self.ends, *(end + 1 for end in self.ends), *points}
        self._measured = set(points if measured is None else measured)
        self._seen: dict[int, int] = {}  # rounds by width
        self._seconds, self._scale = _lines(points), 1.0
        self.pause, self.num_rounds = 0.0, 0

    def seconds(self, num_tokens: int) -> float:
        """Of one forward over so many tokens."""
        if num_tokens <= MAX_TOKENS:
            return self._seconds[num_tokens] * self._scale
        before, last = self._seconds[-2:]
        return (last + (last - before) * (num_tokens - MAX_TOKENS)) * self._scale

    def refine(self, num_tokens: int, seconds: float) -> None:
        """One forward took `seconds`."""
        if not 1 <= num_tokens <= MAX_TOKENS or not 0 < seconds < inf:
            return
        ratio = log(seconds / self.seconds(num_tokens))
        seen = self._seen[num_tokens] = self._seen.get(num_tokens, 0) + 1
        self.num_rounds += 1
        is_guess = num_tokens not in self._measured
        if is_guess and num_tokens == 1:  # nobody knows the machine's speed: all widths move with it
            self._scale *= exp(ratio / seen)
        else:
            off = max(-_CLIP, min(_CLIP, ratio))
            step = off * max(FADE, 0.5 / (seen + 2))
            if is_guess:
                step = max(-_GUESSED, min(_GUESSED, ratio)) / seen
            self._scale *= exp(FADE * off)
            self._seconds[num_tokens] *= exp(step)
        if is_guess and seen >= TRUST:
            self._measured.add(num_tokens)

    def knots(self) -> dict[int, float]:
        """Width -> seconds, as known now: `Curve(curve.knots(), ends=curve.ends)` expects nearly the same."""
        return {w: self.seconds(w) for w in sorted(self._points | self._seen.keys()) if w <= MAX_TOKENS}

    def knots_until(self, widest: int) -> dict[int, float]:
        """Those of `knots` up to so many tokens."""
        return {width: seconds for width, seconds in self.knots().items() if width <= widest}

    @property
    def measured(self) -> list[int]:
        """Widths that are no guesses, or no longer."""
        return sorted(self._measured)


def _lines(points: Mapping[int, float]) -> list[float]:
    """Seconds by width on the lines through `points`, from 0 to MAX_TOKENS tokens. Behind the last one time does not fall."""
    found = [0.0] * (MAX_TOKENS + 1)
    slope = points[1]
    for left, right in pairwise([*sorted(points), MAX_TOKENS + 1]):
        if right in points:
            slope = (points[right] - points[left]) / (right - left)
        else:
            slope = max(slope, 0.0)
        for width in range(left, min(right, MAX_TOKENS + 1)):
            found[width] = points[left] + slope * (width - left)
    return found


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """Seconds of one draft. call: however long it is; step: each drafted token; queued: each known token the drafter has to catch up on
    beyond the first, which the first step runs anyway; row: each further row that drafts along, as a share of at most 1."""

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
        """So many times as dear."""
        return replace(self, call=factor * self.call, step=factor * self.step, queued=factor * self.queued)

    def seconds(self, depth: int, queued: int, num_rows: int = 1) -> float:
        """queued: known tokens the drafter has not run, all rows together."""
        waiting = self.queued * max(0, queued - num_rows)
        return (self.call + self.step * depth) * (1.0 + self.row * (num_rows - 1)) + waiting


_FREE = DraftCost()


class CostModel:
    """All that is known of costs, by context bucket, number of rows and kind of sampling; what nobody measured is guessed from the nearest
    that was, greedy sampling in the end. And how drafts at these costs fared, which is kept with them.

    drafts: by drafter. acceptance: by kind of request and drafter. judged: by drafter, how many drafts were compared with the text and
    how many began right. is_doubted: other code has measured all of this. pause: share of a plain round of several rows that any drafts are
    taken to cost beyond their tokens until that has been measured. choosing: by kind of sampling, seconds that a position takes longer than
    a greedy one, where that has been measured."""

    def __init__(
        self,
        verify: Mapping[int, Mapping[int, float]],
        drafts: Mapping[str, DraftCost],
        *,
        measured: Collection[int] | None = None,
        pause: float = 0.0,
        several: Mapping[tuple[int, int, str], Curve] | None = None,
        ends: Collection[int] = (),
        acceptance: Mapping[tuple[str, str], Acceptance] | None = None,
        judged: Mapping[str, tuple[int, int]] | None = None,
        choosing: Mapping[str, float] | None = None,
    ) -> None:
        """verify: context bucket -> width -> seconds, of one greedy row; several: other curves by bucket, rows and kind, if there are any.
        measured, ends: as Curve has them. Raises ConfigError where there is no curve."""
        if not verify:
            raise ConfigError("A cost model needs at least one latency curve.")
        self.ends = tuple(sorted(ends))
        self._curves = {(b, 1, GREEDY): Curve(p, ends=ends, measured=measured) for b, p in verify.items()}
        self._curves |= several or {}
        self._buckets = sorted(verify)
        self.drafts, self.pause, self.acceptance = dict(drafts), pause, dict(acceptance or {})
        self.judged, self.choosing = dict(judged or {}), dict(choosing or {})
        self.is_doubted = False
        # guessed costs of drafters, and by which factors of them the first drafts differed, as logarithms
        self._guesses: dict[str, tuple[DraftCost, list[float]]] = {}

    def curve(self, context_bucket: int, num_rows: int = 1, kind: str = GREEDY) -> Curve:
        """The curve of rounds of so many rows; asked for the first time it is made from the greedy one, and that from the nearest
        bucket or one row's."""
        kind = kind if kind in DEARER else GREEDY
        found = self._curves.get(key := (context_bucket, num_rows, kind))
        if found is None and kind == GREEDY:
            found = self._curves[key] = self._guess(context_bucket, num_rows)
        elif found is None:
            greedy, more = self.curve(context_bucket, num_rows), self.choosing.get(kind)
            points = {w: s + (more or 0.0) * w for w, s in greedy.knots().items()}
            measured = () if more is None else greedy.measured
            found = self._curves[key] = Curve(points, ends=self.ends, measured=measured)
            found.pause = greedy.pause
        return found

    def _guess(self, context_bucket: int, num_rows: int) -> Curve:
        """A curve that nobody has measured. Several rows' round costs what it costs one row to run as many tokens. With a pause, a plain
        round of them costs one row's and as much for each further row as a further token costs a wide round; drafted tokens add what they
        add to one row's round, and the pause."""
        if num_rows == 1:
            nearest = min(self._buckets, key=lambda b: abs(b - context_bucket))
            source = self._curves[nearest, 1, GREEDY]
            return Curve(source.knots(), ends=self.ends, measured=source.measured)
        one = self.curve(context_bucket)
        points = one.knots()
        if self.pause:
            first = one.seconds(1)
            # rounds that something else delayed can leave a curve that falls; a further row never costs less than nothing
            plain = first + max(0.0, one.seconds(1 + num_rows) - one.seconds(2))
            points = {w: first + (plain - first) * (w - 1) / (num_rows - 1) for w in range(1, num_rows + 1)}
            for w in (k for k in (*one.knots(), num_rows + 1) if k > num_rows):
                points[w] = (1.0 + self.pause) * plain + one.seconds(1 + w - num_rows) - first
        return Curve(points, ends=self.ends, measured=())

    def doubt(self) -> None:
        """Other code has measured all of this: it is taken for guesses, which measuring, rounds and drafts replace."""
        self.is_doubted = True
        self._curves = {k: Curve(c.knots(), ends=self.ends, measured=()) for k, c in self._curves.items()}
        for name, cost in self.drafts.items():
            self.guess_draft(name, cost)

    def know(self, points: Mapping[int, float], measured: Collection[int], ends: Collection[int]) -> None:
        """One greedy row's rounds at short contexts have been measured, at these widths; the other points are guesses."""
        self.ends = tuple(sorted(ends))
        self._curves[0, 1, GREEDY] = Curve(points, ends=ends, measured=measured)

    @property
    def num_measured(self) -> int:
        """Rounds that have corrected what is known, and drafts that have replaced guesses."""
        drafts = sum(len(ratios) for _, ratios in self._guesses.values())
        return drafts + sum(curve.num_rounds for curve in self._curves.values())

    @property
    def measured(self) -> frozenset[int]:
        """Widths of one row's rounds, at short contexts, that were measured at load or by rounds since."""
        return frozenset(self.curve(0).measured)

    def accepted(self, kind: str, drafter: str) -> Acceptance:
        """What is known of a drafter's acceptance, a guess where nobody has asked it."""
        found = self.acceptance.get((kind, drafter))
        if found is None:
            found = self.acceptance[kind, drafter] = Acceptance()
        return found

    def draft(self, name: str, kind: str = GREEDY) -> DraftCost:
        """What a drafter costs; what it costs greedy rows where rows of this kind have not asked it, nothing where nobody has said."""
        return self.drafts.get(f"{name} {kind}") or self.drafts.get(name, _FREE)

    def guess_draft(self, name: str, guess: DraftCost) -> None:
        """What a drafter is taken to cost until it drafts. Its first drafts replace that."""
        self.drafts[name] = guess
        self._guesses[name] = guess, []

    def know_draft(self, name: str, cost: DraftCost) -> None:
        """What a drafter costs has been measured."""
        self.drafts[name] = cost
        self._guesses.pop(name, None)

    def is_guess(self, name: str) -> bool:
        """Whether a drafter's cost rests on no drafts, or on too few."""
        return name in self._guesses and len(self._guesses[name][1]) < TRUST

    def refine_draft(
        self, name: str, depth: int, queued: int, rows: int, seconds: float, kind: str = GREEDY
    ) -> None:
        """One draft took `seconds`: everything this drafter costs rows of this kind moves towards it. A guess becomes the median of its
        first drafts, so that one in which the machine stalled does not count."""
        if kind in DEARER:
            greedy, name = self.draft(name), f"{name} {kind}"
            if name not in self.drafts and greedy is not _FREE:
                self.guess_draft(name, greedy)
        known, ratios = self._guesses[name] if self.is_guess(name) else (self.draft(name), None)
        expected = known.seconds(depth, queued, rows)
        if expected <= 0 or not seconds > 0:
            return
        ratio = log(seconds / expected)
        if ratios is None:
            move = 2.0 * FADE * max(-_CLIP, min(_CLIP, ratio))  # drafts are rarer than rounds
        else:
            ratios.append(max(-_GUESSED, min(_GUESSED, ratio)))
            move = median(ratios)
        self.drafts[name] = known.times(exp(move))

    def as_data(self) -> dict[str, Any]:
        """For `from_data`, plain JSON. Of several rows what rounds have taught; no guessed drafts."""
        curves = [
            {"bucket": b, "rows": rows, "kind": kind, "measured": curve.measured, "seconds": curve.knots()}
            for (b, rows, kind), curve in self._curves.items()
            if (rows, kind) == (1, GREEDY) or curve.num_rounds >= ENOUGH
        ]
        drafts = {n: vars(d) for n, d in self.drafts.items() if not self.is_guess(n)}
        acceptance = [[*key, table.as_data()] for key, table in self.acceptance.items()]
        return {
            "format": _FORMAT,
            "curves": curves,
            "drafts": drafts,
            "ends": self.ends,
            "acceptance": acceptance,
            "judged": self.judged,
            "choosing": self.choosing,
        }

    @classmethod
    def from_data(cls, data: Any) -> CostModel:
        """Raises ConfigError for anything that `as_data` does not return."""
        try:
            if data["format"] != _FORMAT or len(data["curves"]) > _MOST_CURVES:
                raise ConfigError("These costs are of another version.")
            ends, curves = [int(e) for e in data["ends"]], {}
            for part in data["curves"]:
                points = {int(w): float(s) for w, s in part["seconds"].items()}
                if len(points) > MAX_TOKENS or not all(_LEAST <= s <= _MOST for s in points.values()):
                    raise ConfigError("These costs are too many, too small or too large.")
                curve = Curve(points, ends=ends, measured=[int(w) for w in part["measured"]])
                curves[int(part["bucket"]), int(part["rows"]), str(part["kind"])] = curve
            drafts = {n: DraftCost(**{k: float(v) for k, v in d.items()}) for n, d in data["drafts"].items()}
            acceptance = {(str(k), str(d)): Acceptance.from_data(a) for k, d, a in data["acceptance"]}
            first = {b: {1: 1.0} for b, rows, kind in curves if (rows, kind) == (1, GREEDY)}
            judged = {str(d): (int(n), min(int(n), int(r))) for d, (n, r) in data["judged"].items()}
            made = cls(first, drafts, several=curves, ends=ends, acceptance=acceptance, judged=judged)
            made.choosing = {str(k): DraftCost(step=float(s)).step for k, s in data["choosing"].items()}
            return made
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError("These costs cannot be read.") from error
