"""Our Qwen3.5 against transformers' over text-only folders: logits of a prefill and of 20 cached steps. Needs PyTorch."""

from __future__ import annotations

import pytest
import tiny
from compare import assert_same_logits, stepwise, tokens_of
from zoo import Zoo

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

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


def test_folders_saved_by_transformers(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What `save_pretrained` writes (its own config, one tensor an expert) loads as it is."""
    from compare import load_ours

    for shape in ("tied", "moe"):
        theirs = transformers_side.load(zoo.folder(shape, "text"), tiny.SHAPES[shape])
        folder = tmp_path_factory.mktemp(shape)
        theirs.save_pretrained(folder)
        ours = stepwise(load_ours(folder).model, TOKENS[:40], 4)
        assert_same_logits(
            ours, transformers_side.stepwise(theirs, TOKENS[:40], 4), f"{shape}, saved by transformers"
        )
