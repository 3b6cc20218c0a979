"""mlx-vlm as a worker of compare_peers.py: plain decoding and its own MTP rounds, one row and several. Its own process and environment."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if len(sys.argv) > 1 and sys.argv[1]:  # the BLAS that all engines share, loaded before MLX
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from peers import evaluation  # noqa: F401  (between the BLAS and MLX)

# isort: split
import mlx.core as mx
from mlx.utils import tree_map
from mlx_vlm.generate.ar import BatchGenerator, generate_step
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.utils import speculative_stats_since, speculative_stats_snapshot
from mlx_vlm.utils import StoppingCriteria, load_model

from peers.nodes import count_nodes
from peers.talk import Answer, Stopwatch, answer, peak_memory, serve

MODELS: dict[str, Any] = {}
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def start(model: str, head: str, dtype: str) -> Answer:
    kind = DTYPES[dtype]
    for name, peer in (("target", load_model(Path(model))), ("mtp", load_drafter(head)[0])):
        peer.update(
            tree_map(
                lambda p: p.astype(kind) if mx.issubdtype(p.dtype, mx.floating) else p, peer.parameters()
            )
        )
        mx.eval(peer.parameters())
        MODELS[name] = peer
    criteria = StoppingCriteria([], tokenizer=SimpleNamespace())
    MODELS["tokenizer"] = SimpleNamespace(stopping_criteria=criteria)
    return {"version": version("mlx-vlm")}


def _drafting(method: str, depth: int | None) -> dict[str, Any]:
    if method == "plain":
        return {}
    if method != "mtp":
        raise ValueError(f"mlx-vlm has no {method} drafting for these models")
    return {"draft_model": MODELS["mtp"], "draft_kind": "mtp", "draft_block_size": (depth or 2) + 1}


def run(prompts: list[list[int]], num_tokens: list[int], method: str, depth: int | None = None) -> Answer:
    before = speculative_stats_snapshot(MODELS["mtp"])
    # what it keeps of the batch before has as many rows as that ended with, and a larger one falls over it
    MODELS["target"].language_model._rope_deltas = MODELS["target"].language_model._position_ids = None
    drafting = _drafting(method, depth)
    if len(prompts) == 1:
        found = _single(prompts[0], num_tokens[0], drafting)
    else:
        found = _batch(prompts, num_tokens, drafting)
    rounds, accepted, drafted = speculative_stats_since(MODELS["mtp"], before)
    if rounds:
        found |= {"num_rounds": rounds, "num_drafted": drafted, "num_accepted": accepted}
    return found


def _single(prompt: list[int], count: int, drafting: dict[str, Any]) -> Answer:
    whole = Stopwatch()
    stream = generate_step(
        mx.array([prompt]), MODELS["target"], None, None, max_tokens=count, temperature=0.0, **drafting
    )
    tokens = [int(next(stream)[0])]
    clock = Stopwatch()
    for token, _ in stream:
        tokens.append(int(token))
        if len(tokens) == count:
            break
    spent = clock.read()
    return answer([tokens], len(tokens) - 1, spent, whole)


def _batch(prompts: list[list[int]], num_tokens: list[int], drafting: dict[str, Any]) -> Answer:
    whole, clock = Stopwatch(), None
    batch = BatchGenerator(
        MODELS["target"].language_model,
        MODELS["tokenizer"],
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
        compute_logprobs=False,
        greedy_sampling=True,
        **drafting,
    )
    embed = MODELS["target"].language_model.model.embed_tokens
    given = [{"inputs_embeds": embed(mx.array([p]))} for p in prompts]
    found: dict[int, list[int]] = {uid: [] for uid in batch.insert(prompts, num_tokens, prompt_kwargs=given)}
    order, counted = list(found), 0
    while batch.has_work:
        _, responses = batch.next()
        given = [r for r in responses if r.token is not None]
        for response in given:
            found[response.uid].append(int(response.token))
        if clock is not None:
            counted += len(given)
        elif all(found.values()):
            clock = Stopwatch()
    return answer([found[uid] for uid in order], counted, (clock or whole).read(), whole)


def prefill(prompt: list[int]) -> Answer:
    watch = Stopwatch()
    next(generate_step(mx.array([prompt]), MODELS["target"], None, None, max_tokens=1, temperature=0.0))
    return watch.read()


def nodes(prompt: list[int]) -> Answer:
    found, model = {}, MODELS["target"].language_model
    for width in (1, 4):
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([prompt]), cache=cache).logits, [c.state for c in cache])
        out = model(mx.array([[5] * width]), cache=cache).logits
        arrays = [x for c in cache for x in c.state if isinstance(x, mx.array)]
        found[str(width)] = count_nodes(mx.argmax(out, -1), *arrays)
    return {"nodes": found}


def memory() -> Answer:
    return {"bytes": peak_memory()}


if __name__ == "__main__":
    serve({"start": start, "run": run, "prefill": prefill, "nodes": nodes, "memory": memory})
