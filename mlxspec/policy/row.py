"""What the controller remembers of one row: how fast it goes, when lookup finds something, what each model drafter is expected to gain.

Plain numbers that follow what they are told; decides nothing and knows no costs. Rates are tokens a second, values are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from mlxspec.policy.account import Account
from mlxspec.policy.constants import Constants
from mlxspec.policy.estimate import RowEstimate


class Promise:
    """What one model drafter is expected to gain for a row by depth limit, learned from its drafts, each cut at its best place.

    gained, taken: tokens beyond the round's own, and seconds beyond a plain round's. count: drafts it rests on. gap, rest: tokens between
    probes, and since the drafter was asked.
    """

    __slots__ = ("count", "gained", "gap", "rest", "taken")

    def __init__(
        self,
        gained: list[float],
        taken: list[float],
        count: float = 0.0,
        gap: float = 0.0,
        rest: float = 0.0,
    ) -> None:
        self.gained, self.taken, self.count = gained, taken, count
        self.gap, self.rest = gap, rest

    def copy(self, kept: float) -> Promise:
        """For a new row, in which what is known counts as much as so many drafts. The next probe is due when it was due in this row."""
        return Promise(list(self.gained), list(self.taken), min(self.count, kept), self.gap, self.rest)

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

    def follow(self, gained: Sequence[float], taken: Sequence[float], least: float) -> None:
        """A draft was worth that. least: how far a draft moves what is known, however many there were."""
        self.count += 1.0
        part = max(least, 1.0 / (self.count + 1.0))
        for i in range(len(gained)):
            self.gained[i] += part * (gained[i] - self.gained[i])
            self.taken[i] += part * (taken[i] - self.taken[i])


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
        "probed",
        "promises",
        "rate",
        "seconds",
    )

    def __init__(
        self, kind: str, context_bucket: int, rate: float, lookups: Bursts, account: Account, hope: float
    ) -> None:
        self.kind, self.bucket, self.rate = kind, context_bucket, rate
        self.lookups, self.account, self.hope = lookups, account, hope
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

    def best(self, name: str, limit: int, rate: float) -> tuple[float, int]:
        """Highest value of a draft of up to `limit` tokens by a model drafter, and its depth, beside a going rate."""
        return self.promises[name].best(limit, rate, self.lookups.worth(limit, rate))
