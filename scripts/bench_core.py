#!/usr/bin/env python3
"""Plain decoding, prefill and verify against mlx-lm, one run, same BLAS, same weights: a random model of a fixed small shape.

    .venv/bin/python scripts/bench_core.py [--rounds 9] [--json FILE]

The shape (3.4M parameters, 3 Gated DeltaNet layers and 1 attention layer) is fixed so that ratios cannot move with the demo model. What is
timed is evaluated inside the timed region. Needs an otherwise idle machine to mean anything; says nothing about Apple GPUs.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx
import numpy as np
from alternating import alternate, median, ratio
from mlx.utils import tree_flatten

from mlxspec.cache.rollback import by_tape
from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.assemble import assemble

CONFIG = {
    "model_type": "qwen3_5",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
WIDTHS = (2, 3, 4, 5, 8, 16)
PROMPT = 96
NEW = 64


def main() -> None:
    device.compile_kernels()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with device.private_kernels():
        peer, engine = _models()
        figures = {"device": vars(device.report()) | {"notices": list(device.report().notices)}}
        figures |= _decode(peer, engine, options.rounds)
        figures |= _verify(peer, engine, options.rounds)
        figures |= _prefill(peer, engine, max(3, options.rounds // 2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def _models():  # type: ignore[no-untyped-def]
    """mlx-lm's model and our engine over the same random float32 weights."""
    from mlx_lm.utils import load_model, save_config

    from mlx_lm.models.qwen3_5 import Model, ModelArgs  # isort: skip

    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(CONFIG))
    weights = dict(tree_flatten(model.parameters()))
    with tempfile.TemporaryDirectory() as folder:
        mx.save_safetensors(str(Path(folder) / "model.safetensors"), weights)
        save_config(dict(CONFIG), Path(folder) / "config.json")
        peer, _ = load_model(Path(folder))
        mx.eval(peer.parameters())
    return peer, Engine(assemble(CONFIG, lambda: weights).model)


def _decode(peer, engine: Engine, rounds: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Whole generation loops, first token excluded."""
    import time

    from mlx_lm.generate import generate_step

    prompt = [7 * i % 2000 for i in range(PROMPT)]
    speeds: dict[str, list[float]] = {"ours": [], "mlx-lm": []}

    def theirs() -> float:
        stream = generate_step(mx.array(prompt), peer, max_tokens=NEW)
        next(stream)
        started = time.perf_counter()
        count = sum(1 for _ in stream)
        return count / (time.perf_counter() - started)

    def ours() -> float:
        return float(
            engine.generate(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True)).stats.decode_speed
        )

    for turn in range(rounds + 1):
        device.decode_threads()
        for name, run in (
            (("ours", ours), ("mlx-lm", theirs)) if turn % 2 else (("mlx-lm", theirs), ("ours", ours))
        ):
            speed = run()
            if turn:
                speeds[name].append(speed)
    found = float(np.median(np.array(speeds["ours"]) / np.array(speeds["mlx-lm"])))
    print(
        f"plain decode   ours {np.median(speeds['ours']):7.0f} tok/s   mlx-lm {np.median(speeds['mlx-lm']):7.0f} tok/s"
        f"   {found:.2f}x mlx-lm   (goal: at least 1.40)"
    )
    return {"decode_over_mlx_lm": found}


def _verify(peer, engine: Engine, rounds: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """One forward of w tokens with logits at all of them, tape and rollback included, behind a prompt."""
    from mlx_lm.models.cache import make_prompt_cache

    device.decode_threads()
    prompt = mx.array([7 * i % 2000 for i in range(PROMPT)])
    theirs = make_prompt_cache(peer)
    mx.eval(peer(prompt[None], cache=theirs))

    def step(width: int) -> Callable[[], object]:
        model, cache = engine.model, engine.model.make_cache(1, by_tape())
        model.forward(prompt, FlatRows((PROMPT,)), cache, facts=True)
        cache.commit()
        mx.eval(cache.arrays)
        tokens = mx.array([5] * width)

        def run() -> None:
            out = model.forward(tokens, FlatRows((width,)), cache, facts=width == 1)
            mx.eval(mx.argmax(out.logits, -1), cache.arrays)
            cache.commit([1])

        return run

    contestants: dict[str, Callable[[], object]] = {
        "mlx-lm 1": lambda: mx.eval(peer(mx.array([[5]]), cache=theirs))
    }
    contestants |= {f"ours {w}": step(w) for w in (1, *WIDTHS)}
    taken = alternate(contestants, rounds=3 * rounds, warmup=3, inner=4)
    print(
        f"plain step     ours {1e3 * median(taken, 'ours 1'):.2f} ms   mlx-lm {1e3 * median(taken, 'mlx-lm 1'):.2f} ms"
    )
    goals = {4: "(goal: at most 1.70 and 1.15)", 16: "(goal: at most 3.60)"}
    figures = {}
    for width in WIDTHS:
        own, peers = ratio(taken, f"ours {width}", "ours 1"), ratio(taken, f"ours {width}", "mlx-lm 1")
        figures |= {f"verify_{width}_over_own_step": own, f"verify_{width}_over_mlx_lm_step": peers}
        print(
            f"verify of {width:2d}   {own:.2f}x our step   {peers:.2f}x mlx-lm's step   {goals.get(width, '')}"
        )
    return figures


def _prefill(peer, engine: Engine, rounds: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """A whole prompt; only the last position's logits, for both."""
    from mlx_lm.models.cache import make_prompt_cache

    device.prefill_threads()
    figures = {}
    for length in (64, 512, 2048):
        prompt = mx.array([7 * i % 2000 for i in range(length)])

        def ours(prompt: mx.array = prompt, length: int = length) -> None:
            cache = engine.model.make_cache(1)
            for begin in range(0, length, engine.memory.full_chunk):
                piece = prompt[begin : begin + engine.memory.full_chunk]
                rows = FlatRows((piece.size,))
                out = engine.model.forward(piece, rows, cache, facts=True, logits_at="last")
                cache.commit()
                mx.eval(out.logits, cache.arrays)

        def theirs(prompt: mx.array = prompt) -> None:
            cache = make_prompt_cache(peer)
            if prompt.size > 1:  # as generate_step does: all but the last token without logits, then one step
                hidden = peer.language_model.model(prompt[None, :-1], cache=cache)
                mx.eval(hidden, [c.state for c in cache])
            mx.eval(peer(prompt[None, -1:], cache=cache))

        taken = alternate({"ours": ours, "mlx-lm": theirs}, rounds=rounds)
        figures[f"prefill_{length}_over_mlx_lm"] = found = ratio(taken, "mlx-lm", "ours")
        goal = "(goal: at least 2.00)" if length > 64 else ""
        print(
            f"prefill {length:5d}  ours {1e3 * median(taken, 'ours'):7.1f} ms   mlx-lm {1e3 * median(taken, 'mlx-lm'):7.1f} ms"
            f"   {found:.2f}x   {goal}"
        )
    return figures


if __name__ == "__main__":
    main()
