#!/usr/bin/env python3
"""What a step of the engine costs the host behind texts of 2k, 16k, 64k and 128k tokens, and how long lookups take there.

    scripts/bench_long [--lengths 2048 16384 65536 131072] [--ways plain mtp] [--steps 8] [--json FILE]

The model is tiny, and its keys and values are random numbers, so no prompt is read. Calls, bytes and nodes are counted: other work on the
machine does not change them. Host time is the engine's own thread's, without waiting and without MLX's threads. Attention to a long text
drives the host's data out of the caches of a CPU all the same, so host time is compared by the ways "no attention". Each count is of a
step of its own, because counting one slows the others down.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mlxspec.platform import device  # noqa: E402  # before mlx: it loads the BLAS

# isort: split
from mlxspec.config import SamplingParams, SpecConfig  # noqa: E402
from tests import long_text  # noqa: E402

ROOM = 4096  # tokens
PARAMS = {
    "greedy": SamplingParams(max_tokens=ROOM),
    "sampled": SamplingParams(
        max_tokens=ROOM,
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        seed=1,
        stop=("no such text", "nor this"),
        logprobs=True,
    ),
    "processed": SamplingParams(max_tokens=ROOM, logits_processors=(lambda tokens, logits: logits,)),
}
# (options, parameters, stack of tiny_models)
WAYS = {
    "plain, no attention": (SpecConfig(policy="fixed"), "greedy", "recurrent"),
    "ngram-simple, no attention": (
        SpecConfig(drafters=("ngram-simple",), policy="fixed"),
        "sampled",
        "recurrent",
    ),
    "auto, no attention": (SpecConfig(drafters=("ngram-simple",), policy="auto"), "greedy", "recurrent"),
    "plain": (SpecConfig(policy="fixed"), "greedy", "hybrid"),
    "plain, sampled": (SpecConfig(policy="fixed"), "sampled", "hybrid"),
    "plain, a logits processor": (SpecConfig(policy="fixed"), "processed", "hybrid"),
    "ngram-simple": (SpecConfig(drafters=("ngram-simple",), policy="fixed"), "greedy", "hybrid"),
    "mtp": (SpecConfig(drafters=("mtp",), policy="fixed", n_max=3), "greedy", "hybrid"),
    "mtp, sampled": (SpecConfig(drafters=("mtp",), policy="fixed", n_max=3), "sampled", "hybrid"),
    "auto": (SpecConfig(drafters=("ngram-simple", "mtp"), policy="auto"), "greedy", "hybrid"),
}


def main() -> None:
    device.compile_kernels()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=long_text.LENGTHS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {"steps": {}, "lookups": {}}
    with device.private_kernels():
        print(
            "| way | tokens | calls | Python bytes | kept | nodes | MLX bytes | host ms |\n|---|---|---|---|---|---|---|---|"
        )
        for way in options.ways:
            spec, params, stack = WAYS[way]
            for length in options.lengths:
                engine, request = long_text.engine_behind(length, PARAMS[params], spec, stack=stack)
                work = long_text.step_work(engine, request, steps=options.steps)
                engine.close()
                found["steps"][f"{way} behind {length}"] = asdict(work)
                print(
                    f"| {way} | {length} | {work.calls} | {work.python_bytes} | {work.kept_bytes} | {work.nodes} "
                    f"| {work.mlx_bytes} | {1e3 * work.host_seconds:.2f} |",
                    flush=True,
                )
        print("\n| lookup | tokens | microseconds | a token heard |\n|---|---|---|---|")
        for length in options.lengths:
            tokens = long_text.text(length)
            for drafter in long_text.lookups():
                looked, heard = (1e6 * s for s in long_text.lookup_seconds(drafter, tokens))
                found["lookups"][f"{drafter.name} in {length}"] = {"lookup": looked, "heard": heard}
                print(f"| {drafter.name} | {length} | {looked:.1f} | {heard:.1f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
