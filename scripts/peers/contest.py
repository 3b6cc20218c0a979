"""Who does what against whom: prefill, plain decoding, drafting on the workloads, one row and four. Numbers out; knows no layout of theirs.

An answer's length is where our plain decoding ends it, the same for all, so that nobody is timed on text behind an end token.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlxspec.demo import workload
from mlxspec.engine.load import load
from peers.talk import Answer, PeerError

T = TypeVar("T")
PREFILLS = (64, 512, 2048)
LONG = 256
WORKLOADS = ("edit", "explain", "continue", "ask")
DEPTH = 2  # of MTP drafts, mlx-vlm's default; all engines the same
# Each engine's methods, under the names that worker and page know them by.
METHODS: dict[str, tuple[str, ...]] = {
    "mlxspec": (
        *("plain", "fixed:draft-model", "fixed:ngram-simple", "fixed:ngram-mod", "fixed:mtp"),
        *("fixed:ngram-simple,mtp", "auto:ngram-simple,mtp"),
    ),
    "mlx-lm": ("plain",),
    "mlx-vlm": ("plain", "mtp"),
    "llama.cpp": ("plain", "draft-model", "ngram-simple", "ngram-mod", "mtp", "ngram-simple,mtp"),
}


@dataclass(kw_only=True)
class Engine:
    """A contestant. lacks: methods that it refused, and its words."""

    name: str
    peer: Any
    version: str
    lacks: dict[str, str] = field(default_factory=dict)

    def ask(self, do: str, **question: Any) -> Answer:
        answer: Answer = self.peer.ask(do, **question)
        return answer

    def close(self) -> None:
        self.peer.close()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    tokens: list[int]
    length: int  # of its answer


class Contest:
    """One dtype's rounds."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        prompts: int,
        tokens: int,
        rounds: int,
        rows: Sequence[int] = (1, 4),
        prefills: Sequence[int] = PREFILLS,
    ) -> None:
        """rows: how many decode together, one after the other; what is asked of an engine besides goes with one row."""
        self._rows, self._prefills = tuple(rows), tuple(prefills)
        self._said = f"{prompts} prompts a workload, answers of at most {tokens} tokens, {rounds} rounds."
        self._engines, self._ours, self._rounds = list(engines), engines[0], rounds
        self._left: dict[str, str] = {}  # engines that failed altogether, and their words
        self._workloads = _prompts(prompts, tokens, engines[0])

    def run(self) -> dict[str, Any]:
        found: dict[str, Any] = {"versions": {e.name: e.version for e in self._engines}}
        if 1 in self._rows:
            found["nodes"] = self._each("nodes", prompt=list(range(20, 120)))
            found["prefill"] = {str(n): self._prefill(n) for n in self._prefills}
            found["decode"] = self._decode()
        for rows in self._rows:
            found[f"rows {rows}"] = {name: self._workload(p, rows) for name, p in self._workloads.items()}
            found[f"said {rows}"] = self._said
        if 1 in self._rows:
            found["memory"] = self._each("memory")
        lacks = {f"{e.name} {method}": why for e in self._engines for method, why in e.lacks.items()}
        found["lacks"] = lacks | {f"{name} at all": why for name, why in self._left.items()}
        return found

    def _each(self, do: str, **question: Any) -> dict[str, Any]:
        found = {}
        for engine in self._engines:
            try:
                found[engine.name] = engine.ask(do, **question)
            except PeerError as error:
                found[engine.name] = {"error": str(error)}
        return found

    def _prefill(self, length: int) -> dict[str, Any]:
        prompt = [20 + 7 * i % 1900 for i in range(length)]
        taken = self._in_turn(lambda engine: engine.ask("prefill", prompt=prompt)["seconds"])
        return {
            name: {
                "seconds": statistics.median(seconds),
                "over ours": statistics.median(a / b for a, b in zip(seconds, taken["mlxspec"], strict=True)),
            }
            for name, seconds in taken.items()
        }

    def _decode(self) -> dict[str, Any]:
        prompt = [20 + 7 * i % 1900 for i in range(96)]
        answers: dict[str, list[Answer]] = {e.name: [] for e in self._engines}

        def run(engine: Engine) -> float:
            answer = engine.ask("run", prompts=[prompt], num_tokens=[LONG], method="plain")
            answers[engine.name].append(answer)
            return float(answer["seconds"] / answer["num_timed"])

        taken = self._in_turn(run)
        return {
            name: {
                "tok/s": 1 / statistics.median(seconds),
                "over ours": statistics.median(b / a for a, b in zip(seconds, taken["mlxspec"], strict=True)),
                "host busy": _share(answers[name][1:], "host_seconds"),
                "evaluating": _share(answers[name][1:], "evaluated_seconds"),
            }
            for name, seconds in taken.items()
        }

    def _in_turn(self, run: Callable[[Engine], float]) -> dict[str, list[float]]:
        """One figure a round and engine, who begins in turn; the first round only warms up. An engine that fails leaves the contest."""
        taken: dict[str, list[float]] = {}
        for turn in range(self._rounds + 1):
            for engine in _from(self._engines, turn):
                try:
                    figure = run(engine)
                except PeerError as error:
                    if engine is self._ours:
                        raise
                    self._engines.remove(engine)
                    taken.pop(engine.name, None)
                    self._left[engine.name] = str(error)
                    continue
                if turn:
                    taken.setdefault(engine.name, []).append(figure)
        return taken

    def _workload(self, prompts: Sequence[Prompt], rows: int) -> dict[str, Any]:
        """By engine and method: speeds, speed-up over the engine's own plain decoding, acceptance, whether the text is that of plain."""
        groups = [list(prompts[i : i + rows]) for i in range(0, len(prompts), rows)]
        groups = [g for g in groups if len(g) == rows]
        seen: dict[tuple[str, str], list[list[Answer]]] = {}
        for turn in range(self._rounds + 1):
            print(f"  {rows} rows, round {turn} of {self._rounds}", file=sys.stderr)
            for place, group in enumerate(groups if turn else groups[:1]):  # one warms up
                # who comes first finds caches full of somebody else's data: everybody in turn
                for engine in _from(self._engines, turn + place):
                    for method in _from(METHODS[engine.name], turn + place):
                        answer = _asked(engine, method, group)
                        if answer is not None and turn:
                            seen.setdefault((engine.name, method), [[] for _ in range(self._rounds)])[
                                turn - 1
                            ].append(answer)
        found: dict[str, Any] = {}
        for (name, method), turns in seen.items():
            if all(len(t) == len(groups) for t in turns):
                found.setdefault(name, {})[method] = _figures(turns, seen[name, "plain"])
        return found


def _from(items: Sequence[T], place: int) -> list[T]:
    """All of them, beginning with the one at `place`, counted round and round."""
    place %= len(items)
    return [*items[place:], *items[:place]]


def _asked(engine: Engine, method: str, group: Sequence[Prompt]) -> Answer | None:
    key = f"{method}, {len(group)} rows"
    if key in engine.lacks:
        return None
    try:
        return engine.ask(
            "run",
            prompts=[p.tokens for p in group],
            num_tokens=[p.length for p in group],
            method=method,
            **({} if engine.name == "llama.cpp" else {"depth": DEPTH}),
        )
    except PeerError as error:
        engine.lacks[key] = str(error)
        return None


def _figures(turns: list[list[Answer]], plain: list[list[Answer]]) -> dict[str, Any]:
    speeds, bases = [[_speed(t) for t in x] for x in (turns, plain)]
    same = sum(a["tokens"] == b["tokens"] for a, b in zip(turns[0], plain[0], strict=True))
    drafted = sum(a["num_drafted"] for t in turns for a in t)
    rounds = sum(a["num_rounds"] for a in turns[0])
    decoded = sum(len(a["tokens"][0]) - 1 for a in turns[0])
    return {
        "tok/s": statistics.median(speeds),
        "speed-up": statistics.median(a / b for a, b in zip(speeds, bases, strict=True)),
        "same text": [same, len(turns[0])],
        "acceptance": sum(a["num_accepted"] for t in turns for a in t) / drafted if drafted else None,
        "tokens a round": decoded / rounds if rounds and len(turns[0][0]["tokens"]) == 1 else None,
        "host busy": _share([a for t in turns for a in t], "host_seconds"),
        "evaluating": _share([a for t in turns for a in t], "evaluated_seconds"),
        "first tokens": [a["tokens"][0] for a in turns[0]],
    }


def _speed(answers: Sequence[Answer]) -> float:
    return float(sum(a["num_timed"] for a in answers) / sum(a["seconds"] for a in answers))


def _share(answers: Sequence[Answer], what: str) -> float | None:
    """Seconds of `what` over wall seconds; None for an engine that has no such figure."""
    if not answers or any(a[what] is None for a in answers):
        return None
    return float(sum(a[what] for a in answers) / sum(a["seconds"] for a in answers))


def _prompts(count: int, tokens: int, ours: Engine) -> dict[str, list[Prompt]]:
    tokenizer = load("demo", draft="off")
    found = {}
    for name in WORKLOADS:
        items = json.loads(workload(name).read_text(encoding="utf-8"))["items"]
        texts = [
            i["prompt_ids"] if "prompt_ids" in i else tokenizer.chat_prompt(i["messages"]) for i in items
        ]
        found[name] = [
            Prompt(tokens=list(t), length=_length(ours, list(t), tokens, tokenizer.tokenizer))
            for t in texts[:count]
        ]
    return found


def _length(ours: Engine, prompt: list[int], most: int, tokenizer: Any) -> int:
    """Tokens of plain decoding's answer before its end token, at least two and at most `most`."""
    tokens = ours.ask("run", prompts=[prompt], num_tokens=[most], method="plain")["tokens"][0]
    ends = [i for i, t in enumerate(tokens) if t in tokenizer.eos_ids]
    return max(2, ends[0] if ends else len(tokens))
