"""Our Qwen3.5 against transformers' over text-only folders: logits of a prefill and of 20 cached steps. Needs PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from compare import assert_same_logits, load_ours, stepwise, stepwise_rows, tokens_of
from zoo import Zoo

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

import transformers_hub  # noqa: E402
import transformers_side  # noqa: E402

NUM_STEPS = 20
TOKENS = tokens_of(21, 41 + NUM_STEPS, tiny.VOCAB)


@pytest.mark.parametrize("dialect", ["text", "text-bfloat16"])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_text_only_checkpoints(zoo: Zoo, shape: str, dialect: str) -> None:
    """Stored bfloat16 weights are computed with in float32 on both sides."""
    theirs = transformers_side.load(zoo.folder(shape, dialect), tiny.SHAPES[shape])
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    ours = stepwise(zoo.ours(shape, dialect).model, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{shape}, {dialect}")


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_three_ragged_rows(zoo: Zoo, shape: str) -> None:
    theirs = transformers_side.load(zoo.folder(shape, "text"), tiny.SHAPES[shape])
    rows = [tokens_of(31 + r, n + NUM_STEPS, tiny.VOCAB) for r, n in enumerate((23, 1, 41))]
    for r, ours in enumerate(stepwise_rows(zoo.ours(shape, "text").model, rows, NUM_STEPS)):
        reference = transformers_side.stepwise(theirs, rows[r], NUM_STEPS)
        assert_same_logits(ours, reference, f"{shape}, row {r} of three")


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_folders_saved_by_transformers(zoo: Zoo, shape: str, tmp_path: Path) -> None:
    """What `save_pretrained` writes (its own config, one tensor an expert) loads as it is."""
    theirs = transformers_side.load(zoo.folder(shape, "text"), tiny.SHAPES[shape])
    theirs.save_pretrained(tmp_path)
    ours = stepwise(load_ours(tmp_path).model, TOKENS, NUM_STEPS)
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{shape}, saved by transformers")


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_multimodal_folders_saved_by_transformers(shape: str, tmp_path: Path) -> None:
    """As on the hub: names behind `model.language_model.`, a vision tower beside them."""
    theirs = transformers_hub.save_qwen(tmp_path, tiny.SHAPES[shape])
    found = load_ours(tmp_path)
    assert any("passed over" in notice for notice in found.notices)
    ours = stepwise(found.model, TOKENS, NUM_STEPS)
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{shape}, multimodal, saved by transformers")
