"""Our Gemma models against mlx-lm's, over every dialect of checkpoint: prefill and 20 cached steps, windows crossed and wrapped."""

from __future__ import annotations

import mlx.core as mx
import pytest
import tiny_gemma
from compare import (
    array,
    assert_same_logits,
    load_mlx_lm,
    load_ours,
    stepwise,
    stepwise_mlx_lm,
    to_numpy,
    tokens_of,
)
from mlx.utils import tree_flatten
from test_parity_rows import run
from tiny_gemma import Gemmas

from mlxspec.kernels.flat import FlatRows
from mlxspec.platform import memory

NUM_STEPS = 20
TOKENS = tokens_of(5, 37 + NUM_STEPS, tiny_gemma.VOCAB)


@pytest.fixture(scope="module")
def gemmas(tmp_path_factory: pytest.TempPathFactory) -> Gemmas:
    return Gemmas(tmp_path_factory.mktemp("gemmas"))


@pytest.mark.parametrize("name", tiny_gemma.CONFIGS)
def test_float_checkpoints(gemmas: Gemmas, name: str) -> None:
    reference = stepwise_mlx_lm(load_mlx_lm(gemmas.folder(name, "text")), TOKENS, NUM_STEPS)
    for dialect in ("text", "hub", "mlx"):
        ours = stepwise(load_ours(gemmas.folder(name, dialect)).model, TOKENS, NUM_STEPS)
        assert_same_logits(ours, reference, f"{name}, {dialect}")


@pytest.mark.parametrize(
    "dialect", ["mlx-hub-4bit", *(pytest.param(d, marks=pytest.mark.slow) for d in ("mlx-8bit", "mlx-4bit"))]
)
@pytest.mark.parametrize("name", tiny_gemma.CONFIGS)
def test_quantized_checkpoints(
    gemmas: Gemmas, name: str, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are loaded on a CPU, unpacked, and as elsewhere, packed."""
    folder = gemmas.folder(name, dialect)
    reference = stepwise_mlx_lm(load_mlx_lm(folder), TOKENS, NUM_STEPS)
    assert_same_logits(stepwise(load_ours(folder).model, TOKENS, NUM_STEPS), reference, f"{name}, {dialect}")
    monkeypatch.setattr(memory, "UNPACKED_AT_MOST", 0)
    packed = load_ours(folder).model
    assert any(x.dtype == mx.uint32 for _, x in tree_flatten(packed.parameters()))
    assert_same_logits(stepwise(packed, TOKENS, NUM_STEPS), reference, f"{name}, {dialect}, packed")


@pytest.mark.parametrize("name", tiny_gemma.CONFIGS)
def test_a_long_prompt(gemmas: Gemmas, name: str) -> None:
    """Longer than a block of queries, in one piece and in uneven chunks."""
    tokens = tokens_of(8, 600, tiny_gemma.VOCAB)
    reference = stepwise_mlx_lm(load_mlx_lm(gemmas.folder(name, "text")), tokens, 3)
    model = load_ours(gemmas.folder(name, "text")).model
    assert_same_logits(stepwise(model, tokens, 3), reference, f"{name}, long")
    cache, found = model.make_cache(1), []
    for start, end in ((0, 300), (300, 301), (301, 340), (340, 600)):
        piece = tokens[start:end]
        found.append(model.forward(array(piece), FlatRows((end - start,)), cache, certain=True).logits)
        cache.commit()
    assert_same_logits(to_numpy(found), reference, f"{name}, chunks")


@pytest.mark.parametrize("prefill", ["together", "apart"])
@pytest.mark.parametrize("name", tiny_gemma.CONFIGS)
def test_ragged_drafts_with_partial_commits(gemmas: Gemmas, name: str, prefill: str) -> None:
    """Each of three rows equals the row alone, and mlx-lm on the text that was kept."""
    model, theirs = load_ours(gemmas.folder(name, "text")).model, load_mlx_lm(gemmas.folder(name, "text"))
    seen, text, kept = run(model, (0, 1, 2), prefill)
    for r in range(3):
        alone, text_alone, _ = run(model, (r,), "apart")
        assert text_alone[0] == text[r]
        assert_same_logits(seen[r], alone[0], f"{name}, row {r} in a batch against alone")
        assert_same_logits(kept[r], stepwise_mlx_lm(theirs, text[r], 0), f"{name}, row {r} against mlx-lm")


@pytest.mark.parametrize("name", tiny_gemma.CONFIGS)
def test_hidden_last_logits_and_taps(gemmas: Gemmas, name: str) -> None:
    model, tokens = load_ours(gemmas.folder(name, "text")).model, array(TOKENS[:5])
    num_layers = tiny_gemma.CONFIGS[name]["num_hidden_layers"]
    cache, rows = model.make_cache(3), FlatRows((3, 0, 2))
    out = model.forward(tokens, rows, cache, taps=(0, num_layers - 1))
    cache.abort()
    last = model.forward(tokens, rows, cache, logits_at="last")
    cache.abort()
    assert model.forward(tokens, rows, cache, logits_at="none").logits is None
    assert_same_logits(to_numpy([last.logits]), to_numpy([out.logits])[[2, 4]], "last", at_most=1e-5)
    assert_same_logits(to_numpy([model.head(out.hidden)]), to_numpy([out.logits]), "head", at_most=1e-5)
    assert set(out.taps) == {0, num_layers - 1}
    stack = model.language_model.model
    normed = mx.fast.rms_norm(out.taps[num_layers - 1], stack.norm.weight, 1e-3 if "wide" in name else 1e-6)
    assert mx.allclose(normed, out.hidden, atol=1e-5)
