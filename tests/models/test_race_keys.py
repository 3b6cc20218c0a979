"""Every quantized product of few rows in a round, the target's and its drafters', goes through `qmv_rows` with a weight that is raced."""

from __future__ import annotations

from typing import Any

import pytest
from planting import catches

from mlxspec.platform import device

# isort: split
import mlx.core as mx
import mlx.nn as nn

import mlxspec
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.quantize import Format
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.rehearsal import modules_of
from mlxspec.kernels import qmv_rows
from mlxspec.models import tune

PROMPT = "<|im_start|>user\nwhat does len do?<|im_end|>\n<|im_start|>assistant\n"
SIZE = SamplingParams(max_tokens=12)
Key = tuple[tuple[int, ...], int, int, str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The built-in models in 4 bits. The demo's head is a matrix of its own, that of demo-gemma is its embedding."""
    root = tmp_path_factory.mktemp("packed")
    convert("demo", root / "demo", Wish(trunk=Format(bits=4), head_bits=4))
    convert("demo-gemma", root / "demo-gemma", Wish(trunk=Format(bits=4)))
    return {name: str(root / name) for name in ("demo", "demo-gemma")}


def only_linear(right: Any) -> Any:
    def found(*modules: nn.Module) -> Any:
        return [w for w in right(*modules) if w.shape[0] < 1000]

    return found


@catches(
    "the language-model head is not raced",
    "mlxspec.models.tune:raced_weights",
    only_linear,
    case="demo-gemma-ngram-simple",
)
@pytest.mark.parametrize(
    ("model", "draft", "beside"),
    [
        pytest.param("demo", "mtp", None, id="demo-mtp"),
        pytest.param("demo", "draft-model", "demo", id="demo-draft-model"),
        pytest.param("demo", "eagle3", "demo-eagle3", id="demo-eagle3"),
        pytest.param("demo", "dflash", "demo-dflash", id="demo-dflash"),
        pytest.param("demo-gemma", "ngram-simple", None, id="demo-gemma-ngram-simple"),
    ],
)
def test_every_product_has_a_race_key(
    model: str, draft: str, beside: str | None, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply, through = mx.quantized_matmul, qmv_rows.qmv_rows_ops
    seen: dict[Key, bool] = {}  # whether it came through `qmv_rows`
    inside: list[bool] = []

    def noted(x: mx.array, codes: mx.array, *rest: Any, **form: Any) -> mx.array:
        if x.ndim == 2 and x.shape[0] <= qmv_rows.MAX_ROWS:
            key = codes.shape, form["group_size"], form["bits"], form.get("mode", "affine")
            seen[key] = seen.get(key, True) and bool(inside)
        return multiply(x, codes, *rest, **form)

    def passed(x: mx.array, weight: qmv_rows.QuantizedWeight) -> mx.array:
        inside.append(True)
        try:
            return through(x, weight)
        finally:
            inside.pop()

    monkeypatch.setattr(mx, "quantized_matmul", noted)
    monkeypatch.setattr(qmv_rows, "qmv_rows_ops", passed)
    monkeypatch.setattr(device, "has_gpu", lambda: True)  # as products go where the kernel can win
    spec = SpecConfig(drafters=(draft,), policy="fixed")
    with mlxspec.load(folders[model], draft_model=beside, spec=spec) as engine:
        answer = engine.generate(PROMPT, SIZE)
        raced = {
            (w.codes.shape, w.group_size, w.bits, w.mode) for w in tune.raced_weights(*modules_of(engine))
        }
    assert answer.stats.num_rounds > 1
    assert len(seen) > 3
    assert all(seen.values())
    assert set(seen) <= raced
