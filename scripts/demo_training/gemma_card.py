"""The card, notice and licence of the Gemma member. Knows the measured figures, not how they were measured.

Every number is read from the entry `gemma` of `figures.json` or from the checkpoint.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import torch

from .card import _DATA, _NOTICE, _percent
from .gemma_network import GEMMA, GemmaModel, GemmaShape
from .main_phase import MICRO_TOKENS

_CARD = """---
license: other
license_name: psf-2.0
language: [en]
library_name: mlxspec
tags: [speculative-decoding, gemma3_text, demo]
---

# mlxspec demo-gemma

A {millions:.1f}-million-parameter language model with the Gemma 3 text architecture and the tokenizer of the demo family.
{shape}

It exists so that the Gemma paths of mlxspec (windows that wrap, their rollback, their snapshots, drafting for them) run for real
on a fresh machine, offline. It demonstrates an engine. It is not a useful assistant, and nobody should quote its answers as
facts. It is a quarter of the demo target's size, and weaker in everything.

## What it cannot do

{limits}

## Measured on held-out files and held-out question forms

| what | reached |
|---|---|
{table}

A low distinct-4-gram share means that a text repeats itself and is easy to predict and to draft: read such a row with that in mind.
Acceptance of the draft model (`demo-draft`, which learned from the other target) is agreement with this model's own choice at true
prefixes. Cross-entropy on held-out code: {raw_loss} nats a token; by position {positions}.
All figures are of the shipped bfloat16 weights, printed by `scripts/demo_eval_gemma.py` and kept in `figures.json` one folder up.

## Training

{training}
"""

LIMITS = """\
- It has no multi-token head: what drafts for it is lookup of n-grams, the family's draft model, or a grammar.
- Its knowledge of the standard library is thinner than the demo target's, and it reasons about nothing.
- Most edits that it is asked for go wrong somewhere: a place is missed, or a line is skipped, repeated or misspelt. About half of
  what it says of well-known functions is right; the rest sounds like it and is not.
- English only. No thinking, no images: the chat template refuses images with a sentence. It was not trained to call tools.
- Context: 2,048 tokens, the longest it was trained on and measured at."""


def _shape(s: GemmaShape) -> str:
    kinds = " ".join("F" if s.is_full(i) else "W" for i in range(s.layers))
    return (
        f"Layers {kinds} (W sees a window of {s.window} tokens, F all before it), {s.heads}/{s.kv_heads} heads of {s.head_dim}, "
        f"hidden {s.hidden},\nfeed-forward {s.ffn}, vocabulary {s.vocab}, tied."
    )


def _rows(f: dict) -> list[tuple[str, str]]:  # type: ignore[type-arg]
    rows = []
    for key, name in (("held_out_code", "held-out code"), ("held_out_chats", "held-out conversations")):
        cell = f[key]
        note = f"(distinct-4-gram {cell['distinct_4gram']:.2f})"
        rows.append((f"next token right, {name} {note}", _percent(cell["right"])))
        rows.append((f"draft model accepted, {name}", _percent(cell["draft_accepted"])))
    for kind, cell in f["edits"].items():
        name = kind.replace("_", " ")
        rows.append((f"copied tokens right, {name}", _percent(cell["copied_tokens_right"])))
        rows.append((f"whole answers right by greedy decoding, {name}", _percent(cell["greedy_exact"])))
    lookup, talk = f["lookup_on_own_edits"], f["talk"]
    note = f"(n = 3, m = 16; distinct-4-gram {lookup['distinct_4gram']:.2f})"
    rows += [
        (f"prompt lookup on its own edits, tokens a round {note}", f"{lookup['tokens_a_round']:.2f}"),
        ("drafted tokens accepted there", _percent(lookup["accepted_share"])),
        ("of these edits entirely right", f"{lookup['answers_right']} of {lookup['answers']}"),
        ("fifty functions in five unseen question forms", _percent(talk["known_right"])),
        ("off-topic prompts refused", f"{talk['off_topic_refused']} of {talk['off_topic_asked']}"),
        ("greedy answers that end in a cycle", _percent(talk["ended_in_a_cycle"])),
    ]
    return rows


def training_lines(work: Path) -> list[str]:
    """What was done, from the checkpoint in `work`."""
    saved = torch.load(work / "gemma.pt")
    tokens, minutes = saved["step"] * MICRO_TOKENS / 1e6, saved["seconds"] / 60
    return [
        "Command: `python scripts/train_demo.py gemma`; every seed is fixed in the scripts. The run behind these weights was stopped "
        "and resumed and its length was settled on the way, so the command gives a model of the same kind, not the same bits.",
        f"{saved['step']:,} steps, {tokens:.1f} M tokens, {minutes:.0f} minutes of a part of one core, without a GPU: first copies and "
        "renames of a few random names, then the mix of conversations and code, the last hundred in rows of 1,024 and 2,048 tokens. "
        "They were drawn from a third of the generated conversations and half of the raw code.",
    ]


def write_gemma_card(work: Path, out: Path) -> None:
    """README.md, LICENSE and NOTICE in `out/gemma`, from `out/figures.json` and the checkpoint in `work`."""
    figures = json.loads((out / "figures.json").read_text())["gemma"]
    sources = json.loads((work / "sources.json").read_text())
    facts = {
        "python": sources["python"],
        "num_files": f"{len(sources['files']):,}",
        "num_held": sum(f["held_out"] for f in sources["files"]),
    }
    card = _CARD.format(
        millions=sum(p.numel() for p in GemmaModel(GEMMA).parameters()) / 1e6,
        shape=_shape(GEMMA),
        limits=LIMITS,
        table="\n".join(f"| {what} | {reached} |" for what, reached in _rows(figures)),
        raw_loss=figures["raw_loss"],
        positions=", ".join(f"{k}: {v}" for k, v in figures["loss_by_position"].items()),
        training="\n".join(f"- {line}" for line in training_lines(work)),
    )
    folder = out / "gemma"
    (folder / "README.md").write_text(card + _DATA.format(**facts))
    (folder / "NOTICE").write_text(_NOTICE.format(**facts))
    shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt", folder / "LICENSE")
    (folder / "LICENSE").chmod(0o644)
