"""What a token costs: seconds of a target forward by its width and context, seconds of a draft by drafter, depth and catch-up.

Starts from what was measured when the model was loaded (or kept from an earlier load) and follows what rounds really take.
Only ratios matter to whoever asks, so the whole curve moves with the machine's speed and each width besides on its own.
Plain numbers; knows no drafter, no clock and no model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from mlxspec.errors import ConfigError
from mlxspec.policy.constants import Constants

MAX_TOKENS = 384  # widths the curve knows; beyond, the last slope goes on
KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 24, 32, 48, 64, 96, 128, 192, 256, MAX_TOKENS)
# lengths that a draft is cut to, besides those that fill a plateau: each width of a round is compiled once
DEPTHS = (1, 2, 3, 4, 5, 7, 11, 16, 32, 63)
MODEL_DEPTH = 8  # the longest draft that is ever asked of a model
CONTEXTS = (1024, 4096, 16384, 65536)  # bucket b holds contexts up to CONTEXTS[b], the last bucket everything
_FORMAT = 4
_DEFAULT = Constants()
ENOUGH = 2 * _DEFAULT.trust  # rounds or drafts from which on what they taught is kept for the next process


def bucket(context: int) -> int:
    """Which context bucket a row of so many tokens is in."""
    return sum(context > edge for edge in CONTEXTS)


class Curve:
    """Seconds of one target forward by number of tokens, piecewise linear between knots.

    depths: the lengths that drafts of one row are cut to: DEPTHS, and those with which a round is as wide as a plateau.
    """

    def __init__(
        self,
        measured: Mapping[int, float],
        *,
        ends: Collection[int] = (),
        guessed: bool = False,
        met: Collection[int] = (),
        constants: Constants = _DEFAULT,
    ) -> None:
        """measured: width -> seconds, at least width 1. Other knots lie on the lines between, and on the last one beyond; with width 1
        alone every token costs as much as the first. ends: widths behind which time takes a step, the ends of plateaus; they and the
        widths behind them are knots, so that no line crosses a step. guessed: nobody has measured them, so the first measurements of a
        knot replace what it was, but for knots in `met`. Raises ConfigError for anything else."""
        if 1 not in measured or not all(
            isinstance(w, int) and w >= 1 and math.isfinite(s) and s > 0 for w, s in measured.items()
        ):
            raise ConfigError("A latency curve needs positive seconds by width, width 1 among them.")
        self._constants = constants
        self.ends = tuple(sorted(end for end in ends if 1 < end < MAX_TOKENS))
        self.depths = tuple(sorted({*DEPTHS, *(end - 1 for end in self.ends)}))
        self._knots = knots = sorted({*KNOTS, *self.ends, *(end + 1 for end in self.ends)})
        self._base = [_line(measured, knot) for knot in knots]
        self._offset = [0.0] * len(knots)  # log corrections
        self._seen = [0] * len(knots)  # rounds that corrected each
        self._is_guess = [guessed and knot not in met for knot in knots]
        self._met = frozenset(met)
        self.num_rounds = 0  # that corrected it
        self.scale = 1.0
        self.shape: list[float] = [0.0] * (MAX_TOKENS + 1)  # seconds by width before the scale; [0] is 0
        self._draw(0, len(knots) - 1)

    def seconds(self, num_tokens: int) -> float:
        """Of one forward over so many tokens."""
        if num_tokens <= MAX_TOKENS:
            return self.shape[num_tokens] * self.scale
        before = self._knots[-2]
        slope = (self.shape[-1] - self.shape[before]) / (MAX_TOKENS - before)
        return (self.shape[-1] + slope * (num_tokens - MAX_TOKENS)) * self.scale

    def refine(self, num_tokens: int, seconds: float, times: int = 1) -> float:
        """One forward took `seconds`, or the mean of so many did. Returns the clipped log-ratio to what was expected."""
        if num_tokens < 1 or num_tokens > MAX_TOKENS or not seconds > 0:
            return 0.0
        self.num_rounds += times
        c, ratio = self._constants, math.log(seconds / self.seconds(num_tokens))
        off = _clipped(ratio, c.clip)
        if num_tokens == 1 and self._is_guess[0] and self._seen[0] < c.trust:
            # nobody knows the machine's speed: all widths move with it
            self._seen[0] += 1
            self.scale *= math.exp(ratio / self._seen[0])
            return off
        part = 1.0 - (1.0 - c.fade) ** times
        self.scale *= math.exp(part * off)
        knots = self._knots
        right = next(i for i, knot in enumerate(knots) if knot >= num_tokens)
        left = right if knots[right] == num_tokens else right - 1
        for i in {left, right}:
            share = (
                1.0
                if left == right
                else abs(num_tokens - knots[left + right - i]) / (knots[right] - knots[left])
            )
            self._seen[i] += 1
            if self._is_guess[i] and self._seen[i] <= c.trust:
                step = _clipped(ratio, math.log(c.trust)) / self._seen[i]
            else:
                step = off * max(part, 0.5 / (self._seen[i] + 2))
            self._offset[i] += share * step
        self._draw(max(0, left - 1), min(len(knots) - 1, right + 1))
        return off

    def knots(self) -> dict[int, float]:
        """Width -> seconds, as known now: `Curve(curve.knots(), ends=curve.ends)` expects the same."""
        return {knot: self.seconds(knot) for knot in self._knots}

    @property
    def met(self) -> list[int]:
        """Knots that rounds have corrected."""
        return [knot for knot, seen in zip(self._knots, self._seen, strict=True) if seen or knot in self._met]

    @property
    def known(self) -> list[int]:
        """Knots that were measured often enough to be no guesses."""
        enough = (k for k, seen in zip(self._knots, self._seen, strict=True) if seen >= self._constants.trust)
        return sorted(self._met | set(enough))

    def knots_until(self, widest: int) -> dict[int, float]:
        """Those of `knots` up to so many tokens."""
        return {width: seconds for width, seconds in self.knots().items() if width <= widest}

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


def _clipped(ratio: float, most: float) -> float:
    return max(-most, min(most, ratio))


def _line(points: Mapping[int, float], width: int) -> float:
    widths = sorted(points)
    if width in points:
        return points[width]
    if len(widths) == 1:
        return points[1] * width
    above = next((i for i, w in enumerate(widths) if w > width), len(widths) - 1)
    left, right = widths[above - 1], widths[above]
    slope = (points[right] - points[left]) / (right - left)
    if width > right:
        slope = max(slope, 0.0)
    return (
        points[left] + slope * (width - left) if width <= right else points[right] + slope * (width - right)
    )


def _of_rows(one: Curve, num_rows: int, pause: float | None) -> dict[int, float]:
    """Seconds by width for several rows, from one row's.

    Without a pause tokens cost the same whosever they are, as where reading weights is what a round takes. With one a plain round of them
    is one row's and as much for each further row as a further token costs once a round is wide at all, for the step from plain to wide is
    what the pause stands for; drafted tokens add what they add to one row's round and, however many they are, that share of a plain round.
    """
    if pause is None:
        return one.knots()
    first = one.seconds(1)
    # rounds that something else delayed can leave a curve that falls; a further row never costs less than nothing
    plain = first + max(0.0, one.seconds(1 + num_rows) - one.seconds(2))
    found = {w: first + (plain - first) * (w - 1) / (num_rows - 1) for w in range(1, num_rows)}
    return found | {
        w: plain + (pause * plain if w > num_rows else 0.0) + one.seconds(1 + w - num_rows) - first
        for w in one.knots()
        if w >= num_rows
    }


_ROW = 0.25  # what a further row costs until somebody says otherwise


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """Seconds of one draft. call: however long it is; step: each drafted token; queued: each known token the drafter has to catch up on
    beyond the first, which the first step runs anyway; row: each further row that drafts along, as a share."""

    call: float = 0.0
    step: float = 0.0
    queued: float = 0.0
    row: float = _ROW

    def __post_init__(self) -> None:
        if not all(math.isfinite(v) and v >= 0 for v in (self.call, self.step, self.queued, self.row)):
            raise ConfigError("What a draft costs must be seconds, not below 0.")

    def times(self, factor: float) -> DraftCost:
        """So many times as dear."""
        return replace(self, call=factor * self.call, step=factor * self.step, queued=factor * self.queued)

    def seconds(self, depth: int, queued: int, num_rows: int = 1) -> float:
        """queued: known tokens the drafter has not run, all rows together."""
        waiting = self.queued * max(0, queued - num_rows)
        return (self.call + self.step * depth) * (1.0 + self.row * (num_rows - 1)) + waiting


class CostModel:
    """All that is known of costs, by context bucket and number of rows. What nobody measured is guessed from the nearest that was."""

    def __init__(
        self,
        verify: Mapping[int, Mapping[int, float]],
        drafts: Mapping[str, DraftCost],
        *,
        measured: Collection[int] | None = None,
        pause: float | None = None,
        several: Mapping[tuple[int, int], Curve] | None = None,
        ends: Collection[int] = (),
        constants: Constants = _DEFAULT,
    ) -> None:
        """verify: context bucket -> width -> seconds, of one row; several: curves of more rows by bucket and rows, where there are any.
        measured: widths that are no guesses, by default all of them; of others the first rounds that come replace the guess.
        pause: share of a plain round of several rows that any drafts are taken to cost beyond their tokens until it has been
        measured, None where one row's curve holds for them. ends: of plateaus, as Curve has them. Raises ConfigError where there is no
        curve."""
        if not verify:
            raise ConfigError("A cost model needs at least one latency curve.")
        self._constants = constants
        everything = (w for points in verify.values() for w in points)
        self.measured = frozenset(everything if measured is None else measured)
        guessed = measured is not None
        self._curves = {
            (b, 1): Curve(points, ends=ends, guessed=guessed, met=self.measured, constants=constants)
            for b, points in verify.items()
        }
        self.ends = tuple(sorted(ends))
        self._curves |= several or {}
        self._measured = sorted(verify)
        self.drafts, self.pause = dict(drafts), pause
        # guessed costs of drafters, and by which factors of them the first drafts differed, as logarithms
        self._guesses: dict[str, tuple[DraftCost, list[float]]] = {}

    def curve(self, context_bucket: int, num_rows: int = 1) -> Curve:
        """The curve of rounds of so many rows; asked for the first time it is that of the nearest bucket, or made from one row's."""
        rows = 1 if num_rows == 1 else next((k for k in KNOTS if k >= num_rows), MAX_TOKENS)
        found = self._curves.get((context_bucket, rows))
        if found is None:
            if rows > 1:
                one = self.curve(context_bucket)
                points, guessed = _of_rows(one, rows, self.pause), True
            else:
                nearest = min(self._measured, key=lambda b: abs(b - context_bucket))
                points, guessed = self._curves[nearest, 1].knots(), False
            found = Curve(points, ends=self.ends, guessed=guessed, constants=self._constants)
            self._curves[context_bucket, rows] = found
        return found

    @property
    def num_rounds(self) -> int:
        """That have corrected what is known."""
        return sum(curve.num_rounds for curve in self._curves.values())

    @property
    def num_drafts(self) -> int:
        """That have replaced guesses."""
        return sum(len(ratios) for _, ratios in self._guesses.values())

    @property
    def known(self) -> frozenset[int]:
        """Widths of one row's rounds, at short contexts, that were measured at load or by rounds since."""
        return self.measured | (set(self.curve(0).known) if self._measured == [0] else set())

    def draft(self, name: str) -> DraftCost:
        return self.drafts.get(name, _FREE)

    def guess_draft(self, name: str, guess: DraftCost) -> None:
        """What a drafter is taken to cost until it drafts. Its first drafts replace that."""
        self.drafts[name] = guess
        self._guesses[name] = guess, []

    def is_guess(self, name: str) -> bool:
        """Whether a drafter's cost rests on no drafts, or on too few."""
        return name in self._guesses and len(self._guesses[name][1]) < self._constants.trust

    def refine_draft(self, name: str, depth: int, queued: int, num_rows: int, seconds: float) -> None:
        """One draft took `seconds`: everything this drafter costs moves towards it. A guess becomes the median of its first drafts, so that
        one in which the machine stalled does not count."""
        known, ratios = self._guesses[name] if self.is_guess(name) else (self.draft(name), None)
        expected = known.seconds(depth, queued, num_rows)
        if expected <= 0 or not seconds > 0:
            return
        c, ratio = self._constants, math.log(seconds / expected)
        if ratios is None:
            move = 2.0 * c.fade * _clipped(ratio, c.clip)  # drafts are rarer than rounds
        else:
            ratios.append(_clipped(ratio, math.log(c.trust)))
            move = median(ratios)
        self.drafts[name] = known.times(math.exp(move))

    def as_data(self, drafts: Mapping[str, DraftCost] | None = None) -> dict[str, object]:
        """For `from_data`, plain JSON. Of several rows what rounds have taught, and no guesses. drafts: in place of its own."""
        curves = list(self._curves.items())
        return {
            "format": _FORMAT,
            "verify": {
                str(b): {str(w): s for w, s in c.knots().items()} for (b, rows), c in curves if rows == 1
            },
            "several": [
                {"bucket": b, "rows": rows, "met": c.met, "verify": {str(w): s for w, s in c.knots().items()}}
                for (b, rows), c in curves
                if rows > 1 and c.num_rounds >= ENOUGH
            ],
            "drafts": {n: vars(d) for n, d in (self.drafts if drafts is None else drafts).items()},
            "measured": sorted(self.known),
            "ends": self.ends,
        }

    @classmethod
    def from_data(cls, data: object) -> CostModel:
        """Raises ConfigError for anything `as_data` does not return."""
        try:
            if not isinstance(data, dict) or data["format"] != _FORMAT:
                raise ConfigError("These costs are of another version.")
            verify = {int(b): {int(w): float(s) for w, s in c.items()} for b, c in data["verify"].items()}
            drafts = {
                str(n): DraftCost(**{k: float(v) for k, v in d.items()}) for n, d in data["drafts"].items()
            }
            measured, ends = ([int(w) for w in data[name]] for name in ("measured", "ends"))
            several = {
                (int(part["bucket"]), int(part["rows"])): Curve(
                    {int(w): float(s) for w, s in part["verify"].items()},
                    ends=ends,
                    guessed=True,
                    met=[int(w) for w in part["met"]],
                )
                for part in data["several"]
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError("These costs cannot be read.") from error
        return cls(verify, drafts, measured=measured, several=several, ends=ends)


_FREE = DraftCost()


def read_costs(path: Path) -> CostModel | None:
    """Costs kept by `write_costs`; None where there are none that can be used: they are measured again then."""
    try:
        return CostModel.from_data(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ConfigError):
        return None


def write_costs(path: Path, costs: CostModel, drafts: Mapping[str, DraftCost] | None = None) -> None:
    """Keep costs for the next load, with `drafts` in place of their own, replacing the file as a whole. A folder that cannot be written
    to is no error."""
    beside = path.with_suffix(".new")
    try:
        beside.write_text(json.dumps(costs.as_data(drafts)), encoding="utf-8")
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
