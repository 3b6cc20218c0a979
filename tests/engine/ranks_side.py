"""One rank of several whose engines answer the same requests, as a process of its own: `python -m tests.engine.ranks_side OUT`. MLX's ring
is told by the environment who else there is. Writes OUT/<rank>.json: for each case of `cases` the tokens of its answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

import mlxspec.demo
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.mtp import Mtp
from mlxspec.drafters.ngram_simple import NgramSimple
from mlxspec.engine.engine import Engine
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.assemble import assemble
from mlxspec.models.folder import ModelFolder
from mlxspec.models.ranks import ALONE, Ranks

PROMPTS = "def add(a, b):\n    return", "import os\nimport os\nimport", "# what does os.path.join do?\n"
PLAIN = "plain"
DRAFTERS = (PLAIN, "ngram-simple", "mtp", "draft-model", "ngram-simple mtp")


def engine(ranks: Ranks = ALONE) -> Engine:
    """The demo, divided among `ranks`; its drafters are whole."""
    folder, small = ModelFolder(mlxspec.demo.TARGET), ModelFolder(mlxspec.demo.DRAFT)
    made = assemble(folder.config(), folder.read, ranks=ranks)
    draft = assemble(small.config(), small.read).model
    drafters = [
        NgramSimple(3, 12),
        Mtp(made.mtp, made.model.max_context),
        DraftModel(draft, made.model.vocab_size),
    ]
    tokenizer = Tokenizer.from_folder(folder.path)
    return Engine(made.model, tokenizer, drafters=drafters, config=EngineConfig())


def cases(engine: Engine) -> dict[str, list[list[int]]]:
    """Greedy and seeded answers to ragged prompts of different lengths of answers, so that rows join and leave; fixed policy."""
    params = [
        SamplingParams(max_tokens=16 + 8 * i, temperature=0.8 * (i % 2), seed=7 + i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    found = {}
    for names in DRAFTERS:
        spec = SpecConfig(drafters=() if names == PLAIN else tuple(names.split()), policy="fixed", n_max=3)
        found[names] = [list(result.tokens) for result in engine.generate(list(PROMPTS), params, spec=spec)]
    return found


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    ranks = Ranks(rank=group.rank(), size=group.size(), group=group)
    found = cases(engine(ranks))
    (Path(sys.argv[1]) / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
