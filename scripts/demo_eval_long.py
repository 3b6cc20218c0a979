"""Measures a target of the demo family with prompts of thousands of tokens, through the engine; prints the figures.

    python scripts/demo_eval_long.py build/demo/long --work build/demo
    python scripts/demo_eval_long.py --record mlxspec/demo --work build/demo     the shipped target; writes its entry `long` of figures.json

Each prompt is a held-out file, cut to about 1,500 or 6,000 tokens, and a request to edit or show one of its functions, in words that were
not trained on. Everything is measured on the shipped weights by greedy decoding:

- the share of answers that are exactly the edited function, and the part of the answer that is right: one minus the edit distance to the
  reference over its length, in characters;
- drafts of the multi-token head that are accepted, by depth, and tokens a round, of the head alone and of the head with the prompt lookup.
  A drafted text that differs from the plain one is an error.

The phase `long` of scripts/train_demo.py writes the folder and `--work/statements.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from demo_data.long_edits import HELD_OUT_FORMS, KINDS, PastedFile, Statement, Turn, file_of, turn
from demo_eval_vision import distance

import mlxspec
from mlxspec import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine, Result

SEED = 9002
DEPTH = 3
CONTEXT = 8192  # tokens of the longest prompt and its answer
SIZES = (1500, 6000)  # tokens of a file
DRAFTERS = {"head": ("mtp",), "head and lookup": ("ngram-simple", "mtp")}
_NAMES = "value count name index result items path data size key node left right total".split()
_SPEC = SpecConfig(drafters=("mtp",), policy="fixed", n_max=DEPTH, p_min=0.0)


@dataclass
class Cell:
    """Of prompts of one size, and of those of one kind of request."""

    prompts: int = 0
    tokens: int = 0
    whole: int = 0
    characters: int = 0
    edits: int = 0
    rounds: dict[str, list[int]] = field(default_factory=lambda: {name: [0, 0] for name in DRAFTERS})
    accepted: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in range(DEPTH)])

    def add(self, result: Result, wanted: str) -> None:
        self.prompts += 1
        self.tokens += result.stats.num_prompt
        self.whole += result.text == wanted
        self.characters += len(wanted)
        self.edits += min(len(wanted), distance(result.text, wanted))

    def add_drafted(self, name: str, result: Result) -> None:
        self.rounds[name][0] += result.stats.num_rounds
        self.rounds[name][1] += result.stats.num_decoded
        if name == "head":
            for i, (tried, stood) in enumerate(result.stats.drafters["mtp"].by_position):
                self.accepted[i][0] += tried
                self.accepted[i][1] += stood

    def data(self) -> dict[str, object]:
        return {
            "prompts": self.prompts,
            "prompt_tokens": round(self.tokens / self.prompts),
            "exact": round(self.whole / self.prompts, 3),
            "characters_right": round(1 - self.edits / self.characters, 4),
            "head_accepted_at_depth": [round(b / max(1, a), 4) for a, b in self.accepted],
            "tokens_a_round": {name: round(n / r, 3) for name, (r, n) in self.rounds.items()},
        }


def prompts(files: list[list[Statement]], size: int, num: int) -> list[tuple[PastedFile, Turn]]:
    """The same ones each time, of all kinds in turn, no answer twice."""
    rnd, found, said = random.Random(SEED + size), [], set()
    for _ in range(100 * num):
        file = file_of(rnd.choice(files), size, rnd)
        made = file and turn(KINDS[len(found) % len(KINDS)], file, _NAMES, rnd, HELD_OUT_FORMS)
        if file is None or made is None or made.answer in said:
            continue
        said.add(made.answer)
        found.append((file, made))
        if len(found) == num:
            return found
    raise RuntimeError(f"only {len(found)} prompts of {size} tokens")


def measure(engine: Engine, files: list[list[Statement]], num: int) -> dict[str, object]:
    """All figures. Raises RuntimeError where a text depends on drafting."""
    cells: dict[int, dict[str, Cell]] = {}
    for size in SIZES:
        cells[size] = {name: Cell() for name in ("all", *KINDS)}
        for file, asked in prompts(files, size, num):
            prompt = engine.chat_prompt([{"role": "user", "content": asked.question(file)}])
            params = SamplingParams(max_tokens=len(asked.answer) // 2 + 32, temperature=0.0)
            plain = engine.generate(prompt, params, spec=replace(_SPEC, drafters=()))
            both = cells[size]["all"], cells[size][asked.kind]
            for cell in both:
                cell.add(plain, asked.answer)
            for name, drafters in DRAFTERS.items():
                result = engine.generate(prompt, params, spec=replace(_SPEC, drafters=drafters))
                if result.tokens != plain.tokens:
                    raise RuntimeError(f"{name}: {result.text!r}, without drafting {plain.text!r}")
                for cell in both:
                    cell.add_drafted(name, result)
            print(size, asked.kind, json.dumps(both[0].data()), flush=True)
    return {
        "seed": SEED,
        "depth": DEPTH,
        "sizes": {str(s): {k: c.data() for k, c in found.items() if c.prompts} for s, found in cells.items()},
    }


def lifted(source: Path, folder: Path) -> Path:
    """A copy in `folder` of the model in `source`, whose configuration allows CONTEXT tokens."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("folder", type=Path, nargs="?", help="of the model")
    which.add_argument(
        "--record", type=Path, metavar="OUT", help="measure OUT/target, write OUT/figures.json"
    )
    parser.add_argument("--work", type=Path, default=Path("build/demo"))
    parser.add_argument("--prompts", type=int, default=30)
    args = parser.parse_args()
    files = [
        [Statement(**p) for p in pieces]
        for pieces in json.loads((args.work / "statements.json").read_text())["held"]
    ]
    with TemporaryDirectory() as copied:
        folder = lifted(args.record / "target", Path(copied)) if args.record else args.folder
        with mlxspec.load(folder, draft=("ngram-simple", "mtp"), spec=_SPEC, config=EngineConfig()) as engine:
            found = measure(engine, files, args.prompts)
    print(json.dumps(found, indent=1))
    if args.record:
        path = args.record / "figures.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"long": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
