"""Measures the member of the demo family that reads pictures, through the engine; writes its figures, its card and its pictures.

    python scripts/demo_eval_vision.py --out mlxspec/demo --pictures 600

Everything is measured with pictures that training has not drawn, on the shipped weights, by greedy decoding:

- the part of the characters that is right: one minus the edit distance to what the picture says, over its characters;
- drafts of the multi-token head that are accepted, at each depth, and tokens a round: once with the tower's rows at image positions, once
  with the embedding of the placeholder token there, which is what a head gets whose engine looks the token up. The target sees the image
  both times, so the text is the same, which is checked.

Pillow and matplotlib draw the pictures; PyTorch is not needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
from demo_data.pictures import FONTS, QUESTIONS, Picture, picture
from demo_training.vision_card import write_vision_card

import mlxspec
from mlxspec import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.models.image_rows import SeenImages

SEED = 9001  # of no step of training
SHOWN = 9  # pictures that are shipped
DEPTH = 3
_LONGEST = 40  # tokens of an answer
_PARAMS = SamplingParams(max_tokens=_LONGEST, temperature=0.0)
_SPEC = SpecConfig(drafters=("mtp",), policy="fixed", n_max=DEPTH, p_min=0.0)


@dataclass
class Score:
    """pictures, and of them those read without a fault; characters of what they say, and edits that the answers are away from it."""

    pictures: int = 0
    whole: int = 0
    characters: int = 0
    edits: int = 0

    def add(self, said: str, wanted: str) -> None:
        self.pictures += 1
        self.whole += said == wanted
        self.characters += len(wanted)
        self.edits += distance(said, wanted)

    def data(self) -> dict[str, float]:
        return {
            "pictures": self.pictures,
            "whole": round(self.whole / self.pictures, 4),
            "characters_right": round(max(0.0, 1 - self.edits / self.characters), 4),
        }


@dataclass
class Drafted:
    """Of one way to feed the head."""

    rounds: int = 0
    tokens: int = 0
    asked: list[int] = field(default_factory=lambda: [0] * DEPTH)
    accepted: list[int] = field(default_factory=lambda: [0] * DEPTH)

    def add(self, result: Result) -> None:
        self.rounds += result.stats.num_rounds
        self.tokens += result.stats.num_decoded
        work = result.stats.drafters.get("mtp")
        if work is not None:
            for i, (tried, stood) in enumerate(work.by_position):
                self.asked[i] += tried
                self.accepted[i] += stood

    def data(self) -> dict[str, object]:
        return {
            "tokens_a_round": round(self.tokens / self.rounds, 3),
            "drafted": self.asked,
            "accepted": self.accepted,
        }


def distance(one: str, other: str) -> int:
    """Characters to put in, take out or change to make one text of the other."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def held_out(num: int) -> list[Picture]:
    """The same ones each time, of all kinds, fonts and sizes."""
    rng = random.Random(SEED)
    return [picture(rng) for _ in range(num)]


def shown(num: int) -> list[Picture]:
    """Held-out pictures to ship: twice as many numbers as dates and lines of code, each in another font."""
    rng = random.Random(SEED + 1)
    kinds = ("number", "date", "number", "code")
    return [picture(rng, kinds[i % 4], FONTS[i % len(FONTS)]) for i in range(num)]


def question(engine: Engine, asked: Picture) -> PromptWithImages:
    parts = [{"type": "image", "image": asked.image}, {"type": "text", "text": asked.question}]
    found = engine.chat_input([{"role": "user", "content": parts}])
    if not isinstance(found, PromptWithImages):
        raise TypeError("the prompt holds no image")
    return found


def blinded(engine: Engine, token: int) -> None:
    """Give the head the embedding of this token at image positions, in place of the tower's rows."""
    head = engine.chain.drafters["mtp"]
    see = head.see
    row = engine.model.embed(mx.array([token]))

    def without_rows(number: int, seen: SeenImages) -> None:
        see(
            number,
            SeenImages(seen.images, lambda prepared: mx.broadcast_to(row, (prepared.tokens, row.shape[-1]))),
        )

    head.see = without_rows  # type: ignore[method-assign]


def opened(folder: Path) -> Engine:
    return mlxspec.load(folder, draft="mtp", spec=_SPEC, config=EngineConfig(prefix_budget=0))


def measure(folder: Path, pictures: Iterable[Picture]) -> dict[str, object]:
    """All figures of the member in `folder`. Raises RuntimeError where a text depends on what the head was fed."""
    scores = {kind: Score() for kind in QUESTIONS}
    drafted = {kind: {"rows": Drafted(), "placeholder": Drafted()} for kind in QUESTIONS}
    with opened(folder) as engine, opened(folder) as blind:
        assert engine.vision is not None
        blinded(blind, engine.vision.prompt.image)
        for asked in pictures:
            prompt = question(engine, asked)
            plain = engine.generate(prompt, _PARAMS, spec=replace(_SPEC, drafters=()))
            scores[asked.kind].add(plain.text, asked.text)
            for name, by in (("rows", engine), ("placeholder", blind)):
                result = by.generate(prompt, _PARAMS)
                if result.tokens != plain.tokens:
                    raise RuntimeError(f"{name}: {result.text!r}, without drafting {plain.text!r}")
                drafted[asked.kind][name].add(result)
    return {
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "seed": SEED,
        "depth": DEPTH,
        "kinds": {
            kind: {**score.data(), **{name: d.data() for name, d in drafted[kind].items()}}
            for kind, score in scores.items()
            if score.pictures
        },
    }


def write_pictures(folder: Path) -> None:
    """Pictures for `mlxspec demo --vision`, and what stands in them."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for i, asked in enumerate(shown(SHOWN), 1):
        file = f"{asked.kind}-{i}.png"
        asked.image.save(folder / file, optimize=True)
        listed.append({"file": file, "question": asked.question, "text": asked.text, "font": asked.font})
    (folder / "pictures.json").write_text(json.dumps(listed, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("mlxspec/demo"))
    parser.add_argument("--model", type=Path, help="a folder to measure, of which nothing is written")
    parser.add_argument("--pictures", type=int, default=600)
    args = parser.parse_args()
    figures = measure(args.model or args.out / "vision", held_out(args.pictures))
    print(json.dumps(figures, indent=1))
    if args.model is None:
        path = args.out / "figures.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"vision": figures}, indent=1) + "\n")
        write_pictures(args.out / "pictures")
        write_vision_card(args.out)


if __name__ == "__main__":
    main()
