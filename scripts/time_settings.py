#!/usr/bin/env python3
"""Times six settings on prompts of the demo by this machine's clock, and says how far the simulated clock is off.

    scripts/time_settings --json FILE [--prompts 15] [--turns 5] [--tokens 96] [--temperature 0]     about four minutes, on an idle machine
    scripts/time_settings --from FILE                                                                 compares stored timings again

Every prompt is answered with each setting in turns, in an order that changes; a first turn is not counted. The file keeps the seconds of
each answer and the rounds of the turn in the middle. A clock is fitted to the rounds, its ratios over plain decoding are compared with the
timed ones, and the curve of simulation/machines.py that is called CPU is compared likewise. Exit 1 where the fitted clock is off by more
than 3 % over the prompts of a setting, or by more than 8 % for one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

from simulation.clock import Clock, Timed, compare, fit, read, write
from simulation.engine_clock import SETTINGS, Answer, WatchedEngine, fixed_spec
from simulation.machines import MACHINES

from mlxspec import load
from mlxspec.config import EngineConfig, SpecConfig

PROMPTS = Path(__file__).with_name("bench_policy.json")
TIMED = ("off", "mtp 1", "mtp 3", "lookup", "lookup, mtp 3", "auto")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--from", dest="stored", type=Path, metavar="FILE")
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args(arguments)
    if min(options.prompts, options.turns, options.tokens) < 1:
        parser.error("--prompts, --turns and --tokens must be at least 1")
    if options.stored is None:
        timed = take(options.prompts, options.turns, options.tokens, options.temperature)
        if options.json is not None:
            write(options.json, timed, {"device": device.report().device, "turns": options.turns})
    else:
        timed = read(options.stored)
    print(speeds(timed))
    fitted = fit(timed)
    print("\nfitted:", fitted)
    offs = compare(timed, fitted)
    for name, clock in (("fitted", fitted), ("machines.py, CPU", known(fitted.plain))):
        print(f"\n| {name} | mean, % | most, % | prompt |\n|---|---|---|---|")
        for off in compare(timed, clock):
            print(f"| {off.setting} | {100 * off.mean:+.1f} | {100 * off.most:+.1f} | {off.prompt} |")
    return int(not all(off.is_close for off in offs))


def known(plain: float) -> Clock:
    """The clock that simulations run by, at `plain` seconds a plain round."""
    machine = next(m for m in MACHINES if m.name == "CPU")
    cost = machine.drafts["mtp"]
    return Clock(plain=plain, widths=machine.widths, call=cost.call, step=cost.step, queued=cost.queued)


def speeds(timed: Sequence[Timed]) -> str:
    """A table of the settings: over off, of the best in hindsight, slowest."""
    seconds = {(t.setting, t.prompt): t.usual for t in timed}
    settings, prompts = list(dict.fromkeys(s for s, _ in seconds)), sorted({p for _, p in seconds})
    best = {p: min(seconds[s, p] for s in settings if s != "auto") for p in prompts}
    lines = ["| setting | over off | of the best | slowest of " + f"{len(prompts)} |", "|---|---|---|---|"]
    for setting in settings:
        over = [seconds["off", p] / seconds[setting, p] for p in prompts]
        hindsight = statistics.mean(best[p] / seconds[setting, p] for p in prompts)
        lines.append(f"| {setting} | {statistics.mean(over):.2f} | {hindsight:.3f} | {min(over):.2f} |")
    return "\n".join(lines)


def take(num_prompts: int, turns: int, tokens: int, temperature: float) -> list[Timed]:
    """Answers every prompt with every setting, in turns."""
    device.compile_kernels()
    engine = load("demo", draft=("ngram-simple", "mtp"), config=EngineConfig(prefix_budget=0, past_texts=0))
    watched = WatchedEngine(engine)
    every = json.loads(PROMPTS.read_text(encoding="utf-8"))["demo"]
    texts = [p["text"] for p in every[:: max(1, len(every) // num_prompts)][:num_prompts]]
    specs = {name: SpecConfig() for name in TIMED}
    for name in TIMED:
        if name == "auto":
            specs[name] = replace(engine.spec, policy="auto")
        elif (setting := SETTINGS[name]) is not None:
            specs[name] = fixed_spec(engine, *setting)
    taken: dict[tuple[str, int], list[Answer]] = {(n, i): [] for n in TIMED for i in range(len(texts))}
    for turn in range(turns + 1):
        for i, text in enumerate(texts):
            first = (turn + i) % len(TIMED)
            for name in TIMED[first:] + TIMED[:first]:
                answer = watched.answer(text, specs[name], tokens=tokens, temperature=temperature, seed=i)
                if turn:
                    taken[name, i].append(answer)
    return [
        Timed(
            setting=name,
            prompt=i,
            seconds=tuple(a.seconds for a in answers),
            rounds=tuple(sorted(answers, key=lambda a: a.seconds)[len(answers) // 2].rounds),
        )
        for (name, i), answers in taken.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
