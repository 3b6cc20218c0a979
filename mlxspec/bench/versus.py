"""Measures another server and one of ours on the same prompts, in turns, both through OpenAI's API and counted by the same tokenizer.

Each turn asks a prompt with a number in front, so that neither side finds the whole of it in its prefix cache; the first turn is not
measured. A ratio is named only where all texts are the same: other texts are other work. Knows HTTP through rival.py; knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mlxspec.bench.demo_prompts import UNIQUE, edit
from mlxspec.bench.rival import Rival, TimedAnswer
from mlxspec.bench.tasks import TASKS
from mlxspec.engine.ratio import Ratio, of_pairs
from mlxspec.version import __version__

_CHAT = "What should I see in Lisbon in two days? Answer in a few sentences."
_MISCOUNTED = 1.25  # its count over ours, or ours over its: beyond it a notice says so
_FEW = 8  # tokens that special tokens and cut words may make


class BothAnswers(NamedTuple):
    """The answers of both servers to one prompt."""

    rival: TimedAnswer
    own: TimedAnswer

    @property
    def is_same(self) -> bool:
        """Return whether both answers have the same text."""
        return self.rival.text == self.own.text

    @property
    def num_common(self) -> int:
        """Return the number of leading characters that both texts share."""
        pairs = zip(self.rival.text, self.own.text, strict=False)
        shorter = min(len(self.rival.text), len(self.own.text))
        return next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)


@dataclass(kw_only=True)
class Contest:
    """A comparison of this engine with a rival server on one prompt. A turn is the answers of both. count: counts the tokens of a text.
    turns: the measured turns. num_different: the number of turns, measured or not, whose two texts differ; common: the number of
    leading characters that the two texts of the first such turn share, None without such a turn."""

    name: str
    count: Callable[[str], int]
    turns: list[BothAnswers] = field(default_factory=list)
    num_different: int = 0
    common: int | None = None

    def add(self, turn: BothAnswers, *, is_measured: bool) -> None:
        """Add a turn's answers."""
        if not turn.is_same:
            self.num_different += 1
            self.common = turn.num_common if self.common is None else self.common
        if is_measured:
            self.turns.append(turn)

    def speed(self, answer: TimedAnswer) -> float:
        """Return tokens a second after the first piece; 0 where the answer came in one piece."""
        num = self.count(answer.text) - self.count(answer.pieces[0].text)
        return num / answer.decode_seconds if num > 0 and answer.decode_seconds > 0 else 0.0

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Return our tokens a second and the rival's, one pair for each turn."""
        return [(self.speed(turn.own), self.speed(turn.rival)) for turn in self.turns]

    @property
    def ratio(self) -> Ratio:
        """Return our speed as a multiple of the rival's."""
        return Ratio(refusal="the texts differ") if self.num_different else of_pairs(self.pairs)

    def middle(self, answers: Sequence[TimedAnswer]) -> tuple[float, float]:
        """Return the medians of tokens a second and of seconds to the first piece."""
        speeds, firsts = [self.speed(a) for a in answers], [a.first_seconds for a in answers]
        return median(speeds or [0.0]), median(firsts or [0.0])

    @property
    def miscounted(self) -> tuple[int, int] | None:
        """Return the numbers of tokens by the rival's count and by ours, for the first answer whose counts are far apart; None where
        there is none."""
        for turn in self.turns:
            said, counted = turn.rival.num_said, self.count(turn.rival.text)
            if said is None or abs(said - counted) <= _FEW:
                continue
            if max(said, counted) > _MISCOUNTED * max(1, min(said, counted)):
                return said, counted
        return None

    def data(self) -> dict[str, Any]:
        """Return the contest as plain JSON, without texts."""

        def of(answer: TimedAnswer) -> dict[str, float | int | None]:
            return {
                "tokens": self.count(answer.text),
                "tokens_said": answer.num_said,
                "first_seconds": round(answer.first_seconds, 4),
                "decode_seconds": round(answer.decode_seconds, 4),
                "tokens_per_second": round(self.speed(answer), 2),
            }

        return {
            "prompt": self.name,
            "same_text": not self.num_different,
            "turns": [{"rival": of(turn.rival), "own": of(turn.own)} for turn in self.turns],
            "ratio": {name: value for name, value in self.ratio.data().items() if name != "words"},
        }


def prompts() -> list[tuple[str, str]]:
    """Return names and texts of the default prompts: chat, code, and an edit of code."""
    code = next(task.prompt for task in TASKS if task.name == "code_python")
    return [("chat", _CHAT), ("code", code), ("edit", edit("rename result to output", UNIQUE))]


def contest(
    rival: Rival,
    own: Rival,
    asked: Sequence[tuple[str, str]],
    count: Callable[[str], int],
    *,
    max_tokens: int,
    repeat: int,
    told: Callable[[str, int, BothAnswers], None] = lambda name, turn, answers: None,
) -> list[Contest]:
    """Return the contests of all prompts: the answers of both servers in `repeat` turns, after one that is not measured. The server that
    begins alternates.

    told: called with a prompt's name, the number of the turn and its answers. Raises RivalError.
    """
    found = []
    for name, text in asked:
        contest = Contest(name=name, count=count)
        for turn in range(1 + repeat):
            messages = [{"role": "user", "content": f"Question {turn + 1}. {text}"}]
            order = (rival, own) if turn % 2 else (own, rival)
            answers = {id(side): side.answer(messages, max_tokens) for side in order}
            both = BothAnswers(answers[id(rival)], answers[id(own)])
            contest.add(both, is_measured=turn > 0)
            told(name, turn, both)
        found.append(contest)
    return found


def as_data(
    rival: Rival, own: Rival, contests: Sequence[Contest], memory: Sequence[int | None], machine: str
) -> dict[str, Any]:
    """Return the contests as plain JSON that can be given away: without texts, and for a model's folder its name alone. memory: resident
    bytes of the rival's process and of ours."""
    import mlx.core as mx

    return {
        "kind": "versus",
        "machine": machine,
        "day": date.today().isoformat(),
        "mlxspec": __version__,
        "mlx": mx.__version__,
        "rival": {"model": Path(rival.model).name, "resident_bytes": memory[0]},
        "own": {"model": Path(own.model).name, "resident_bytes": memory[1]},
        "prompts": [c.data() for c in contests],
    }
