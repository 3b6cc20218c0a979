#!/usr/bin/env python3
"""Random requests to tiny random models, plain and drafted: is the text the same? Counts, not timings.

    .venv/bin/python scripts/fuzz_text.py [--requests 3000] [--first 0] [--forms float32 bfloat16 4bit ...] [--families hybrid ...]
        [--ranks 2]

Each case mixes a family, a dtype or quantization, drafters, a policy, rows, samplers, constraints and turns
(tests/engine/random_requests.py). A text may differ only from a place where plain decoding's two best tokens are closer than rounding; such
flips are counted, by form. A case that differs otherwise is printed with its number, and the exit code is 1; `--first NUMBER --requests 1`
runs it again. With --ranks the drafted model is divided among so many local processes, and plain decoding is one process's
(tests/engine/rank_requests.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import families, tiny_models  # noqa: E402
from tests.engine import equality, rank_processes, rank_requests  # noqa: E402
from tests.engine.random_requests import case, play  # noqa: E402

COLUMNS = ("requests", "tokens", "drafted", "accepted", "cached", "cancelled", "not compared")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="at least so many are run")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--forms", nargs="+", choices=list(tiny_models.FORMS), default=list(tiny_models.FORMS)
    )
    parser.add_argument("--families", nargs="+", choices=families.NAMES, default=families.NAMES)
    parser.add_argument("--ranks", type=int, default=1, help="processes that run the drafted model together")
    options = parser.parse_args()
    if options.ranks > 1:
        return over_ranks(options)
    counts = {form: Counter[str]() for form in options.forms}
    number, failed = options.first, 0
    while sum(c["requests"] for c in counts.values()) < options.requests:
        made = case(number, form=options.forms, family=options.families)
        num_excused = len(equality.excused)
        try:
            counts[made.form] += play(made)
        except AssertionError as error:
            failed += 1
            print(f"{made}: {error}", file=sys.stderr, flush=True)
            counts[made.form]["requests"] += 1
        counts[made.form]["flips"] += len(equality.excused) - num_excused
        number += 1
    print(f"cases {options.first} to {number - 1}")
    print("| form |", " | ".join(COLUMNS), "| flips | per 1,000 tokens |")
    print("| --- |", " | ".join("---" for _ in COLUMNS), "| --- | --- |")
    for form, found in counts.items():
        share = 1000 * found["flips"] / max(1, found["tokens"])
        print(
            f"| {form} |", " | ".join(str(found[c]) for c in COLUMNS), f"| {found['flips']} | {share:.2f} |"
        )
    for line in equality.excused:
        print(line)
    print(f"{failed} cases differ")
    return int(failed > 0)


def over_ranks(options: argparse.Namespace) -> int:
    forms = rank_requests.FORMS if options.forms == list(tiny_models.FORMS) else options.forms
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = ["-m", "tests.engine.rank_requests", str(out), "--first", str(options.first)]
        command += ["--requests", str(options.requests), "--forms", *forms]
        ended = rank_processes.run([command] * options.ranks, Path(folder), seconds=24 * 3600)
        if any(e.code for e in ended):
            print("\n".join(e.err for e in ended), file=sys.stderr)
            return 1
        found = json.loads(out.read_text())
    print(f"over {options.ranks} ranks: {', '.join(f'{n} {c}' for n, c in sorted(found['counts'].items()))}")
    for line in (*found["flips"], *found["failures"]):
        print(line)
    print(f"{len(found['failures'])} cases differ, {len(found['flips'])} flips")
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
