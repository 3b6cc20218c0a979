"""Proposals over a part of the vocabulary: makes the lists of frequent tokens, and measures what they cover, save and cost.

    python scripts/proposals.py bytes                                          bytes a drafted token reads, at published sizes
    python scripts/proposals.py acceptance [--tokens 96] [--seeds 2] [--bits 4] [--conversations]
                                                                               acceptance lost on the demo family
    python scripts/proposals.py count --tokenizer FOLDER -o FILE GROUP...      a list of the most frequent tokens
    python scripts/proposals.py coverage --tokenizer FOLDER [--list FILE] GROUP...

A GROUP is NAME=PATH,PATH or NAME*WEIGHT=PATH,PATH: files and folders of texts, of which each group has a share in the counts by its weight
(1) and not by its size. Of catalogues of translations (.po) the translations are read. coverage tells for lists of several sizes which
share of a group's tokens they hold: of the merges alone, of FILE, and of FILE with the tokens that stood before in the same piece of
4,096 tokens.

acceptance counts the list from the standard library, or with --conversations from conversations of the kinds that the demo was trained on.
--bits keeps the rows in so many bits, as beside a quantized model.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mlxspec import load  # noqa: E402

# isort: split
import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402

from mlxspec.bench.texts import texts_in  # noqa: E402
from mlxspec.checkpoints import proposal_rows  # noqa: E402
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig  # noqa: E402
from mlxspec.drafters import proposals  # noqa: E402
from mlxspec.loading import row_lists  # noqa: E402
from mlxspec.loading.tokenizer import Tokenizer  # noqa: E402
from mlxspec.models.assemble import ROUTERS  # noqa: E402
from mlxspec.models.registry import architecture  # noqa: E402

LISTED = 32_768
PIECE = 4096  # tokens of a text that count as its own
PUBLISHED = {"4B": "qwen3.5-4b", "9B": "qwen3.5-9b", "27B": "qwen3.6-27b", "35B-A3B": "qwen3.6-35b-a3b"}
ROWS = (2048, 1536, 1024, 512)  # of the demo's vocabulary of 2048


def bytes_table(asked: int | None = None) -> list[list[str]]:
    """For each model and form: bytes of a drafted token's layers and of its head, with all rows and with those that are taken."""
    from write_checkpoint import SIZES

    rows = []
    for name, size in PUBLISHED.items():
        for form, bits in (("bfloat16", None), ("4 bits", 4)):
            target, head = built(SIZES[size], bits)
            found = proposal_rows.proposing(head, target, asked, 4)
            assert found is not None
            layer = found.whole - proposal_rows.whole_reads(head).head
            cells = [layer, found.whole - layer, found.whole, found.row_bytes, found.reduced]
            rows.append(
                [name, form, *(f"{x / 1e6:.0f}" for x in cells), f"{found.whole / found.reduced:.1f}"]
            )
    return rows


def built(config: dict[str, Any], bits: int | None) -> tuple[Any, Any]:
    """Target and MTP head of a published shape; nothing is allocated."""
    kind = architecture(config)
    parsed = kind.parse(config)
    target = kind.build(parsed)
    assert kind.head is not None
    head = kind.head(parsed, target)
    for module in (target, head):
        module.set_dtype(mx.bfloat16)
        if bits is not None:
            nn.quantize(module, 64, bits, class_predicate=_is_packable)
    return target, head


def _is_packable(path: str, part: nn.Module) -> bool:
    return hasattr(part, "to_quantized") and not path.endswith(ROUTERS) and part.weight.shape[-1] % 64 == 0


def conversation_counts(tokenizer: Tokenizer) -> np.ndarray:
    """Counts of tokens in conversations about functions that were not held out; each kind of conversation has the same share."""
    from demo_data import edits, smalltalk
    from demo_data.build import _edit_sets, _question_sets
    from demo_data.corpus import functions, read_library
    from demo_data.questions import known_functions

    rng = random.Random(7)
    found = [f for f in functions(read_library()) if not f.held]
    pool = edits.identifiers(found)
    rng.shuffle(found)
    sets = _edit_sets(found[:500], pool, rng, 1)
    sets["known"] = _question_sets(known_functions(), rng, 2)
    sets["refusal"] = [smalltalk.refusal_chat(rng) for _ in range(200)]
    sets["greeting"] = [smalltalk.greeting_chat(rng) for _ in range(50)]
    shares = np.zeros(tokenizer.vocab_size)
    for texts in sets.values():
        counts = row_lists.count(tokenizer, texts)
        shares += counts / max(1, counts.sum())
    return shares


def acceptance_table(
    tokens: int, seeds: int, bits: int | None = None, conversations: bool = False
) -> list[list[str]]:
    """The demo's drafters with lists of several sizes: accepted drafts, greedy and sampled, beside the share of the head's rows that is
    read; with the text's own tokens and without."""
    from bench_acceptance import prompts

    if bits is not None:
        proposal_rows.is_packed = lambda target: True
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLXSPEC_CACHE"] = folder
        plain = load("demo", draft="off", config=EngineConfig(prefix_budget=0))
        library = sorted(Path(ast.__file__).parent.glob("*.py"))
        counts = (
            conversation_counts(plain.tokenizer)
            if conversations
            else row_lists.count(plain.tokenizer, texts_in(library))
        )
        path = row_lists.own_path(plain.tokenizer)
        row_lists.write(
            path, plain.tokenizer, row_lists.by_frequency(counts, plain.tokenizer.num_ordinary, LISTED)
        )
        texts = prompts(plain)
        asked = [
            SamplingParams(max_tokens=tokens, temperature=t, seed=s, ignore_eos=True)
            for t, s in [(0.0, 0), *((0.7, s) for s in range(seeds))]
            for _ in texts
        ]
        texts = texts * (1 + seeds)
        wanted = [r.tokens for r in plain.generate(texts, asked)]
        for drafter in ("mtp", "draft-model"):
            for num in ROWS:
                for own in (True, False):
                    if num == ROWS[0] and not own:
                        continue
                    proposals.MOST_OWN = 2048 if own else 0
                    spec = SpecConfig(
                        draft_vocab=0 if num == ROWS[0] else num,
                        draft_bits=bits or SpecConfig.draft_bits,
                        policy="fixed",
                        n_max=3,
                    )
                    made = load("demo", draft=drafter, spec=spec, config=EngineConfig(prefix_budget=0))
                    found = made.generate(texts, asked)
                    greedy, sampled = found[: len(found) // (1 + seeds)], found[len(found) // (1 + seeds) :]
                    cells = [f"{100 * _accepted(part):.1f} %" for part in (greedy, sampled)]
                    same = sum(r.tokens == w for r, w in zip(found, wanted, strict=True))
                    rows.append(
                        [drafter, str(num), "yes" if own else "no", *cells, f"{same} of {len(wanted)}"]
                    )
    return rows


def _accepted(results: list[Any]) -> float:
    drafted = sum(r.stats.num_drafted for r in results)
    return sum(r.stats.num_accepted for r in results) / max(1, drafted)


def read_group(text: str) -> tuple[str, float, list[Path]]:
    """NAME*WEIGHT=PATH,PATH. Raises ValueError."""
    name, _, paths = text.partition("=")
    name, _, weight = name.partition("*")
    if not name or not paths:
        raise ValueError(f"{text} is not NAME=PATH")
    return name, float(weight or 1), [Path(p) for p in paths.split(",")]


def texts_of(paths: list[Path]) -> Iterator[str]:
    """Texts; of catalogues the translations alone."""
    for path in paths:
        files = sorted(path.rglob("*.po")) if path.is_dir() else [path]
        if path.suffix == ".po" or (path.is_dir() and files):
            yield from (translations(f.read_text(encoding="utf-8")) for f in files)
        else:
            yield from texts_in([path])


def translations(catalogue: str) -> str:
    """What stands in the msgstr entries of a .po file."""
    found, inside = [], False
    for line in catalogue.splitlines():
        if line.startswith(("msgstr", '"')):
            inside = inside or line.startswith("msgstr")
            if inside and '"' in line:
                found.append(ast.literal_eval(line[line.index('"') :]))
        else:
            inside = False
    return "\n".join(s for s in found if s and not s.startswith("Project-Id-Version"))


def count(tokenizer: Tokenizer, groups: list[tuple[str, float, list[Path]]], num: int) -> np.ndarray:
    """The most frequent ids where each group's tokens weigh as much as the group does."""
    shares = np.zeros(tokenizer.vocab_size)
    for name, weight, paths in groups:
        counts = row_lists.count(tokenizer, texts_of(paths))
        print(f"{name}: {counts.sum():,} tokens, {(counts > 0).sum():,} different", file=sys.stderr)
        shares += weight * counts / max(1, counts.sum())
    return row_lists.by_frequency(shares, tokenizer.num_ordinary, num)


def coverage_table(
    tokenizer: Tokenizer, listed: np.ndarray, groups: list[tuple[str, float, list[Path]]], sizes: list[int]
) -> list[list[str]]:
    """Per cent of each group's tokens, by size and kind of list."""
    merges = np.arange(tokenizer.num_ordinary)
    whole = np.concatenate([listed, merges])
    _, first = np.unique(whole, return_index=True)
    whole = whole[np.sort(first)]
    rows = []
    for name, _, paths in groups:
        pieces = []
        for text in texts_of(paths):
            ids = np.asarray(tokenizer.encode(text, special=False))
            pieces += [ids[i : i + PIECE] for i in range(0, len(ids), PIECE)]
        fresh = [_first_places(p) for p in pieces]
        ids, is_first = np.concatenate(pieces), np.concatenate(fresh)
        cells = []
        for size in sizes:
            held = [np.isin(ids, order[:size]) for order in (merges, whole)]
            shares = [held[0].mean(), held[1].mean(), (held[1] | ~is_first).mean()]
            cells.append(" / ".join(f"{100 * s:.1f}" for s in shares))
        rows.append([name, f"{len(ids):,}", *cells])
    return rows


def _first_places(ids: np.ndarray) -> np.ndarray:
    """Where an id stands for the first time."""
    is_first = np.zeros(len(ids), np.bool_)
    is_first[np.unique(ids, return_index=True)[1]] = True
    return is_first


def table(names: list[str], rows: list[list[str]]) -> str:
    """As Markdown."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


BYTES = [
    "model",
    "weights",
    "layer, MB",
    "head, MB",
    "all, MB",
    "32k rows, MB",
    "all with them, MB",
    "times fewer",
]
ACCEPTANCE = ["drafter", "rows", "and the text's own", "accepted, greedy", "accepted at 0.7", "same text"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bytes")
    accepted = commands.add_parser("acceptance")
    accepted.add_argument("--tokens", type=int, default=96)
    accepted.add_argument("--seeds", type=int, default=2)
    accepted.add_argument("--bits", type=int, choices=(4, 8))
    accepted.add_argument("--conversations", action="store_true")
    for name in ("count", "coverage"):
        command = commands.add_parser(name)
        command.add_argument("--tokenizer", type=Path, required=True)
        command.add_argument("groups", nargs="+", type=read_group)
        if name == "count":
            command.add_argument("-o", "--out", type=Path, required=True)
        else:
            command.add_argument("--list", type=Path)
            command.add_argument("--sizes", default="8192,16384,32768,65536")
    args = parser.parse_args()

    if args.command == "bytes":
        print(table(BYTES, bytes_table()))
    elif args.command == "acceptance":
        print(table(ACCEPTANCE, acceptance_table(args.tokens, args.seeds, args.bits, args.conversations)))
    else:
        tokenizer = Tokenizer.from_folder(args.tokenizer)
        if args.command == "count":
            row_lists.write(args.out, tokenizer, count(tokenizer, args.groups, LISTED))
        else:
            listed = np.zeros(0, np.int64) if args.list is None else row_lists.read(args.list)[1]
            sizes = [int(s) for s in args.sizes.split(",")]
            rows = coverage_table(tokenizer, listed, args.groups, sizes)
            print(table(["text", "tokens", *(f"{s:,}" for s in sizes)], rows))


if __name__ == "__main__":
    main()
