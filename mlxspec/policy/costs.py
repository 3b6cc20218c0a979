"""What rounds and drafts cost: seconds of a target forward by its width, rows and context; seconds of a draft by drafter and depth.

Starts from what was measured when the model was loaded (or kept from an earlier load) and follows what rounds really take. Only ratios
matter to whoever asks, so a whole curve moves with the machine's speed, and each width besides on its own. Plain numbers; knows no
drafter, no clock and no model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mlxspec.errors import ConfigError
from mlxspec.policy.acceptance import TRUST, Learned

MAX_TOKENS = 384  # widths the curve knows; beyond, the last slope goes on
KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 24, 32, 48, 64, 96, 128, 192, 256, MAX_TOKENS)
# lengths that a draft is cut to, besides those that fill a plateau: each width of a round is compiled once
DEPTHS = (1, 2, 3, 4, 5, 7, 11, 16, 32, 63)
CONTEXTS = (1024, 4096, 16384, 65536)  # bucket b holds contexts up to CONTEXTS[b], the last bucket everything
FADE = 0.05  # share of what is known of a cost that one round replaces
ENOUGH = 2 * TRUST  # rounds or drafts from which on what they taught is kept for the next process
_CLIP = 0.15  # logarithm of a ratio: no single round or draft moves known costs by more, however late it was
_ROW = 0.25  # share of a draft that each further row costs, until somebody says otherwise
_FORMAT = 5
_MOST_CURVES = 200  # in a file


def bucket(context: int) -> int:
    """Which context bucket a row of so many tokens is in."""
    return sum(context > edge for edge in CONTEXTS)


class Curve:
    """Seconds of one target forward by number of tokens, piecewise linear between knots.

    depths: the lengths that drafts of one row are cut to: DEPTHS, and those with which a round is as wide as a plateau. pause: seconds that
    a plain round takes longer where it could not run ahead of the host, as behind a round with drafts.
    """

    def __init__(
        self,
        points: Mapping[int, float],
        *,
        ends: Collection[int] = (),
        measured: Collection[int] | None = None,
    ) -> None:
        """points: width -> seconds, at least width 1. Other knots lie on the lines between, and on the last one beyond; with width 1
        alone every token costs as much as the first. ends: widths behind which time takes a step, the ends of plateaus; they and the
        widths behind them are knots, so that no line crosses a step. measured: which points are no guesses, by default all. The first
        rounds of a guessed width replace the guess. Raises ConfigError for anything else."""
        if 1 not in points or not all(
            isinstance(w, int) and w >= 1 and math.isfinite(s) and s > 0 for w, s in points.items()
        ):
            raise ConfigError("A latency curve needs positive seconds by width, width 1 among them.")
        self.ends = tuple(sorted(end for end in ends if 1 < end < MAX_TOKENS))
        self.depths = tuple(sorted({*DEPTHS, *(end - 1 for end in self.ends)}))
        self._knots = knots = sorted({*KNOTS, *self.ends, *(end + 1 for end in self.ends)})
        self._base = [_line(points, knot) for knot in knots]
        self._offset = [0.0] * len(knots)  # log corrections
        self._measured = frozenset(points if measured is None else measured)
        self._is_guess = [measured is not None and knot not in measured for knot in knots]
        self._seen = [0] * len(knots)  # rounds that corrected each
        self.num_rounds = 0  # that corrected it
        self.scale, self.pause = 1.0, 0.0
        self.shape: list[float] = [0.0] * (MAX_TOKENS + 1)  # seconds by width before the scale; [0] is 0
        self._draw(0, len(knots) - 1)

    def seconds(self, num_tokens: int) -> float:
        """Of one forward over so many tokens."""
        if num_tokens <= MAX_TOKENS:
            return self.shape[num_tokens] * self.scale
        before = self._knots[-2]
        slope = (self.shape[-1] - self.shape[before]) / (MAX_TOKENS - before)
        return (self.shape[-1] + slope * (num_tokens - MAX_TOKENS)) * self.scale

    def refine(self, num_tokens: int, seconds: float, times: int = 1) -> None:
        """One forward took `seconds`, or the mean of so many did."""
        if not 1 <= num_tokens <= MAX_TOKENS or not seconds > 0:
            return
        self.num_rounds += times
        ratio, knots = math.log(seconds / self.seconds(num_tokens)), self._knots
        if num_tokens == 1 and self._is_guess[0] and self._seen[0] < TRUST:
            self._seen[0] += 1  # nobody knows the machine's speed: all widths move with it
            self.scale *= math.exp(ratio / self._seen[0])
            return
        off, part = max(-_CLIP, min(_CLIP, ratio)), 1.0 - (1.0 - FADE) ** times
        self.scale *= math.exp(part * off)
        right = next(i for i, knot in enumerate(knots) if knot >= num_tokens)
        left = right if knots[right] == num_tokens else right - 1
        for i in {left, right}:
            far = abs(num_tokens - knots[left + right - i]) / max(1, knots[right] - knots[left])
            self._seen[i] += 1
            if self._is_guess[i] and self._seen[i] <= TRUST:
                step = max(-math.log(TRUST), min(math.log(TRUST), ratio)) / self._seen[i]
            else:
                step = off * max(part, 0.5 / (self._seen[i] + 2))
            self._offset[i] += (1.0 if left == right else far) * step
        self._draw(max(0, left - 1), min(len(knots) - 1, right + 1))

    def knots(self) -> dict[int, float]:
        """Width -> seconds, as known now: `Curve(curve.knots(), ends=curve.ends)` expects the same."""
        return {knot: self.seconds(knot) for knot in self._knots}

    def knots_until(self, widest: int) -> dict[int, float]:
        """Those of `knots` up to so many tokens."""
        return {width: seconds for width, seconds in self.knots().items() if width <= widest}

    @property
    def measured(self) -> list[int]:
        """Widths that are no guesses, or no longer."""
        known = {knot for knot, seen in zip(self._knots, self._seen, strict=True) if seen >= TRUST}
        return sorted(self._measured | known)

    def _draw(self, first: int, last: int) -> None:
        """Fill `shape` between two knots."""
        shape = self.shape
        for i in range(first, last + 1):
            right = self._knots[i]
            shape[right] = self._base[i] * math.exp(self._offset[i])
            if i > first:
                left = self._knots[i - 1]
                slope = (shape[right] - shape[left]) / (right - left)
                for width in range(left + 1, right):
                    shape[width] = shape[left] + slope * (width - left)


def _line(points: Mapping[int, float], width: int) -> float:
    """Seconds of a width on the lines through `points`."""
    if width in points:
        return points[width]
    if len(points) == 1:
        return points[1] * width
    widths = sorted(points)
    above = next((i for i, w in enumerate(widths) if w > width), len(widths) - 1)
    left, right = widths[above - 1], widths[above]
    slope = (points[right] - points[left]) / (right - left)
    return points[right] + (max(slope, 0.0) if width > right else slope) * (width - right)


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """Seconds of one draft. call: however long it is; step: each drafted token; queued: each known token the drafter has to catch up on
    beyond the first, which the first step runs anyway; row: each further row that drafts along, as a share of at most 1."""

    call: float = 0.0
    step: float = 0.0
    queued: float = 0.0
    row: float = _ROW

    def __post_init__(self) -> None:
        if not all(math.isfinite(v) and v >= 0 for v in vars(self).values()) or self.row > 1:
            raise ConfigError("What a draft costs must be seconds, not below 0, and a row's share at most 1.")

    def times(self, factor: float) -> DraftCost:
        """So many times as dear."""
        return replace(self, call=factor * self.call, step=factor * self.step, queued=factor * self.queued)

    def seconds(self, depth: int, queued: int, num_rows: int = 1) -> float:
        """queued: known tokens the drafter has not run, all rows together."""
        waiting = self.queued * max(0, queued - num_rows)
        return (self.call + self.step * depth) * (1.0 + self.row * (num_rows - 1)) + waiting


_FREE = DraftCost()


class CostModel:
    """All that is known of costs, by context bucket and number of rows; what nobody measured is guessed from the nearest that was. And
    what drafts at these costs have shown, which is kept with them: `learned`."""

    def __init__(
        self,
        verify: Mapping[int, Mapping[int, float]],
        drafts: Mapping[str, DraftCost],
        *,
        measured: Collection[int] | None = None,
        pause: float = 0.0,
        several: Mapping[tuple[int, int], Curve] | None = None,
        ends: Collection[int] = (),
        learned: Learned | None = None,
    ) -> None:
        """verify: context bucket -> width -> seconds, of one row; several: curves of more rows by bucket and rows, where there are any.
        measured, ends: as Curve has them. pause: share of a plain round of several rows that any drafts are taken to cost beyond their
        tokens until that has been measured. Raises ConfigError where there is no curve."""
        if not verify:
            raise ConfigError("A cost model needs at least one latency curve.")
        self.ends = tuple(sorted(ends))
        self._curves = {(b, 1): Curve(p, ends=ends, measured=measured) for b, p in verify.items()}
        self._curves |= several or {}
        self._buckets = sorted(verify)
        self.drafts, self.pause, self.learned = dict(drafts), pause, learned or Learned()
        # guessed costs of drafters, and by which factors of them the first drafts differed, as logarithms
        self._guesses: dict[str, tuple[DraftCost, list[float]]] = {}

    def curve(self, context_bucket: int, num_rows: int = 1) -> Curve:
        """The curve of rounds of so many rows; asked for the first time it is that of the nearest bucket, or made from one row's."""
        found = self._curves.get((context_bucket, num_rows))
        return found or self._curves.setdefault(
            (context_bucket, num_rows), self._guess(context_bucket, num_rows)
        )

    def _guess(self, context_bucket: int, num_rows: int) -> Curve:
        """A curve that nobody has measured. Several rows' round costs what it costs one row to run as many tokens. With a pause, a plain
        round of them costs one row's and as much for each further row as a further token costs a wide round; drafted tokens add what they
        add to one row's round, and the pause."""
        if num_rows == 1:
            nearest = min(self._buckets, key=lambda b: abs(b - context_bucket))
            source = self._curves[nearest, 1]
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

    @property
    def num_measured(self) -> int:
        """Rounds that have corrected what is known, and drafts that have replaced guesses."""
        drafts = sum(len(ratios) for _, ratios in self._guesses.values())
        return drafts + sum(curve.num_rounds for curve in self._curves.values())

    @property
    def measured(self) -> frozenset[int]:
        """Widths of one row's rounds, at short contexts, that were measured at load or by rounds since."""
        return frozenset(self.curve(0).measured)

    def draft(self, name: str) -> DraftCost:
        """What a drafter costs; nothing where nobody has said."""
        return self.drafts.get(name, _FREE)

    def guess_draft(self, name: str, guess: DraftCost) -> None:
        """What a drafter is taken to cost until it drafts. Its first drafts replace that."""
        self.drafts[name] = guess
        self._guesses[name] = guess, []

    def is_guess(self, name: str) -> bool:
        """Whether a drafter's cost rests on no drafts, or on too few."""
        return name in self._guesses and len(self._guesses[name][1]) < TRUST

    def refine_draft(self, name: str, depth: int, queued: int, num_rows: int, seconds: float) -> None:
        """One draft took `seconds`: everything this drafter costs moves towards it. A guess becomes the median of its first drafts, so that
        one in which the machine stalled does not count."""
        known, ratios = self._guesses[name] if self.is_guess(name) else (self.draft(name), None)
        expected = known.seconds(depth, queued, num_rows)
        if expected <= 0 or not seconds > 0:
            return
        ratio = math.log(seconds / expected)
        if ratios is None:
            move = 2.0 * FADE * max(-_CLIP, min(_CLIP, ratio))  # drafts are rarer than rounds
        else:
            ratios.append(max(-math.log(TRUST), min(math.log(TRUST), ratio)))
            move = median(ratios)
        self.drafts[name] = known.times(math.exp(move))

    def as_data(self) -> dict[str, Any]:
        """For `from_data`, plain JSON, without `learned`. Of several rows what rounds have taught; no guessed drafts."""
        kept = [
            {
                "bucket": b,
                "rows": rows,
                "measured": curve.measured,
                "seconds": {str(w): s for w, s in curve.knots().items()},
            }
            for (b, rows), curve in self._curves.items()
            if rows == 1 or curve.num_rounds >= ENOUGH
        ]
        drafts = {n: vars(d) for n, d in self.drafts.items() if not self.is_guess(n)}
        return {"format": _FORMAT, "curves": kept, "drafts": drafts, "ends": self.ends}

    @classmethod
    def from_data(cls, data: Any) -> CostModel:
        """Raises ConfigError for anything `as_data` does not return."""
        try:
            if data["format"] != _FORMAT or len(data["curves"]) > _MOST_CURVES:
                raise ConfigError("These costs are of another version.")
            ends, curves = [int(e) for e in data["ends"]], {}
            for part in data["curves"]:
                points = {int(w): float(s) for w, s in part["seconds"].items()}
                measured = [int(w) for w in part["measured"]]
                if len(points) > MAX_TOKENS or max(points.values()) > MAX_TOKENS * 1e3:
                    raise ConfigError("These costs are too large.")
                curve = Curve(points, ends=ends, measured=measured)
                curves[int(part["bucket"]), int(part["rows"])] = curve
            drafts = {
                str(n): DraftCost(**{k: float(v) for k, v in d.items()}) for n, d in data["drafts"].items()
            }
            found = cls({b: {1: 1.0} for b, rows in curves if rows == 1}, drafts, several=curves, ends=ends)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError("These costs cannot be read.") from error
        return found
