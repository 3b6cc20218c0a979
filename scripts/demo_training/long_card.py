"""The card of the member with room for long prompts. Knows the measured figures, not how they were measured; all are read from
`figures.json`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

_CARD = """---
license: other
license_name: psf-2.0
language: [en]
library_name: mlxspec
tags: [speculative-decoding, qwen3_5, demo]
---

# mlxspec demo-long

The demo target with a context of {context:,} tokens in place of 2,048, {bits} bits a weight, {size:.1f} MB.

    mlxspec generate --model demo-long -f prompt.txt

It exists so that a prompt of thousands of tokens can be read, drafted for and answered by a built-in model. It demonstrates an engine. It
is not a useful assistant, and nobody should quote its answers as facts.

## Measured with held-out files

A prompt is a held-out file of CPython's library, cut to {sizes} tokens, and a request for one of its functions: rename it, rename a
name in it, change a literal, remove its docstring, or show it, {prompts} prompts of each size. The answer is that function alone. The
request's words were not trained on. Greedy decoding through the engine; every drafted text equals the plain one, which is checked.

| prompt | exactly right | characters right | head accepted at depth 1 / 2 / 3 | tokens a round, head | with prompt lookup |
|---|---|---|---|---|---|
{table}

By request, with prompts of {largest} tokens:

| request | prompts | exactly right | characters right | tokens a round, head | with prompt lookup |
|---|---|---|---|---|---|
{kinds}

{verdict}

Cross-entropy on held-out code by position, nats a token, beside the demo target's, which was trained on 2,048 positions:

| positions | demo-long | demo |
|---|---|---|
{positions}

The demo target's loss does not rise behind 2,048 tokens, so the rotary positions are not scaled. Yarn by four and linear scaling by four
were tried on it: 0.01 nats worse.

All figures are of the shipped weights, printed by `scripts/demo_eval_long.py` and `scripts/demo_long_loss.py` and kept in `figures.json`
one folder up.

## Training

{training}

## Data and licence

Trained on top of the demo target, on the same data and on edits of whole files that were made from the same training files. Its card,
one folder up under `target`, says which. The library is copyright (c) Python Software Foundation, under the PSF License Agreement
(`LICENSE` here); the weights are given out under the same terms. See `NOTICE`.
"""
TITLES = {
    "rename_function": "rename the function",
    "rename": "rename a name in it",
    "docstring": "remove its docstring",
    "literal": "change a literal",
    "copy": "show it",
}


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _rounds(cell: dict[str, Any]) -> str:
    return " | ".join(f"{x:.2f}" for x in cell["tokens_a_round"].values())


def write_long_card(out: Path) -> None:
    """README.md, LICENSE and NOTICE in `out/long`."""
    found = json.loads((out / "figures.json").read_text())["long"]
    config = json.loads((out / "long" / "config.json").read_text())
    sizes = found["sizes"]
    table = [
        f"| {c['prompt_tokens']:,} tokens | {_percent(c['exact'])} | {_percent(c['characters_right'])} | "
        f"{' / '.join(_percent(x) for x in c['head_accepted_at_depth'])} | {_rounds(c)} |"
        for c in (cells["all"] for cells in sizes.values())
    ]
    largest = max(sizes, key=int)
    kinds = [
        f"| {TITLES[k]} | {c['prompts']} | {_percent(c['exact'])} | {_percent(c['characters_right'])} | {_rounds(c)} |"
        for k, c in sizes[largest].items()
        if k != "all"
    ]
    card = _CARD.format(
        context=config["max_position_embeddings"],
        bits=config["quantization"]["bits"],
        size=(out / "long" / "model.safetensors").stat().st_size / 1e6,
        sizes=" or ".join(f"about {int(s):,}" for s in sizes),
        prompts=sizes[largest]["all"]["prompts"],
        table="\n".join(table),
        largest=f"{sizes[largest]['all']['prompt_tokens']:,}",
        kinds="\n".join(kinds),
        verdict=found["verdict"],
        positions="\n".join(
            f"| {p} | {a:.3f} | {b:.3f} |" for p, (a, b) in found["loss_by_position"].items()
        ),
        training=found["training"],
    )
    (out / "long" / "README.md").write_text(card)
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(out / "target" / name, out / "long" / name)
        (out / "long" / name).chmod(0o644)
