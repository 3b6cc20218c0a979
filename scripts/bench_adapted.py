#!/usr/bin/env python3
"""Measures what a drafter that was adapted or made anew is worth: share of drafted tokens accepted, tokens a round, and the time of plain
decoding over that of drafting, on beginnings of texts.

    .venv/bin/python scripts/bench_adapted.py MODEL --texts FOLDER [--draft-model D] [--tokens 96] [--num 16] [--rounds 3] [--dtype T]

base is the drafter itself, adapted what `mlxspec adapt` made of it. Times alternate with plain decoding's. The texts should be of the kind
that was adapted to, and others. The demo is asked its recorded prompts too ("old"). On a GPU floats may decide ties otherwise than in
plain decoding; elsewhere all texts are equal.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from alternating import alternate, ratio  # noqa: E402

from mlxspec import SamplingParams, SpecConfig, load  # noqa: E402
from mlxspec.bench.texts import named_texts_in  # noqa: E402
from mlxspec.bench.workloads import read_workloads  # noqa: E402
from mlxspec.config import EngineConfig  # noqa: E402
from mlxspec.engine.api import Result  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.loading import hub  # noqa: E402
from mlxspec.models.folder import DRAFTS_AS, ModelFolder  # noqa: E402

BEGINNING = 48  # tokens of a prompt


def prompts(engine: Engine, folder: Path, num: int, *, has_old: bool) -> dict[str, list[list[int]]]:
    if engine.tokenizer is None:
        raise SystemExit("This model has no tokenizer.")
    texts = sorted(named_texts_in([folder], []))
    some = random.Random(7).sample(texts, min(num, len(texts)))
    found = {"new": [engine.tokenizer.encode(text[:1000])[:BEGINNING] for _, text in some]}
    if has_old:
        works = read_workloads(engine, ("explain", "continue", "ask"))
        found["old"] = [list(prompt) for work in works for prompt in work.prompts[: num // len(works)]]
    return found


def run(
    engine: Engine, asked: list[list[int]], params: SamplingParams, last: dict[str, list[Result]], name: str
) -> None:
    """One request at a time, as one user has it."""
    last[name] = [engine.generate([prompt], params)[0] for prompt in asked]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--draft-model", help="of a drafter in a folder of its own")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--num", type=int, default=16, help="prompts of a kind")
    parser.add_argument("--rounds", type=int, default=3, help="of timing")
    parser.add_argument("--dtype")
    o = parser.parse_args()
    loaded = partial(load, o.model, dtype=o.dtype, images=False, config=EngineConfig(prefix_budget=0))
    name = "mtp" if o.draft_model is None else DRAFTS_AS[ModelFolder(hub.resolve(o.draft_model)).kind()]
    ways: dict[str, Engine] = {"plain": loaded(draft="off")}
    for head in ("base", "adapted"):
        for policy in ("fixed", "auto"):
            spec = SpecConfig(policy=policy)
            engine = loaded(draft=[name], draft_model=o.draft_model, head=head, spec=spec)
            if head == "base" or any("adapted" in notice for notice in engine.notices):
                ways[f"{head} | {policy}"] = engine
    print("| drafter | policy | prompts | temperature | accepted | tokens a round | plain over it | equal |")
    print("|---" * 8 + "|", flush=True)
    for kind, some in prompts(ways["plain"], o.texts, o.num, has_old=o.model == "demo").items():
        for temperature in (0.0, 1.0):
            params, last = SamplingParams(max_tokens=o.tokens, temperature=temperature, seed=5), {}
            turns = {way: partial(run, engine, some, params, last, way) for way, engine in ways.items()}
            taken = alternate(turns, rounds=o.rounds)
            plain = [result.tokens for result in last.pop("plain")]
            for way, results in last.items():
                stats = [result.stats for result in results]
                share = sum(s.num_accepted for s in stats) / max(1, sum(s.num_drafted for s in stats))
                a_round = sum(s.num_decoded for s in stats) / max(1, sum(s.num_rounds for s in stats))
                equal = sum(r.tokens == right for r, right in zip(results, plain, strict=True))
                print(f"| {way} | {kind} | {temperature:g} | {100 * share:.1f} % | {a_round:.2f} ", end="")
                print(f"| {ratio(taken, 'plain', way):.2f} | {equal} of {len(some)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
