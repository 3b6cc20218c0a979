#!/usr/bin/env python3
"""Measures what a drafter that was adapted or made anew is worth: share of drafted tokens accepted, tokens a round, and the time of plain
decoding over that of drafting, on beginnings of texts.

    .venv/bin/python scripts/bench_adapted.py MODEL --texts FOLDER [--draft-model D] [--tokens 96] [--num 16] [--rounds 3] [--dtype T]

Ways: plain; base, the drafter itself; adapted, what `mlxspec adapt` made of it; both with the policy "fixed", and then with "auto", whose
time is compared with plain decoding's, alternating. The demo is asked its recorded prompts too ("old"). A line says how many texts equal
those of plain decoding: all of them, but for ties that floats decide on a GPU.
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--draft-model", help="of a drafter in a folder of its own")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--num", type=int, default=16, help="prompts of a kind")
    parser.add_argument("--rounds", type=int, default=3, help="of timing")
    parser.add_argument("--dtype")
    o = parser.parse_args()
    loaded = partial(load, o.model, dtype=o.dtype, images=False, config=EngineConfig(prefix_budget=0))
    plain = loaded(draft="off")
    asked = prompts(plain, o.texts, o.num, has_old=o.model == "demo")
    name = "mtp" if o.draft_model is None else DRAFTS_AS[ModelFolder(hub.resolve(o.draft_model)).kind()]
    ways: dict[tuple[str, str], Engine] = {}
    for head in ("base", "adapted"):
        for policy in ("fixed", "auto"):
            spec = SpecConfig(policy=policy)
            ways[head, policy] = loaded(draft=[name], draft_model=o.draft_model, head=head, spec=spec)
    if not any("adapted" in notice for notice in ways["adapted", "auto"].notices):
        ways = {way: engine for way, engine in ways.items() if way[0] == "base"}
    print(
        "| drafter | policy | prompts | temperature | accepted | tokens a round | plain over it | equal texts |"
    )
    print("|---" * 8 + "|", flush=True)
    for kind, some in asked.items():
        for temperature in (0.0, 1.0):
            params, last = SamplingParams(max_tokens=o.tokens, temperature=temperature, seed=5), {}
            turns = {"plain": partial(run, plain, some, params, last, "plain")}
            turns |= {
                f"{h} {p}": partial(run, e, some, params, last, f"{h} {p}") for (h, p), e in ways.items()
            }
            taken = alternate(turns, rounds=o.rounds)
            for way in [way for way in turns if way != "plain"]:
                stats = [result.stats for result in last[way]]
                drafted, accepted = (
                    sum(getattr(s, f) for s in stats) for f in ("num_drafted", "num_accepted")
                )
                a_round = sum(s.num_decoded for s in stats) / max(1, sum(s.num_rounds for s in stats))
                equal = sum(a.tokens == b.tokens for a, b in zip(last[way], last["plain"], strict=True))
                print(
                    f"| {way.replace(' ', ' | ')} | {kind} | {temperature:g} | {100 * accepted / max(1, drafted):.1f} % "
                    f"| {a_round:.2f} | {ratio(taken, 'plain', way):.2f} | {equal} of {len(some)} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
