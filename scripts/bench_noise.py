#!/usr/bin/env python3
"""How often an MTP draft of depth 1 stands at temperature 1, by how the drafter chooses: at the true prefixes of held-out text.

    .venv/bin/python scripts/bench_noise.py [--temperature 1.0] [--json FILE]

Held-out text is the code in the demo family's `continue`, `explain` and `edit` workloads, from files the family never saw. Target and head
read it once; at every position the target's next token is drawn as the engine draws it (keyed Gumbel noise), and a draft is chosen by each
rule. No text is generated, so nothing can loop. A count, not a timing: it means the same on any machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx
import numpy as np

from mlxspec.demo import workload
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.tokenizer import Tokenizer, read_json
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble import Assembled, assemble
from mlxspec.platform.resources import demo_folder
from mlxspec.sampling.noise import gumbel

NUM_SEEDS = 8
RULES = ("argmax drafts", "own noise", "shared noise", "rejection")


def main() -> None:
    device.compile_kernels()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = demo_folder("target")
    tokenizer = Tokenizer.from_folder(folder)
    texts = [tokenizer.encode(text)[:1024] for text in held_out()]
    with device.private_kernels():
        family = assemble(read_json(folder / "config.json"), lambda: read_folder(folder))
        counted = [rates(family, tokens, options.temperature) for tokens in texts if len(tokens) > 32]
    weights = [n for n, _ in counted]
    found = dict(
        zip(RULES, np.average([r for _, r in counted], axis=0, weights=weights).tolist(), strict=True)
    )
    grams = [tuple(t[i : i + 4]) for t in texts for i in range(len(t) - 3)]
    print(
        f"{sum(weights)} positions of {len(counted)} held-out texts, distinct-4-gram {len(set(grams)) / len(grams):.2f}"
    )
    for rule, rate in found.items():
        print(f"{rule:14s} {rate:.3f}   {rate / found['argmax drafts']:.2f}x argmax drafts")
    if options.json:
        options.json.write_text(json.dumps(found | {"temperature": options.temperature}, indent=1))


def held_out() -> list[str]:
    """Code out of the recorded prompts: what stands between the fences, with its true continuation where one was asked for."""
    found = []
    for name in ("continue", "explain", "edit"):
        for item in json.loads(workload(name).read_text())["items"]:
            code = item["messages"][0]["content"].split("```")[1].removeprefix("python\n")
            if name == "continue":
                code += item["reference"].split("```")[1].removeprefix("python\n")
            found.append(code)
    return found


def rates(family: Assembled, tokens: list[int], temperature: float) -> tuple[int, list[float]]:
    """(positions, acceptance by rule). Target position t says what follows token t; the head's cell t + 1 is asked the same."""
    model, head = family.model, family.mtp
    if head is None:
        raise SystemExit("The demo target has no MTP head.")
    rows = FlatRows((len(tokens),))
    cache, drafts = model.make_cache(1), head.make_cache(1)
    out = model.forward(mx.array(tokens), rows, cache, facts=True)
    before = mx.concatenate([mx.zeros((1, model.hidden_size)), out.hidden[:-1]])
    guess = head.forward(mx.array(tokens), before, rows, drafts, logits_at="all")
    # the head's cell at t predicts token t + 1 from token t and the hidden before it, as the target's position t does
    p, q = (logits.astype(mx.float32) / temperature for logits in (out.logits, guess.logits))
    probs_p, probs_q = mx.softmax(p, axis=-1), mx.softmax(q, axis=-1)
    likeliest = mx.argmax(q, axis=-1)[:, None]
    argmax = mx.take_along_axis(probs_p, likeliest, axis=-1).mean().item()
    own = (probs_p * probs_q).sum(axis=-1).mean().item()
    rejection = mx.minimum(probs_p, probs_q).sum(axis=-1).mean().item()
    places = list(range(1, len(tokens) + 1))
    same = 0.0
    for seed in range(NUM_SEEDS):
        noise = gumbel([seed] * len(tokens), places, model.vocab_size)
        same += (mx.argmax(p + noise, axis=-1) == mx.argmax(q + noise, axis=-1)).mean().item()
    return len(tokens), [argmax, own, same / NUM_SEEDS, rejection]


if __name__ == "__main__":
    main()
