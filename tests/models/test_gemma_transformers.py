"""Our Gemma models against transformers': prefill and 20 cached steps, and the folders its save_pretrained writes. Needs PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gemma
from compare import assert_same_logits, load_ours, stepwise, tokens_of

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import transformers_side  # noqa: E402
from transformers import Gemma3ForCausalLM, Gemma4ForCausalLM  # noqa: E402

NUM_STEPS = 20
TOKENS = tokens_of(21, 41 + NUM_STEPS, tiny_gemma.VOCAB)


@pytest.mark.parametrize("name", tiny_gemma.CONFIGS)
def test_text_only_checkpoints(name: str, tmp_path: Path) -> None:
    c = tiny_gemma.CONFIGS[name]
    folder = tiny_gemma.write_text(tmp_path / "text", c)
    kind = Gemma4ForCausalLM if tiny_gemma.is_gemma4(c) else Gemma3ForCausalLM
    theirs, report = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    reference = transformers_side.stepwise(theirs.eval(), TOKENS, NUM_STEPS)
    assert_same_logits(stepwise(load_ours(folder).model, TOKENS, NUM_STEPS), reference, name)
    theirs.save_pretrained(tmp_path / "saved")
    ours = stepwise(load_ours(tmp_path / "saved").model, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{name}, saved by transformers")
