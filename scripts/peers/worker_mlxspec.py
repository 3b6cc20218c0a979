"""mlxspec as a worker of compare_peers.py. A method: `plain`, or a policy and drafters as in `auto:ngram-simple,mtp`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip
from peers import evaluation  # noqa: F401  (between the BLAS and MLX)

# isort: split
import mlx.core as mx

from mlxspec.cache.rollback import by_tape
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load
from mlxspec.events import TokensEvent
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model
from peers.nodes import count_nodes
from peers.talk import Answer, Stopwatch, peak_memory, serve

DRAFTERS = ("ngram-simple", "ngram-mod", "mtp", "draft-model")
ENGINES: list[Engine] = []


def start(model: str, draft_model: str, dtype: str) -> Answer:
    device.compile_kernels()
    engine = load(
        model,
        draft=DRAFTERS,
        draft_model=draft_model,
        dtype=dtype,
        config=EngineConfig(max_rows=8, prefix_budget=0),
        spec=SpecConfig(policy="fixed"),
    )
    ENGINES[:] = [engine]
    return {"version": __import__("mlxspec").__version__, "blas": str(device.report().blas)}


def _spec(method: str, depth: int | None) -> SpecConfig:
    if method == "plain":
        return SpecConfig(policy="fixed")
    policy, _, names = method.rpartition(":")
    return SpecConfig(drafters=tuple(names.split(",")), policy=policy or "fixed", n_max=depth)


def run(prompts: list[list[int]], num_tokens: list[int], method: str, depth: int | None = None) -> Answer:
    """Decode so many tokens for each prompt, rows together. Time runs from when every row has its first token."""
    engine = ENGINES[0]
    spec = _spec(method, depth)
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=n, ignore_eos=True), spec=spec)
        for prompt, n in zip(prompts, num_tokens, strict=True)
    ]
    counted, waiting = 0, {r.number for r in requests}
    watch, clock = Stopwatch(), None
    while not engine.is_idle:
        events = engine.step()
        given = [e for e in events if isinstance(e, TokensEvent)]
        if clock is None:
            waiting -= {e.request for e in given}
            if not waiting:
                clock = Stopwatch()
        else:
            counted += sum(len(e.tokens) for e in given)
    spent, whole = clock.read() if clock else watch.read(), watch.read()
    stats = [r.stats for r in requests]
    return {
        "tokens": [r.history[len(r.prompt) :] for r in requests],
        "num_timed": counted,
        **spent,
        "whole_seconds": whole["seconds"],
        "num_rounds": max(s.num_rounds for s in stats),
        "num_drafted": sum(s.num_drafted for s in stats),
        "num_accepted": sum(s.num_accepted for s in stats),
    }


def prefill(prompt: list[int]) -> Answer:
    """Seconds from the prompt to its first token."""
    engine = ENGINES[0]
    watch = Stopwatch()
    engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True), spec=_spec("plain", None))
    return watch.read()


def nodes(prompt: list[int]) -> Answer:
    """Graph nodes of one plain step and of a verify of four."""
    return {"nodes": nodes_of(ENGINES[0].model, prompt)}


def nodes_of(model: Model, prompt: list[int]) -> dict[str, int]:
    found = {}
    # on a CPU a forward is handed over in pieces, and what has been handed over cannot be counted any more
    with device.private_kernels(), patch.object(device, "start"):
        for width in (1, 4):
            cache = model.make_cache(1, by_tape())
            model.forward(mx.array(prompt, mx.int32), FlatRows((len(prompt),)), cache, facts=True)
            cache.commit()
            for _ in range(2):  # as it runs once its shape has come up
                mx.eval(cache.arrays)
                cache.abort()
                tokens, rows = mx.array([5] * width, mx.int32), FlatRows((width,))
                out = model.forward(tokens, rows, cache, facts=width == 1)
            found[str(width)] = count_nodes(mx.argmax(out.logits, -1), *cache.arrays)
    return found


def memory() -> Answer:
    return {"bytes": peak_memory()}


if __name__ == "__main__":
    handlers: dict[str, Any] = {
        "start": start,
        "run": run,
        "prefill": prefill,
        "nodes": nodes,
        "memory": memory,
    }
    serve(handlers)
