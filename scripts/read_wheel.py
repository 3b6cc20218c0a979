#!/usr/bin/env python3
"""Reads from MLX's macOS wheels which attention kernels they hold, and keeps it in tests/kernels/mlx_wheel.json.

    .venv/bin/python scripts/read_wheel.py      # of the installed version; downloads two wheels, 120 MB, and needs no Mac

Kept are the head sizes of kernels in mlx.metallib, and of libmlx.dylib the sentences by which it refuses a fused kernel and the names of
its switches. A kernel that exists is not always used. Where this file changes, read `ScaledDotProductAttention::use_fallback` in MLX's
sources and the tables in mlxspec/kernels/attention.py again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RECORD = Path(__file__).resolve().parent.parent / "tests" / "kernels" / "mlx_wheel.json"
SYSTEMS = ("14_0", "26_0")  # without kernels for matrix units, and with them
_FEW = re.compile(rb"\bsdpa_vector_(?:float|float16_t|bfloat16_t)_(\d+)_(\d+)")
_MANY = re.compile(rb"\bsteel_attention_\w+?_bd(\d+)(?:_bv(\d+))?_")
_SAYS = re.compile(rb"the fused kernels require .*?(?=\0sdpa_vector)", re.DOTALL)
_SWITCHES = re.compile(rb"MLX_SDPA_\w+")


def kernels(metallib: bytes) -> dict[str, list[str]]:
    """Head sizes of the kernels for few and for many queries, as "D", or as "D and V" where values have others."""
    found = {}
    for kind, name in (("few", _FEW), ("many", _MANY)):
        pairs = {(int(keys), int(values or keys)) for keys, values in name.findall(metallib)}
        found[kind] = [str(k) if k == v else f"{k} and {v}" for k, v in sorted(pairs)]
    return found


def dispatch(library: bytes) -> dict[str, list[str]]:
    """Sentences, in pieces as the library has them, and switches. Raises ValueError where there are none."""
    says = _SAYS.search(library)
    if says is None:
        raise ValueError(
            "libmlx.dylib holds no sentence about fused attention: scripts/read_wheel.py has to learn its new words."
        )
    return {
        "says": [piece.decode().strip() for piece in says[0].split(b"\0") if piece],
        "switches": sorted({name.decode() for name in _SWITCHES.findall(library)}),
    }


def read(wheels: dict[str, Path]) -> dict[str, object]:
    """What is kept of one version. wheels: by system."""
    found: dict[str, object] = {}
    for system, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            found[f"macosx_{system}"] = kernels(archive.read("mlx/lib/mlx.metallib"))
            found |= dispatch(archive.read("mlx/lib/libmlx.dylib"))
    return found


def _download(version: str, system: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", f"mlx-metal=={version}", "--no-deps"]
    command += [f"--platform=macosx_{system}_arm64", "--only-binary=:all:", f"--dest={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    version = importlib.metadata.version("mlx")
    with tempfile.TemporaryDirectory() as folder:
        wheels = {system: _download(version, system, Path(folder, system)) for system in SYSTEMS}
        found = read(wheels)
    known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    RECORD.write_text(json.dumps(known | {version: found}, indent=1) + "\n", encoding="utf-8")
    print(f"MLX {version} is in {RECORD}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
