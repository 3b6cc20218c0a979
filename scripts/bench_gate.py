#!/usr/bin/env python3
"""Has anything become slower? Compares ratios with stored ones (bench_gate.json) and exits 1 where one is worse past its tolerance.

    scripts/bench_gate [--update] [--counts] [--rounds 9]

Timed ratios are taken beside mlx-lm in the same run, over one random model of a fixed small shape (3.4M parameters, three Gated DeltaNet
layers and one of attention), so that a slow day slows both and no change of the demo model moves them. They are stored by machine; on a
machine that nothing is stored of, each is held against the worst of all others. Counts, which no machine can blur: graph nodes of a step,
and on the demo's workloads tokens a round and MTP rounds that the host waits for with nothing queued.
--counts leaves the timed part out; --update stores what was found. Timed ratios need an otherwise idle machine. Exit 2: nothing stored,
or nothing measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mlxspec.platform import device  # noqa: E402  # isort: skip  (before MLX: it loads the BLAS)

import mlx.core as mx  # noqa: E402
from alternating import alternate, ratio  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from mlxspec import load  # noqa: E402
from mlxspec.bench.workloads import read_workloads  # noqa: E402
from mlxspec.config import SamplingParams, SpecConfig  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.kernels.flat import FlatRows  # noqa: E402
from mlxspec.models.assemble import assemble  # noqa: E402

Figures = dict[str, dict[str, float]]
STORED = ROOT / "scripts" / "bench_gate.json"
# Of the stored value; two runs of an idle machine differ by up to a tenth.
TOLERANCE = {"timed": 0.15, "counted": 0.02}
SMALLER_IS_BETTER = ("verify_", "nodes_", "waits_")
WORKLOADS = ("edit", "explain", "continue", "ask")
PROMPTS = 3
TOKENS = 64

# The random model that is timed beside mlx-lm.
CONFIG = {
    "model_type": "qwen3_5", "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}  # fmt: skip
WIDTHS = (2, 3, 4, 5, 8, 16)  # tokens of a verify
LENGTHS = (64, 512, 2048)  # tokens of a prompt
PROMPT, NEW = [7 * i % 2000 for i in range(96)], 64


def main() -> int:
    options = _options()
    device.compile_kernels()
    found, machine = {"counted": _counted()}, ""
    if not options.counts:
        machine, found["timed"] = _timed(options.rounds)
    if options.update:
        kept = json.loads(STORED.read_text()) if STORED.is_file() else {"counted": {}, "timed": {}}
        kept["counted"] = found["counted"]
        if machine:
            kept["timed"][machine] = found["timed"]
        STORED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        print(f"stored in {STORED.relative_to(ROOT)}")
        return 0
    if not STORED.is_file():
        print("Nothing is stored to compare with: run it with --update once.", file=sys.stderr)
        return 2
    stored = json.loads(STORED.read_text())
    if machine and stored["timed"] and machine not in stored["timed"]:
        known = ", ".join(stored["timed"])
        print(f"Of {machine} nothing is stored: timed ratios against the least of {known}.")
    lines = compare({"counted": stored["counted"], "timed": timed_of(stored["timed"], machine)}, found)
    for line, _ in lines:
        print(line)
    bad = sum(worse for _, worse in lines)
    print(f"{bad} of {len(lines)} are worse than stored." if bad else "Nothing is worse than stored.")
    return int(bad > 0)


def timed_of(stored: Figures, machine: str) -> dict[str, float]:
    """What timed ratios are held against on a machine."""
    if machine in stored:
        return stored[machine]
    known = {name: [f[name] for f in stored.values() if name in f] for f in stored.values() for name in f}
    return {n: (max if n.startswith(SMALLER_IS_BETTER) else min)(values) for n, values in known.items()}


def compare(stored: Figures, found: Figures) -> list[tuple[str, bool]]:
    """A line for each figure that was found, and whether it is worse past its tolerance. One of which nothing is stored is not."""
    lines = []
    for kind, figures in found.items():
        for name, value in figures.items():
            old = stored.get(kind, {}).get(name)
            if old is None:
                lines.append((f"  {name:34s} {value:8.3f}   (new)", False))
                continue
            smaller = name.startswith(SMALLER_IS_BETTER)
            change = (value - old if smaller else old - value) / old
            worse = change > TOLERANCE[kind]
            lines.append((f"{'! ' if worse else '  '}{name:34s} {value:8.3f}   stored {old:8.3f}", worse))
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


# ---- counts


def _counted() -> dict[str, float]:
    every = ("ngram-simple", "mtp", "draft-model")
    engine = load("demo", draft=every, spec=SpecConfig(policy="fixed"))  # not the user's adapted one
    found = {f"nodes_{width}": float(_nodes(engine, width)) for width in (1, 4)}
    params = SamplingParams(max_tokens=TOKENS)
    waited = rounds_mtp = 0
    for work in read_workloads(engine, WORKLOADS):
        for names in (("ngram-simple",), ("mtp",), ("draft-model",), ("ngram-simple", "mtp")):
            spec = SpecConfig(drafters=names, policy="fixed")
            before = engine.stats.num_synchronised
            stats = [engine.generate(list(p), params, spec=spec).stats for p in work.prompts[:PROMPTS]]
            rounds = sum(s.num_rounds for s in stats)
            tokens = sum(s.num_decoded for s in stats)
            found[f"tokens_a_round_{work.name}_{'+'.join(names)}"] = tokens / rounds
            if names == ("mtp",):
                waited, rounds_mtp = waited + engine.stats.num_synchronised - before, rounds_mtp + rounds
    found["waits_a_round_mtp"] = waited / rounds_mtp
    return found


def _nodes(engine: Engine, width: int) -> int:
    """Graph nodes of a plain step (width 1) or of a verify behind a prompt, as it runs once its shape has come up."""
    cache, prompt = engine.model.make_cache(1), list(range(20, 120))
    # on a CPU a forward is handed over in pieces, and what has been handed over cannot be counted any more
    with device.private_kernels(), patch.object(device, "start"):
        engine.model.forward(mx.array(prompt, mx.int32), FlatRows((len(prompt),)), cache, certain=True)
        cache.commit()
        for _ in range(2):
            mx.eval(cache.arrays)
            cache.abort()
            tokens, rows = mx.array([5] * width, mx.int32), FlatRows((width,))
            out = engine.model.forward(tokens, rows, cache, certain=width == 1)
        return count_nodes(mx.argmax(out.logits, -1), *cache.arrays)


def count_nodes(*outputs: mx.array) -> int:
    """Primitives behind arrays that have not been evaluated; a compiled function counts as those it was fused into."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *outputs)
        return len(re.findall(r"\[label =\"[^\"]*\", shape=rectangle\]", path.read_text()))


# ---- times beside mlx-lm


def _timed(rounds: int) -> tuple[str, dict[str, float]]:
    """The machine's name, and the ratios."""
    logging.disable(logging.WARNING)
    with device.private_kernels():
        peer, engine = _models()
        found = {"decode_over_mlx_lm": _decode(peer, engine, rounds)}
        found |= _verify(peer, engine, rounds) | _prefill(peer, engine, max(3, rounds // 2))
    return _processor(), found


def _processor() -> str:
    """The device's name; on Linux with family and model, because virtual machines call processors of several generations alike."""
    path = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in path.read_text().splitlines()] if path.exists() else []
    known = {name.strip(): value.strip() for name, _, value in lines}
    kind = [
        f"{word} {known[name]}"
        for name, word in (("cpu family", "family"), ("model", "model"))
        if name in known
    ]
    return ", ".join([device.report().device, *kind])


def _models() -> tuple[Any, Engine]:
    """mlx-lm's model and our engine over the same random float32 weights."""
    from mlx_lm.models.qwen3_5 import Model, ModelArgs
    from mlx_lm.utils import load_model, save_config

    mx.random.seed(0)
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(CONFIG)).parameters()))
    with tempfile.TemporaryDirectory() as folder:
        mx.save_safetensors(str(Path(folder) / "model.safetensors"), weights)
        save_config(dict(CONFIG), Path(folder) / "config.json")
        peer, _ = load_model(Path(folder))
        mx.eval(peer.parameters())
    return peer, Engine(assemble(CONFIG, lambda: weights).model)


def _decode(peer: Any, engine: Engine, rounds: int) -> float:
    """Our tokens a second over mlx-lm's: whole generation loops, the first token excluded."""
    from mlx_lm.generate import generate_step

    def theirs() -> float:
        stream = generate_step(mx.array(PROMPT), peer, max_tokens=NEW)
        next(stream)
        started = time.perf_counter()
        return sum(1 for _ in stream) / (time.perf_counter() - started)

    def ours() -> float:
        params = SamplingParams(max_tokens=NEW, ignore_eos=True)
        return float(engine.generate(PROMPT, params).stats.decode_speed)

    ratios = []
    for turn in range(rounds + 1):
        device.decode_threads()
        speeds = {run: run() for run in ((ours, theirs) if turn % 2 else (theirs, ours))}
        ratios += [speeds[ours] / speeds[theirs]] * (turn > 0)
    return median(ratios)


def _verify(peer: Any, engine: Engine, rounds: int) -> dict[str, float]:
    """One forward of w tokens with logits at all of them, tape and rollback included, over a plain step of ours and of mlx-lm's."""
    from mlx_lm.models.cache import make_prompt_cache

    device.decode_threads()
    prompt = mx.array(PROMPT)
    theirs = make_prompt_cache(peer)
    mx.eval(peer(prompt[None], cache=theirs))

    def step(width: int) -> Callable[[], object]:
        model, cache = engine.model, engine.model.make_cache(1)
        model.forward(prompt, FlatRows((prompt.size,)), cache, certain=True)
        cache.commit()
        mx.eval(cache.arrays)
        tokens = mx.array([5] * width)

        def run() -> None:
            out = model.forward(tokens, FlatRows((width,)), cache, certain=width == 1)
            mx.eval(mx.argmax(out.logits, -1), cache.arrays)
            cache.commit([1])

        return run

    runs: dict[str, Callable[[], object]] = {
        "mlx-lm": lambda: mx.eval(peer(mx.array([[5]]), cache=theirs)),
        **{str(w): step(w) for w in (1, *WIDTHS)},
    }
    taken = alternate(runs, rounds=3 * rounds, warmup=3, inner=4)
    own = {f"verify_{w}_over_own_step": ratio(taken, str(w), "1") for w in WIDTHS}
    return own | {f"verify_{w}_over_mlx_lm_step": ratio(taken, str(w), "mlx-lm") for w in WIDTHS}


def _prefill(peer: Any, engine: Engine, rounds: int) -> dict[str, float]:
    """mlx-lm's time over ours for a whole prompt; logits of the last position only, for both."""
    from mlx_lm.models.cache import make_prompt_cache

    device.prefill_threads()
    found = {}
    for length in LENGTHS:
        prompt = mx.array([7 * i % 2000 for i in range(length)])

        def ours(prompt: mx.array = prompt) -> None:
            cache, chunk = engine.model.make_cache(1), engine.memory.full_chunk
            for begin in range(0, prompt.size, chunk):
                piece = prompt[begin : begin + chunk]
                rows = FlatRows((piece.size,))
                out = engine.model.forward(piece, rows, cache, certain=True, logits_at="last")
                cache.commit()
                mx.eval(out.logits, cache.arrays)

        def theirs(prompt: mx.array = prompt) -> None:
            """As generate_step does: all but the last token without logits, then one step."""
            cache = make_prompt_cache(peer)
            hidden = peer.language_model.model(prompt[None, :-1], cache=cache)
            mx.eval(hidden, [c.state for c in cache])
            mx.eval(peer(prompt[None, -1:], cache=cache))

        taken = alternate({"ours": ours, "mlx-lm": theirs}, rounds=rounds)
        found[f"prefill_{length}_over_mlx_lm"] = ratio(taken, "mlx-lm", "ours")
    return found


if __name__ == "__main__":
    sys.exit(main())
