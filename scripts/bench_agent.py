#!/usr/bin/env python3
"""Measures what drafting from earlier texts gives an agent on a model: tokens a round, speeds over plain decoding, memory.

    .venv/bin/python scripts/bench_agent.py [MODEL] [--turns 30] [--chars 1000] [--rounds 3] [--context 16384]

The agent of replay_texts.py reads and rewrites six files, in two conversations with other edits. The model is made to say what the agent
says: it runs as it is, its context longer if need be, and the logits of the trace's next token are raised. So verifies cost what they
cost, and what is accepted is what the trace has. Three engines with prefix cache and policy `auto` take turns at each turn of the agent:
plain, with `ngram-simple` alone, and with `suffix` before it. With --rounds the agent edits anew; nothing is forgotten between rounds
but what earlier rounds said.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from replay_texts import SEED, agent, files  # noqa: E402

from mlxspec import SamplingParams, load  # noqa: E402
from mlxspec.engine.api import Result  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402

import mlx.core as mx  # noqa: E402  # isort: skip

WAYS = {"plain": (), "lookup": ("ngram-simple",), "suffix": ("suffix", "ngram-simple")}


class Traced:
    """A model that says `text`, prompt and answer of one row, whatever it computes."""

    def __init__(self, model: Any, max_context: int) -> None:
        self._model, self.max_context = model, max_context
        self.text: Sequence[int] = ()
        self.num_prompt = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: mx.array, rows: Any, cache: Any, **more: Any) -> Any:
        behind = cache.lengths[0] + tokens.shape[0]
        out = self._model.forward(tokens, rows, cache, **more)
        return out if out.logits is None else replace(out, logits=self._said(out.logits, behind))

    def head(self, hidden: mx.array) -> mx.array:
        """Of a prompt that the prefix cache has whole."""
        return self._said(self._model.head(hidden), self.num_prompt)

    def _said(self, logits: mx.array, behind: int) -> mx.array:
        """logits (N, V): the last ones stand behind so many tokens."""
        num = logits.shape[0]
        said = [*self.text[behind - num + 1 : behind + 1], *[0] * num][:num]
        wanted = mx.arange(logits.shape[1]) == mx.array(said)[:, None]
        return mx.where(wanted, 1e4, logits)


@dataclass(kw_only=True)
class Sums:
    """Of all turns of one way: tokens and rounds of decoding, its seconds, and those of whole turns, prompts included."""

    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    decoding: float = 0.0
    whole: float = 0.0

    def add(self, result: Result, seconds: float) -> None:
        stats = result.stats
        self.tokens, self.rounds = self.tokens + stats.num_decoded, self.rounds + stats.num_rounds
        self.accepted, self.decoding = (
            self.accepted + stats.num_accepted,
            self.decoding + stats.decode_seconds,
        )
        self.whole += seconds


def engine_of(name: str, drafters: Sequence[str], context: int) -> Engine:
    engine = load(name, draft=list(drafters) if drafters else "off")
    most = max(context, engine.max_context)
    engine._model = Traced(engine.model, most)  # type: ignore[assignment]
    engine.factory.max_context = most
    return engine


def turn(engine: Engine, prompt: list[int], answer: list[int], sums: Sums) -> None:
    model: Any = engine.model
    model.text, model.num_prompt = [*prompt, *answer], len(prompt)
    params = SamplingParams(max_tokens=len(answer), ignore_eos=True)
    started = time.perf_counter()
    result = engine.generate([prompt], params)[0]
    sums.add(result, time.perf_counter() - started)
    if list(result.tokens) != answer:
        raise SystemExit("The model did not say what the trace says.")


def conversation(
    engines: Mapping[str, Engine], turns: Sequence[tuple[list[int], list[int]]]
) -> dict[str, Sums]:
    found = {name: Sums() for name in engines}
    for i, (prompt, answer) in enumerate(turns):
        names = list(engines)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            turn(engines[name], prompt, answer, found[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--chars", type=int, default=1000, help="of each file: some 30 lines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=16384, help="tokens, where the model has fewer")
    options = parser.parse_args()
    engines = {name: engine_of(options.model, drafters, options.context) for name, drafters in WAYS.items()}
    tokenizer, rng, found = engines["plain"].tokenizer, random.Random(SEED), list[dict[str, Sums]]()
    if tokenizer is None:
        raise SystemExit(f"{options.model} has no tokenizer.")
    sources = [text[: options.chars] for text in files(rng, 6)]
    for i in range(2 * options.rounds):
        turns = [
            (tokenizer.encode(prompt, special=False), tokenizer.encode(answer, special=False))
            for prompt, answer in agent(rng, sources)[: options.turns]
        ]
        found.append(conversation(engines, turns))
        memory = engines["suffix"].texts.nbytes
        print(f"conversation {i + 1}: {len(turns)} turns, {sum(len(a) for _, a in turns)} tokens said, last prompt "
              f"{len(turns[-1][0])}; {memory / 1e6:.2f} MB of texts", flush=True)  # fmt: skip
    print(
        "\n| conversation | tokens a round: lookup | suffix | accepted: lookup | suffix | decoding over plain: lookup | suffix ",
        end="",
    )
    print("| suffix over lookup | whole turns over plain: lookup | suffix |\n" + "|---" * 10 + "|")
    for title, some in (("1", found[:1]), ("2 and later", found[1:])):
        rows = []
        for sums in some:
            plain, lookup, suffix = sums["plain"], sums["lookup"], sums["suffix"]
            drafting = (lookup, suffix)
            rows.append((
                *(s.tokens / s.rounds for s in drafting), *(s.accepted for s in drafting),
                *(plain.decoding / s.decoding for s in drafting), lookup.decoding / suffix.decoding,
                *(plain.whole / s.whole for s in drafting),
            ))  # fmt: skip
        columns = [median(column) for column in zip(*rows, strict=True)]
        print(f"| {title} | " + " | ".join(f"{x:.2f}" if x < 1000 else f"{x:.0f}" for x in columns) + " |")


if __name__ == "__main__":
    main()
