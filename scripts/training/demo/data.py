"""The data of the demo family: conversations by kind, and Python files, all made from the standard library's text.

`PYTHONPATH=scripts python -m training.demo.data FOLDER` writes `train/KIND.txt` and `held/KIND.txt` (texts, separated by an
end-of-document token), and `sources.json` (files, hashes, split).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from collections.abc import Callable
from pathlib import Path

from . import copies, edits, smalltalk
from .chat import DOCUMENT_END, ask
from .corpus import Function, SourceFile, first_sentence, functions, read_library
from .questions import Known, answer, known_functions, training_question

EDITS = ("rename", "rename_function", "literal", "docstring")

Sets = dict[str, list[str]]


def _repeat(make: Callable[[], str | None], count: int) -> list[str]:
    return [text for text in (make() for _ in range(count)) if text]


def _edit_sets(found: list[Function], pool: list[str], rnd: random.Random, rounds: int) -> Sets:
    sets: Sets = {kind: [] for kind in (*EDITS, "explain", "continue", "turns")}
    for number in range(rounds):
        for f in found:
            for kind in EDITS:
                sets[kind] += _repeat(lambda f=f, kind=kind: edits.edit_chat(kind, f, pool, rnd), 1)
            if number < 2:
                sets["explain"] += _repeat(lambda f=f: edits.explain_chat(f, rnd), 1)
                sets["continue"] += _repeat(lambda f=f: edits.continue_chat(f, rnd), 1)
            if f.doc or number == 0:
                sets["turns"] += _repeat(lambda f=f: edits.several_turns(f, pool, rnd), 1)
    return sets


def _other_docs(found: list[Function], rnd: random.Random) -> list[str]:
    texts = []
    for f in found:
        sentence = first_sentence(f.doc) if f.doc else ""
        if len(sentence) >= 12:
            item = Known(name=f.qualname, aliases=(), answer="", sentence=sentence)
            said = answer(f.qualname, edits.signature(f.source), sentence)
            texts.append(ask(training_question(item, rnd), said))
    return texts


def conversations(files: list[SourceFile], seed: int, share: float = 1.0) -> tuple[Sets, Sets]:
    """Training and held-out conversations by kind. share: of the conversations that are made from word lists, below 1 for a smoke run."""
    rnd = random.Random(seed)
    found = functions(files)
    train, held = [f for f in found if not f.held], [f for f in found if f.held]
    pool = edits.identifiers(train, at_least=6 if share == 1 else 2)
    snippets, known = [f.source for f in train], known_functions()

    def count(whole: int) -> int:
        return max(1, round(whole * share))

    sets = _edit_sets(train, pool, rnd, 2)
    sets["copy"] = _repeat(lambda: copies.short_copy(pool, snippets, rnd), count(30_000))
    sets["short_rename"] = _repeat(lambda: copies.short_rename(pool, rnd), count(40_000))
    sets["known"] = [ask(training_question(k, rnd), k.answer) for k in known for _ in range(count(24))]
    sets["other_docs"] = _other_docs(train, rnd)
    sets["refusal"] = _repeat(lambda: smalltalk.refusal_chat(rnd), count(6000))
    sets["invented"] = _repeat(lambda: smalltalk.invented_chat(rnd), count(400))
    sets["greeting"] = _repeat(lambda: smalltalk.greeting_chat(rnd), count(600))
    for texts in sets.values():
        rnd.shuffle(texts)
    held_sets = _edit_sets(held, pool, rnd, 1)
    held_snippets = [f.source for f in held]
    held_sets["copy"] = _repeat(lambda: copies.short_copy(pool, held_snippets, rnd), 100)
    held_sets["short_rename"] = _repeat(lambda: copies.short_rename(pool, rnd), 100)
    for texts in held_sets.values():
        rnd.shuffle(texts)
    return sets, held_sets


def build(folder: Path, *, seed: int = 7, share: float = 1.0) -> None:
    """Write the data set into `folder`. share: of the library's files and of the conversations, below 1 for a trial."""
    files = read_library()[:: 1 if share == 1 else 12]
    train, held = conversations(files, seed, share)
    library = [f.text for f in files if not f.held]
    for side, sets in (("train", {**train, "library": library}), ("held", held)):
        (folder / side).mkdir(parents=True, exist_ok=True)
        for kind, texts in sets.items():
            (folder / side / f"{kind}.txt").write_text(DOCUMENT_END.join(texts), encoding="utf-8")
            print(f"{side} {kind}: {len(texts)} texts")
    listed = [{"path": f.path, "sha256": f.sha256, "held_out": f.held} for f in files]
    sources = {"python": platform.python_version(), "licence": "PSF-2.0", "seed": seed, "files": listed}
    (folder / "sources.json").write_text(json.dumps(sources))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    build(parser.parse_args().folder)
