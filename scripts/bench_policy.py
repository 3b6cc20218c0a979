#!/usr/bin/env python3
"""How fast policy `auto` is beside `off`, or beside `fixed`, on prompts that no constant was tuned on, in alternating pairs.

    scripts/bench_policy [--temperatures 0,0.8] [--tokens 96] [--pairs 5] [--json FILE]           the demo model, 30 prompts
    scripts/bench_policy --model FOLDER [--tokens 32,96] [--temperatures 0] [...]                 a real model, 24 prompts
    scripts/bench_policy --draft ngram-simple,dflash --draft-model demo-dflash --beside fixed     named drafters, which always draft
    scripts/bench_policy --host                                    CPU time of the policy alone, in a plain and a drafted round, and of
                                                                   choosing a drafted token

Prompts are in bench_policy.json: for the demo model 30 questions of five kinds (code, edits, questions, lists, prose), answered up to the
model's own end; for a folder (Gemma 3 270M from scripts/real_model) 24 texts of six kinds (numbers, code, prose, JSON, copies, questions)
to go on with, for exactly so many tokens. Each prompt is answered in pairs: off and auto, then auto and off, and so on. A ratio is the
other's decoding time over auto's, of the same prompt in the same pair; 1 is equal, less is slower. Prefill is left out. No ratio is given
where two texts of a prompt differ, and the command fails.

The first answers of the process (one with auto, one with the other) pay for compiling and are given apart. Costs and acceptance rates that
mlxspec keeps on this machine are used and go on learning, as in use; --fresh begins with none. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = Path(__file__).with_suffix(".json")
HOST_ROUNDS, HOST_TURNS = 20_000, 100
WARM_UP = "what does len do?"
FEW_ACCEPTED = 0.25  # tokens a round: drafting does not pay below


@dataclass(kw_only=True)
class Cell:
    """One prompt at one temperature and length. ratios: one a pair; accepted: draft tokens that auto had accepted in a round; per_round: by
    policy, tokens of the answer for each round."""

    kind: str
    prompt: int
    temperature: float
    tokens: int
    generated: int = 0
    drafted: int = 0
    accepted: float = 0.0
    ratios: list[float] = field(default_factory=list)
    per_round: dict[str, float] = field(default_factory=dict)
    same: bool = True

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.host:
        import policy_host

        for kind in policy_host.KINDS:
            print(f"a {kind} round: {policy_host.microseconds(kind, HOST_ROUNDS):.1f} us of CPU time")
        for asked, share in policy_host.shares_of_a_step(HOST_TURNS).items():
            print(f"choosing a drafted token, {asked}: {share:.3f} of the building of a plain step")
        return 0
    with tempfile.TemporaryDirectory(prefix="mlxspec-bench-") as folder:
        if options.fresh:
            os.environ["MLXSPEC_CACHE"] = folder
        bench = Bench(options.model, options.beside, options.draft, options.draft_model)
        first = bench.first()
        cells = [
            cell
            for temperature in options.temperatures
            for tokens in options.tokens or ([96] if bench.is_demo else [32, 96])
            for cell in bench.measure(temperature, tokens, options.pairs, options.limit)
        ]
    shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in first.items())
    print(f"first answers of the process: {shown}, not counted below")
    for group in groups(cells):
        print("\n" + report(group, options.beside))
    if options.json:
        found = {"model": str(options.model or "demo"), "device": bench.device, "pairs": options.pairs}
        found |= {"first_seconds": first, "cells": [asdict(c) for c in cells]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(not all(c.same for c in cells))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_policy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model that continues text")
    parser.add_argument(
        "--draft", default="auto", help="drafters by name, in the order in which they are asked"
    )
    parser.add_argument("--draft-model", metavar="MODEL")
    parser.add_argument("--beside", choices=("off", "fixed"), default="off")
    parser.add_argument("--temperatures", type=_numbers(float), help="default 0,0.8; of a folder 0")
    parser.add_argument("--tokens", type=_numbers(int), default=None, help="default 96; of a folder 32,96")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--limit", type=int, help="the first so many prompts only")
    parser.add_argument("--fresh", action="store_true", help="begin with an empty cache folder")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--host", action="store_true", help="what the policy alone costs the host")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    if options.temperatures is None:
        options.temperatures = [0.0] if options.model else [0.0, 0.8]
    return options


def _numbers(kind: type) -> Any:
    def numbers(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return numbers


class Bench:
    """One engine over the demo model (model None) or the model of a folder."""

    def __init__(
        self, model: Path | None, beside: str = "off", draft: str = "auto", draft_model: str | None = None
    ) -> None:
        from mlxspec import load
        from mlxspec.config import EngineConfig
        from mlxspec.platform import device

        device.compile_kernels()
        self.is_demo = model is None
        self._others = ("auto", beside)
        self.device = device.report().device
        self._engine = load(
            "demo" if model is None else model,
            draft=draft if draft == "auto" else draft.split(","),
            draft_model=draft_model,
            config=EngineConfig(prefix_budget=0, past_texts=0),
        )
        self._prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))["demo" if self.is_demo else "text"]

    def first(self) -> dict[str, float]:
        """Seconds of the process's first answers."""
        return {name: self._answer(WARM_UP, name, 0.0, 32, seed=0)[0] for name in self._others}

    def measure(self, temperature: float, tokens: int, pairs: int, limit: int | None = None) -> list[Cell]:
        """All prompts, each once a pair, so that a slow minute does not meet one prompt alone."""
        prompts = self._prompts[:limit]
        cells = [
            Cell(kind=p["kind"], prompt=i, temperature=temperature, tokens=tokens)
            for i, p in enumerate(prompts)
        ]
        texts: list[list[int] | None] = [None] * len(cells)
        for turn in range(pairs):
            for i, cell in enumerate(cells):
                seconds = {}
                for name in self._others[:: (-1) ** (turn + 1)]:
                    seconds[name], text, stats = self._answer(
                        prompts[i]["text"], name, temperature, tokens, seed=i
                    )
                    texts[i] = texts[i] or text
                    cell.same &= text == texts[i]
                    cell.per_round[name] = len(text) / max(1, stats.num_rounds)
                    if name == "auto":
                        cell.generated, cell.drafted = len(text), stats.num_drafted
                        cell.accepted = stats.num_accepted / max(1, stats.num_rounds)
                cell.ratios.append(seconds[self._others[1]] / seconds["auto"])
        return cells

    def _answer(
        self, prompt: str, policy: str, temperature: float, tokens: int, *, seed: int
    ) -> tuple[float, list[int], Any]:
        """Seconds of decoding, tokens of the answer, and its statistics."""
        from mlxspec.config import SamplingParams, SpecConfig

        engine = self._engine
        given = engine.chat_prompt([{"role": "user", "content": prompt}]) if self.is_demo else prompt
        params = SamplingParams(
            max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=not self.is_demo
        )
        spec = SpecConfig() if policy == "off" else replace(engine.spec, policy=policy)
        started = time.perf_counter()
        result = engine.generate(given, params, spec=spec)
        seconds = time.perf_counter() - started - result.stats.prefill_seconds
        return seconds, list(result.tokens), result.stats


def groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one temperature and length together."""
    found: dict[tuple[float, int], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.temperature, cell.tokens), []).append(cell)
    return list(found.values())


def report(cells: Sequence[Cell], beside: str = "off") -> str:
    """A table of one group and what it comes to."""
    lines = [
        f"temperature {cells[0].temperature:g}, up to {cells[0].tokens} tokens",
        f"| prompt | tokens | drafted | accepted a round | auto over {beside}, median | least |",
        "|---|---|---|---|---|---|",
    ]
    for c in cells:
        shown = f"{c.median:.3f} | {min(c.ratios):.3f}" if c.same else "text differs | -"
        lines.append(f"| {c.kind} {c.prompt} | {c.generated} | {c.drafted} | {c.accepted:.2f} | {shown} |")
    alike = [c for c in cells if c.same]
    lines.append(f"equal texts: {len(alike)} of {len(cells)}")
    if alike:
        worst = min(alike, key=lambda c: c.median)
        means = {name: statistics.mean(c.per_round[name] for c in alike) for name in alike[0].per_round}
        lines.append("tokens a round: " + ", ".join(f"{name} {mean:.2f}" for name, mean in means.items()))
        lines.append(f"median {statistics.median(c.median for c in alike):.3f}")
        lines.append(f"worst prompt {worst.median:.3f} ({worst.kind} {worst.prompt})")
        few = [c for c in alike if c.accepted < FEW_ACCEPTED]
        if few:
            shown = f"median {statistics.median(c.median for c in few):.3f}, worst {min(c.median for c in few):.3f}"
            lines.append(
                f"{len(few)} prompts with fewer than {FEW_ACCEPTED} accepted tokens a round: {shown}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
