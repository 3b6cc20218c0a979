#!/usr/bin/env python3
"""What drafting is worth for real shapes on whatever device MLX has, with random weights: no download, acceptance taken from records.

    python scripts/bench_gpu.py [--shape 0.8B 9B] [--bits 4] [--tokens 128] [--rounds 3] [--json FILE]

For each shape: time of a verify of 1 to 8 tokens and the bandwidth at which it reads the weights; then MTP decoding at each depth against
plain decoding, in turn. The head really runs and its time counts, but its tokens are replaced: as many of each draft are right as were
accepted at that place of the demo family's recorded answers. No speed-up is given where texts differ. `tiny` is for trying the script.
Made for an NVIDIA GPU (the extra `cuda`) or a Mac; a CPU can run it and says nothing about either. On a Hopper GPU MLX compiles each
kernel of a product with 4-bit weights for some minutes at its first use; `--bits 16` does without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mlxspec.platform import device  # noqa: E402  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from alternating import alternate, median, ratio  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from simulation.traces import read_traces  # noqa: E402

from mlxspec.config import SamplingParams, SpecConfig  # noqa: E402
from mlxspec.drafters.base import Ask, Draft, Unread  # noqa: E402
from mlxspec.drafters.mtp import Mtp  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.kernels.flat import FlatRows  # noqa: E402
from mlxspec.models.assemble import assemble  # noqa: E402
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp  # noqa: E402
from mlxspec.models.registry import architecture  # noqa: E402
from mlxspec.sampling.sampler import BatchSampler  # noqa: E402

TRACES = ROOT / "tests" / "policy" / "traces.npz"
GROUP = 64
DEPTHS = (1, 2, 3, 4)
WIDTHS = tuple(range(1, 9))
PROMPT = 128
_SHARED = {
    "model_type": "qwen3_5", "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.8B": _SHARED | {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    },
    "9B": _SHARED | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32, "tie_word_embeddings": False,
    },
    "tiny": _SHARED | {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "tie_word_embeddings": False,
    },
}  # fmt: skip


class Recorded(Mtp):
    """The head with its tokens replaced: it costs what it costs, and is right as often as the record says.

    text: what plain decoding says behind the prompt of `num_prompt` tokens. accepted: at each place, how many tokens of a draft are right.
    """

    def __init__(self, head: Qwen35Mtp, max_context: int, vocab_size: int) -> None:
        super().__init__(head, max_context)
        self._vocab_size = vocab_size
        self.text: Sequence[int] = ()
        self.num_prompt = 0
        self.accepted: Sequence[int] = (0,)

    def propose(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        drafts = super().propose(asks, sampler)
        return [self._replaced(ask, draft) for ask, draft in zip(asks, drafts, strict=True)]

    def propose_behind(self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread) -> None:
        """Rounds wait: what the record says depends on the place, which is unknown before."""

    def _replaced(self, ask: Ask, draft: Draft) -> Draft:
        place = len(ask.history) - self.num_prompt
        true = list(self.text[place : place + draft.length])
        right = self.accepted[place % len(self.accepted)]
        said = [t if i < right else (t + 1) % self._vocab_size for i, t in enumerate(true)]
        said += [0] * (draft.length - len(said))
        own = mx.array(draft.tokens).astype(mx.int32)  # computed all the same
        tokens = mx.array(said, mx.int32) + 0 * own
        return draft._replace(tokens=tokens)


def main() -> None:
    options = _options()
    device.compile_kernels()
    report = device.report()
    print(f"device: {report.device}, backend {report.backend}")
    if report.backend == "cpu":
        print("This is a CPU: the figures below say nothing about GPUs.")
    found: dict[str, Any] = {"device": report.device, "backend": report.backend, "shapes": {}}
    for name in options.shape:
        print(f"\n{name}: random {options.bits}-bit weights", flush=True)
        with device.private_kernels():
            engine, drafter = _engine(SHAPES[name], options.bits)
            found["shapes"][name] = verify(engine, options.rounds)
            found["shapes"][name] |= _decode(engine, drafter, options.tokens, options.rounds)
        del engine, drafter
        mx.clear_cache()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["0.8B", "9B"])
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _engine(config: dict[str, Any], bits: int) -> tuple[Engine, Recorded]:
    quantized = {} if bits == 16 else {"quantization": {"bits": bits, "group_size": GROUP}}
    made = assemble(config | quantized, lambda: _weights(config, bits))
    if not isinstance(made.mtp, Qwen35Mtp):
        raise RuntimeError("the random weights hold no head")
    drafter = Recorded(made.mtp, made.model.max_context, made.model.vocab_size)
    return Engine(made.model, drafters=[drafter], spec=SpecConfig(drafters=("mtp",), policy="fixed")), drafter


def _weights(config: dict[str, Any], bits: int) -> dict[str, mx.array]:
    """Under the names and in the formats that conversions have; quantized matrices are random bytes, small and centred."""
    mx.random.seed(0)
    kind = architecture(config)
    parsed = kind.parse(config)
    trunk = kind.build(parsed)
    head = Qwen35Mtp(parsed, trunk)  # type: ignore[arg-type]
    found: dict[str, mx.array] = {}
    for prefix, module in (("", trunk), ("mtp.", head)):
        if bits != 16:
            nn.quantize(module, group_size=GROUP, bits=bits)
        for path, array in tree_flatten(module.parameters()):
            found[prefix + path] = _random(path, array)
    return found


def _random(path: str, like: mx.array) -> mx.array:
    if like.dtype == mx.uint32:
        return mx.random.randint(0, (1 << 31) - 1, like.shape, mx.uint32)
    if path.endswith("scales"):
        return mx.full(like.shape, 0.004, mx.bfloat16)
    if path.endswith("biases"):
        return mx.full(like.shape, -0.03, mx.bfloat16)
    return like.astype(mx.float32 if path.endswith("A_log") else mx.bfloat16)


def verify(engine: Engine, rounds: int, widths: Sequence[int] = WIDTHS) -> dict[str, Any]:
    """Milliseconds of a verify by width, behind a prompt, and the weights' bytes over the time."""
    model = engine.model
    size = sum(x.nbytes for _, x in tree_flatten(model.parameters()))  # type: ignore[attr-defined]
    prompt = mx.array([5 + i % 400 for i in range(PROMPT)], mx.int32)

    def step(width: int) -> Any:
        cache = model.make_cache(1)
        model.forward(prompt, FlatRows((PROMPT,)), cache, certain=True)
        cache.commit()
        mx.eval(cache.arrays)
        tokens = mx.array([7] * width, mx.int32)

        def run() -> None:
            out = model.forward(tokens, FlatRows((width,)), cache, certain=width == 1)
            mx.eval(mx.argmax(out.logits, -1), cache.arrays)
            cache.commit([1])

        return run

    taken = alternate({str(w): step(w) for w in widths}, rounds=3 * rounds, warmup=3, inner=4)
    curve = {w: (1e3 * median(taken, str(w)), ratio(taken, str(w), "1")) for w in widths}
    print(f"weights {size / 1e9:.2f} GB\nwidth      ms   over a plain step   GB/s")
    for width, (milliseconds, over) in curve.items():
        print(f"{width:5d} {milliseconds:7.2f}   {over:17.2f}   {size / milliseconds / 1e6:4.0f}")
    return {"weights_bytes": size, "verify_ms": {w: ms for w, (ms, _) in curve.items()}}


def _decode(engine: Engine, drafter: Recorded, tokens: int, rounds: int) -> dict[str, Any]:
    """MTP at each depth against plain decoding, acceptance as recorded."""
    prompt = [5 + i % 400 for i in range(PROMPT)]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    plain = SpecConfig(policy="fixed")
    drafter.text, drafter.num_prompt = engine.generate(prompt, params, spec=plain).tokens, PROMPT
    found: dict[str, Any] = {"decode": {}}
    print("record      depth   tok/s plain   drafting   speed-up   accepted   tokens a round")
    for name, workload in read_traces(TRACES).items():
        drafter.accepted = [
            int(n) for answer in workload.answers if "mtp" in answer for n in answer["mtp"].stood
        ]
        for depth in DEPTHS:
            spec = SpecConfig(drafters=("mtp",), policy="fixed", n_max=depth)
            pairs, stats, same = [], None, True
            for turn in range(rounds + 1):
                speeds = {}
                for kind in (plain, spec) if turn % 2 else (spec, plain):
                    started = time.perf_counter()
                    result = engine.generate(prompt, params, spec=kind)
                    taken = time.perf_counter() - started - result.stats.prefill_seconds
                    speeds[kind is spec] = result.stats.num_decoded / taken
                    same &= tuple(result.tokens) == tuple(drafter.text)
                    stats = result.stats if kind is spec else stats
                if turn:
                    pairs.append(speeds)
            if stats is None:
                raise RuntimeError("nothing was drafted")
            pairs.sort(key=lambda p: p[True] / p[False])
            middle = pairs[len(pairs) // 2]
            over = f"{middle[True] / middle[False]:.2f}x" if same else "text differs"
            print(
                f"{name:10s} {depth:6d} {middle[False]:13.1f} {middle[True]:10.1f} {over:>10s}"
                f" {100 * stats.num_accepted / max(1, stats.num_drafted):8.0f} % {stats.tokens_per_round:16.2f}"
            )
            speeds = {"plain": middle[False], "drafting": middle[True], "same": same}
            found["decode"][f"{name} {depth}"] = speeds
    return found


if __name__ == "__main__":
    main()
