#!/usr/bin/env python3
"""Random requests to tiny random models, plain and drafted: is the text the same? Counts, not timings.

    .venv/bin/python scripts/fuzz_text.py [--requests 3000] [--first 0] [--forms float32 bfloat16 4bit ...]

Each case mixes a dtype or quantization, a way of rollback, drafters, a policy, rows, constraints and turns
(tests/engine/random_requests.py). A text may differ only from a place where plain decoding's two best tokens are closer than rounding; such
flips are counted, by form. A case that differs otherwise is printed with its number, and the exit code is 1; `--first NUMBER --requests 1`
runs it again.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import tiny_models  # noqa: E402
from tests.engine import equality  # noqa: E402
from tests.engine.random_requests import case, play  # noqa: E402

COLUMNS = ("requests", "tokens", "drafted", "accepted", "cached", "cancelled", "not compared")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000, help="at least so many are run")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--forms", nargs="+", choices=list(tiny_models.FORMS), default=list(tiny_models.FORMS)
    )
    options = parser.parse_args()
    counts = {form: Counter[str]() for form in options.forms}
    number, failed = options.first, 0
    while sum(c["requests"] for c in counts.values()) < options.requests:
        made = case(number, options.forms)
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


if __name__ == "__main__":
    sys.exit(main())
