"""Assembles the data set: conversations by kind (training and held out), raw code, the tokenizer, and token arrays.

Knows which kinds there are and how many; the training script knows in which proportions they are shown. Output folder:
`tokenizer.json`, `conversations.json` (text), `tokens.npz` (per kind: flat ids, row offsets, index of the first answer token),
`sources.json` (files, hashes, split, interpreter version).
"""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import copies, edits, smalltalk
from .chat import ANSWER, DOCUMENT_END, END, START, ask
from .corpus import SourceFile, first_sentence, functions, read_library
from .questions import Known, answer, known_functions, training_question

VOCAB_SIZE = 2048
SPECIAL = (DOCUMENT_END, START, END)
# Identifiers are cut from the punctuation before them, so a name has one spelling after "(", "." or "[" and copying or
# renaming it is the same token sequence everywhere (a leading space is the one variant left).
PATTERN = r" ?[A-Za-z]+|\p{N}| ?[^\sA-Za-z\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Sets = dict[str, list[str]]


def _repeat(make: Callable[[], str | None], count: int) -> list[str]:
    return [text for text in (make() for _ in range(count)) if text]


def _edit_sets(found: list, pool: list[str], rnd: random.Random, rounds: int) -> Sets:  # type: ignore[type-arg]
    sets: Sets = {
        k: [] for k in ("rename", "rename_function", "literal", "docstring", "explain", "continue", "turns")
    }
    for number in range(rounds):
        for f in found:
            for kind in ("rename", "rename_function", "literal", "docstring"):
                sets[kind] += _repeat(lambda f=f, kind=kind: edits.edit_chat(kind, f, pool, rnd), 1)
            if number < 2:
                sets["explain"] += _repeat(lambda f=f: edits.explain_chat(f, rnd), 1)
                sets["continue"] += _repeat(lambda f=f: edits.continue_chat(f, rnd), 1)
            if f.doc or number == 0:
                sets["turns"] += _repeat(lambda f=f: edits.several_turns(f, pool, rnd), 1)
    return sets


def _question_sets(known: list[Known], rnd: random.Random, forms: int) -> list[str]:
    return [ask(training_question(item, rnd), item.answer) for item in known for _ in range(forms)]


def _other_docs(found: list, rnd: random.Random) -> list[str]:  # type: ignore[type-arg]
    texts = []
    for f in found:
        sentence = first_sentence(f.doc) if f.doc else ""
        if len(sentence) >= 12 and not f.held:
            item = Known(name=f.qualname, aliases=(), answer="", sentence=sentence)
            said = answer(f.qualname, edits.signature(f.source), sentence)
            texts.append(ask(training_question(item, rnd), said))
    return texts


def conversations(files: list[SourceFile], seed: int) -> tuple[Sets, Sets]:
    """Training and held-out conversations by kind."""
    rnd = random.Random(seed)
    found = functions(files)
    train, held = [f for f in found if not f.held], [f for f in found if f.held]
    pool = edits.identifiers(train)
    snippets = [f.source for f in train]
    known = known_functions()
    sets = _edit_sets(train, pool, rnd, 2)
    sets["copy"] = _repeat(lambda: copies.short_copy(pool, snippets, rnd), 30_000)
    sets["short_rename"] = _repeat(lambda: copies.short_rename(pool, rnd), 40_000)
    sets["known"] = _question_sets(known, rnd, 24)
    sets["other_docs"] = _other_docs(train, rnd)
    sets["refusal"] = _repeat(lambda: smalltalk.refusal_chat(rnd), 6000)
    sets["invented"] = _repeat(lambda: smalltalk.invented_chat(rnd), 400)
    sets["greeting"] = _repeat(lambda: smalltalk.greeting_chat(rnd), 600)
    for texts in sets.values():
        rnd.shuffle(texts)
    held_sets = _edit_sets(held, pool, rnd, 1)
    held_snippets = [f.source for f in held]
    held_sets["copy"] = _repeat(lambda: copies.short_copy(pool, held_snippets, rnd), 100)
    held_sets["short_rename"] = _repeat(lambda: copies.short_rename(pool, rnd), 100)
    for texts in held_sets.values():
        rnd.shuffle(texts)
    return sets, held_sets


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE entries; the special tokens are 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _pack(tokenizer: Tokenizer, texts: list[str]) -> dict[str, np.ndarray]:
    """Flat ids, row offsets (num_rows + 1) and, per row, the index of the first answer's first token."""
    marker = tokenizer.encode(ANSWER).ids
    rows, starts = [], []
    for encoding in tokenizer.encode_batch(texts):
        ids = encoding.ids
        found = next((i for i in range(len(ids)) if ids[i : i + len(marker)] == marker), -len(marker))
        rows.append(np.array(ids, np.uint16))
        starts.append(found + len(marker))
    offsets = np.cumsum([0] + [len(r) for r in rows]).astype(np.int64)
    flat = np.concatenate(rows) if rows else np.zeros(0, np.uint16)
    return {"ids": flat, "offsets": offsets, "starts": np.array(starts, np.int32)}


def build(folder: Path, seed: int = 7, tokenizer_file: Path | None = None) -> None:
    """Write the whole data set into `folder`, in tokens of `tokenizer_file` or of a tokenizer made from it."""
    began = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    files = read_library()
    train, held = conversations(files, seed)
    print(f"{len(files)} files, conversations made in {time.time() - began:.0f} s", flush=True)
    library = [f.text for f in files if not f.is_test and not f.held]
    tests = [f.text for f in files if f.is_test and not f.held]
    if tokenizer_file is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    else:
        sample = (
            library[::2] + tests[::8] + [t for k in ("known", "explain", "refusal") for t in train[k][::4]]
        )
        tokenizer = train_tokenizer(sample)
    tokenizer.save(str(folder / "tokenizer.json"))
    arrays: dict[str, np.ndarray] = {}
    for side, sets in (("train", train), ("held", held)):
        for kind, texts in sets.items():
            for name, array in _pack(tokenizer, texts).items():
                arrays[f"{side}/{kind}/{name}"] = array
    raw = {"train/library": library, "train/tests": tests, "held/raw": [f.text for f in files if f.held]}
    for name, texts in raw.items():
        ids = [np.array([0, *e.ids], np.uint16) for e in tokenizer.encode_batch(texts)]
        arrays[f"raw/{name}"] = np.concatenate(ids)
    np.savez(folder / "tokens.npz", **arrays)
    (folder / "held.json").write_text(json.dumps(held))
    sources = {
        "python": platform.python_version(),
        "licence": "PSF-2.0",
        "seed": seed,
        "files": [{"path": f.path, "sha256": f.sha256, "held_out": f.held} for f in files],
    }
    (folder / "sources.json").write_text(json.dumps(sources))
    for kind in train:
        rows = np.diff(arrays[f"train/{kind}/offsets"])
        held_rows = len(held.get(kind, []))
        print(
            f"{kind:16s} {len(rows):6d} rows {rows.sum() / 1e6:6.2f} M tokens, median {int(np.median(rows))}, held {held_rows}"
        )
    for name in raw:
        chars = sum(map(len, raw[name]))
        print(
            f"raw {name} {len(arrays['raw/' + name]) / 1e6:.2f} M tokens, {chars / len(arrays['raw/' + name]):.2f} chars/token"
        )
    print(f"built in {time.time() - began:.0f} s", flush=True)
