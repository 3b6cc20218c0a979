#!/usr/bin/env python3
"""What sampling costs beside the head's matrix product and a whole forward, at the size of Qwen3.5 0.8B: vocabulary 248,320.

    .venv/bin/python scripts/bench_sampling.py [--rounds 5] [--positions 1 4 17] [--dtype float32] [--vocab 248320] [--json FILE]
    .venv/bin/python scripts/bench_sampling.py --forward FOLDER [--positions 17]

Logits are random numbers; the positions are one row's token and its draft. Each way to sample goes through the function that a round calls
(engine/sample_round.py), so penalties see the draft, a grammar's set of allowed tokens is unpacked, and rejection needs two distributions.
All ways, the product and the forward are timed in turns in one process; a ratio is the median over rounds of both times of the same round.
"head" is one matrix product, "tied head" the product as the engine computes it with an embedding that is the head too.

--forward: a model folder, such as `scripts/write_checkpoint qwen3.5-0.8b FOLDER` writes. A verify of so many tokens behind a short text is
timed too, as the engine runs it, and the vocabulary is the model's.

On a CPU, seconds are those of this process's CPU threads, so that other programs on the machine count little; on a GPU they are wall time.
Peak is the most memory that one call holds beyond the logits, the logits' own bytes being 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx
import mlx.nn as nn
from alternating import alternate, median, ratio

from mlxspec.config import SamplingParams
from mlxspec.drafters.base import Draft
from mlxspec.drafters.chain import Proposal
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load
from mlxspec.engine.request import Request
from mlxspec.engine.sample_round import choose
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.layers import project
from mlxspec.sampling.acceptance import ForMatch, ForRejection
from mlxspec.sampling.bits import Bits, only
from mlxspec.sampling.sampler import RowSampler

HEAD, TIED, FORWARD = (
    "head",
    "tied head",
    "forward",
)  # one matrix product; as the engine multiplies a tied one; a verify
HISTORY = list(range(100, 148))  # tokens before the first position
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """masked: a grammar allows all but three tokens. rejects: drafts are decided by rejection, with a drafter's scores."""

    asked: Mapping[str, Any]
    masked: bool = False
    rejects: bool = False


TOP_P: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
MIN_P: dict[str, Any] = {"temperature": 1.0, "min_p": 0.05}
WAYS = {
    "greedy": Way(asked={}),
    "temperature 1": Way(asked={"temperature": 1.0}),
    "top-k 20": Way(asked={"temperature": 1.0, "top_k": 20}),
    "top-k 20, top-p 0.95": Way(asked={"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    "top-p 0.95": Way(asked=TOP_P),
    "top-p 0.95, penalties": Way(asked={**TOP_P, **PENALTIES}),
    "top-p 0.95, grammar": Way(asked=TOP_P, masked=True),
    "top-p 0.95, rejection": Way(asked=TOP_P, rejects=True),
    "min-p 0.05": Way(asked=MIN_P),
    "min-p 0.05, penalties": Way(asked={**MIN_P, **PENALTIES}),
    "greedy, log-probabilities": Way(asked={"logprobs": True}),
    "greedy, top_logprobs 5": Way(asked={"logprobs": True, "top_logprobs": 5}),
}
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
GRAMMAR = 3  # tokens that it forbids


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
    parser.add_argument("--forward", type=Path, metavar="FOLDER")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtype = DTYPES[options.dtype]
    engine = load(options.forward, draft="off", images=False) if options.forward else None
    vocab = engine.model.vocab_size if engine else options.vocab
    hidden = engine.model.hidden_size if engine else options.hidden
    with device.private_kernels():
        device.decode_threads()
        found = {
            num: measured(num, vocab, hidden, dtype, options.rounds, options.ways, engine)
            for num in options.positions
        }
    for num, rows in found.items():
        print(f"{num} positions of {vocab} tokens, {options.dtype}, head of {hidden}")
        for name, row in rows.items():
            beside = f"  {row['over_forward']:5.2f} of the forward" if engine else ""
            print(
                f"  {name:26s} {1e3 * row['seconds']:8.1f} ms  {row['ratio']:5.2f} of the head"
                f"  {row['over_tied']:5.2f} of a tied head{beside}"
                f"  peak {row['peak']:4.1f}"
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def measured(
    num: int,
    vocab: int,
    hidden: int,
    dtype: mx.Dtype,
    rounds: int,
    ways: list[str],
    engine: Engine | None,
) -> dict[str, dict[str, float]]:
    """Name of a way -> seconds, ratio to the head's product, to a tied head and to the forward, peak memory in logits."""
    weight, x = mx.random.normal((vocab, hidden)).astype(dtype), mx.random.normal((num, hidden)).astype(dtype)
    logits = (mx.random.normal((num, vocab)) * 3).astype(dtype)
    mx.eval(weight, x, logits)
    tied = nn.Embedding(1, 1)
    tied.weight = weight
    calls: dict[str, Callable[[], object]] = {
        HEAD: lambda: mx.eval(x @ weight.T),
        TIED: lambda: mx.eval(project(tied, x)),
    }
    if engine:
        calls[FORWARD] = verify(engine, num)
    calls |= {name: sampled(WAYS[name], logits) for name in ways}
    clock = time.perf_counter if device.has_gpu() else time.process_time
    taken = alternate(calls, rounds=rounds, clock=clock)
    return {
        name: {
            "seconds": median(taken, name),
            "ratio": ratio(taken, name, HEAD),
            "over_tied": ratio(taken, name, TIED),
            "peak": peak(call) / logits.nbytes,
        }
        | ({"over_forward": ratio(taken, name, FORWARD)} if engine else {})
        for name, call in calls.items()
    }


def verify(engine: Engine, num: int) -> Callable[[], object]:
    """One forward of `num` tokens with logits at all of them, behind a short text, of which one is kept."""
    model = engine.model
    cache = model.make_cache(1)
    model.forward(mx.array(HISTORY), FlatRows((len(HISTORY),)), cache, facts=True, logits_at="none")
    cache.commit()
    mx.eval(cache.arrays)
    tokens = mx.array([5] * num)

    def run() -> None:
        out = model.forward(tokens, FlatRows((num,)), cache, facts=num == 1)
        mx.eval(out.logits, cache.arrays)
        cache.commit([1])

    return run


class _Grammar:
    """Constraints that allow the same tokens everywhere."""

    def __init__(self, allowed: Bits) -> None:
        self.allowed = allowed

    def reaches(self, width: int) -> bool:
        return True

    def masks(self, tokens: list[int]) -> list[Bits]:
        return [self.allowed] * (len(tokens) + 1)


@dataclass(frozen=True)
class _Row:
    """As much of a request as sampling reads."""

    params: SamplingParams
    sampler: RowSampler
    history: list[int]


def sampled(way: Way, logits: mx.array) -> Callable[[], object]:
    """One round's sampling of a row whose draft takes all positions but the first."""
    num, vocab = logits.shape
    params = SamplingParams(seed=1, **way.asked)
    drafted = [(7 * i) % vocab for i in range(num - 1)]
    sampler = RowSampler(params, HISTORY, vocab, drafts_by="independent", keeps_drafts=way.rejects)
    if way.masked:
        sampler.constraints = cast(Any, _Grammar(only(range(GRAMMAR, vocab), vocab)))
    row = cast(Request, _Row(params, sampler, HISTORY))
    length = len(drafted)
    submission = ForRejection(length) if way.rejects else ForMatch(length)
    scores = mx.random.normal((length, vocab)) * 3 if way.rejects and length else None
    proposal = Proposal(
        drafter="mtp", draft=Draft(length, list(drafted), scores=scores), submission=submission
    )
    tokens = mx.array([HISTORY[-1], *drafted])
    mx.eval([a for a in (scores, tokens, sampler.counts, sampler.prompt_seen) if a is not None])
    return partial(chosen, row, proposal, FlatRows((num,)), tokens, logits)


def chosen(row: Request, proposal: Proposal, rows: FlatRows, tokens: mx.array, logits: mx.array) -> None:
    mx.eval(choose([row], [proposal], rows, tokens, logits).arrays)


def peak(call: Callable[[], object]) -> int:
    """Bytes that it holds at once beyond what was held before."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    call()
    return int(mx.get_peak_memory()) - before


if __name__ == "__main__":
    main()
