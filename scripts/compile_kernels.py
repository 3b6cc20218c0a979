#!/usr/bin/env python3
"""Writes the full Metal source of every kernel variant, and compiles each with Apple's compiler. Needs no GPU.

    scripts/compile_kernels [--out FOLDER] [--std metal3.1 metal3.2 metal4.0 metal4.1] [--write-only]

A variant is one set of template values and argument types: MLX compiles it the first time a process launches it. The variants here are
those that the launchers in mlxspec/kernels ask for at the published Qwen3.5, 3.6 and 3.8 sizes, in every dtype, weight format, number of
rows and mode, and those of the kernels' own self-checks. The text of a file is what MLX generates. The compiler gets MLX's own header in
front of it and MLX's own options, as MLX gives them at run time. Written are FOLDER/KERNEL-NUMBER.metal and FOLDER/variants.json, which
says what each file is.

Exit status: 0 every variant compiled (or was written), 1 a variant did not compile, 2 there is no Apple compiler here.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx
from write_checkpoint import SIZES

from mlxspec.kernels import conv_qkv, gdn_prefill, gdn_round, kv_attend, launch, products
from mlxspec.kernels.conv_ops import GdnInputs, GdnShape
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import Replay, RowLayout, Tape
from mlxspec.kernels.quantized_kv import KV_BITS, QuantizedTokens
from mlxspec.kernels.quantized_weight import MICROSCALING, QuantizedWeight

STANDARDS = ("metal3.1", "metal3.2", "metal4.0", "metal4.1")  # of macOS 14, 15, 26 and 27
INCLUDE = Path(mx.__file__).parent / "include"
HEADER = "mlx/backend/metal/kernels/utils.h"  # MLX puts its text in front of every custom kernel
FLAGS = ("-fno-fast-math", "-Wall", "-Wno-unused")
ROWS = ((1,), (4,), (17,), (64,), (3, 1, 6), (1,) * 9)  # widths of rows: narrow, wide, ragged, and nine rows
PIECES = ((512,), (2048,), (1000,), (600, 8))  # of prompts
# heads that share a key, and tokens: in room for 8, 16, 32 and 64 queries, tokens fewer than 8 and not
QUERIES = ((1, 1), (8, 1), (1, 8), (16, 1), (2, 8), (8, 4), (4, 8), (16, 4), (8, 8))
_metal_kernel = mx.fast.metal_kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel with its template values (name, value as text) and argument types (dtype, rank, whether it has fewer than 8 elements)."""

    kernel: str
    template: tuple[tuple[str, str], ...]
    arguments: tuple[tuple[str, int, bool], ...]


class Recorder:
    """In the place of `mx.fast.metal_kernel`: a launch records its variant and gives zeros. `texts`: Metal source by variant."""

    def __init__(self) -> None:
        self.texts: dict[Variant, str] = {}

    def __call__(self, *, name: str, **settings: Any) -> Callable[..., list[mx.array]]:
        real = _metal_kernel(name=name, **settings)

        def call(
            *, inputs: Sequence[Any], template: Sequence[tuple[str, Any]], **call: Any
        ) -> list[mx.array]:
            arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
            variant = Variant(
                kernel=name.removeprefix("mlxspec_"),
                template=tuple((key, str(value).removeprefix("mlx.core.")) for key, value in template),
                arguments=tuple((str(a.dtype).removeprefix("mlx.core."), a.ndim, a.size < 8) for a in arrays),
            )
            if variant not in self.texts:
                self.texts[variant] = _text(real, arrays, {**call, "template": template})
            pairs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in pairs]

        return call


def _text(kernel: Any, inputs: Sequence[mx.array], call: dict[str, Any]) -> str:
    """The Metal source that MLX generates for this launch; it depends on dtypes, ranks and whether there are fewer than 8 elements."""
    like = [mx.zeros((1,) * (a.ndim - 1) + (1 if a.size < 8 else 8,) * (a.ndim > 0), a.dtype) for a in inputs]
    mx.eval(like)
    seen: list[dict[str, Any]] = []
    mx.export_function(seen.append, lambda *arrays: kernel(inputs=list(arrays), **call), *like)
    made = [e["arguments"] for e in seen if e.get("type") == "primitive" and e.get("name") == "CustomKernel"]
    return str(made[0][1])


def variants() -> dict[Variant, str]:
    """Every variant and its Metal source."""
    recorder = Recorder()
    with launch.using(recorder):
        launch.forget()
        launch.reports()  # runs every self-check; what it makes of zeros does not matter
        launch.forget()
        for dtype in launch.FLOATS:
            for shape in shapes():
                _recurrences(shape, dtype)
            _products(dtype)
            _attention(dtype)
    return recorder.texts


def shapes() -> list[GdnShape]:
    """Heads of the Gated DeltaNet layers of every published size."""
    found = {}
    for config in SIZES.values():
        text = config.get("text_config", config)
        if "linear_num_value_heads" in text:
            names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
            found[GdnShape(*(text[f"linear_{name}"] for name in names))] = None
    return list(found)


def _recurrences(shape: GdnShape, dtype: mx.Dtype) -> None:
    """Rounds in every mode behind nothing and behind kept tokens, flushes, and prompts."""
    for widths in (*ROWS, *PIECES):
        rows = FlatRows(widths)
        layout, tokens = RowLayout.of(rows), _tokens(shape, dtype, rows.num_tokens)
        state = mx.zeros((rows.num_rows, shape.num_v_heads, shape.v_dim, shape.k_dim))
        num = mx.array([1] * rows.num_rows, mx.int32)
        kept = Replay(Tape(tokens.k, mx.zeros(tokens.v.shape), tokens.log_g), layout, num)
        projected = mx.zeros(
            (rows.num_tokens, shape.conv_size + shape.num_v_heads * (shape.v_dim + 2)), dtype
        )
        window = mx.zeros((rows.num_rows, 3, shape.conv_size), dtype)
        weights = conv_qkv.ConvWeights(
            mx.zeros((4, shape.conv_size), dtype), mx.zeros(shape.num_v_heads), mx.zeros(shape.num_v_heads)
        )
        is_prompt = widths in PIECES
        for last in (None, kept):
            kept_inputs = projected[:, : shape.conv_size]
            inputs = None if last is None else conv_qkv.LastInputs(kept_inputs, layout, num)
            for certain in (True,) if is_prompt else (False, True):
                conv_qkv.conv_qkv_metal(projected, window, weights, shape, layout, inputs, certain=certain)
            gdn_round.gdn_advance_metal(tokens, state, layout, last)
            if not is_prompt:
                gdn_round.gdn_round_metal(tokens, state, layout, last)
        if is_prompt:
            gdn_prefill.gdn_prefill_metal(tokens, state, rows)
            continue
        gdn_round.gdn_flush_metal(state, kept)


def _tokens(shape: GdnShape, dtype: mx.Dtype, count: int) -> GdnInputs:
    keys = mx.zeros((count, shape.num_k_heads, shape.k_dim), dtype)
    gates = mx.zeros((count, shape.num_v_heads))
    return GdnInputs(keys, keys, mx.zeros((count, shape.num_v_heads, shape.v_dim), dtype), gates, gates)


def _products(dtype: mx.Dtype) -> None:
    """Quantized products of every format that kernels take, for every number of rows."""
    for weight, kernel in itertools.product(_weights(dtype), products.KERNELS):
        for num_rows in kernel.rows:
            if kernel.supports(num_rows, weight, dtype):
                kernel.run(mx.zeros((num_rows, weight.shape[1]), dtype), weight)


def _attention(dtype: mx.Dtype) -> None:
    """Quantized keys and values: every size of head and number of bits, few and many queries of a key head, plain steps and verifies."""
    for dim in kv_attend.DIMS:
        for bits in KV_BITS:
            tokens = QuantizedTokens.of(mx.zeros((1, 1, 256, dim), dtype), bits)
            for heads, width in QUERIES:
                queries = mx.zeros((1, heads, width, dim), dtype)
                kv_attend.kv_attend_metal(queries, tokens, tokens, 1.0)


def _weights(dtype: mx.Dtype) -> Iterator[QuantizedWeight]:
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (16, 32, 64, 128):
            with suppress(ValueError):  # not a format of MLX's
                yield QuantizedWeight.of(mx.zeros((64, 512), dtype), group, bits)
    for mode, form in MICROSCALING.items():
        yield QuantizedWeight.of(mx.zeros((64, 512), dtype), *form, mode)


# ---- files and the compiler


def write(folder: Path) -> dict[str, Variant]:
    """Variants by file name; the folder must be absent or one that was written here."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "variants.json").is_file():
        raise FileExistsError(f"{folder} is not empty and holds no variants.json.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = variants()
    named: dict[str, Variant] = {}
    for variant, text in found.items():
        number = sum(v.kernel == variant.kernel for v in named.values())
        name = f"{variant.kernel}-{number:03d}.metal"
        (folder / name).write_text(text, encoding="ascii")
        named[name] = variant
    described = {name: dataclasses.asdict(variant) for name, variant in named.items()}
    (folder / "variants.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return named


def command(file: Path, standard: str) -> list[str]:
    """Apple's compiler on one file, with what MLX gives it: its header in front, no fast math."""
    head = ["xcrun", "-sdk", "macosx", "metal", "-x", "metal", f"-std={standard}", *FLAGS]
    return [*head, f"-I{INCLUDE}", "-include", HEADER, "-c", str(file), "-o", os.devnull]


def compile_all(folder: Path, named: dict[str, Variant], standards: Sequence[str]) -> list[str]:
    """What the compiler said of each variant that it refused or warned of our text."""

    def run(task: tuple[str, str]) -> str:
        name, standard = task
        done = subprocess.run(command(folder / name, standard), capture_output=True, text=True, check=False)
        warned = any(name in line and "warning:" in line for line in done.stderr.splitlines())
        if not done.returncode and not warned:
            return ""
        verdict = "does not compile" if done.returncode else "compiles with a warning"
        return f"{name} {verdict} as {standard} ({_said(named[name])}):\n{done.stderr.strip()[:2000]}"

    tasks = [(name, standard) for standard in standards for name in named]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [said for said in pool.map(run, tasks) if said]


def _said(variant: Variant) -> str:
    return ", ".join(f"{key} {value}" for key, value in variant.template)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/compile_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("build/metal"), metavar="FOLDER")
    parser.add_argument("--std", nargs="+", choices=STANDARDS, default=list(STANDARDS[:-1]))
    parser.add_argument("--write-only", action="store_true", help="write the files and compile nothing")
    options = parser.parse_args(arguments)
    if not options.write_only and shutil.which("xcrun") is None:
        print("scripts/compile_kernels: no xcrun; Apple's compiler comes with Xcode.", file=sys.stderr)
        return 2
    try:
        with device.private_kernels():
            named = write(options.out)
    except OSError as error:
        print(f"scripts/compile_kernels: {error}", file=sys.stderr)
        return 2
    kernels = [v.kernel for v in named.values()]
    counts = {kernel: kernels.count(kernel) for kernel in sorted(set(kernels))}
    print(f"{len(named)} variants in {options.out}: " + ", ".join(f"{n} of {k}" for k, n in counts.items()))
    if options.write_only:
        return 0
    failed = compile_all(options.out, named, options.std)
    for said in failed:
        print(f"\n{said}")
    print(f"\n{len(named)} variants, {' '.join(options.std)}: {len(failed) or 'no'} failures or warnings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
