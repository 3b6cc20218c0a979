"""One rank of several whose engines answer the same requests, as a process of its own: `python -m tests.engine.ranks_side OUT`. MLX's ring
is told by the environment who else there is. Rank 0 writes OUT/0.json: for each case of `cases` the tokens of its answers."""

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
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.engine.ranks import Ranks, follow, join
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.assemble import assemble
from mlxspec.models.folder import ModelFolder

PROMPTS = "def add(a, b):\n    return", "import os\nimport os\nimport", "# what does os.path.join do?\n"
PLAIN = "plain"
DRAFTERS = (PLAIN, "ngram-simple", "mtp", "draft-model", "ngram-simple mtp")


def engine(ranks: Ranks | None = None) -> Engine:
    """The demo, divided among ranks if there are any; its drafters are whole."""
    folder, small = ModelFolder(mlxspec.demo.TARGET), ModelFolder(mlxspec.demo.DRAFT)
    made = assemble(folder.config(), folder.read, group=None if ranks is None else ranks.group)
    draft = assemble(small.config(), small.read).model
    drafters = [
        ngram_lookup("ngram-simple", 3, 12),
        Mtp(made.mtp, made.model.max_context),
        DraftModel(draft, made.model.vocab_size),
    ]
    tokenizer = Tokenizer.from_folder(folder.path)
    return Engine(made.model, tokenizer, drafters=drafters, config=EngineConfig(), ranks=ranks)


def cases(engine: Engine) -> dict[str, list[list[int]]]:
    """Greedy and seeded answers to ragged prompts of different lengths of answers, so that rows join and leave."""
    params = [
        SamplingParams(max_tokens=16 + 8 * i, temperature=0.8 * (i % 2), seed=7 + i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    found = {}
    for policy in ("fixed", "auto"):
        for names in DRAFTERS:
            drafters = () if names == PLAIN else tuple(names.split())
            spec = SpecConfig(drafters=drafters, policy=policy, n_max=3)
            results = engine.generate(list(PROMPTS), params, spec=spec)
            found[f"{policy} {names}"] = [list(result.tokens) for result in results]
    return found


def main() -> None:
    mx.disable_compile()  # as tests do
    ranks = join()
    if ranks is None:
        raise SystemExit("This is run once for each of several ranks.")
    made = engine(ranks)
    if ranks.leads:
        (Path(sys.argv[1]) / "0.json").write_text(json.dumps(cases(made)))
        made.dismiss()
    else:
        follow(made.step)


if __name__ == "__main__":
    main()
