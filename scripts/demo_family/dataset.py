"""The data set: conversations by kind, raw code, a tokenizer, token arrays; and batches of packed rows of them.

`build` writes `tokenizer.json`, `tokens.npz` (per kind: flat ids, row offsets, index of the first answer token), `held.json` (the held-out
conversations as text) and `sources.json` (files, hashes, split). `Data` reads them, and `Sampler` draws rows of one mixture: a batch is a
pure function of the seed and its number, so that a run that is resumed sees the same data.
"""

from __future__ import annotations

import json
import platform
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import copies, edits, smalltalk
from .chat import ANSWER, DOCUMENT_END, END, START, WORDINGS, ask
from .corpus import Function, SourceFile, first_sentence, functions, read_library
from .questions import Known, answer, known_functions, training_question

VOCAB_SIZE = 2048
SPECIAL = (DOCUMENT_END, START, END)  # ids 0, 1 and 2
# Identifiers are cut from the punctuation before them, so a name has one spelling after "(", "." or "[", and copying or renaming it is
# the same token sequence everywhere (a leading space is the one variant left).
PATTERN = r" ?[A-Za-z]+|\p{N}| ?[^\sA-Za-z\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EDITS = ("rename", "rename_function", "literal", "docstring")

SYSTEM_PROMPTS: list[str] = WORDINGS["dataset"]["system_prompts"]
# Shares of a mixture by tokens. Prompts count 0.2 in the loss, those of the short copies (random text) nothing.
CURRICULUM: dict[str, float] = WORDINGS["dataset"]["curriculum"]
MIX: dict[str, float] = WORDINGS["dataset"]["mix"]
LONG = dict(MIX, turns=0.12, known=0.21, rename=0.14, copy=0.02, short_rename=0.03)
PROMPT_WEIGHT = {"copy": 0.0, "short_rename": 0.0}

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


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE entries."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spelled])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
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


def build(folder: Path, *, seed: int = 7, tokenizer_file: Path | None = None, share: float = 1.0) -> None:
    """Write the data set into `folder`, in tokens of `tokenizer_file` or of a tokenizer made from it. share: below 1 for a smoke run."""
    folder.mkdir(parents=True, exist_ok=True)
    files = read_library()[:: 1 if share == 1 else 12]
    train, held = conversations(files, seed, share)
    library = [f.text for f in files if not f.is_test and not f.held]
    tests = [f.text for f in files if f.is_test and not f.held]
    if tokenizer_file is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    else:
        said = [t for k in ("known", "explain", "refusal") for t in train[k][::4]]
        tokenizer = train_tokenizer(library[::2] + tests[::8] + said)
    tokenizer.save(str(folder / "tokenizer.json"))
    arrays: dict[str, np.ndarray] = {}
    for side, sets in (("train", train), ("held", held)):
        for kind, texts in sets.items():
            packed = _pack(tokenizer, texts)
            arrays |= {f"{side}/{kind}/{name}": array for name, array in packed.items()}
            print(f"{side} {kind}: {len(texts)} conversations, {len(packed['ids']) / 1e6:.2f} M tokens")
    raw = {"train/library": library, "train/tests": tests, "held/raw": [f.text for f in files if f.held]}
    for name, texts in raw.items():
        ids = [np.array([0, *e.ids], np.uint16) for e in tokenizer.encode_batch(texts)]
        arrays[f"raw/{name}"] = np.concatenate(ids)
    np.savez(folder / "tokens.npz", **arrays)
    (folder / "held.json").write_text(json.dumps(held))
    listed = [{"path": f.path, "sha256": f.sha256, "held_out": f.held} for f in files]
    sources = {"python": platform.python_version(), "licence": "PSF-2.0", "seed": seed, "files": listed}
    (folder / "sources.json").write_text(json.dumps(sources))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """All rows of one kind: flat ids (uint16), offsets (num_rows + 1), index of each row's first answer token."""

    ids: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, i: int) -> tuple[np.ndarray, int]:
        return self.ids[self.offsets[i] : self.offsets[i + 1]].astype(np.int64), int(self.starts[i])


class Data:
    """The tokenized data set in memory."""

    def __init__(self, folder: Path) -> None:
        arrays = np.load(folder / "tokens.npz")
        names = sorted({key.rsplit("/", 1)[0] for key in arrays if not key.startswith("raw/")})
        kinds = {n: Kind(**{f: arrays[f"{n}/{f}"] for f in ("ids", "offsets", "starts")}) for n in names}
        self.train, self.held = (
            {n.partition("/")[2]: k for n, k in kinds.items() if n.startswith(side) and len(k)}
            for side in ("train/", "held/")
        )
        self.library, self.tests = arrays["raw/train/library"], arrays["raw/train/tests"]
        self.held_raw = arrays["raw/held/raw"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        render = "<|im_start|>system\n{}<|im_end|>\n"
        self.systems = [np.array(self.tokenizer.encode(render.format(t)).ids) for t in SYSTEM_PROMPTS]

    def raw(self, rng: np.random.Generator, length: int) -> np.ndarray:
        source = self.library if rng.random() < 0.7 else self.tests
        at = int(rng.integers(0, len(source) - length))
        return source[at : at + length].astype(np.int64)


class Sampler:
    """Draws rows of one mixture at one length. A row holds whole conversations, often separated by an end-of-document token, and its tail
    is filled with raw code, so that an answer is never cut off from its question."""

    def __init__(self, data: Data, mixture: dict[str, float], length: int) -> None:
        self.data, self.length = data, length
        self.kinds = [k for k in mixture if k in data.train]
        means = [np.minimum(np.diff(data.train[k].offsets), length).mean() for k in self.kinds]
        weights = np.array([mixture[k] for k in self.kinds]) / np.array(means)
        self.probabilities = weights / weights.sum()
        self.raw_share = mixture["raw"] / sum(mixture.values()) * 0.7  # tails of rows are the rest

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """One row of `length + 2` ids and the loss weight of each token as a target."""
        size = self.length + 2
        if rng.random() < self.raw_share:
            ids = self.data.raw(rng, size)
            return ids, np.where(ids == 0, 0.0, 1.0)
        ids, weights = np.zeros(size, np.int64), np.zeros(size)
        used = misses = 0
        if rng.random() < 0.08:
            system = self.data.systems[int(rng.integers(len(self.data.systems)))]
            ids[: len(system)], used = system, len(system)
        while size - used > 24 and misses < 6:
            kind = self.kinds[int(rng.choice(len(self.kinds), p=self.probabilities))]
            rows = self.data.train[kind]
            one, start = rows.row(int(rng.integers(len(rows))))
            if used + len(one) > size:
                misses += 1
                continue
            ids[used : used + len(one)] = one
            weights[used + start : used + len(one)] = 1.0
            weights[used : used + start] = PROMPT_WEIGHT.get(kind, 0.2)
            used += len(one) + int(rng.random() < 0.6)  # the id between is 0, <|endoftext|>
        if used + 1 < size:
            used += int(ids[used - 1] != 0)
            ids[used:] = self.data.raw(rng, size - used)
            weights[used:] = np.where(ids[used:] == 0, 0.0, 1.0)
        return ids, weights

    def batch(self, seed: int, number: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Micro-batch `number` of the run: ids and weights (rows, length + 2)."""
        rng = np.random.default_rng([seed, number])
        pairs = [self.row(rng) for _ in range(rows)]
        return np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs]).astype(np.float32)
