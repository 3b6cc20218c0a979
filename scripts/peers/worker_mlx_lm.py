"""mlx-lm as a worker of compare_peers.py: plain decoding only, as it refuses drafting on these hybrids. Own process, own environment."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

if len(sys.argv) > 1 and sys.argv[1]:  # the BLAS that all engines share, loaded before MLX
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from peers import evaluation  # noqa: F401  (between the BLAS and MLX)

# isort: split
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from peers.nodes import count_nodes
from peers.talk import Answer, Stopwatch, answer, peak_memory, serve

MODELS: list[Any] = []
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def start(model: str, draft_model: str, dtype: str) -> Answer:
    peer, _ = load_model(Path(model))
    kind = DTYPES[dtype]
    peer.update(
        tree_map(lambda p: p.astype(kind) if mx.issubdtype(p.dtype, mx.floating) else p, peer.parameters())
    )
    mx.eval(peer.parameters())
    MODELS[:] = [peer]
    return {"version": version("mlx-lm")}


def run(prompts: list[list[int]], num_tokens: list[int], method: str, depth: int | None = None) -> Answer:
    if method != "plain":
        raise ValueError("mlx-lm does not draft for models with recurrent layers")
    return _single(prompts[0], num_tokens[0]) if len(prompts) == 1 else _batch(prompts, num_tokens)


def _single(prompt: list[int], count: int) -> Answer:
    whole = Stopwatch()
    stream = generate_step(mx.array(prompt), MODELS[0], max_tokens=count)
    tokens = [int(next(stream)[0])]
    clock = Stopwatch()
    tokens += [int(token) for token, _ in stream]
    return answer([tokens], len(tokens) - 1, clock.read(), whole)


def _batch(prompts: list[list[int]], num_tokens: list[int]) -> Answer:
    whole, clock = Stopwatch(), None
    batch = BatchGenerator(MODELS[0], completion_batch_size=len(prompts), prefill_batch_size=len(prompts))
    found: dict[int, list[int]] = {uid: [] for uid in batch.insert(prompts, num_tokens)}
    order, finished, counted = list(found), 0, 0
    while finished < len(prompts):
        _, responses = batch.next()
        for response in responses:
            found[response.uid].append(int(response.token))
            finished += response.finish_reason is not None
        if clock is not None:
            counted += len(responses)
        elif all(found.values()):
            clock = Stopwatch()
    return answer([found[uid] for uid in order], counted, (clock or whole).read(), whole)


def prefill(prompt: list[int]) -> Answer:
    watch = Stopwatch()
    next(generate_step(mx.array(prompt), MODELS[0], max_tokens=1))
    return watch.read()


def nodes(prompt: list[int]) -> Answer:
    found = {}
    for width in (1, 4):
        cache = make_prompt_cache(MODELS[0])
        mx.eval(MODELS[0](mx.array(prompt)[None], cache=cache), [c.state for c in cache])
        out = MODELS[0](mx.array([[5] * width]), cache=cache)
        arrays = [x for c in cache for x in c.state if isinstance(x, mx.array)]
        found[str(width)] = count_nodes(mx.argmax(out, -1), *arrays)
    return {"nodes": found}


def memory() -> Answer:
    return {"bytes": peak_memory()}


if __name__ == "__main__":
    serve({"start": start, "run": run, "prefill": prefill, "nodes": nodes, "memory": memory})
