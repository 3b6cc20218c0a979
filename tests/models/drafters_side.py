"""One rank of several whose engines draft for tiny divided models, as a process of its own: `drafters_side.py LIST OUT`, where MLX's ring
is told by the environment who else there is. LIST: a JSON list of cases, each a target's folder and the folders of its drafters. Writes
OUT/<rank>.json: for each case, by drafter, the tokens of its answers and all that was drafted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.models.assemble import Assembled, assemble
from mlxspec.models.assemble_drafter import assemble_drafter
from mlxspec.models.fill import evaluate
from mlxspec.models.folder import ModelFolder
from mlxspec.platform.host import numbers
from tests import tiny_models

PROMPTS = [5, 9, 33, 5, 9, 33, 5, 9], [70, 2, 41, 2, 41, 2], [11]
PLAIN = "plain"
Answers = dict[str, Any]


def answers(case: dict[str, Any], group: mx.distributed.Group | None = None) -> Answers:
    """Greedy and seeded answers of different lengths to ragged prompts, plain and with each drafter at a fixed depth."""
    folder = ModelFolder(Path(case["target"]))
    made = assemble(folder.config(), folder.read, mx.float32, group=group)
    found = {}
    for drafter in (None, *_drafters(made, folder, [Path(path) for path in case["drafters"]])):
        drafters, drafts = [] if drafter is None else [drafter], list[Any]()
        if drafter is not None:
            _record(drafter, drafts)
        engine = Engine(made.model, tiny_models.tokenizer(), drafters=drafters, config=EngineConfig())
        name = PLAIN if drafter is None else _title(drafter)
        spec = SpecConfig(drafters=tuple(d.name for d in drafters), policy="fixed", n_max=3)
        params = [
            SamplingParams(max_tokens=6 + 3 * i, temperature=0.9 * (i % 2), seed=3 + i, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        results = engine.generate([list(p) for p in PROMPTS], params, spec=spec)
        found[name] = {
            "tokens": [list(result.tokens) for result in results],
            "drafts": [d if isinstance(d, list) else numbers(d).tolist() for d in drafts],
        }
    return found


def _record(drafter: Drafter, drafts: list[Any]) -> None:
    """Note the tokens of every draft."""

    def noting(given: Any) -> Any:
        def noted(*args: Any) -> Any:
            found = given(*args)
            drafts.extend(draft.tokens for draft in found or ())
            return found

        return noted

    for name in ("draft", "draft_behind"):
        setattr(drafter, name, noting(getattr(drafter, name)))


def _title(drafter: Drafter) -> str:
    return drafter.model.title if isinstance(drafter, DFlashDrafter) else drafter.name


def _drafters(made: Assembled, folder: ModelFolder, beside: list[Path]) -> list[Drafter]:
    """All are whole on each rank; what they ask of the target is the divided model's."""
    model = made.model
    small = assemble(folder.config(), folder.read, mx.float32).model
    found: list[Drafter] = [ngram_lookup("ngram-simple", 2, 6), DraftModel(small, model.vocab_size)]
    if made.mtp is not None:
        found.append(Mtp(made.mtp, model.max_context))
    for path in beside:
        other = ModelFolder(path)
        if other.kind() == "eagle3":
            head = assemble_drafter("eagle3", other.config(), other.read, model, mx.float32)
            evaluate([head])
            found.append(Eagle3(head, model.max_context))
        else:
            block = assemble_drafter("dflash", other.config(), other.read, model, mx.float32)
            evaluate([block])
            found.append(DFlashDrafter(block, model.max_context))
    return found


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    found = [answers(case, group) for case in json.loads(Path(sys.argv[1]).read_text())]
    (Path(sys.argv[2]) / f"{group.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
