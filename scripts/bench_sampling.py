#!/usr/bin/env python3
"""What sampling costs beside the head's matrix product, at the size of Qwen3.5 0.8B: hidden 1024, vocabulary 248,320, random numbers.

    .venv/bin/python scripts/bench_sampling.py [--rounds 5] [--positions 1 4 17] [--dtype float32] [--vocab 248320] [--json FILE]

Every way to sample and the product are timed in turns in one process; a ratio is the median over rounds of both times of the same round.
On a CPU, seconds are those of this process's CPU threads, so that other programs on the machine count little; on a GPU they are wall time.
Peak is the most memory that one call holds beyond the logits, the logits' own bytes being 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx
from alternating import alternate, median, ratio

from mlxspec.config import SamplingParams
from mlxspec.sampling.logprobs import logprobs
from mlxspec.sampling.sampler import BatchSampler, RowSampler

HEAD = "head"
WAYS = {
    "greedy": SamplingParams(),
    "temperature 1": SamplingParams(temperature=1.0, seed=1),
    "top-k 20": SamplingParams(temperature=1.0, top_k=20, seed=1),
    "top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95, seed=1),
    "top-k 20, top-p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05, seed=1),
}
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def main() -> None:
    device.compile_kernels()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--positions", type=int, nargs="+", default=[1, 4, 17])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with device.private_kernels():
        device.decode_threads()
        found = {
            num: measured(num, options.vocab, options.hidden, DTYPES[options.dtype], options.rounds)
            for num in options.positions
        }
    for num, rows in found.items():
        print(f"{num} positions of {options.vocab} tokens, {options.dtype}, head of {options.hidden}")
        for name, row in rows.items():
            print(
                f"  {name:24s} {1e3 * row['seconds']:8.1f} ms  {row['ratio']:5.2f} of the head  peak {row['peak']:4.1f}"
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def measured(num: int, vocab: int, hidden: int, dtype: mx.Dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Name of a way -> seconds, ratio to the head's product, peak memory in logits."""
    weight, x = mx.random.normal((vocab, hidden)).astype(dtype), mx.random.normal((num, hidden)).astype(dtype)
    logits = (mx.random.normal((num, vocab)) * 3).astype(dtype)
    mx.eval(weight, x, logits)
    calls: dict[str, Callable[[], object]] = {HEAD: lambda: mx.eval(x @ weight.T)}
    for name, params in WAYS.items():
        sampler = BatchSampler([RowSampler(params, [], vocab)], vocab)
        calls[name] = partial(sampled, sampler, logits)
    for top in (0, 5):
        chosen = mx.zeros((num,), mx.int32)
        calls[f"log-probabilities, top {top}"] = partial(with_logprobs, logits, chosen, top)
    clock = time.perf_counter if device.has_gpu() else time.process_time
    taken = alternate(calls, rounds=rounds, clock=clock)
    return {
        name: {
            "seconds": median(taken, name),
            "ratio": ratio(taken, name, HEAD),
            "peak": peak(call) / logits.nbytes,
        }
        for name, call in calls.items()
    }


def sampled(sampler: BatchSampler, logits: mx.array) -> None:
    num = logits.shape[0]
    mx.eval(sampler.sample(logits, [0] * num, range(num)))


def with_logprobs(logits: mx.array, chosen: mx.array, top: int) -> None:
    mx.eval(logprobs(logits, chosen, top).arrays)


def peak(call: Callable[[], object]) -> int:
    """Bytes that it holds at once beyond what was held before."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    call()
    return int(mx.get_peak_memory()) - before


if __name__ == "__main__":
    main()
