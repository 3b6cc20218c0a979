#!/usr/bin/env python3
"""What it brings to queue a round with MTP drafts before the one before it has been read: tokens a second with and without, side by side.

    python scripts/bench_overlap.py [--rounds 7] [--tokens 128] [--rows 1] [--depth 3] [--context 0]

One engine, the demo model's workloads, prefix store off; the two ways take turns, medians of each workload's ratio. Plain decoding beside
them. Texts must be equal, or the command fails. Synchronised: rounds for which the host waited with nothing queued behind them. Needs an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from mlxspec import load
from mlxspec.bench.workloads import read_workloads
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.platform import device

WORKLOADS = ("edit", "explain", "continue", "ask")


def main() -> int:
    options = _options()
    device.compile_kernels()
    engine = load(
        "demo", draft=("mtp",), spec=SpecConfig(policy="fixed"), config=EngineConfig(prefix_budget=0)
    )
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    drafted = SpecConfig(drafters=("mtp",), policy="fixed", n_max=options.depth)
    ways = {"plain": (SpecConfig(), True), "waiting": (drafted, False), "overlapped": (drafted, True)}
    print(
        f"{'workload':10} {'plain':>7} {'waiting':>8} {'overlapped':>10}  ratio  tokens/round  synchronised"
    )
    ratios = []
    for work in read_workloads(engine, WORKLOADS):
        prompts = [list(p) for p in (work.prompts * options.rows)[: options.rows]]
        prompts = [(p * (options.context // len(p) + 1))[-max(options.context, len(p)) :] for p in prompts]
        found: dict[str, list[float]] = {way: [] for way in ways}
        texts, counts = set(), (0, 0, 0.0)
        for turn in range(options.rounds + 2):
            for way, (spec, overlaps) in ways.items():
                engine._pipeline._overlaps = overlaps
                speed, text, counted = _run(engine, prompts, params, spec)
                texts.add(text)
                counts = counted if way == "overlapped" else counts
                if turn > 1:  # the first ones compile
                    found[way].append(speed)
        if len(texts) > 1:
            print(f"{work.name:10} texts differ, so there is nothing to compare")
            continue
        pairs = zip(found["overlapped"], found["waiting"], strict=True)
        ratios.append(statistics.median(a / b for a, b in pairs))
        speeds = {way: statistics.median(taken) for way, taken in found.items()}
        print(
            f"{work.name:10} {speeds['plain']:7.0f} {speeds['waiting']:8.0f} {speeds['overlapped']:10.0f}  {ratios[-1]:5.2f}"
            f"  {counts[2]:12.2f}  {counts[1]} of {counts[0]}"
        )
    if ratios:
        print(f"overlapped / waiting: {statistics.geometric_mean(ratios):.2f}")
    return 0 if len(ratios) == len(WORKLOADS) else 1


def _run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, spec: SpecConfig
) -> tuple[float, tuple[tuple[int, ...], ...], tuple[int, int, float]]:
    """Tokens a second of decoding, the texts, and rounds, synchronised ones, tokens a round and row."""
    stats = engine.stats
    before = stats.num_rounds, stats.num_synchronised, stats.round_seconds, stats.num_emitted
    results = engine.generate(prompts, params, spec=spec)
    rounds, waits = stats.num_rounds - before[0], stats.num_synchronised - before[1]
    seconds, tokens = stats.round_seconds - before[2], stats.num_emitted - before[3]
    return tokens / seconds, tuple(r.tokens for r in results), (rounds, waits, tokens / rounds / len(prompts))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--context", type=int, default=0, help="repeat prompts up to so many tokens")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
