"""Tests that compare numbers, under OpenBLAS's kernels for three generations of CPUs: bounds must not be those of one machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What the kernels of a generation need of a CPU. OpenBLAS runs older kernels on a newer CPU, not the other way round.
NEEDED = {
    "Nehalem": {"sse4_2"},
    "Haswell": {"avx2", "fma"},
    "SkylakeX": {"avx512f", "avx512dq", "avx512bw", "avx512vl"},
}
COMPARES = re.compile(
    r"allclose|isclose|array_equal|\.abs\(|\brounding\b|\bequality\b|models\.compare|cache\.mixers|test_gdn_ops"
)
# Emulated kernels are computed by NumPy without a BLAS. The others of these compare no products, or compile for minutes.
ELSEWHERE = (
    "tests/metal/",
    "tests/bench/",
    "tests/policy/",
    "tests/loading/",
    "tests/test_compiled.py",
    "tests/test_core_types.py",
)
ASK = """
import ctypes
from mlxspec.platform import device
name = getattr(device._chosen.library, "openblas_get_corename", None)
if name is not None:
    name.restype = ctypes.c_char_p
    print(name().decode())
"""


def files() -> list[str]:
    found = (str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py")))
    return [
        f for f in found if not f.startswith(ELSEWHERE) and COMPARES.search((ROOT / f).read_text("utf-8"))
    ]


def features() -> set[str]:
    """Of this CPU, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def core_used(core: str) -> str:
    """The kernels that a process uses in which OPENBLAS_CORETYPE is `core`; empty without OpenBLAS."""
    command = [sys.executable, "-c", ASK]
    env = {**os.environ, "OPENBLAS_CORETYPE": core}
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    ).stdout.strip()


def test_the_files_that_compare_numbers_are_found() -> None:
    found = files()
    for name in (
        "kernels/test_softmax",
        "kernels/test_gdn_at_once",
        "cache/test_rollback",
        "models/test_parity_mlx_lm",
        "engine/test_equality",
    ):
        assert f"tests/{name}.py" in found


@pytest.mark.slow
@pytest.mark.parametrize("core", NEEDED)
def test_numbers_are_within_their_bounds(core: str) -> None:
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        pytest.skip("needs Linux on x86-64")
    if not NEEDED[core] <= features():
        pytest.skip(f"this CPU cannot run OpenBLAS's kernels for {core}")
    if not core_used(core):
        pytest.skip("needs OpenBLAS")
    assert core_used(core) == core
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *files(),
    ]
    done = subprocess.run(
        command,
        env={k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"} | {"OPENBLAS_CORETYPE": core},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
