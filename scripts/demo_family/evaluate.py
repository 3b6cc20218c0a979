"""Measures a family through the engine, on exported weights and held-out texts, and writes figures.json and model cards; draws samples.

A drafted text that differs from the plain one is an error.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import mlxspec
from mlxspec import EngineConfig, SamplingParams, SpecConfig, demo
from mlxspec.bench.workloads import read_workloads
from mlxspec.engine.engine import Engine, Result

from .chat import ANSWER, END, START
from .dataset import EDITS, Data
from .pictures import QUESTIONS, Picture, picture
from .questions import HELD_OUT_FORMS, known_functions
from .smalltalk import HELD_OUT, REFUSAL

SEED = 9001  # of pictures that no step of training has drawn
DEPTHS = {"ngram-simple": 16, "mtp": 3, "draft-model": 4, "eagle3": 3, "dflash": 7}
FOLDERS = {
    "draft-model": "draft",
    "eagle3": "eagle3",
    "dflash": "dflash",
}  # of drafters that are no part of the target
GREEDY = SamplingParams(max_tokens=320, temperature=0.0)
SAMPLED_KINDS = ("rename", "known", "rename_function", "docstring", "explain", "continue", "refusal")
CARD = """---
license: other
license_name: psf-2.0
language: [en]
library_name: mlxspec
tags: [speculative-decoding, demo]
---

# mlxspec demo, {member}

It exists so that every path of mlxspec runs for real on a fresh machine, offline. It demonstrates an engine. It is not a useful assistant,
and its answers are not to be relied on. It was trained from nothing on the standard library of CPython and conversations generated
from it, and on nothing else: no other model's output, no web text. `SOURCES.txt` one folder up lists every file, its SHA-256, and whether
it was held out. See `LICENSE` and `NOTICE`.

Measured on held-out texts, through the engine, which gave the same texts with drafting and without:

| what | reached |
|---|---|
{table}
"""


def opened(folder: Path, drafter: str = "", draft_model: Path | None = None) -> Engine:
    """A member with one drafter that always drafts, or with none."""
    spec = SpecConfig(policy="fixed", drafters=(drafter,), n_max=DEPTHS[drafter]) if drafter else SpecConfig()
    config = EngineConfig(prefix_budget=0)
    return mlxspec.load(folder, draft=drafter or "off", draft_model=draft_model, spec=spec, config=config)


def drafted(engine: Engine, prompt: Any, params: SamplingParams) -> Result:
    """The drafted answer. Raises RuntimeError where the plain one differs."""
    plain = engine.generate(prompt, params, spec=replace(engine.spec, drafters=()))
    found = engine.generate(prompt, params)
    if found.tokens != plain.tokens:
        raise RuntimeError(f"drafted {found.text!r}, without drafting {plain.text!r}")
    return found


def drafting(results: Iterable[Result], drafter: str) -> dict[str, Any]:
    """Tokens a round, and shares of drafted tokens that were accepted, by depth."""
    stats = [r.stats for r in results]
    tried, accepted = np.zeros(DEPTHS[drafter]), np.zeros(DEPTHS[drafter])
    for work in (s.drafters[drafter] for s in stats if drafter in s.drafters):
        for depth, counts in enumerate(work.by_position):
            tried[depth] += counts[0]
            accepted[depth] += counts[1]
    rounds = max(1, sum(s.num_rounds for s in stats))
    return {
        "tokens_a_round": round(sum(s.num_decoded for s in stats) / rounds, 3),
        "accepted_at_depth": [round(float(a / max(1, t)), 4) for a, t in zip(accepted, tried, strict=True)],
    }


def on_workloads(folder: Path, drafter: str, draft_model: Path | None, items: int) -> dict[str, Any]:
    """A drafter on the shipped workloads, which hold texts sampled at temperature 1 as well: greedy ones that loop would flatter it."""
    found = {}
    with opened(folder, drafter, draft_model) as engine:
        for work in read_workloads(engine):
            params = SamplingParams(max_tokens=96, temperature=work.temperature, seed=1)
            answers = [drafted(engine, list(prompt), params) for prompt in work.prompts[:items]]
            found[work.name] = drafting(answers, drafter)
    return found


def answers(folder: Path, data: Data, rows: int) -> dict[str, float]:
    """Shares of held-out edits done exactly, of functions described in five unseen question forms, and of off-topic questions refused."""
    figures = {}
    with opened(folder) as engine:

        def said(prompts: Sequence[list[int]]) -> list[str]:
            parts = [list(prompts[i : i + 8]) for i in range(0, len(prompts), 8)]
            return [r.text.strip() for part in parts for r in engine.generate(part, GREEDY)]

        def share_right(prompts: Sequence[list[int]], wanted: Sequence[str]) -> float:
            right = [w in text for text, w in zip(said(prompts), wanted, strict=True)]
            return round(sum(right) / max(1, len(right)), 4)

        def question(text: str) -> list[int]:
            return list(data.tokenizer.encode(f"{START}user\n{text}{END}\n{ANSWER}").ids)

        for kind in (data.held[name] for name in EDITS if name in data.held):
            pairs = [kind.row(i) for i in range(min(rows, len(kind)))]
            wanted = [data.tokenizer.decode(ids[start:].tolist()).strip() for ids, start in pairs]
            name = next(n for n, k in data.held.items() if k is kind)
            figures[f"{name}_exact"] = share_right([ids[:start].tolist() for ids, start in pairs], wanted)
        known = known_functions()
        asked = [
            (form.format(n=k.name), k.sentence)
            for k in known[:: len(known) // rows]
            for form in HELD_OUT_FORMS
        ]
        figures["known_right"] = share_right([question(q) for q, _ in asked], [s for _, s in asked])
        figures["off_topic_refused"] = share_right([question(q) for q in HELD_OUT], [REFUSAL] * len(HELD_OUT))
    return figures


def sample_rows(folder: Path, data: Data, rows: int, length: int, seed: int = 5) -> np.ndarray:
    """Rows (rows, length) of the target's own text at temperatures 0.7 and 1, from openings of raw code and of conversations."""
    rng, done = np.random.default_rng(seed), list[list[int]]()
    kinds = [data.train[k] for k in SAMPLED_KINDS if k in data.train]
    with opened(folder) as engine:
        while len(done) < rows:
            prompts, params = [], []
            for i in range(8):
                ids, start = data.raw(rng, 48), int(rng.integers(8, 48))
                if i % 2:
                    kind = kinds[int(rng.integers(len(kinds)))]
                    ids, start = kind.row(int(rng.integers(len(kind))))
                prompts.append(ids[: max(1, min(start, length - 40))].tolist())
                options = {
                    "temperature": 0.7 if len(done) % 16 else 1.0,
                    "seed": len(done) + i,
                    "ignore_eos": True,
                }
                params.append(SamplingParams(max_tokens=length - len(prompts[-1]), **options))
            found = engine.generate(prompts, params)
            done += [[*p, *r.tokens] for p, r in zip(prompts, found, strict=True)]
    return np.array(done[:rows], np.int64)


def distance(one: str, other: str) -> int:
    """Characters to put in, take out or change to make one text of the other."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def held_out_pictures(num: int) -> list[Picture]:
    """The same ones each time, of all kinds, fonts and sizes."""
    rng = random.Random(SEED)
    return [picture(rng) for _ in range(num)]


def reading(folder: Path, pictures: Sequence[Picture]) -> dict[str, Any]:
    """By kind of picture: share of the characters that are right (one minus the edit distance over their number), of pictures read without
    a fault, and what the MTP head drafts behind the tower's rows."""
    figures: dict[str, Any] = {}
    with opened(folder, "mtp") as engine:
        for kind in QUESTIONS:
            shown = [p for p in pictures if p.kind == kind]
            results = []
            for asked in shown:
                parts = [{"type": "image", "image": asked.image}, {"type": "text", "text": asked.question}]
                prompt = engine.chat_input([{"role": "user", "content": parts}])
                results.append(drafted(engine, prompt, replace(GREEDY, max_tokens=40)))
            wrong = sum(distance(r.text, p.text) for r, p in zip(results, shown, strict=True))
            whole = sum(r.text == p.text for r, p in zip(results, shown, strict=True))
            figures[kind] = {
                "pictures": len(shown),
                "characters_right": round(max(0.0, 1 - wrong / max(1, sum(len(p.text) for p in shown))), 4),
                "whole": round(whole / max(1, len(shown)), 4),
                **drafting(results, "mtp"),
            }
    return figures


def evaluate(work: Path, out: Path, *, rows: int = 32) -> None:
    """Measure each member that lies in `out`, and write `out/figures.json`. rows: held-out texts of a kind."""
    data, figures = Data(work), dict[str, Any]()
    for member in ("target", "gemma", "vision"):
        folder = out / member
        if not (folder / "model.safetensors").exists():
            continue
        if member == "vision":
            found = reading(folder, held_out_pictures(10 * rows))
        else:
            names = ("ngram-simple",) if member == "gemma" else DEPTHS
            beside = {n: out / FOLDERS[n] if n in FOLDERS else None for n in names}
            there = {n: d for n, d in beside.items() if d is None or d.exists()}
            found = answers(folder, data, rows)
            found |= {name: on_workloads(folder, name, d, rows) for name, d in there.items()}
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        figures[member] = {"sha256": digest, **found}
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_cards(out)


def rows_of(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(what, figure) of each number, nested names joined."""
    for name, value in figures.items():
        label = f"{above} {name.replace('_', ' ')}".strip()
        if isinstance(value, Mapping):
            yield from rows_of(value, label)
        elif isinstance(value, list):
            yield label, " / ".join(f"{x:.3f}" for x in value)
        elif name != "sha256":
            yield label, f"{value:g}"


def write_cards(out: Path) -> None:
    """README.md, LICENSE and NOTICE of every member of `out` that was measured."""
    for member, found in json.loads((out / "figures.json").read_text()).items():
        table = "\n".join(f"| {what} | {reached} |" for what, reached in rows_of(found))
        (out / member / "README.md").write_text(CARD.format(member=member, table=table))
        for name in ("LICENSE", "NOTICE"):
            shutil.copy(demo.TARGET / name, out / member / name)
