"""FP8 and NVFP4 folders that transformers, compressed-tensors and ModelOpt have written: the weights are the tools' own numbers, and so
are the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import load_ours, stepwise

from mlxspec.loading.weights import read_folder
from mlxspec.platform.host import numbers

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EIGHT: dict[str, Any] = {"num_bits": 8}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "transformers, FP8 blocks": ("transformers", "fp8_by_transformers", {}),
    "compressed-tensors, FP8 blocks": (
        "compressed_tensors",
        "float-quantized",
        EIGHT | {"strategy": "block", "block_structure": [128, 128]},
    ),
    "compressed-tensors, FP8 rows": (
        "compressed_tensors",
        "float-quantized",
        EIGHT | {"strategy": "channel"},
    ),
    "compressed-tensors, FP8 matrices": (
        "compressed_tensors",
        "float-quantized",
        EIGHT | {"strategy": "tensor"},
    ),
    "compressed-tensors, NVFP4": (
        "compressed_tensors",
        "nvfp4-pack-quantized",
        {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    ),
    "ModelOpt, NVFP4": ("modelopt", "nvfp4_by_modelopt", {}),
}


@pytest.mark.filterwarnings("ignore")  # of PyTorch and the tools
@pytest.mark.parametrize("case", CASES)
def test_what_a_tool_has_written_loads(case: str, tmp_path: Path) -> None:
    package, kind, values = CASES[case]
    pytest.importorskip(package, reason=f"{package} is not installed")
    import published_side as side

    made = side.by_compressed_tensors(kind, **values) if values else getattr(side, kind)()
    wanted = side.write(tmp_path / "model", *made)
    found = read_folder(tmp_path / "model")
    for name, weight in wanted.weights.items():
        largest = np.abs(weight).max()
        assert np.abs(numbers(found[name]) - weight).max() <= 2.0**-22 * largest, name
    ours = stepwise(load_ours(tmp_path / "model").model, side.TOKENS, 4)
    largest = np.abs(wanted.whole).max()
    assert np.abs(ours - wanted.logits).max() < 1e-5 * largest
    assert np.abs(ours - wanted.whole).max() > 1e-2 * largest  # it was quantized
