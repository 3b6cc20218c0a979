"""Drafting on quantized folders as mlx-lm writes them. Matrices stay packed, as on a GPU and in models too large to unpack."""

from __future__ import annotations

import pytest
from compare import load_ours
from zoo import QUANTIZED, Zoo

from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine.engine import Engine
from mlxspec.platform import memory
from tests.engine.equality import PLAIN, asked, prompts, same, spec

FAST = {("tied", "mlx-nvfp4")}
# one more scale for each expert: MLX does not multiply with it on a CPU, so it is unpacked, and it needs experts
FORMATS = [form for form, how in QUANTIZED.items() if not how.scaled]


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        pytest.param(shape, form, marks=[] if (shape, form) in FAST else [pytest.mark.slow])
        for shape in ("tied", "moe")
        for form in FORMATS
        if (shape, form) != ("tied", "mlx-4bit-64")
    ],
)
def test_drafted_text_is_plain_text(shape: str, form: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "UNPACKED_AT_MOST", 0)
    model, other = (load_ours(zoo.folder(shape, form)).model for _ in range(2))
    assert any("scales" in m for m in model.modules()), "nothing is packed"
    run = Engine(model, drafters=[ngram_lookup("ngram-simple", 2, 12), DraftModel(other, model.vocab_size)])
    some, params = prompts(3, 1), asked(1, 3)
    plain = [run.generate(p, s, spec=PLAIN) for p, s in zip(some, params, strict=True)]
    for how in (
        spec("draft-model"),
        spec("draft-model", p_min=0.05, n_max=9),
        spec("ngram-simple", "draft-model"),
    ):
        together = run.generate(some, params, spec=how)
        for prompt, wish, wanted, got in zip(some, params, plain, together, strict=True):
            assert not got.stats.notices
            same(wanted, got, prompt, wish, f"{shape}, {form}", model)
        assert sum(r.stats.num_accepted for r in together) > 0
