"""The model cards of drafters that read the target's layers, with licence and notice. Knows the measured figures, not how they were
measured."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import torch

from .card import _DATA, _NOTICE, _percent

TITLES = {"eagle3": "EAGLE-3", "dflash": "DFlash2"}
TEXTS = {
    "held_out_code": "held-out code",
    "held_out_chats": "held-out conversations",
    "sampled_0.7": "sampled at temperature 0.7",
    "sampled_1.0": "sampled at temperature 1",
}
_CARD = """---
license: other
license_name: psf-2.0
language: [en]
library_name: mlxspec
tags: [speculative-decoding, {name}, demo]
---

# mlxspec demo-{name}

{lead}

    mlxspec generate --draft-model demo-{name} -p "what is a list?"

It exists so that the path of these drafters runs for real on a fresh machine, offline. It drafts for the demo target only.

## Measured on held-out files

Per cent of drafted tokens that are the target's likeliest at true prefixes, by depth, given that the depths before agreed. The same texts
for all.

| text | {title} | MTP head | draft model |
|---|---|---|---|
{table}

{more}
All figures are of the shipped bfloat16 weights, printed by `scripts/demo_eval.py` and kept in `figures.json` one folder up.

## Training

- Command: `python scripts/train_demo.py {name}`; every seed is fixed in the scripts.
- {steps:,} steps, {tokens:.1f} M tokens, {minutes:.0f} minutes of {cores} of a shared machine, without a GPU, on the frozen
  target. {how}
"""
_LEADS = {
    "eagle3": "A {millions:.1f}-million-parameter EAGLE-3 drafter for the demo target, in the layout of the speculators library: one\n"
    "layer that reads the residual streams behind three of the target's layers, the target's embedding, and a head of {rows:,} of its\n"
    "2,048 tokens (`d2t`).",
    "dflash": "A {millions:.1f}-million-parameter DFlash2 drafter for the demo target, in its authors' layout: four layers that draft\n"
    "seven tokens in one forward from the residual streams behind three of the target's layers, short convolutions along the block, and a\n"
    "selector that picks the tokens from left to right.",
}
_CORES = {"eagle3": "a part of one core", "dflash": "parts of two cores"}
_HOW = {
    "eagle3": "It began close to the target's MTP head and learned the target's distribution for three recursive steps on its own output.\n"
    "  The run behind these weights was resumed with another number of steps and ended before the learning rate had fallen, so the\n"
    "  command gives a drafter of the same kind, not the same bits.",
    "dflash": "It began close to the target's MTP head and learned the target's distribution at seven positions behind random places of\n"
    "  the training texts. The run behind these weights took its first 501 steps without convolutions and selector, with wider MLPs and\n"
    "  in one process, so the command gives a drafter of the same kind, not the same bits.",
}


def _depths(shares: list[float]) -> str:
    return " / ".join(_percent(x) for x in shares)


def _more(name: str, figures: dict) -> str:  # type: ignore[type-arg]
    if name == "eagle3":
        parts = [f"{TEXTS[k]} {_percent(cell['covered'])}" for k, cell in figures.items() if k in TEXTS]
        return f"The drafter has a row for the target's likeliest token at:\n{', '.join(parts)}.\nElsewhere its draft is rejected."
    parts = [f"{TEXTS[k]} {cell['dflash_tokens_per_round']:.2f}" for k, cell in figures.items() if k in TEXTS]
    return f"Tokens a round with whole blocks: {', '.join(parts)}."


def write_layer_card(work: Path, out: Path, name: str) -> None:
    """README.md, LICENSE and NOTICE in `out/NAME`, from `out/figures.json` and the checkpoint in `work`. name: one of TITLES."""
    figures = json.loads((out / "figures.json").read_text())["layers"][name]
    sources = json.loads((work / "sources.json").read_text())
    saved, folder = torch.load(work / f"{name}.pt"), out / name
    kept = {n: x for n, x in saved["model"].items() if x.is_floating_point()}
    rows = kept["lm_head.weight"].shape[0] if "lm_head.weight" in kept else 0
    table = []
    for key, text in TEXTS.items():
        cell = figures[key]
        own, mtp = (_depths(cell[f"{n}_accepted_at_depth"]) for n in (name, "mtp"))
        table.append(f"| {text} | {own} | {mtp} | {_percent(cell['draft_accepted'])} |")
    card = _CARD.format(
        name=name,
        title=TITLES[name],
        lead=_LEADS[name].format(millions=sum(x.numel() for x in kept.values()) / 1e6, rows=rows),
        table="\n".join(table),
        more=_more(name, figures),
        steps=saved["step"],
        tokens=saved.get("tokens", saved["step"] * 2048) / 1e6,
        minutes=saved["seconds"] / 60,
        cores=_CORES[name],
        how=_HOW[name],
    )
    facts = {
        "python": sources["python"],
        "num_files": f"{len(sources['files']):,}",
        "num_held": sum(f["held_out"] for f in sources["files"]),
    }
    (folder / "README.md").write_text(card + _DATA.format(**facts))
    (folder / "NOTICE").write_text(_NOTICE.format(**facts))
    shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt", folder / "LICENSE")
    (folder / "LICENSE").chmod(0o644)
