"""Our Gemma models against transformers': prefill and 20 cached steps, and the folders its save_pretrained writes. Needs PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_gemma
from compare import assert_same_logits, load_ours, stepwise, stepwise_rows, tokens_of

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import transformers_hub  # noqa: E402
import transformers_side  # noqa: E402
from transformers import Gemma3ForCausalLM, Gemma4ForCausalLM  # noqa: E402

NUM_STEPS = 20
TOKENS = tokens_of(21, 41 + NUM_STEPS, tiny_gemma.VOCAB)


def load_theirs(folder: Path, c: tiny_gemma.Config) -> Any:
    kind = Gemma4ForCausalLM if tiny_gemma.is_gemma4(c) else Gemma3ForCausalLM
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("name", tiny_gemma.CONFIGS)
def test_text_only_checkpoints(name: str, tmp_path: Path) -> None:
    c = tiny_gemma.CONFIGS[name]
    folder = tiny_gemma.write_text(tmp_path / "text", c)
    theirs = load_theirs(folder, c)
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    assert_same_logits(stepwise(load_ours(folder).model, TOKENS, NUM_STEPS), reference, name)
    theirs.save_pretrained(tmp_path / "saved")
    ours = stepwise(load_ours(tmp_path / "saved").model, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{name}, saved by transformers")


@pytest.mark.parametrize("name", tiny_gemma.CONFIGS)
def test_three_ragged_rows(name: str, tmp_path: Path) -> None:
    """Of them one wraps its window in the prompt, one in the steps."""
    c = tiny_gemma.CONFIGS[name]
    folder = tiny_gemma.write_text(tmp_path, c)
    theirs = load_theirs(folder, c)
    rows = [tokens_of(31 + r, n + NUM_STEPS, tiny_gemma.VOCAB) for r, n in enumerate((50, 1, 29))]
    for r, ours in enumerate(stepwise_rows(load_ours(folder).model, rows, NUM_STEPS)):
        reference = transformers_side.stepwise(theirs, rows[r], NUM_STEPS)
        assert_same_logits(ours, reference, f"{name}, row {r} of three")


@pytest.mark.parametrize("name", tiny_gemma.CONFIGS)
def test_multimodal_folders_saved_by_transformers(name: str, tmp_path: Path) -> None:
    theirs = transformers_hub.save_gemma(tmp_path, tiny_gemma.CONFIGS[name])
    found = load_ours(tmp_path)
    assert any("passed over" in notice for notice in found.notices)
    ours = stepwise(found.model, TOKENS, NUM_STEPS)
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{name}, multimodal, saved by transformers")


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_FULL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6, "factor": 2.0}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn, older name": ("gemma3", {"rope_scaling": _YARN}),
    "rope_parameters": (
        "gemma3",
        {
            "rope_scaling": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": _YARN | {"rope_theta": 1e6},
            },
        },
    ),
    "full layers stretched by rope_scaling beside rope_parameters": (
        "gemma3",
        {"rope_scaling": _YARN, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
    ),
    "stretched proportional positions": (
        "gemma4-dense",
        {"rope_parameters": {"sliding_attention": _YARN | {"rope_theta": 1e4}, "full_attention": _FULL}},
    ),
    "heads of one size": ("gemma4-dense", {"global_head_dim": 16}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_configs(name: str, tmp_path: Path) -> None:
    """As they are, and as transformers saves them."""
    base, change = CHANGES[name]
    c = tiny_gemma.CONFIGS[base] | change
    folder = tiny_gemma.write_text(tmp_path / "text", c)
    theirs = load_theirs(folder, c)
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    assert_same_logits(stepwise(load_ours(folder).model, TOKENS, NUM_STEPS), reference, name)
    theirs.save_pretrained(tmp_path / "saved")
    ours = stepwise(load_ours(tmp_path / "saved").model, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{name}, saved by transformers")
