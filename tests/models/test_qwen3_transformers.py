"""Our Qwen3 and Qwen3-Next against transformers': prefill and 20 cached steps, and the folders its save_pretrained writes. Needs
PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_qwen3
from compare import assert_same_logits, load_ours, stepwise, stepwise_rows, tokens_of

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import transformers  # noqa: E402
import transformers_side  # noqa: E402

NUM_STEPS = 20
TOKENS = tokens_of(21, 41 + NUM_STEPS, tiny_qwen3.VOCAB)


def load_theirs(folder: Path, c: tiny_qwen3.Config) -> Any:
    model, report = getattr(transformers, c["architectures"][0]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", tiny_qwen3.CONFIGS)
def test_published_layout(name: str, dtype: str, tmp_path: Path) -> None:
    """Stored bfloat16 weights are computed with in float32 on both sides. And what `save_pretrained` writes loads as it is."""
    c = tiny_qwen3.CONFIGS[name]
    folder = tiny_qwen3.write(tmp_path / "text", c, dtype=getattr(mx, dtype))
    theirs = load_theirs(folder, c)
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    assert_same_logits(stepwise(load_ours(folder).model, TOKENS, NUM_STEPS), reference, f"{name}, {dtype}")
    theirs.save_pretrained(tmp_path / "saved")
    saved = load_ours(tmp_path / "saved")
    assert not saved.notices
    ours = stepwise(saved.model, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{name}, {dtype}, saved by transformers")


@pytest.mark.parametrize("name", tiny_qwen3.CONFIGS)
def test_three_ragged_rows(name: str, tmp_path: Path) -> None:
    c = tiny_qwen3.CONFIGS[name]
    folder = tiny_qwen3.write(tmp_path, c)
    theirs = load_theirs(folder, c)
    rows = [tokens_of(31 + r, n + NUM_STEPS, tiny_qwen3.VOCAB) for r, n in enumerate((23, 1, 41))]
    for r, ours in enumerate(stepwise_rows(load_ours(folder).model, rows, NUM_STEPS)):
        reference = transformers_side.stepwise(theirs, rows[r], NUM_STEPS)
        assert_same_logits(ours, reference, f"{name}, row {r} of three")


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CHANGES: dict[str, dict[str, Any]] = {
    "yarn, older name": {"rope_scaling": _YARN},
    "yarn": {"rope_theta": None, "rope_parameters": _YARN | {"rope_theta": 1e6}},
    "linear": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "qwen3-next"])
def test_rotary_positions(name: str, change: str, tmp_path: Path) -> None:
    """The published cards ask for yarn beyond 32,768 tokens."""
    c = {k: v for k, v in (tiny_qwen3.CONFIGS[name] | CHANGES[change]).items() if v is not None}
    folder = tiny_qwen3.write(tmp_path, c)
    reference = transformers_side.stepwise(load_theirs(folder, c), TOKENS, NUM_STEPS)
    assert_same_logits(stepwise(load_ours(folder).model, TOKENS, NUM_STEPS), reference, f"{name}, {change}")
