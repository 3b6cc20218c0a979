#!/usr/bin/env python3
"""Reads how Apple's compiler ordered the arithmetic of MLX's kernels, out of MLX's macOS wheel. Needs llvm-dis (Debian: llvm), no Mac.

    .venv/bin/python scripts/read_air.py            # of the installed version; downloads one wheel, 60 MB
    .venv/bin/python scripts/read_air.py --write    # and keep it in tests/metal/mlx_air.json, once it has been proved

A wheel's mlx.metallib holds each kernel as LLVM bitcode. `fmuladd` is one operation that the GPU may round once; `fmul` and `fadd` are
rounded each. Our kernels claim the bits of MLX's, so a kernel with another order must be proved again: the script prints one line that
names the kernels that have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

RECORD = Path(__file__).resolve().parent.parent / "tests" / "metal" / "mlx_air.json"
SYSTEM = "26_0"
_QMV = "affine_qmv_fast_{0}_gs_64_b_{1}_batch_0_pr_{2}_hgs_0_r_4"
_FLOATS = ("float", "float16_t", "bfloat16_t")
# whose bits or order ours claims, or which it relies on: products of one row, Gated DeltaNet over a prompt, attention
KERNELS = (
    *(_QMV.format(dtype, bits, pr) for dtype in _FLOATS for bits in (4, 8) for pr in (0, 1)),
    "mxfp4_qmv_fast_bfloat16_t_gs_32_b_4_batch_0_pr_0_hgs_0_r_4",
    "nvfp4_qmv_fast_bfloat16_t_gs_16_b_4_batch_0_pr_0_hgs_0_r_2",
    "nvfp4_qmv_fast_bfloat16_t_gs_16_b_4_batch_0_pr_0_hgs_0_r_4",
    "mxfp8_qmv_fast_bfloat16_t_gs_32_b_8_batch_0_pr_0_hgs_0_r_4",
    "sdpa_vector_bfloat16_t_128_128",
    "sdpa_vector_bfloat16_t_256_256",
    "sdpa_vector_2pass_1_bfloat16_t_256_256",
)
FAMILIES = (
    "seq_gated_delta_",
    "gated_delta_fused_chunk",
    "gated_delta_fused_nax_bfloat",
    "steel_attention_bfloat16",
)
_OPERATION = re.compile(
    r"= (?:tail )?(?:call \w+ @(?:llvm\.(fmuladd|fma)|air\.(?:fast_)?(\w+))|(f(?:mul|add|sub|div)) (?:fast )?(\w+|<[^>]+>)|(fptrunc))"
)


def functions(metallib: bytes) -> dict[str, tuple[int, int]]:
    """Return where the bitcode of each function of a metallib begins and how long it is. Raises ValueError for another file."""
    if metallib[:4] != b"MTLB":
        raise ValueError("This is no metallib.")
    lists, _, _, _, _, _, bitcode, _ = struct.unpack_from("<8Q", metallib, 24)
    (num,) = struct.unpack_from("<I", metallib, lists)
    place, found = lists + 4, {}
    for _ in range(num):
        (size,) = struct.unpack_from("<I", metallib, place)
        tags, at = {}, place + 4
        while (tag := metallib[at : at + 4]) != b"ENDT":
            (length,) = struct.unpack_from("<H", metallib, at + 4)
            tags[tag] = metallib[at + 6 : at + 6 + length]
            at += 6 + length
        offset = struct.unpack("<3Q", tags[b"OFFT"])[2]
        found[tags[b"NAME"].rstrip(b"\0").decode()] = bitcode + offset, struct.unpack("<Q", tags[b"MDSZ"])[0]
        place += size
    return found


def operations(bitcode: bytes) -> list[str]:
    """Return the floating-point operations of a function in the order of its text, such as "fmul.half"."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.bc")
        file.write_bytes(bitcode)
        command = ["llvm-dis", str(file), "-o", "-"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = []
    for match in _OPERATION.finditer(text):
        fused, called, name, kind, cut = match.groups()
        if name:
            found.append(f"{name}.{kind}")
        elif fused or cut:
            found.append(fused or cut)
        elif called.startswith(("simd_sum", "exp", "log", "rsqrt", "sqrt")):
            found.append(called)
    return found


def read(metallib: bytes) -> dict[str, list[str]]:
    """Return the operations of the kernels that ours are compared with, by name."""
    there = functions(metallib)
    chosen = [*KERNELS, *sorted(name for name in there if name.startswith(FAMILIES))]
    return {
        name: operations(metallib[at : at + size])
        for name in chosen
        if name in there
        for at, size in (there[name],)
    }


def kept(found: Mapping[str, list[str]]) -> dict[str, str]:
    """Return what is kept of them: all operations of a product of one row, of others their number and a digest."""
    return {
        name: " ".join(operations)
        if "qmv" in name
        else f"{len(operations)} operations, {hashlib.sha256(' '.join(operations).encode()).hexdigest()[:16]}"
        for name, operations in found.items()
    }


def changed(found: Mapping[str, str], record: Mapping[str, str]) -> list[str]:
    """Return the kernels that are not as they are on record, those that are gone and those that are new included."""
    return sorted(name for name in {*found, *record} if found.get(name) != record.get(name))


def line(version: str, names: list[str], proved: str, num: int) -> str:
    """Return one line on the kernels that have changed since the version that was proved."""
    if not names:
        return f"MLX {version}: all {num} kernels are those of {proved}, which was proved."
    return f"MLX {version}: {len(names)} of {num} kernels have changed since {proved}, which was proved: {', '.join(names)}."


def missing() -> str | None:
    """Return why bitcode cannot be read here, None where it can."""
    return None if shutil.which("llvm-dis") else "there is no llvm-dis (Debian: apt install llvm)"


def download(version: str, folder: Path) -> bytes:
    """Return mlx.metallib of a version's macOS wheel. Raises CalledProcessError where the package index cannot be reached."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", f"mlx-metal=={version}", "--no-deps"]
    command += [f"--platform=macosx_{SYSTEM}_arm64", "--only-binary=:all:", f"--dest={folder}"]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("mlx/lib/mlx.metallib")


def main() -> int:
    """Compare the installed version with the record; with --write replace the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="keep what was read as the version that was proved"
    )
    options = parser.parse_args()
    if (reason := missing()) is not None:
        parser.error(reason)
    version = importlib.metadata.version("mlx")
    with tempfile.TemporaryDirectory() as folder:
        found = kept(read(download(version, Path(folder))))
    if options.write:
        RECORD.write_text(
            json.dumps({"proved": version, "kernels": found}, indent=1) + "\n", encoding="utf-8"
        )
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    names = changed(found, record["kernels"])
    print(line(version, names, record["proved"], len(found)))
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
