#!/usr/bin/env python3
"""What a real vocabulary costs the host: reading it, text to ids and back, and a grammar's masks. Needs no model; times are of one thread.

    python scripts/bench_vocabulary.py [--vocabulary qwen] [--repeats 5]

The vocabulary must be there: scripts/real_model (Gemma 3's), scripts/real_model --vocabulary qwen. Prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from real_parts import places  # noqa: E402

from mlxspec.config import SamplingParams  # noqa: E402
from mlxspec.loading.token_bytes import TokenBytes  # noqa: E402
from mlxspec.loading.tokenizer import Tokenizer  # noqa: E402
from mlxspec.sampling.bad_words import BadWords  # noqa: E402
from mlxspec.sampling.grammar import GrammarCompiler  # noqa: E402

ROWS = {places.MODEL: 262_144, places.VOCABULARY: 248_320}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "count": {"type": "integer"},
    },
    "required": ["name", "tags", "count"],
    "additionalProperties": False,
}
ANSWER = '{"name": "a lamp of green glass", "tags": ["lamp", "glass"], "count": 12}'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", choices=["qwen"], help="Qwen3.6's instead of Gemma 3's")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    name = places.VOCABULARY if options.vocabulary else places.MODEL
    why = places.missing(name)
    if why:
        print(f"bench_vocabulary: {why}.", file=sys.stderr)
        return 1
    for what, unit, seconds in measure(places.place(name), ROWS[name], options.repeats):
        scale = 1e3 if unit == "ms" else 1e6
        print(f"{what:44}{scale * seconds:10.1f} {unit}")
    return 0


def measure(folder: Path, rows: int, repeats: int) -> list[tuple[str, str, float]]:
    """(what, unit to show it in, seconds: of one call, one token or one position)."""
    text = "\n\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md")))[:60_000]
    known = Tokenizer.from_folder(folder)
    data = TokenBytes(known, rows)
    ids, answer = known.encode(text, special=False), known.encode(ANSWER, special=False)
    params = SamplingParams(json_schema=SCHEMA)
    compiler = GrammarCompiler(data)

    def first_grammar() -> object:
        return GrammarCompiler(data).compile(params)

    def stream() -> None:
        made = known.stream()
        for token in ids:
            made.push(token)

    def masks() -> None:
        grammar = compiler.compile(params)
        for token in answer:
            grammar.mask()
            grammar.forced()
            if not grammar.consume(token):
                raise ValueError(f"the grammar refuses token {token} of its own answer")

    compiler.compile(params)
    return [
        ("read the tokenizer", "ms", _median(lambda: Tokenizer.from_folder(folder), repeats)),
        ("bytes of all tokens", "ms", _median(lambda: TokenBytes(known, rows), repeats)),
        ("first grammar (tables of the vocabulary)", "ms", _median(first_grammar, repeats)),
        ("another grammar", "ms", _median(lambda: compiler.compile(params), repeats)),
        ("forbidden words", "ms", _median(lambda: BadWords(("lamp", "glass"), data), repeats)),
        ("text to ids, a token", "us", _median(lambda: known.encode(text), repeats) / len(ids)),
        ("ids to streamed text, a token", "us", _median(stream, repeats) / len(ids)),
        ("mask and forced tokens, a position", "us", _median(masks, repeats) / len(answer)),
    ]


def _median(call: Callable[[], Any], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
