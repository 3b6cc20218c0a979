"""What the controller remembers of one row: how fast it goes, when lookup finds something, what each model drafter is expected to gain.

Plain numbers that follow what they are told. `Promise.best` picks the depth of a draft from costs that it is given; the controller decides
whether to draft. Rates are tokens a second, values are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from mlxspec.policy.account import Account
from mlxspec.policy.constants import Constants
from mlxspec.policy.estimate import RowEstimate

# of drafts, each cut at its best place, by depth limit: tokens beyond the round's own, seconds by which verifying them makes it longer
Drafts = tuple[list[float], list[float]]


class Mood:
    """How much drafts are worth in a row's text beside the texts of rows before, by depth limit.

    All model drafters of a row share it. So a drafter that was not asked is not taken to be better than one that was asked in a hard text.
    factors: on the tokens and on the seconds of rows before.
    """

    __slots__ = ("_due", "_got", "factors")

    def __init__(self, factors: Drafts) -> None:
        self.factors: Drafts = list(factors[0]), list(factors[1])
        self._got: Drafts = [], []
        self._due: Drafts = [], []

    def follow(self, due: Drafts, got: Drafts, prior: float, fade: float) -> None:
        """A draft was worth `got` where `due` was to be expected. prior: drafts that the factors of the beginning count for."""
        if not self._due[0]:
            self._due = [prior * x for x in due[0]], [prior * x for x in due[1]]
            gains, widths = self.factors
            self._got = (
                [f * x for f, x in zip(gains, self._due[0], strict=True)],
                [f * x for f, x in zip(widths, self._due[1], strict=True)],
            )
        for which in range(len(due)):
            sums, expected, factors = self._got[which], self._due[which], self.factors[which]
            for i, (wanted, came) in enumerate(zip(due[which], got[which], strict=True)):
                expected[i] += wanted - fade * expected[i]
                sums[i] += came - fade * sums[i]
                if expected[i] > 0.0:
                    factors[i] = sums[i] / expected[i]

    def age(self, due: Drafts, most: float) -> None:
        """What is known is old: it counts as much as so many drafts at most, each of which is expected to be worth `due`."""
        if self._due[0] and self._due[0][-1] > most * due[0][-1]:
            part = most * due[0][-1] / self._due[0][-1]
            self._due = [part * x for x in self._due[0]], [part * x for x in self._due[1]]
            self._got = [part * x for x in self._got[0]], [part * x for x in self._got[1]]


class Promise:
    """What a draft by one model drafter is expected to be worth for a row: the mean of its drafts in this row and of a few drafts more,
    which are worth what its drafts were in rows before, times the row's mood.

    known: of rows before. weight: drafts that this rests on. own, count: of this row. gap, rest: tokens between probes, and since the
    drafter was asked.
    """

    __slots__ = ("_most", "_prior", "count", "gap", "known", "own", "rest", "weight")

    def __init__(self, known: Drafts, weight: float, most: float, gap: float, rest: float) -> None:
        """most: drafts that what is known counts for in this row at most."""
        self.known, self.weight, self.gap, self.rest = known, weight, gap, rest
        self._most, self._prior = most, min(weight, most)
        self.own: Drafts = [0.0] * len(known[0]), [0.0] * len(known[0])
        self.count = 0.0

    def for_row(self) -> Promise:
        """What a new row begins with."""
        return Promise(self.known, self.weight, self._most, self.gap, self.rest)

    def best(
        self, limit: int, rate: float, worth: Sequence[float], mood: Mood, drafting: tuple[float, float]
    ) -> tuple[float, int]:
        """Highest value and its depth, among depths 1 to `limit`. worth: of each token of a draft. drafting: seconds of a draft, and of
        each of its tokens."""
        best, depth, value, before, (call, step) = -1.0, 0, 0.0, 0.0, drafting
        (gains, widths), (own_gains, own_widths), (better, wider) = self.known, self.own, mood.factors
        known = self._prior / (self._prior + self.count)
        for i in range(min(limit, len(gains))):
            gained = known * better[i] * gains[i] + (1.0 - known) * own_gains[i]
            longer = known * wider[i] * widths[i] + (1.0 - known) * own_widths[i]
            value += worth[i] * (gained - before)
            before = gained
            here = value - rate * (longer + call + step * (i + 1))
            if here > best:
                best, depth = here, i + 1
        return best, depth

    def follow(self, draft: Drafts, least: float) -> None:
        """A draft was worth that. least: how far a draft moves what is known, however many there were."""
        self.count = min(self.count + 1.0, 1.0 / least)
        for own, new in zip(self.own, draft, strict=True):
            for i, value in enumerate(new):
                own[i] += (value - own[i]) / self.count

    def add_to(self, before: Promise, mood: Mood, stays: float) -> Promise:
        """`before`, which new rows begin with, and what this row has shown besides, as it would have in a text like others. stays: of what
        is known, behind each draft. The next probe is due when it was due in this row."""
        weight, count = before.weight * stays**self.count, self.count
        gains, widths = (
            [
                (weight * a + count * b) / (weight + count * f)
                for a, b, f in zip(old, own, factors, strict=True)
            ]
            for old, own, factors in zip(before.known, self.own, mood.factors, strict=True)
        )
        total = weight + count * mood.factors[0][-1]
        return Promise((gains, widths), total, self._most, self.gap, self.rest)


class Bursts:
    """Lookup finds text in bursts: how long it stays away between them, and how fast they are. All counts fade."""

    __slots__ = ("_bursts", "_found", "_is_on", "_rounds", "_seconds", "_tokens", "constants")

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self._tokens = self._rounds = constants.spell  # between bursts
        self._bursts = 0.0
        self._found, self._seconds = 0.0, 0.0  # tokens within bursts, and what they took
        self._is_on = False

    def for_next_row(self) -> Bursts:
        """What a new row begins with."""
        new = copy(self)
        new._is_on = False
        return new

    def follow(self, num_tokens: int, seconds: float, *, looked_up: bool, num_rounds: int = 1) -> None:
        """So many rounds gave so many tokens."""
        fade = (1.0 - self.constants.fade) ** num_rounds
        if looked_up:
            self._found, self._seconds = fade * self._found + num_tokens, fade * self._seconds + seconds
            self._bursts += not self._is_on
        else:
            self._bursts *= fade
            self._tokens = fade * self._tokens + num_tokens
            self._rounds = fade * self._rounds + num_rounds
        self._is_on = looked_up

    def won(self, plain: float) -> float:
        """Seconds that bursts have saved lately, below 0 lost. plain: seconds of a plain round, which gives one token."""
        return self._found * plain - self._seconds

    def horizon(self) -> float:
        """Drafts of a model that share what catching up costs: those up to the next burst, behind which it has to catch up again."""
        most = self.constants.spell
        return max(1.0, min(most, self._rounds / self._bursts)) if self._bursts else most

    def worth(self, depth: int, rate: float) -> list[float]:
        """By place in a model's draft, what a token is worth: less where lookup would have found it before long, for less than a token
        costs at `rate`."""
        if self._found <= rate * self._seconds:
            return [1.0] * depth
        stays = 1.0 - min(1.0, self._bursts / self._tokens)
        rest = rate * self._seconds / self._found
        return [rest + (1.0 - rest) * stays**i for i in range(1, depth + 1)]


class RowControl:
    """One row's part of the controller's memory. Make it with `Controller.open`."""

    __slots__ = (
        "_time",
        "_tokens",
        "account",
        "bucket",
        "estimates",
        "hope",
        "kind",
        "left_plain",
        "lookups",
        "mood",
        "probed",
        "promises",
        "rate",
        "seconds",
    )

    def __init__(
        self,
        kind: str,
        context_bucket: int,
        rate: float,
        lookups: Bursts,
        account: Account,
        hope: float,
        mood: Mood,
    ) -> None:
        self.kind, self.bucket, self.rate = kind, context_bucket, rate
        self.lookups, self.account, self.hope, self.mood = lookups, account, hope, mood
        self.estimates: dict[str, RowEstimate] = {}
        self.promises: dict[str, Promise] = {}
        self.seconds = 0.0
        self.probed = 0.0  # seconds of probes
        self.left_plain = False  # whether drafts are made or verified in this round
        self._tokens, self._time = rate, 1.0 if rate else 0.0

    def follow(self, num_tokens: int, seconds: float, fade: float, num_rounds: int = 1) -> None:
        """The going rate of so many rounds: tokens over seconds, both fading by `fade` a round."""
        fade = (1.0 - fade) ** num_rounds
        if self._time > 0 and self.seconds == 0.0:  # what came from an earlier row counts for a spell
            spell = self.lookups.constants.spell * seconds / num_rounds
            self._tokens, self._time = self._tokens * spell, self._time * spell
        self._tokens, self._time = fade * self._tokens + num_tokens, fade * self._time + seconds
        self.rate = self._tokens / self._time
