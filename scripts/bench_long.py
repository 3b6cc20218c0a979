#!/usr/bin/env python3
"""What a step of the engine costs the host behind texts of 2k, 16k, 64k and 128k tokens, and how long lookups take there.

    scripts/bench_long [--lengths 2048 16384 65536 131072] [--ways plain mtp] [--steps 8] [--json FILE]
    scripts/bench_long --generate 4000 [--last 500] [--model FOLDER]

The model is tiny, and its keys and values are random numbers, so no prompt is read. Calls, bytes and nodes are counted: other work on the
machine does not change them. Host time is the engine's own thread's, without waiting and without MLX's threads. Attention to a long text
drives the host's data out of the caches of a CPU all the same, so host time is compared by the ways "no attention". Each count is of a
step of its own, because counting one slows the others down.

--generate: how fast the last tokens of so long an answer are, against as many tokens behind a prompt that is the rest of that answer. Both
attend to the same tokens, so attention's growth is in both, and what else grew with the answer would show. Two engines with the same model
decode in turn, BLOCK tokens each. The model is the tiny one, or a FOLDER as scripts/write_checkpoint makes them. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mlxspec.platform import device  # noqa: E402  # before mlx: it loads the BLAS

# isort: split
import mlx.core as mx  # noqa: E402
from alternating import alternate, ratio  # noqa: E402

from mlxspec import load  # noqa: E402
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.engine.request import Request  # noqa: E402
from tests import long_text, tiny_models  # noqa: E402

ROOM = 4096  # tokens
FIRST_PROMPT = 16
BLOCK = 50  # tokens that are timed together
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
    parser.add_argument("--generate", type=int, metavar="TOKENS")
    parser.add_argument("--last", type=int, default=500, help="so many tokens of the answer are timed")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="for --generate")
    options = parser.parse_args()
    if options.generate is not None:
        if not 2 * BLOCK <= 2 * options.last <= options.generate:
            parser.error(f"--last must be from {BLOCK} tokens to half of --generate")
        print(generation_line(generation(options.generate, options.last, options.model)))
        return
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


def generation(tokens: int, last: int, folder: Path | None = None) -> dict[str, float]:
    """Speed of the last tokens of an answer over that of as many behind a prompt, and over that of its first."""
    model, tokenizer = _model(folder)

    def engine() -> Engine:
        return Engine(model, tokenizer, config=EngineConfig(prefix_budget=0))

    def begun(made: Engine, prompt: list[int], more: int) -> Request:
        params = SamplingParams(max_tokens=more + BLOCK, ignore_eos=True)
        request = made.submit(prompt, params, spec=SpecConfig(policy="fixed"))
        _decode(made, request, BLOCK)
        return request

    answering, reading = engine(), engine()
    answer = begun(answering, [(7 * i) % 90 + 1 for i in range(FIRST_PROMPT)], tokens)
    started = time.perf_counter()
    _decode(answering, answer, last)
    first = (time.perf_counter() - started) / last
    _decode(answering, answer, tokens - last - answer.num_generated)
    behind = begun(reading, answer.history[:-BLOCK], last + BLOCK)
    turns = {
        "generated": lambda: _decode(answering, answer, BLOCK),
        "behind a prompt": lambda: _decode(reading, behind, BLOCK),
    }
    taken = alternate(turns, rounds=last // BLOCK, warmup=0)
    equal = answer.history == behind.history
    each = statistics.median(taken["generated"]) / BLOCK
    answering.close()
    reading.close()
    return {
        "ratio": ratio(taken, "behind a prompt", "generated"),
        "over the first": first / each,
        "milliseconds": 1e3 * each,
        "equal": float(equal),
    }


def generation_line(found: dict[str, float]) -> str:
    return (
        f"speed of the last tokens: {found['ratio']:.3f} of that behind a prompt of the same text, {found['over the first']:.3f} of that "
        f"of the first tokens; {found['milliseconds']:.2f} ms each; {'equal' if found['equal'] else 'other'} tokens"
    )


def _model(folder: Path | None):  # type: ignore[no-untyped-def]
    """A model and its tokenizer."""
    if folder is None:
        return long_text.models("hybrid")[0], tiny_models.tokenizer()
    made = load(str(folder), draft="off")
    return made.model, made.tokenizer


def _decode(engine: Engine, request: Request, tokens: int) -> None:
    """So many tokens more; nothing is on its way then."""
    ends = request.num_generated + tokens
    while request.num_generated < ends:
        engine.step()
    mx.synchronize()


if __name__ == "__main__":
    main()
