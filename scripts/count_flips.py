#!/usr/bin/env python3
"""How often verifying several tokens at once chooses another token than plain decoding, by dtype and width.

    .venv/bin/python scripts/count_flips.py [--model demo] [--dtype bfloat16 float32] [--widths 2 4 8 17] [--tokens 1000] [--at-once]

Each text is read once by plain steps of one token and once for each width by verifies of so many tokens, all of which are accepted. Both
see the same tokens, so a flip is counted where it happens and nothing follows from it. At each position the likeliest token is compared,
and the token drawn at temperature 1 with the engine's keyed noise. Texts are held-out code for the built-in demo, random tokens for other
models. A count, not a timing. --at-once runs the recurrence of verifies of more than four tokens all at once, as float32 does on a CPU, in
every dtype. --packed keeps quantized weights packed on a CPU.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx
import numpy as np
from bench_noise import held_out

import mlxspec
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.rollback import Rollback, by_tape
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model
from mlxspec.platform.host import numbers
from mlxspec.sampling.noise import gumbel

PROMPT = 16  # tokens that are read together before the steps that are compared
LONGEST = 256  # tokens of a text
HEADER = f"{'dtype':10s} {'width':>5s} {'tokens':>7s} {'changed':>8s} {'largest':>9s} {'greedy':>7s} {'sampled':>8s}"


class Counts(NamedTuple):
    """Of positions: how many have a logit that changed, another likeliest token, another drawn token; largest change of a logit."""

    positions: int = 0
    changed: int = 0
    greedy: int = 0
    sampled: int = 0
    largest: float = 0.0

    def plus(self, other: Counts) -> Counts:
        added = (a + b for a, b in zip(self[:4], other[:4], strict=True))
        return Counts(*added, largest=max(self.largest, other.largest))

    def line(self, dtype: str, width: int) -> str:
        """Flips per 1,000 tokens, and the share of positions whose logits are not equal bit for bit."""
        greedy, sampled = (1000 * n / self.positions for n in (self.greedy, self.sampled))
        share = f"{self.changed / self.positions:.1%}"
        return f"{dtype:10s} {width:5d} {self.positions:7d} {share:>8s} {self.largest:9.1e} {greedy:7.2f} {sampled:8.2f}"


def main() -> None:
    device.compile_kernels()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a folder, or demo")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--widths", nargs="+", type=int, default=[2, 4, 8, 17])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    if options.packed:
        device.UNPACKED_AT_MOST = 0
    print(HEADER)
    for dtype in options.dtype:
        engine = mlxspec.load(options.model, dtype=dtype, draft="off")
        if options.model == "demo":
            texts = cut([engine.tokenizer.encode(text) for text in held_out()], options.tokens)
        else:
            drawn = np.random.default_rng(0).integers(0, engine.model.vocab_size, options.tokens).tolist()
            texts = [drawn[i : i + LONGEST] for i in range(0, len(drawn), LONGEST)]
        with device.private_kernels():
            for width, counts in count(engine.model, texts, options.widths, at_once=options.at_once).items():
                print(counts.line(dtype, width), flush=True)
        engine.close()


def cut(texts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Beginnings of texts, `num_tokens` in all if there are as many."""
    found: list[list[int]] = []
    for text in texts:
        left = num_tokens - sum(map(len, found))
        if left > PROMPT:
            found.append(text[: min(LONGEST, left)])
    return [text for text in found if len(text) > PROMPT]


def count(
    model: Model, texts: list[list[int]], widths: list[int], *, at_once: bool = False
) -> dict[int, Counts]:
    """By width."""
    rollback = by_tape(exact=model.dtype != mx.float32 and not at_once)
    found = dict.fromkeys(widths, Counts())
    for seed, text in enumerate(texts):
        noise = numbers(
            gumbel([seed] * (len(text) - PROMPT), range(PROMPT + 1, len(text) + 1), model.vocab_size)
        )
        plain = read(model, text, 1, rollback)
        for width in widths:
            found[width] = found[width].plus(compare(plain, read(model, text, width, rollback), noise))
    return found


def read(model: Model, text: list[int], width: int, rollback: Rollback) -> np.ndarray:
    """Logits (tokens behind the prompt, V) float32, `width` of them by a forward."""
    cache, found = model.make_cache(1, rollback), []
    forward(model, text[:PROMPT], cache, facts=True)
    for start in range(PROMPT, len(text), width):
        found.append(forward(model, text[start : start + width], cache, facts=width == 1))
    return np.concatenate(found)


def forward(model: Model, tokens: list[int], cache: ModelCache, *, facts: bool) -> np.ndarray:
    """facts: as plain decoding reads; else as a verify, all of which is accepted."""
    out = model.forward(mx.array(tokens, mx.int32), FlatRows((len(tokens),)), cache, facts=facts)
    assert out.logits is not None
    found = numbers(out.logits)
    cache.commit() if facts else cache.commit([len(tokens)])
    cache.flush()
    return found


def compare(plain: np.ndarray, verified: np.ndarray, noise: np.ndarray) -> Counts:
    """All (positions, V)."""
    return Counts(
        positions=len(plain),
        changed=int((plain != verified).any(axis=1).sum()),
        greedy=int((plain.argmax(1) != verified.argmax(1)).sum()),
        sampled=int(((plain + noise).argmax(1) != (verified + noise).argmax(1)).sum()),
        largest=float(np.abs(plain - verified).max()),
    )


if __name__ == "__main__":
    main()
