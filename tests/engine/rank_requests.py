"""The random requests of random_requests.py over ranks: `python -m tests.engine.rank_requests OUT`, once for each rank, with the variables
that mlx.launch sets in the environment.

Rank 0 plays the cases, plain in a process of its own whole model and drafted over the ranks; the others follow. Cases of one dtype, way of
rollback and model share an engine, so prefix hits of one case reach into another. Rank 0 writes what came of it to OUT, as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

from mlxspec.config import EngineConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.ranks import Ranks, follow, join
from tests import engines, families, tiny_models
from tests.engine import equality, random_requests

FORMS = ("float32", "4bit-float32")
ONLY: dict[str, Sequence[Any]] = {  # what can be divided among ranks, and drafters that ranks make alike
    "family": ("hybrid", "qwen3-moe"),
    "drafter": [n for n in random_requests.DRAFTERS if n != "own"],
    "sampler": [n for n in random_requests.SAMPLERS if n not in ("processor", "callable")],
    "kv_bits": (16,),
    "some_rows": (False,),
    "prefix_budget": (4 << 20,),
}
Key = tuple[str, str, str]


def key_of(made: random_requests.Case) -> Key:
    return made.family, made.form, made.block


def divided_engine(key: Key, ranks: Ranks) -> Engine:
    """With every drafter and a prefix cache; the target is divided among the ranks."""
    family, form, block = key
    model = tiny_models.make(families.QWEN[family], form=form, group=ranks.group)
    drafters = engines.made_drafters(model, family, form, block=block, told=False)
    settings = EngineConfig(prefix_budget=4 << 20)
    return Engine(model, tiny_models.tokenizer(), drafters=drafters, config=settings, ranks=ranks)


def chosen(first: int, num_requests: int, forms: Sequence[str]) -> list[random_requests.Case]:
    """Cases from a number on with at least so many requests, those that may share an engine together."""
    found, num, number = [], 0, first
    while num < num_requests:
        made = random_requests.case(number, form=forms, **ONLY)
        found.append(made)
        num += sum(map(len, made.turns))
        number += 1
    return sorted(found, key=lambda made: (key_of(made), made.number))


def lead(ranks: Ranks, cases: Sequence[random_requests.Case]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    engine, key = None, None
    for made in cases:
        if engine is None or key_of(made) != key:
            if engine is not None:
                engine.dismiss()
            key = key_of(made)
            ranks.first(key)
            engine = divided_engine(key, ranks)
        try:
            counts += random_requests.play(made, engine)
        except AssertionError as error:
            failures.append(f"{made}: {str(error)[:2000]}")
        counts["cases"] += 1
        counts["auto"] += made.spec.policy == "auto"
    if engine is not None:
        engine.dismiss()
    ranks.first(None)
    return {"counts": dict(counts), "flips": list(equality.excused), "failures": failures}


def obey(ranks: Ranks) -> None:
    while (key := ranks.first(None)) is not None:
        follow(divided_engine(key, ranks).step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    options = parser.parse_args()
    mx.disable_compile()  # as tests do: g++ would take most of the time
    ranks = join()
    if ranks is None:
        raise SystemExit("This is run once for each of several ranks.")
    cases = chosen(options.first, options.requests, options.forms)
    if ranks.leads:
        options.out.write_text(json.dumps(lead(ranks, cases)))
    else:
        obey(ranks)


if __name__ == "__main__":
    main()
