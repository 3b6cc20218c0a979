#!/usr/bin/env python3
"""Measures drafting from known text on a model: 40 edit tasks, drafted from a prediction, by lookup alone, and from the same answer that
was said before ("again"), beside plain decoding.

    .venv/bin/python scripts/bench_predicted.py [MODEL] [--tokens 96] [--rounds 3] [--tasks 40]

A task is a prompt. Its prediction is the model's own plain answer with one change undone: a name, a line that is new or gone, two blocks
in another order, a block that is replaced; or it is another answer. The demo is asked its recorded prompts, another model
to copy files of Python's standard library and to go on with them. Greedy; seconds of whole answers, alternating. No speed is printed where
a text differs from the plain one.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from alternating import alternate, ratio  # noqa: E402

from mlxspec import SamplingParams, SpecConfig, load  # noqa: E402
from mlxspec.bench.workloads import read_workloads  # noqa: E402
from mlxspec.config import EngineConfig  # noqa: E402
from mlxspec.engine.api import Result  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402

LIB = Path(sysconfig.get_paths()["stdlib"])
LOOKUP = ("suffix", "ngram-simple")
NUM = 40
OWNERS = count()


def rename(text: str, rng: random.Random) -> str:
    names = sorted(set(re.findall(r"\b[a-z_]{4,}\b", text)), key=lambda name: (-text.count(name), name))
    return re.sub(rf"\b{rng.choice(names[:4] or ['the'])}\b", "older_name", text)


def insert(text: str, rng: random.Random) -> str:
    """The line is new in the answer: it is not in the prediction."""
    lines = text.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return "".join(lines)


def delete(text: str, rng: random.Random) -> str:
    """The line is gone in the answer."""
    lines = text.splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines)), "    # a comment that the answer does not have any more\n")
    return "".join(lines)


def reorder(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    a, b, c = sorted(rng.choices(range(len(lines) + 1), k=3))
    return "".join([*lines[:a], *lines[b:c], *lines[a:b], *lines[c:]])


def replace(text: str, rng: random.Random) -> str:
    begin = rng.randrange(max(1, len(text) // 2))
    return text[:begin] + "raise NotImplementedError('to be written')\n" + text[begin + len(text) // 5 :]


CHANGES: dict[str, Callable[[str, random.Random], str]] = {
    "rename": rename, "insert": insert, "delete": delete, "reorder": reorder, "replace": replace,
}  # fmt: skip


def prompts(engine: Engine, model: str, rng: random.Random) -> list[Sequence[int]]:
    if model == "demo":
        kinds = read_workloads(engine, ("edit", "explain", "continue", "ask"))
        return [prompt for work in kinds for prompt in work.prompts[: NUM // len(kinds)]]
    if engine.tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer.")
    paths = rng.sample([p for p in sorted(LIB.glob("*.py")) if p.stat().st_size > 9000], NUM)
    texts = [p.read_text(errors="replace")[3000:4000] for p in paths]
    copies = [f"The file:\n```python\n{t}\n```\nThe same file again:\n```python\n" for t in texts[: NUM // 2]]
    return [engine.tokenizer.encode(text) for text in [*copies, *texts[NUM // 2 :]]]


def run(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, last: dict[str, Result], name: str,
    drafters: tuple[str, ...], predicted: str = "", owner: str = "",
) -> None:  # fmt: skip
    """owner: whose earlier answers count; without one an answer has an owner of its own, and is not drafted from the same one before."""
    spec = SpecConfig(
        drafters=drafters,
        owner=owner or str(next(OWNERS)),
        policy="auto" if drafters else None,
        predicted=predicted,
    )
    last[name] = engine.generate([prompt], params, spec=spec)[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=NUM, help="of them, the first so many are run")
    options = parser.parse_args()
    config = EngineConfig(prefix_budget=0)  # a prompt that is asked again is read again
    engine, rng = load(options.model, draft=list(LOOKUP), config=config), random.Random(7)
    params = SamplingParams(max_tokens=options.tokens)
    asked, plain = prompts(engine, options.model, rng)[: options.tasks], SpecConfig()
    answers = [engine.generate([prompt], params, spec=plain)[0] for prompt in asked]
    found, differ = defaultdict[str, list[tuple[float, ...]]](list), 0
    kinds = [*CHANGES, "nothing matches"]
    for i, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        kind = kinds[i % len(kinds)]
        change = CHANGES.get(kind)
        other = answers[(i + len(answers) // 2 + 1) % len(answers)].text
        prediction = change(answer.text or " ", rng) if change else other
        last: dict[str, Result] = {}

        way = partial(run, engine, prompt, params, last)
        again = partial(way, "again", LOOKUP, owner=f"task {i}")
        again()
        taken = alternate(
            {
                "plain": partial(way, "plain", ()),
                "lookup": partial(way, "lookup", LOOKUP),
                "predicted": partial(way, "predicted", LOOKUP, prediction),
                "again": again,
            },
            rounds=options.rounds,
        )
        if any(result.tokens != answer.tokens for result in last.values()):
            differ += 1
            continue
        rounds = [
            last[n].stats.num_decoded / max(1, last[n].stats.num_rounds)
            for n in ("lookup", "predicted", "again")
        ]
        speeds = [1 / ratio(taken, n, base) for n in ("predicted", "again") for base in ("plain", "lookup")]
        found[kind].append((*rounds, 1 / ratio(taken, "lookup", "plain"), *speeds))
        print(f"{i:3d} {kind:16s}" + "".join(f"{x:8.2f}" for x in found[kind][-1]), flush=True)
    print("\n| change | tasks | tokens a round: lookup | predicted | again | lookup over plain ", end="")
    print("| predicted over plain | over lookup | again over plain | over lookup |")
    print("|---" * 10 + "|")
    for kind in kinds:
        columns = [median(column) for column in zip(*found[kind], strict=True)] or [float("nan")] * 8
        print(f"| {kind} | {len(found[kind])} | " + " | ".join(f"{x:.2f}" for x in columns) + " |")
    print(f"{differ} of {len(asked)} texts differ from plain decoding.")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
