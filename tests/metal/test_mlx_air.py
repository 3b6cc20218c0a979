"""The arithmetic of MLX's kernels as Apple's compiler ordered it, which scripts/read_air.py has read from MLX's macOS wheel."""

from __future__ import annotations

import importlib.metadata
import json
import struct
import subprocess
from pathlib import Path

import pytest
import read_air
from planting import catches

RECORD = json.loads(read_air.RECORD.read_text(encoding="utf-8"))
# What metal/qmv_rows.metal says, statement by statement, where a compiler fuses within a statement and not beyond it. Of x0*c0 + x1*c1 +
# x2*c2 + x3*c3 the second product is rounded, and each other one is fused into the sum, which is then added to the accumulator.
FOUR = ["fmul.float", "fmuladd", "fmuladd", "fmuladd", "fadd.float"]
PART = ["fmul.float", "fmuladd", "fadd.float"]  # scale * product + sum * bias, then a sum of its own
PASS = {  # of a lane over its values. MLX scales x by powers of two, which changes no bit, where ours shifts the code.
    4: ["fadd.float"] * 4 + ["fmul.float"] * 3 + FOUR + PART,
    8: ["fadd.float", "fmuladd", *PART],
}


def operations(name: str) -> list[str]:
    return str(RECORD["kernels"][name]).split()


@pytest.mark.parametrize("bits", PASS)
@pytest.mark.parametrize("dtype", ["float", "float16_t", "bfloat16_t"])
@pytest.mark.parametrize("remainder", [0, 1], ids=["whole", "outputs that are no multiple of 8"])
def test_a_product_of_one_row_is_added_in_the_order_of_qmv_rows(
    bits: int, dtype: str, remainder: int
) -> None:
    end = ["simd_sum"] if dtype == "float" else ["simd_sum", "fptrunc"]
    wanted = 2 * PASS[bits] + end  # whole blocks of K, and what is left of it
    assert operations(f"affine_qmv_fast_{dtype}_gs_64_b_{bits}_batch_0_pr_{remainder}_hgs_0_r_4") == wanted


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_codes_of_microscaling_formats_are_multiplied_in_half_before_they_are_widened(mode: str) -> None:
    """And there is no bias: the scaled product is added by itself."""
    (name, *_) = (name for name in RECORD["kernels"] if name.startswith(mode))
    found = operations(name)
    num_codes = 1 if mode == "mxfp8" else 4
    assert found.count("fmul.half") == num_codes + (mode == "nvfp4")  # nvfp4's scale is a code as well
    assert found[0] == "fmul.half"
    assert found[-4:] == ["fmul.float", "fadd.float", "simd_sum", "fptrunc"]
    sums = [operation for operation in found[:-4] if operation != "fmul.half"]
    assert sums == (["fmuladd"] if mode == "mxfp8" else FOUR)


@pytest.mark.parametrize(
    ("found", "names", "says"),
    [
        (RECORD["kernels"], [], "all"),
        (
            {**RECORD["kernels"], "sdpa_vector_bfloat16_t_256_256": "1 operations, 0"},
            ["sdpa_vector_bfloat16_t_256_256"],
            "1 of",
        ),
        ({**RECORD["kernels"], "seq_gated_delta_new": "1 operations, 0"}, ["seq_gated_delta_new"], "1 of"),
    ],
)
def test_a_kernel_that_has_changed_is_named_in_one_line(
    found: dict[str, str], names: list[str], says: str
) -> None:
    assert read_air.changed(found, RECORD["kernels"]) == names
    line = read_air.line("9.9", names, RECORD["proved"], len(found))
    assert line.startswith(f"MLX 9.9: {says} ")
    assert all(name in line for name in names)
    assert "\n" not in line


def test_functions_of_a_metallib_are_found() -> None:
    body = b"".join(
        tag + struct.pack("<H", len(value)) + value
        for tag, value in (
            (b"NAME", b"k\0"),
            (b"OFFT", struct.pack("<3Q", 0, 0, 5)),
            (b"MDSZ", struct.pack("<Q", 3)),
        )
    )
    body += b"ENDT"
    entry = struct.pack("<I", len(body) + 4) + body
    header = b"MTLB" + bytes(20) + struct.pack("<8Q", 88, 0, 0, 0, 0, 0, 1000, 0)
    assert read_air.functions(header + struct.pack("<I", 1) + entry) == {"k": (1005, 3)}
    with pytest.raises(ValueError, match="no metallib"):
        read_air.functions(b"none")


@pytest.mark.slow
@catches("a compiler that fuses all", "read_air:operations", lambda right: lambda code: [*right(code), "fma"])
def test_the_installed_mlx_has_the_kernels_that_were_proved(tmp_path: Path) -> None:
    if (reason := read_air.missing()) is not None:
        pytest.skip(reason)
    version = importlib.metadata.version("mlx")
    try:
        metallib = read_air.download(version, tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("MLX's macOS wheel cannot be fetched")
    found = read_air.kept(read_air.read(metallib))
    names = read_air.changed(found, RECORD["kernels"])
    said = read_air.line(version, names, RECORD["proved"], len(found))
    print(said)
    assert not names, said
