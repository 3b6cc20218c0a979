"""Statistics: what drafting did, by request and by drafter, and the times of the engine. All are plain numbers."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

from mlxspec.engine.ratio import Ratio, ratio

if TYPE_CHECKING:
    from mlxspec.engine.probe import ProbeReport

_MOST_ROUNDS = 512
_PAIRS = 6  # parts of an answer; the right ratio is outside of the range of six honest ones once in 32 times
_SECONDS_BEFORE = 10.0  # an answer may be compared with plain rounds of this long before it began


@dataclass
class DrafterStats:
    """The work of one drafter for one request. by_position[i]: how often drafted token i was verified, and how often it was accepted.

    num_calls: how often a draft was requested of it, including drafts of which nothing was verified. seconds: the duration of these
    calls, including the other rows of the same calls. num_judged: drafts whose first token was compared with the text, verified or not;
    num_right: those whose first token was right. num_rounds, num_drafted, num_accepted: rounds with its drafts, their verified drafted
    tokens, and the accepted ones.
    """

    num_calls: int = 0
    seconds: float = 0.0
    num_judged: int = 0
    num_right: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    by_position: list[tuple[int, int]] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.num_rounds += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        while len(self.by_position) < num_drafted:
            self.by_position.append((0, 0))
        for i in range(num_drafted):
            tried, accepted = self.by_position[i]
            self.by_position[i] = (tried + 1, accepted + (i < num_accepted))

    @property
    def acceptance(self) -> float:
        """Return the acceptance rate, accepted over drafted tokens; 0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


@dataclass
class RequestStats:
    """The statistics of one request. Seconds are wall time. prefill_seconds: up to the first token, without the time of other requests
    in between. decode_seconds: after the first token; rows that decode together share it. draft_seconds and verify_seconds are parts
    of it: choosing and drafting, and target forwards. num_compiling_rounds: rounds in which MLX compiled something, which happens
    once in a process. num_cached: tokens of the prompt whose state the prefix cache had; num_read: tokens of the prompt that were
    read, fewer than the rest where the request ended before.

    num_generated: tokens of the answer, without the end token; num_end: 1 once the end token was sampled, which took a place in a round.
    num_thinking: tokens between the thinking tags, where a thinking budget, a grammar or the search for loops follows them;
    num_thinking_forced: tokens of a closing tag that were forced. num_loops: how often a looping text was closed or ended.
    num_plain_rounds: rounds that decoded this row alone as plain decoding does. other_rounds: the newest of its other rounds that
    compiled nothing and had no second row: for each the time of its end and its duration, in seconds. widest: most tokens, over all
    rows, of a round with this request. exact_width: number of tokens up to which rounds are known to have the bits of plain steps, None
    where that is not known. num_predicted: tokens of the prediction that the request contained; num_foretold: tokens of the answer that
    this prediction contained, whichever drafter drafted them.
    """

    num_prompt: int = 0
    num_cached: int = 0
    num_read: int = 0
    num_generated: int = 0
    num_end: int = 0
    num_rounds: int = 0
    num_thinking: int = 0
    num_thinking_forced: int = 0
    num_loops: int = 0
    num_predicted: int = 0
    num_foretold: int = 0
    widest: int = 0
    exact_width: int | None = None
    seed: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    num_compiling_rounds: int = 0
    num_plain_rounds: int = 0
    other_rounds: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_MOST_ROUNDS), repr=False, compare=False
    )
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        return sum(d.num_drafted for d in self.drafters.values())

    @property
    def num_accepted(self) -> int:
        return sum(d.num_accepted for d in self.drafters.values())

    @property
    def num_drafted_rounds(self) -> int:
        """Return the number of rounds that verified a draft."""
        return sum(d.num_rounds for d in self.drafters.values() if d.num_drafted)

    @property
    def num_decoded(self) -> int:
        """Return the number of tokens that rounds gave: all but the first one, the end token included."""
        return max(0, self.num_generated + self.num_end - 1)

    @property
    def is_bit_exact(self) -> bool | None:
        """Return whether each of the request's rounds had the bits of plain steps; None where that is not known."""
        return None if self.exact_width is None else self.widest <= self.exact_width

    @property
    def tokens_per_round(self) -> float:
        """Return the mean number of tokens that a round committed for this request; 1 is plain decoding."""
        return self.num_decoded / self.num_rounds if self.num_rounds else 0.0

    @property
    def decode_speed(self) -> float:
        """Return the decoding speed in tokens a second; the first token and the time before it do not count."""
        return self.num_decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def other_seconds(self) -> float:
        """Return the seconds of decoding that were neither drafting nor verifying: accepting, giving tokens to drafters, and converting
        tokens to text."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def prefill_speed(self) -> float:
        """Return the speed of reading the prompt, in tokens a second."""
        return self.num_read / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    def data(self) -> dict[str, Any]:
        """Return the statistics as plain objects, by the names of the attributes; computed figures are included, other_rounds is not."""
        computed = (
            "num_drafted_rounds",
            "num_drafted",
            "num_accepted",
            "num_decoded",
            "tokens_per_round",
            "decode_speed",
            "prefill_speed",
            "other_seconds",
            "is_bit_exact",
        )
        found = asdict(self) | {name: getattr(self, name) for name in computed}
        del found["other_rounds"]
        for name, work in self.drafters.items():
            found["drafters"][name]["acceptance"] = work.acceptance
        return found


class PlainRounds:
    """The times of the newest rounds that decoded one row as plain decoding does: without drafts, launched ahead, and compiling nothing."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, int, float]] = deque(maxlen=_MOST_ROUNDS)

    def add(self, at: float, context: int, seconds: float) -> None:
        """Add a round. at: time of its end, in seconds. context: tokens of the row. seconds: its duration."""
        self._rounds.append((at, context, seconds))

    def ratio(self, stats: RequestStats) -> Ratio:
        """Return how many times as fast an answer that was decoded alone was as its tokens in plain rounds, or a Ratio with the reason
        why that cannot be stated.

        Tokens and rounds are counted; only seconds are measured. Each of the pairs compares the mean time of a sixth of the answer's
        rounds that were not plain with that of a sixth of the plain ones. Those are its own plain rounds and the ones of the last
        seconds before it, with half to twice its context. The answer's own share of plain rounds counts on both sides.
        """
        began = stats.other_rounds[0][0] - stats.other_rounds[0][1] if stats.other_rounds else 0.0
        middle = stats.num_prompt + stats.num_generated / 2
        plain = [
            seconds
            for at, context, seconds in self._rounds
            if at >= began - _SECONDS_BEFORE and middle / 2 <= context <= middle * 2
        ]
        pairs = []
        if min(len(plain), len(stats.other_rounds)) >= _PAIRS and not (
            stats.num_compiling_rounds or stats.num_loops
        ):
            share = stats.num_plain_rounds / stats.num_rounds
            parts = zip(_parts([seconds for _, seconds in stats.other_rounds]), _parts(plain), strict=True)
            for other, own in parts:
                seconds = share * mean(own) + (1 - share) * mean(other)
                pairs.append((stats.tokens_per_round / seconds, 1 / mean(own)))
        return ratio(pairs, num_rounds=stats.num_rounds, num_drafted_rounds=stats.num_drafted_rounds)


def _parts(times: list[float]) -> list[list[float]]:
    """Return the times cut into _PAIRS consecutive parts of nearly equal length, in the order of measurement."""
    ends = [len(times) * i // _PAIRS for i in range(_PAIRS + 1)]
    return [times[start:end] for start, end in zip(ends, ends[1:], strict=False)]


@dataclass
class EngineStats:
    """The totals of an engine since it was made. probe: the report of the exactness probe, None where it has not run.

    num_synchronised: rounds for which the host waited while no later round was launched. num_unread: launched rounds that were dropped
    before they were read, because one of their rows ended. num_verified: tokens that the target ran in rounds, over all rows. plain: the
    times of plain decoding.
    """

    num_rounds: int = 0
    num_plain_rounds: int = 0
    num_synchronised: int = 0
    num_unread: int = 0
    num_verified: int = 0  # tokens the target ran in rounds, over all rows
    num_emitted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    round_seconds: float = 0.0
    probe: ProbeReport | None = None
    plain: PlainRounds = field(default_factory=PlainRounds)
