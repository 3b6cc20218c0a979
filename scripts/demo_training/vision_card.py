"""The card of the member that reads pictures. Knows the measured figures, not how they were measured; all are read from `figures.json`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

_CARD = """---
license: mit
language: [en]
library_name: mlxspec
tags: [speculative-decoding, qwen3_5, image-text-to-text, demo]
---

# mlxspec demo-vision

A {millions:.1f}-million-parameter model with the Qwen3.5 architecture that reads pictures: a vision tower of {depth} layers
({hidden} numbers a patch of {patch} x {patch} pixels, {merge} x {merge} patches a token), {layers} text layers, and a multi-token head.
It reads one line: a number, a date or a short line of code. Ask "Read the number.", "Read the date." or "Read the code.".

It exists so that images with drafting can be tried at once, and so that one figure can be measured: what a multi-token head
accepts with the image's own rows at image positions, and with the placeholder token's row there. It is no text recognition for
use: it has seen pictures that one script drew, and nothing else.

## Measured on held-out pictures

{total} pictures that training has not drawn, in {fonts} fonts and letters of {low} to {high} pixels: a half of them with noise, a third
blurred, most in colours of their own.

| picture | pictures | characters right | read without a fault | tokens a round |
|---|---|---|---|---|
{table}

Characters right: one minus the edit distance to what the picture says, over its characters. {goal}

## What image rows are worth to the head

First drafted tokens of a round that are accepted, by greedy decoding through the engine, by what the head is given at image positions.
The model itself sees the image both times, and the text is the same. The head drafts {drafts} tokens a round; it was trained for the
first of them, so the others are seldom accepted.

| picture | the tower's rows | the placeholder's row | tokens a round, rows | tokens a round, placeholder |
|---|---|---|---|---|
{heads}

All figures are of the shipped bfloat16 weights, printed by `scripts/demo_eval_vision.py` and kept in `figures.json` one folder up.

## Training

{training}

## Data and licence

Trained from nothing on pictures drawn by `scripts/demo_data/pictures.py` with Pillow's default font and seven that come with matplotlib
(DejaVu, STIX and Computer Modern). The tokenizer is the family's, made from the standard library of CPython; its notice is in `NOTICE`
one folder up, under `target`.
"""


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _share(found: dict[str, Any]) -> str:
    """Of the first drafted tokens."""
    return _percent(found["accepted"][0] / max(1, found["drafted"][0]))


def training_lines(steps: int) -> list[str]:
    """What was done."""
    return [
        "Command: `python scripts/train_demo.py vision`; every seed is fixed in the scripts. The run behind these weights was stopped and "
        "resumed and its length was settled on the way, so the command gives a model of the same kind, not the same bits.",
        f"{steps:,} steps of 8 to 64 pictures of one size on a part of one core, without a GPU: 1,200 steps of numbers alone in narrow "
        "pictures, then all kinds and sizes. Three losses: the answer's tokens, the head's drafts of them, and the letters that a linear "
        "layer, dropped afterwards, finds in each row of the tower.",
        "Two things were changed on the way. The first 3,600 steps were made with AdamW for all parameters, the later ones with Muon for "
        "matrices. The first 4,040 steps saw pictures that preprocessing did not resize; held-out ones are resized, and flat ones with "
        "small letters were read badly, so the later steps saw resized ones.",
    ]


def write_vision_card(out: Path) -> None:
    """README.md in `out/vision`, from `out/figures.json` and the member's config.json."""
    from demo_data.pictures import FONTS, SIZES
    from safetensors import safe_open

    folder = out / "vision"
    figures = json.loads((out / "figures.json").read_text())["vision"]
    config = json.loads((folder / "config.json").read_text())
    tower, text, kinds = config["vision_config"], config["text_config"], figures["kinds"]
    with safe_open(folder / "model.safetensors", "np") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        steps = int((file.metadata() or {}).get("steps", "0"))
    digits = kinds["number"]["characters_right"]
    met = "is reached" if digits >= 0.95 else "is not reached"
    card = _CARD.format(
        millions=sum(_product(shape) for shape in sizes) / 1e6,
        depth=tower["depth"],
        hidden=tower["hidden_size"],
        patch=tower["patch_size"],
        merge=tower["spatial_merge_size"],
        layers=text["num_hidden_layers"],
        total=sum(k["pictures"] for k in kinds.values()),
        fonts=len(FONTS),
        low=SIZES[0],
        high=SIZES[1],
        goal=f"The goal, 95 % of the characters of numbers, {met}.",
        drafts=figures["depth"],
        table="\n".join(
            f"| {name} | {k['pictures']} | {_percent(k['characters_right'])} | {_percent(k['whole'])} | {k['rows']['tokens_a_round']:.2f} |"
            for name, k in kinds.items()
        ),
        heads="\n".join(
            f"| {name} | {_share(k['rows'])} | {_share(k['placeholder'])} | {k['rows']['tokens_a_round']:.2f} | "
            f"{k['placeholder']['tokens_a_round']:.2f} |"
            for name, k in kinds.items()
        ),
        training="\n".join(f"- {line}" for line in training_lines(steps)),
    )
    (folder / "README.md").write_text(card)
    shutil.copy(Path(__file__).resolve().parents[2] / "LICENSE", folder / "LICENSE")


def _product(shape: list[int]) -> int:
    found = 1
    for n in shape:
        found *= n
    return found
