"""The model cards, notices and licence texts beside the weights. Knows the measured figures, not how they were measured.

Every number in a card is read from `figures.json` or from the checkpoints; a goal that was missed is printed as missed.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .network import DRAFT, TARGET, LanguageModel, Shape

LOW = "missed"

_HEAD = """---
license: other
license_name: psf-2.0
language: [en]
library_name: mlxspec
tags: [speculative-decoding, qwen3_5, demo]
---

# {title}

{lead}

It exists so that every path of mlxspec (hybrid cache rollback, multi-token prediction, draft model, prompt lookup, chat,
server) runs for real on a fresh machine, offline. It demonstrates an engine. It is not a useful assistant, and nobody
should quote its answers as facts.
"""

_LIMITS = """
## What it cannot do

- It knows about 1,700 functions of Python's standard library by heart, as signature and first sentence, and mixes up those
  it saw rarely or whose names are alike. It reasons about nothing.
- Edits are renames, one changed literal, a removed docstring, on functions of up to about 25 lines. Removing a docstring and
  renaming the function usually succeed. Renaming a variable or changing a literal usually goes wrong somewhere: a place is
  missed, or a line is skipped or repeated. It explains a function only by repeating its docstring, and its continuations of
  code are plausible at best and often run into a loop.
- A name alone ("sorted") or an unusual way of asking often gets nonsense; "what does sorted do?" is what it understands.
- Asked for anything else it should say that it cannot help; it does not always.
- English only. No thinking, no images: the chat template refuses images with a sentence. It was not trained to call tools: it calls one
  where a grammar makes it.
- Context: {context} tokens, the longest it was trained on.
{longer}"""

_DATA = """
## Data and licence

Trained from nothing on the standard library of CPython {python} and conversations generated from it (signatures, docstrings,
functions and checked edits of them), plus templates for greetings and refusals. Nothing else was used: no other model's
output, no web text. {num_files} files, {num_held} of them held out; `SOURCES.txt` one folder up lists every file with its
SHA-256 and its side. The library is copyright (c) Python Software Foundation, under the PSF License Agreement (`LICENSE`
here); the weights are given out under the same terms. See `NOTICE`.
"""

_NOTICE = """mlxspec demo model
==================

These weights were trained on the standard library of CPython {python}
(https://www.python.org), Copyright (c) 2001-2023 Python Software Foundation;
All Rights Reserved. Its licence is in the file LICENSE beside this one.

What was made of it: the library's source files were tokenized as raw code and
turned into questions, answers and edits by the generators under
scripts/demo_data; a language model was trained on the result. The weights
contain no files of the library, but reproduce its docstrings and short
pieces of its code when asked to.
"""


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _line(what: str, reached: str, goal: str, ok: bool) -> str:
    return f"| {what} | {reached} | {goal} | {'yes' if ok else LOW} |"


def goals(figures: dict) -> list[tuple[str, str, str, bool]]:  # type: ignore[type-arg]
    """(what, reached, goal, met) of every promise."""
    rows: list[tuple[str, str, str, bool]] = []
    acceptance = figures["acceptance"]
    names = {
        "held_out_code": "held-out code",
        "held_out_chats": "held-out conversations",
        "sampled_0.7": "sampled at temperature 0.7",
        "sampled_1.0": "sampled at temperature 1",
    }
    for key, name in names.items():
        cell = acceptance[key]
        depths = cell["mtp_accepted_at_depth"]
        met = all(d >= g for d, g in zip(depths, (0.68, 0.66, 0.64), strict=True))
        note = f"(distinct-4-gram {cell['distinct_4gram']:.2f})"
        rows.append(
            (
                f"MTP accepted at depth 1 / 2 / 3, {name} {note}",
                " / ".join(map(_percent, depths)),
                "68 / 66 / 64 %",
                met,
            )
        )
    for key, name in names.items():
        cell = acceptance[key]
        if "draft_accepted" in cell:
            met = cell["draft_accepted"] >= 0.55
            note = f"(distinct-4-gram {cell['distinct_4gram']:.2f})"
            rows.append(
                (f"draft model accepted, {name} {note}", _percent(cell["draft_accepted"]), "55 %", met)
            )
    edits = figures["edits"]
    for kind in ("rename", "rename_function", "literal", "docstring"):
        reached = edits[kind]["copied_tokens_right"]
        rows.append(
            (f"copied tokens right, {kind.replace('_', ' ')}", _percent(reached), "98 %", reached >= 0.98)
        )
    for kind, goal in (("docstring", 0.6), ("rename_function", 0.3)):
        reached = edits[kind]["greedy_exact"]
        label = "remove docstring" if kind == "docstring" else "rename function"
        rows.append(
            (f"{label}, greedy, exact", _percent(reached), f"{goal:.0%}".replace("%", " %"), reached >= goal)
        )
    talk = figures["talk"]
    right = talk["known_right"]
    rows.append(("fifty functions in five unseen question forms", _percent(right), "80 %", right >= 0.8))
    refused = talk["off_topic_refused"]
    rows.append(
        ("off-topic prompts refused", f"{refused} of {talk['off_topic_asked']}", "18 of 20", refused >= 18)
    )
    cycles = talk["ended_in_a_cycle"]
    rows.append(("greedy answers that end in a cycle", _percent(cycles), "under 3 %", cycles < 0.03))
    best = figures["lookup"]["n=3 m=16"]["all"]
    rows.append(("prompt lookup on edits, tokens a round (n = 3, m = 16)", f"{best:.2f}", "4", best >= 4))
    return rows


def _figures(figures: dict) -> str:  # type: ignore[type-arg]
    table = "\n".join(_line(*row) for row in goals(figures))
    edits = figures["edits"]
    others = ", ".join(f"{k.replace('_', ' ')} {_percent(edits[k]['greedy_exact'])}" for k in edits)
    positions = ", ".join(f"{k}: {v}" for k, v in figures["loss_by_position"].items())
    return f"""
## Measured on held-out files and held-out question forms

| what | reached | goal | met |
|---|---|---|---|
{table}

Acceptance is agreement with the target's argmax at true prefixes, depth by depth given the depths before (a later step reads
the text's own tokens, not its earlier drafts); never taken from greedy text, whose loops would flatter it. A low
distinct-4-gram share means that the text repeats itself and is easy to draft: read such a row with that in mind.

Whole edits exactly right by greedy decoding: {others}.
Cross-entropy on held-out code: {figures["raw_loss"]} nats a token; by position {positions}.
All figures are of the shipped bfloat16 weights, printed by `scripts/demo_eval.py` and kept in `figures.json` one folder up.
"""


def _shape(s: Shape) -> str:
    kinds = " ".join("A" if (i + 1) % s.interval == 0 else "G" for i in range(s.layers))
    return (
        f"Layers {kinds} (G Gated DeltaNet, {s.linear_heads} heads of {s.linear_key_dim}/{s.linear_value_dim}; A attention, "
        f"{s.heads}/{s.kv_heads} heads of {s.head_dim}), hidden {s.hidden}, feed-forward {s.ffn}, vocabulary {s.vocab}, untied."
    )


def training_facts(work: Path) -> dict[str, list[str]]:
    """What was done for each member, one sentence a phase, from the checkpoints in `work`."""
    lines = {}
    for phase, tokens_a_step in (("main", 4096), ("mtp", 2048), ("draft", 2048)):
        saved = torch.load(work / f"{phase}.pt")
        tokens, minutes = saved["step"] * tokens_a_step / 1e6, saved["seconds"] / 60
        lines[phase] = f"{saved['step']:,} steps, {tokens:.1f} M tokens, {minutes:.0f} minutes"
    where = "on one or two cores of a shared machine, without a GPU"
    return {
        "target": [
            "Command: `python scripts/train_demo.py all`; every seed is fixed in the scripts. The run behind these weights was "
            "stopped and resumed several times and its length was settled on the way, so the command gives a model of the same "
            "kind, not the same bits.",
            f"Trunk and head: {lines['main']} {where}: first copies and renames of a few random names (without them "
            "copying is not learned), then the mix of conversations and code, the last tenth in rows of 1,024 and 2,048 tokens.",
            "After a first measurement (79 % on the fifty functions; one of the five unseen forms reached 16 %) the training forms "
            "were widened by eighteen, most of two clauses and the last 300 steps saw them. The held-out forms were never trained on, "
            "but the choice was made knowing that figure. Head and draft model had been trained on the trunk before those steps and "
            "were continued on the one after.",
            f"Multi-token head: {lines['mtp']} on the frozen trunk, three recursive steps, the trunk's distribution as target.",
        ],
        "draft": [
            "Command: `python scripts/train_demo.py all`; every seed is fixed in the scripts.",
            f"Distilled from the target: {lines['draft']} {where}; half of the rows are text sampled from the target. Most steps saw "
            "the target as it was 300 steps before its end, the last ones the finished one.",
        ],
    }


def longer_prompts(figures: Mapping[str, Any]) -> str:
    """What longer prompts give, from the entry `long` of the figures; nothing where it was not measured."""
    if "long" not in figures:
        return ""
    cell = figures["long"]["sizes"][max(figures["long"]["sizes"], key=int)]["all"]
    accepted = " / ".join(f"{100 * x:.1f} %" for x in cell["head_accepted_at_depth"])
    right = round(cell["exact"] * cell["prompts"])
    return (
        f"- In prompts of {cell['prompt_tokens']:,} tokens it cannot edit: with its limit lifted, {right} of {cell['prompts']} edits "
        "in pasted files\n  came out right. The head's greedy drafts were accepted there at depth 1 / 2 / 3: "
        f"{accepted},\n  {cell['tokens_a_round']['head']:.2f} tokens a round.\n"
    )


def write_cards(work: Path, out: Path) -> None:
    """README.md, LICENSE and NOTICE of both members, from `out/figures.json` and the checkpoints in `work`."""
    figures = json.loads((out / "figures.json").read_text())
    sources = json.loads((work / "sources.json").read_text())
    done = training_facts(work)
    facts = {
        "python": sources["python"],
        "num_files": f"{len(sources['files']):,}",
        "num_held": sum(f["held_out"] for f in sources["files"]),
        "context": "2,048",
    }
    leads = {
        "target": "-million-parameter language model with the Qwen3.5 hybrid architecture: Gated DeltaNet layers, gated\n"
        "attention, and a head for multi-token prediction.",
        "draft": "-million-parameter draft model for the demo target, with the same tokenizer.",
    }
    for member, shape in (("target", TARGET), ("draft", DRAFT)):
        folder = out / member
        millions = sum(p.numel() for p in LanguageModel(shape).parameters()) / 1e6
        lead = f"A {millions:.1f}{leads[member]} {_shape(shape)}"
        how = "\n## Training\n\n" + "\n".join(f"- {line}" for line in done[member]) + "\n"
        limits = _LIMITS.format(**facts, longer=longer_prompts(figures)) if member == "target" else ""
        head = _HEAD.format(title=f"mlxspec demo {member}", lead=lead)
        (folder / "README.md").write_text(head + limits + _figures(figures) + how + _DATA.format(**facts))
        (folder / "NOTICE").write_text(_NOTICE.format(**facts))
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt", folder / "LICENSE")
        (folder / "LICENSE").chmod(0o644)
