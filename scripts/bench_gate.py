#!/usr/bin/env python3
"""Has anything become slower? Compares ratios with stored ones (bench_gate.json) and exits 1 where one is worse past its tolerance.

    python scripts/bench_gate.py [--update] [--counts] [--rounds 9]

Ratios, not times: against mlx-lm in the same run (bench_core.py), so that a slow day slows both. They are stored by machine, for a fast
one is kinder to some than a slow one; on a machine that nothing is stored of, each is held against the least of all others. Counts,
which no machine can blur: graph nodes of a step, and on the demo's workloads tokens a round and MTP rounds that the host waits for with
nothing queued.
--counts leaves the timed part out; --update stores what was found. Timed ratios need an otherwise idle machine. Exit 2: nothing stored,
or nothing measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

STORED = ROOT / "scripts" / "bench_gate.json"
TOLERANCE = {
    "timed": 0.15,
    "counted": 0.02,
}  # of the stored value; two runs of an idle machine differ by up to a tenth
SMALLER_IS_BETTER = ("verify_", "nodes_", "waits_")
WORKLOADS = ("edit", "explain", "continue", "ask")
PROMPTS = 3
TOKENS = 64


def main() -> int:
    options = _options()
    found, machine = {"counted": _counted()}, ""
    if not options.counts:
        machine, found["timed"] = _timed(options.rounds)
    if options.update:
        kept = json.loads(STORED.read_text()) if STORED.is_file() else {"counted": {}, "timed": {}}
        kept["counted"] = found["counted"]
        if machine:
            kept["timed"][machine] = found["timed"]
        STORED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        print(f"stored in {STORED.relative_to(ROOT)}")
        return 0
    if not STORED.is_file():
        print("Nothing is stored to compare with: run it with --update once.", file=sys.stderr)
        return 2
    stored = json.loads(STORED.read_text())
    if machine and stored["timed"] and machine not in stored["timed"]:
        print(
            f"Of {machine} nothing is stored: timed ratios against the least of {', '.join(stored['timed'])}."
        )
    lines = compare({"counted": stored["counted"], "timed": timed_of(stored["timed"], machine)}, found)
    for line, _ in lines:
        print(line)
    bad = sum(worse for _, worse in lines)
    print(f"{bad} of {len(lines)} are worse than stored." if bad else "Nothing is worse than stored.")
    return int(bad > 0)


def timed_of(stored: dict[str, dict[str, float]], machine: str) -> dict[str, float]:
    """What timed ratios are held against on a machine."""
    if machine in stored:
        return stored[machine]
    names = {name for figures in stored.values() for name in figures}
    return {
        name: (max if name.startswith(SMALLER_IS_BETTER) else min)(
            figures[name] for figures in stored.values() if name in figures
        )
        for name in names
    }


def compare(
    stored: dict[str, dict[str, float]], found: dict[str, dict[str, float]]
) -> list[tuple[str, bool]]:
    """A line for each figure that was found, and whether it is worse past its tolerance. One of which nothing is stored is not."""
    lines = []
    for kind, figures in found.items():
        for name, value in figures.items():
            old = stored.get(kind, {}).get(name)
            if old is None:
                lines.append((f"  {name:34s} {value:8.3f}   (new)", False))
                continue
            smaller = name.startswith(SMALLER_IS_BETTER)
            change = (value - old if smaller else old - value) / old
            worse = change > TOLERANCE[kind]
            lines.append((f"{'! ' if worse else '  '}{name:34s} {value:8.3f}   stored {old:8.3f}", worse))
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


def _timed(rounds: int) -> tuple[str, dict[str, float]]:
    """The machine's name, and the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "core.json"
        command = [
            sys.executable,
            str(ROOT / "scripts" / "bench_core.py"),
            "--rounds",
            str(rounds),
            "--json",
            str(out),
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        figures = json.loads(out.read_text())
    return figures["device"]["device"], {n: value for n, value in figures.items() if n != "device"}


def _counted() -> dict[str, float]:
    from mlxspec import load
    from mlxspec.bench.workloads import read_workloads
    from mlxspec.config import SamplingParams, SpecConfig
    from mlxspec.platform import device

    device.compile_kernels()
    from peers.worker_mlxspec import nodes_of

    engine = load("demo", draft=("ngram-simple", "mtp", "draft-model"), spec=SpecConfig(policy="fixed"))
    found = {
        f"nodes_{width}": float(count)
        for width, count in nodes_of(engine.model, list(range(20, 120))).items()
    }
    params = SamplingParams(max_tokens=TOKENS)
    waited = rounds_mtp = 0
    for work in read_workloads(engine, WORKLOADS):
        for names in (("ngram-simple",), ("mtp",), ("draft-model",), ("ngram-simple", "mtp")):
            spec = SpecConfig(drafters=names, policy="fixed")
            before = engine.stats.num_synchronised
            stats = [engine.generate(list(p), params, spec=spec).stats for p in work.prompts[:PROMPTS]]
            rounds = sum(s.num_rounds for s in stats)
            found[f"tokens_a_round_{work.name}_{'+'.join(names)}"] = (
                sum(s.num_decoded for s in stats) / rounds
            )
            if names == ("mtp",):
                waited, rounds_mtp = waited + engine.stats.num_synchronised - before, rounds_mtp + rounds
    found["waits_a_round_mtp"] = waited / rounds_mtp
    return found


if __name__ == "__main__":
    sys.exit(main())
