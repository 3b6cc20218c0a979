"""The phase for long prompts: its losses are those of the weighted tokens, and its head is fed as a drafting loop feeds it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training networks need PyTorch")

import torch.nn.functional as F  # noqa: E402
from demo_training.long_phase import LongPlan, _losses, tune_long  # noqa: E402
from demo_training.network import LanguageModel, Shape  # noqa: E402

pytestmark = pytest.mark.torch
SHAPE = Shape(vocab=64, hidden=64, ffn=64, layers=3, heads=1, linear_heads=1)


@torch.no_grad()
def test_losses_are_those_of_the_weighted_tokens() -> None:
    torch.manual_seed(3)
    model = LanguageModel(SHAPE)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    ids, weights = torch.randint(0, 64, (96,)), torch.zeros(96)
    weights[0:9], weights[70:90] = 0.05, 1.0
    text, drafts, right, same = _losses(model, ids, weights)
    hidden = model.model(ids[None])
    logits = model.lm_head(hidden)[0]
    each = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
    torch.testing.assert_close(text, (each * weights[1:]).sum() / weights[1:].sum())
    # cells of all tokens but the first, which has no hidden before it
    told = model.lm_head(model.mtp.recurse(model.model.embed_tokens, hidden[:, :-1], ids[None, 1:], 1)[0])[0]
    soft = logits.softmax(-1)
    each = F.cross_entropy(told[:-1], soft[1:-1], reduction="none")
    torch.testing.assert_close(drafts, (each * weights[2:]).sum() / weights[2:].sum())
    best = logits.argmax(-1)
    assert right == pytest.approx(float((best[69:89] == ids[70:90]).float().mean()))
    assert same == pytest.approx(float((told.argmax(-1) == best[1:])[68:88].float().mean()))


def test_processes_must_share_the_rows() -> None:
    with pytest.raises(ValueError, match="2 rows a step cannot be shared by 3 processes"):
        tune_long(None, None, LongPlan(steps=1), world=3)
