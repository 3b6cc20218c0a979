"""Prints what the kernels move, by the emulator's count, against the least there is to move; the tables of docs/kernels.md.

    python tests/metal/bytes_table.py

Bytes are counted once per threadgroup that touches them, so a threadgroup's own reuse is free and sharing between threadgroups is not.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import emulator
import mlx.core as mx
import numpy as np
from checks_conv import draw, draw_weights, num_columns
from checks_gdn import Shape, Tokens, ints, layout
from checks_qmv import draw as draw_quantized

from mlxspec.kernels import conv_qkv, gdn_prefill, gdn_round, launch, qmv_rows
from mlxspec.kernels.conv_ops import GdnShape
from mlxspec.kernels.flat import FlatRows

HEADS = {"0.8B": 16, "9B, 35B-A3B": 32, "27B": 48}  # value heads; 16 key heads, dims 128
WIDTHS = (1, 2, 4, 8, 16, 64)
MB = 1e6


def main() -> None:
    with device.private_kernels(), launch.using(emulator.metal_kernel):
        print("gdn_round, one layer, one row, everything kept, bfloat16\n")
        print("| model | width | least, MB | moved / least |\n|---|---|---|---|")
        for name, heads in HEADS.items():
            for width in WIDTHS:
                print(round_line(name, heads, width))
        print("\nconv_qkv, 27B layer, bfloat16\n\n| width | least, MB | moved / least |\n|---|---|---|")
        for width in WIDTHS:
            print(conv_line(width))
        print(
            "\nqmv_rows, 5120 -> 1024, 4 bit, bfloat16\n\n| rows | weights, MB | x in threadgroups, MB | weights read |\n|---|---|---|---|"
        )
        for num_rows in (1, 2, 4, 8):
            print(qmv_line(num_rows))
        print(
            "\ngdn_prefill, 27B heads / 6, 256 tokens, bfloat16\n\n| least, MB | moved / least |\n|---|---|\n"
            + prefill_line()
        )


def moved(run: Callable[[], object]) -> int:
    emulator.runs.clear()
    run()
    return sum(r.num_bytes for r in emulator.runs)


def data(heads: int, width: int) -> tuple[Tokens, mx.array, gdn_round.Replay]:
    shape = Shape(key_heads=16, value_heads=heads, key_dim=128, value_dim=128, dtype=mx.bfloat16)
    rng = np.random.default_rng(0)
    t, state = shape.tokens(rng, (width,)), shape.state(rng, 1)
    delta = mx.array(rng.standard_normal(t.inputs.v.shape).astype(np.float32))
    return (
        t,
        state,
        gdn_round.Replay(gdn_round.Tape(t.inputs.k, delta, t.inputs.log_g), t.rows, ints([width])),
    )


def round_line(name: str, heads: int, width: int) -> str:
    t, state, last = data(heads, width)
    inputs = sum(x.nbytes for x in t.inputs)
    y = delta = 4 * t.inputs.v.size
    least = inputs + sum(x.nbytes for x in last.tape) + 2 * state.nbytes + y + delta
    ours = moved(lambda: gdn_round.gdn_round_metal(t.inputs, state, t.rows, last))
    return f"| {name} | {width} | {least / MB:.2f} | {ours / least:.3f} |"


def conv_line(width: int) -> str:
    shape, rng = GdnShape(16, 48, 128, 128), np.random.default_rng(0)
    weights = draw_weights(rng, shape, mx.bfloat16)
    projected = draw(rng, width, num_columns(shape), dtype=mx.bfloat16)
    window = draw(rng, 1, 3, shape.conv_size, dtype=mx.bfloat16)
    last = conv_qkv.LastInputs(projected, layout(width), ints([1]))
    outputs = 2 * width * shape.conv_size + 8 * width * 48 + window.nbytes
    least = 2 * width * (shape.conv_size + 96) + weights.weight.nbytes + window.nbytes + outputs
    ours = moved(lambda: conv_qkv.conv_qkv_metal(projected, window, weights, shape, layout(width), last))
    return f"| {width} | {least / MB:.3f} | {ours / least:.3f} |"


def qmv_line(num_rows: int) -> str:
    x, weight = draw_quantized(num_rows, 1024, 5120, dtype=mx.bfloat16)
    own = weight.codes.nbytes + weight.scales.nbytes + weight.biases.nbytes
    emulator.runs.clear()
    qmv_rows.qmv_rows_metal(x, weight)
    read = emulator.runs[-1].bytes_read
    ratio = (read["w"] + read["scales"] + read["biases"]) / own
    return f"| {num_rows} | {own / MB:.2f} | {read['x'] / MB:.2f} | {ratio:.3f} times |"


def prefill_line() -> str:
    shape = Shape(key_heads=4, value_heads=8, key_dim=128, value_dim=128, dtype=mx.bfloat16)
    rng = np.random.default_rng(0)
    t, state = shape.tokens(rng, (256,)), shape.state(rng, 1)
    least = sum(x.nbytes for x in t.inputs) + 2 * state.nbytes + 4 * t.inputs.v.size
    ours = moved(lambda: gdn_prefill.gdn_prefill_metal(t.inputs, state, FlatRows((256,))))
    return f"| {least / MB:.2f} | {ours / least:.3f} |"


if __name__ == "__main__":
    main()
