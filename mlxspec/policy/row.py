"""What the controller remembers of one row: how fast it goes, when lookup finds something, what each model drafter promises.

Plain numbers that follow what they are told; decides nothing and knows no costs. Rates are tokens a second, values are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlxspec.policy.estimate import RowEstimate

FIRST_GAP = 8  # tokens before the first probe; the gap doubles while probes show nothing
HORIZON = 8.0  # most drafts that share what catching up costs
_WAIT = 8.0  # tokens and rounds without lookup that every row is taken to begin with
_CARRIED = 0.5  # how much of what one row knows of lookup counts for the next
_FADE = 0.95  # of what is known of lookup, a round
_KEPT = 2.0  # drafts that a new row takes what earlier rows have shown for
_PATIENCE, _MOST_PATIENCE = 16.0, 4096.0  # tokens that a drafter rests, at least and at most
_FOLLOW = 0.04  # how far one draft moves what a drafter promises
_HOPE, _LEAST_HOPE = 0.1, 0.4  # how far one row moves it, and what stays
_RATE_FOLLOW = 0.05


class Promise:
    """What one model drafter is worth to a row by depth limit, learned from its drafts, each cut at its best place.

    gained, taken: tokens beyond the round's own, and seconds beyond a plain round's. count: drafts it rests on; asked: whether this row
    has seen any. gap, rest: tokens between looks, and since the drafter was asked; spent: seconds of looks. won: seconds that its drafts
    have saved the row lately, below 0 lost. hope: how often it ended a row promising something, lately: where it never does, looks
    are allowed less.

    A drafter rests that has lost too much or, for a row alone, promises too little; what it promises and has lost returns meanwhile to what
    the row began with: catching up may be too dear for looks to show that a bad stretch of text is over. Each rest is twice as long as
    the one before, and half of it once a draft has saved time.
    """

    __slots__ = (
        "_began",
        "_patience",
        "_rests",
        "asked",
        "count",
        "gained",
        "gap",
        "hope",
        "rest",
        "spent",
        "taken",
        "won",
    )

    def __init__(
        self, gained: list[float], taken: list[float], count: float = 0.0, hope: float = 1.0
    ) -> None:
        self.gained, self.taken, self.count, self.hope = gained, taken, count, hope
        self._began = (list(gained), list(taken)) if count else None  # a mere guess is nothing to return to
        self._rests, self._patience = False, _PATIENCE
        self.asked = False
        self.gap = self.rest = (
            FIRST_GAP  # the first look is due at once: nothing is cheaper to catch up on than nothing
        )
        self.spent = self.won = 0.0

    def copy(self) -> Promise:
        """For a new row. It is looked at anew at once, where catching up is cheap, but then half as rarely as the row before came to."""
        new = Promise(list(self.gained), list(self.taken), min(self.count, _KEPT), self.hope)
        new.gap = new.rest = max(FIRST_GAP, self.gap // 2)
        return new

    def best(self, limit: int, rate: float, worth: Sequence[float]) -> tuple[float, int]:
        """Highest value and its depth, among depths 1 to `limit`. worth: of each token of a draft."""
        best, depth, value, before = -1.0, 0, 0.0, 0.0
        for i in range(min(limit, len(self.gained))):
            gained = self.gained[i]
            value += worth[i] * (gained - before)
            before = gained
            if value - rate * self.taken[i] > best:
                best, depth = value - rate * self.taken[i], i + 1
        return best, depth

    def follow(self, gained: Sequence[float], taken: Sequence[float]) -> None:
        """A draft was worth that."""
        self.count += 1.0
        self.asked = True
        part = max(_FOLLOW, 1.0 / (self.count + 1.0))
        for i in range(len(gained)):
            self.gained[i] += part * (gained[i] - self.gained[i])
            self.taken[i] += part * (taken[i] - self.taken[i])

    def let(self, *, draft: bool) -> None:
        """Whether it may draft if it is the best there is; else it rests."""
        if not draft and not self._rests:
            self._patience = min(2.0 * self._patience, _MOST_PATIENCE)
        self._rests = not draft

    def went_on(self, num_tokens: int, saved: float | None = None) -> None:
        """So many tokens have come. saved: seconds that its draft of this round has saved, None where it did not draft."""
        self.rest += num_tokens
        kept = math.exp(-num_tokens / self._patience)
        self.won *= kept
        if saved is not None:
            self.won += saved
            if saved > 0.0:
                self._patience = max(_PATIENCE, 0.5 * self._patience)
        elif self._rests and self._began is not None:
            for now, began in zip((self.gained, self.taken), self._began, strict=True):
                for i, value in enumerate(began):
                    now[i] += (1.0 - kept) * (value - now[i])

    def end(self, *, is_promising: bool) -> None:
        """The row has ended."""
        if self.asked:
            self.hope = max(_LEAST_HOPE, self.hope + _HOPE * (is_promising - self.hope))


class Bursts:
    """Lookup finds text in bursts: how long it stays away between them, and how fast they are. All counts fade."""

    __slots__ = ("_bursts", "_found", "_is_on", "_rounds", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._rounds = _WAIT  # between bursts
        self._bursts = 0.0
        self._found, self._seconds = 0.0, 0.0  # tokens within bursts, and what they took
        self._is_on = False

    def copy(self) -> Bursts:
        """For a new row."""
        new = Bursts()
        for name in ("_tokens", "_rounds", "_bursts", "_found", "_seconds"):
            setattr(new, name, _CARRIED * getattr(self, name))
        return new

    def follow(self, num_tokens: int, seconds: float, *, looked_up: bool, num_rounds: int = 1) -> None:
        """So many rounds gave so many tokens."""
        fade = _FADE**num_rounds
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
        return max(1.0, min(HORIZON, self._rounds / self._bursts)) if self._bursts else HORIZON

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
        "bucket",
        "drafting",
        "estimates",
        "is_look",
        "kind",
        "lookups",
        "promises",
        "rate",
        "risked",
        "seconds",
        "share",
    )

    def __init__(self, kind: str, context_bucket: int, rate: float, lookups: Bursts) -> None:
        self.kind, self.bucket, self.rate, self.lookups = kind, context_bucket, rate, lookups
        self.estimates: dict[str, RowEstimate] = {}
        self.promises: dict[str, Promise] = {}
        self.seconds = 0.0
        self.drafting: str | None = None  # the model drafter whose draft this round verifies
        self.is_look = False  # whether that was asked for just to look at it
        self.share = 0.0  # seconds of a plain round that are the row's
        self.risked = 0.0  # seconds beyond them that its draft and verifying it take
        self._tokens, self._time = rate, 1.0 if rate else 0.0

    def follow(self, num_tokens: int, seconds: float, num_rounds: int = 1) -> None:
        """The going rate of so many rounds: tokens over seconds, both fading."""
        fade = (1.0 - _RATE_FOLLOW) ** num_rounds
        if self._time > 0 and self.seconds == 0.0:  # what came from an earlier row counts for a dozen rounds
            dozen = 12 * seconds / num_rounds
            self._tokens, self._time = self._tokens * dozen, self._time * dozen
        self._tokens, self._time = fade * self._tokens + num_tokens, fade * self._time + seconds
        self.rate = self._tokens / self._time

    def best(self, name: str, limit: int, rate: float) -> tuple[float, int]:
        """Highest value of a draft of up to `limit` tokens by a model drafter, and its depth, beside a going rate."""
        return self.promises[name].best(limit, rate, self.lookups.worth(limit, rate))
