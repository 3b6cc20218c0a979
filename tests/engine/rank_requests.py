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
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.engine.ranks import Ranks, follow, join
from tests import tiny_models
from tests.engine import equality, random_requests

Key = tuple[str, str, str, str]
FORMS = ("float32", "4bit-float32")


def key_of(made: random_requests.Case) -> Key:
    return made.target, made.form, made.block


def divided_engine(key: Key, ranks: Ranks) -> Engine:
    """With every drafter and a prefix store; the target is divided among the ranks."""
    target, form, block = key
    is_hybrid = target == "hybrid"
    model = _part(target, form, ranks.group)
    config = tiny_models.config() if is_hybrid else tiny_models.QWEN3_MOE
    small = tiny_models.echo(form=form) if is_hybrid else tiny_models.qwen3(form)
    heads: list[Drafter] = []
    if is_hybrid:
        heads = [Mtp(tiny_models.make_mtp(config, model, form=form), model.max_context)]
    window = None if block == "DFlash" else 9
    drafters: list[Drafter] = [
        *heads,
        Eagle3(tiny_models.eagle3_for(config, model, form=form), model.max_context),
        DFlashDrafter(tiny_models.make_dflash(model, block, form=form, window=window), model.max_context),
        DraftModel(small, model.vocab_size),
        ngram_lookup("ngram-simple", 2, 12),
        ngram_lookup("ngram-map-k", 2, 8, 1),
        ngram_lookup("ngram-map-k4v", 2, 8, 1),
    ]
    settings = EngineConfig(prefix_budget=4 << 20)
    return Engine(model, tiny_models.tokenizer(), drafters=drafters, config=settings, ranks=ranks)


def _part(target: str, form: str, group: mx.distributed.Group) -> Any:
    if target == "hybrid":
        return tiny_models.make(tiny_models.config(tiny_models.STACKS["hybrid"]), form=form, group=group)
    return tiny_models.make(tiny_models.QWEN3_MOE, form=form, group=group)


def chosen(first: int, num_requests: int, forms: Sequence[str]) -> list[random_requests.Case]:
    """Cases from a number on with at least so many requests, those that may share an engine together."""
    found, num, number = [], 0, first
    while num < num_requests:
        made = random_requests.case(number, forms)
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
