"""The compiled path, which users take: the demo family's texts and whatever depends on fusing, in a process where MLX compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxspec.platform import compile_folder

ROOT = Path(__file__).resolve().parent.parent
# Of the demo what has one row compile all there is; each shape that is new to the folder costs a run of g++.
EQUALITY = "tests/engine/test_demo_equality.py::test"
ONE_ROW = (
    f"{EQUALITY}_one_row_drafted_is_the_row_plain",
    "tests/kernels/test_activations.py",
)
# Rows together, what else depends on fusing, and a little model of each family.
MORE = (
    *ONE_ROW,
    f"{EQUALITY}_ragged_rows_drafted_are_the_rows_plain[all]",
    f"{EQUALITY}_rows_together_are_the_rows_alone[0]",
    "tests/kernels/test_gdn_ops.py",
    "tests/models/test_runners.py",
    "tests/models/test_launches.py",
    "tests/models/test_random_families.py",
    "tests/models/test_adapters_beside.py::test_texts_are_those_of_one_adapter_alone",
    "tests/cache/test_cache_contract.py::test_long_rounds_of_ragged_drafts_leave_no_trace",
)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform.startswith("linux") and compile_folder.compiler() is None,
    reason="needs g++, with which MLX compiles for the CPU",
)
@pytest.mark.parametrize(
    "tests", [ONE_ROW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["one row", "more"]
)
def test_shipped_models_say_the_same_compiled(tests: tuple[str, ...]) -> None:
    kept = {k: v for k, v in os.environ.items() if k != "MLX_DISABLE_COMPILE"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--compiled",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    done = subprocess.run(command, env=kept, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
