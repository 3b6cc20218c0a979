"""Statistics: what drafting did, by request and by drafter, and the times of the engine. Plain numbers; knows no arrays."""

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
    """One drafter's work for one request. by_position[i]: how often draft token i was verified and how often it was accepted.

    num_calls: how often it was asked, also for drafts of which nothing was verified; seconds: what that took, of all rows asked together.
    num_judged: drafts whose first token was compared with the text, verified or not; num_right: those whose first token was accepted.
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
        """Accepted over drafted tokens, 0 when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


@dataclass
class RequestStats:
    """One request. Seconds are wall time: prefill up to the first token, without what others had of that time; decode behind it, which
    rows decoding together share, of which draft (choosing and drafting) and verify (target forwards) are parts. num_compiling_rounds:
    those in which MLX compiled something, once in a process. num_cached: tokens of the prompt that the prefix store had, so that they were
    not read; num_read: those that were read, fewer than the rest where a request ended before.

    num_generated leaves out the end token; num_end is 1 once that was sampled, for a round had to find it. num_thinking: tokens between the
    thinking tags, where a thinking budget or a grammar watches them, or they looped; num_thinking_forced: tokens of a closing tag that were
    forced. num_loops: how often a text that looped was closed or ended.
    num_plain_rounds: rounds that decoded it alone as plain decoding does; other_rounds: the newest of its other rounds that compiled
    nothing and had no second row, when each ended and how long it took, in seconds.
    widest: tokens of the widest round that it took part in, of all rows; exact_width: up to how many a round is known to have the bits of
    plain steps, None where that is not known.
    num_predicted: tokens of the prediction that the request brought along; num_foretold: tokens of the answer that stand in it, whoever
    drafted them.
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
        """Rounds that verified a draft."""
        return sum(d.num_rounds for d in self.drafters.values() if d.num_drafted)

    @property
    def num_decoded(self) -> int:
        """Tokens that rounds gave: all but the first, the end token included."""
        return max(0, self.num_generated + self.num_end - 1)

    @property
    def is_bit_exact(self) -> bool | None:
        """Whether each of its rounds had the bits of plain steps; None where that is not known."""
        return None if self.exact_width is None else self.widest <= self.exact_width

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens a target forward gave behind the first token; 1 is plain decoding."""
        return self.num_decoded / self.num_rounds if self.num_rounds else 0.0

    @property
    def decode_speed(self) -> float:
        """Tokens a second behind the first token."""
        return self.num_decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def other_seconds(self) -> float:
        """Seconds of decoding for accepting, telling drafters, and text."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def prefill_speed(self) -> float:
        """Tokens of the prompt read a second."""
        return self.num_read / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    def data(self) -> dict[str, Any]:
        """All of it as plain objects, figures that are computed included; the names are those of the attributes."""
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
    """Times of the newest rounds that decoded one row as plain decoding does: without drafts, launched ahead, and compiling nothing."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, int, float]] = deque(maxlen=_MOST_ROUNDS)

    def add(self, at: float, context: int, seconds: float) -> None:
        """Add a round that ended at a time in seconds, of a row with a number of tokens of context."""
        self._rounds.append((at, context, seconds))

    def ratio(self, stats: RequestStats) -> Ratio:
        """Return how much faster an answer that was decoded alone was than its tokens in plain rounds, or why that cannot be said.

        Its tokens and rounds are counted; only seconds are measured. A pair is the mean time of a sixth of its rounds that were not plain,
        beside that of a sixth of the plain ones, its own and those of the last seconds before it, with half to twice its context. A plain
        round of its own counts as one on both sides.
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
    """Return the times in _PAIRS parts, each as it was measured, one behind the other."""
    ends = [len(times) * i // _PAIRS for i in range(_PAIRS + 1)]
    return [times[start:end] for start, end in zip(ends, ends[1:], strict=False)]


@dataclass
class EngineStats:
    """Totals since the engine was made. probe: what the exactness probe found, None where it has not run.

    num_synchronised: rounds for which the host waited while nothing else was queued; for the others the next one was on its way.
    num_unread: rounds on their way that were dropped, since a row that left had a part in them. plain: what plain decoding takes, as far
    as rounds have shown.
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
