"""Our Qwen3 and Qwen3-Next against mlx-lm's, over every dialect of checkpoint: logits of a prefill and of 20 cached steps, ragged drafts,
hiddens and taps; and Qwen3-Next's MTP head against modules of mlx-lm."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mtp_reference
import numpy as np
import pytest
import tiny_qwen3
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
from tiny_qwen3 import Qwen3s

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.assemble_drafter import assemble_head_lazily
from mlxspec.platform import memory

NUM_STEPS = 20
TOKENS = tokens_of(5, 37 + NUM_STEPS, tiny_qwen3.VOCAB)


@pytest.fixture(scope="module")
def qwen3s(tmp_path_factory: pytest.TempPathFactory) -> Qwen3s:
    return Qwen3s(tmp_path_factory.mktemp("qwen3s"))


@pytest.mark.parametrize("name", tiny_qwen3.CONFIGS)
def test_float_checkpoints(qwen3s: Qwen3s, name: str) -> None:
    reference = stepwise_mlx_lm(load_mlx_lm(qwen3s.folder(name, "text")), TOKENS, NUM_STEPS)
    for dialect in ("text", "mlx"):
        made = load_ours(qwen3s.folder(name, dialect))
        assert not made.notices
        assert (made.mtp is not None) == (name == "qwen3-next" and dialect == "text")
        assert made.lacks_head == (name == "qwen3-next" and dialect == "mlx")
        assert_same_logits(stepwise(made.model, TOKENS, NUM_STEPS), reference, f"{name}, {dialect}")


@pytest.mark.parametrize("name", tiny_qwen3.CONFIGS)
def test_bfloat16_checkpoints(qwen3s: Qwen3s, name: str) -> None:
    """Stored in bfloat16 and computed with in float32 on both sides: mlx-lm adds 1 to norms before."""
    theirs = load_mlx_lm(qwen3s.folder(name, "text-bfloat16"))
    if name == "qwen3-next":  # mlx-lm rounds the sums to bfloat16, so it gets them from the float32 folder
        exact = load_mlx_lm(qwen3s.folder(name, "text"))
        rounded = {k: v.astype(mx.bfloat16).astype(mx.float32) for k, v in tiny_weights(name).items()}
        exact.load_weights(list(exact.sanitize(rounded).items()), strict=False)
        theirs = exact
    theirs.set_dtype(mx.float32)
    reference = stepwise_mlx_lm(theirs, TOKENS, NUM_STEPS)
    ours = stepwise(load_ours(qwen3s.folder(name, "text-bfloat16")).model, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{name}, bfloat16")


def tiny_weights(name: str) -> dict[str, mx.array]:
    arrays = tiny_qwen3.unfuse_experts(tiny_qwen3.weights(tiny_qwen3.CONFIGS[name]))
    return {k: mx.array(v) for k, v in arrays.items()}


@pytest.mark.parametrize("dialect", ["mlx-8bit", "mlx-4bit"])
@pytest.mark.parametrize("name", tiny_qwen3.CONFIGS)
def test_quantized_checkpoints(
    qwen3s: Qwen3s, name: str, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are loaded on a CPU, unpacked, and as elsewhere, packed."""
    folder = qwen3s.folder(name, dialect)
    reference = stepwise_mlx_lm(load_mlx_lm(folder), TOKENS, NUM_STEPS)
    assert_same_logits(stepwise(load_ours(folder).model, TOKENS, NUM_STEPS), reference, f"{name}, {dialect}")
    monkeypatch.setattr(memory, "UNPACKED_AT_MOST", 0)
    packed = load_ours(folder).model
    assert any(x.dtype == mx.uint32 for _, x in tree_flatten(packed.parameters()))
    assert_same_logits(stepwise(packed, TOKENS, NUM_STEPS), reference, f"{name}, {dialect}, packed")


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-next"])
def test_ragged_drafts_with_partial_commits(qwen3s: Qwen3s, name: str) -> None:
    """Each of three rows equals the row alone, and mlx-lm on the text that was kept."""
    folder = qwen3s.folder(name, "text")
    model, theirs = load_ours(folder).model, load_mlx_lm(folder)
    seen, text, kept = run(model, (0, 1, 2), "together")
    for r in range(3):
        alone, text_alone, _ = run(model, (r,), "apart")
        assert text_alone[0] == text[r]
        assert_same_logits(seen[r], alone[0], f"{name}, row {r} in a batch against alone")
        assert_same_logits(kept[r], stepwise_mlx_lm(theirs, text[r], 0), f"{name}, row {r} against mlx-lm")


@pytest.mark.parametrize("name", tiny_qwen3.CONFIGS)
def test_hidden_and_taps(qwen3s: Qwen3s, name: str) -> None:
    folder, tokens = qwen3s.folder(name, "text"), TOKENS[:21]
    model, theirs = load_ours(folder).model, load_mlx_lm(folder)
    out = model.forward(
        array(tokens), FlatRows((len(tokens),)), model.make_cache(1), certain=True, taps=(2, 0, 1)
    )
    residual = theirs.model.embed_tokens(array(tokens)[None])
    for i, layer in enumerate(theirs.model.layers):
        residual = layer(residual, mask=None if getattr(layer, "is_linear", False) else "causal")
        if i < 3:
            np.testing.assert_allclose(to_numpy([out.taps[i]]), to_numpy([residual[0]]), atol=1e-4)
    np.testing.assert_allclose(to_numpy([out.hidden]), to_numpy([theirs.model.norm(residual)[0]]), atol=1e-4)


def test_mtp_head_of_qwen3_next(qwen3s: Qwen3s) -> None:
    """Cells of a prompt against modules of mlx-lm that are put together as the head was trained."""
    from mlx_lm.models.qwen3_next import ModelArgs, Qwen3NextDecoderLayer

    c = tiny_qwen3.CONFIGS["qwen3-next"]
    layer = Qwen3NextDecoderLayer(ModelArgs.from_dict(c), c["full_attention_interval"] - 1)
    reference = mtp_reference.mlx_lm_head(layer, c["rms_norm_eps"], tiny_qwen3.weights(c))
    made, tokens = load_ours(qwen3s.folder("qwen3-next", "text")), tokens_of(11, 29, tiny_qwen3.VOCAB)
    assert made.mtp is not None
    hidden = np.random.default_rng(3).standard_normal((len(tokens), tiny_qwen3.HIDDEN), np.float32)
    out = made.mtp.forward(
        array(tokens), mx.array(hidden), FlatRows((len(tokens),)), made.mtp.make_cache(1), logits_at="none"
    )
    np.testing.assert_allclose(to_numpy([out.hidden]), reference(tokens, hidden), atol=1e-4)


def test_a_folder_saved_by_mlx_lm_keeps_no_head(qwen3s: Qwen3s, tmp_path: Path) -> None:
    """The original beside a conversion gives it its head back."""
    converted, original = qwen3s.folder("qwen3-next", "mlx"), qwen3s.folder("qwen3-next", "text")
    target = load_ours(converted)
    head = assemble_head_lazily(lambda: assemble_read(original), target)
    wanted = load_ours(original).mtp
    assert wanted is not None
    for (name, ours), (_, theirs) in zip(
        tree_flatten(head.parameters()), tree_flatten(wanted.parameters()), strict=True
    ):
        assert mx.array_equal(ours, theirs), name


def assemble_read(folder: Path) -> dict[str, mx.array]:
    from mlxspec.loading.weights import read_folder

    return read_folder(folder)
