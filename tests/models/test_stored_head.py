"""A language-model head that is stored though config.json says that the embedding is it: it is used where it differs, and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import load_mlx_lm, load_ours, stepwise, stepwise_mlx_lm, tokens_of
from mlx_lm_families import FAMILIES, write
from planting import catches

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.quantize import Format
from mlxspec.models.assemble import Assembled

TOKENS = tokens_of(5, 24, 320)


def edited(folder: Path, **values: Any) -> Path:
    """config.json with these values wherever a text model is described."""
    config = json.loads((folder / "config.json").read_text())
    for place in (config, config.get("text_config", {})):
        if place:
            place.update(values)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_head(folder: Path, family: str, head: str, bits: int | None = None) -> Path:
    """A folder whose config says tied, and that holds a head of its own: another, the embedding once more, one of fewer rows, or none."""
    edited(write(folder, family, bits), tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = {k: v for k, v in mx.load(str(path)).items() if "lm_head" not in k}
    mx.eval(tensors)
    table = next(k for k in tensors if k.endswith("model.embed_tokens.weight"))
    place = table.replace("model.embed_tokens.weight", "lm_head.")
    if head == "same":
        rest = {k: v for k, v in tensors.items() if k.startswith(table.removesuffix("weight"))}
        tensors |= {place + k.rpartition(".")[2]: v for k, v in rest.items()}
    elif head != "none":
        mx.random.seed(7)
        tensors[f"{place}weight"] = 0.3 * mx.random.normal((320 if head == "other" else 64, 64))
        mx.eval(tensors)
    path.unlink()
    mx.save_safetensors(str(path), tensors, metadata={"format": "mlx"})
    return folder


def differs(made: Assembled) -> bool:
    return any("one that differs" in notice for notice in made.notices)


@catches(
    "a stored head is dropped",
    "mlxspec.models.assemble:head_as_stored",
    lambda right: lambda config, weights: (config, ()),
    case="None-qwen3]",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [None, 4])
def test_another_head_is_used_and_kept(bits: int | None, family: str, tmp_path: Path) -> None:
    """As mlx-lm's classes do it of the same folder once its config says untied; of Gemma 3 as it is."""
    folder = with_head(tmp_path / "model", family, "other", bits)
    made = load_ours(folder)
    ours = stepwise(made.model, TOKENS, 8)
    assert differs(made)
    if family.startswith("gemma3"):
        np.testing.assert_allclose(ours, stepwise_mlx_lm(load_mlx_lm(folder), TOKENS, 8), atol=1e-3)
    converted = convert(str(folder), tmp_path / "converted", Wish(dtype="float32"))
    again = load_ours(converted.folder)
    assert not differs(again)
    np.testing.assert_allclose(stepwise(again.model, TOKENS, 8), ours, atol=1e-4)
    np.testing.assert_allclose(
        stepwise_mlx_lm(load_mlx_lm(converted.folder), TOKENS, 8), ours, atol=1e-3, rtol=1e-3
    )
    edited(folder, tie_word_embeddings=False)
    np.testing.assert_allclose(stepwise_mlx_lm(load_mlx_lm(folder), TOKENS, 8), ours, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("head", ["same", "short"])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3_text", "gemma4"])
def test_what_is_no_other_head_is_not_used(family: str, bits: int | None, head: str, tmp_path: Path) -> None:
    folder = with_head(tmp_path / "model", family, head, bits)
    made = load_ours(folder)
    assert made.config.tied
    assert any("of another shape" in notice for notice in made.notices) == (head == "short")
    plain = with_head(tmp_path / "plain", family, "none", bits)
    np.testing.assert_array_equal(
        stepwise(made.model, TOKENS, 8), stepwise(load_ours(plain).model, TOKENS, 8)
    )


def test_a_quantized_conversion_of_another_head(tmp_path: Path) -> None:
    folder = with_head(tmp_path / "model", "gemma3_text", "other")
    made = convert(str(folder), tmp_path / "made", Wish(trunk=Format(bits=8, group_size=32)))
    theirs = stepwise_mlx_lm(load_mlx_lm(made.folder), TOKENS, 8)
    np.testing.assert_allclose(stepwise(load_ours(made.folder).model, TOKENS, 8), theirs, atol=1e-2)
    assert "language_model.lm_head.scales" in mx.load(str(made.folder / "model.safetensors"))


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3"])
def test_a_gemma_without_a_head_has_its_embedding(family: str, tmp_path: Path) -> None:
    """mlx-lm looks at the tensors alone."""
    folder = edited(write(tmp_path / "model", family), tie_word_embeddings=False)
    ours = stepwise(load_ours(folder).model, TOKENS, 8)
    np.testing.assert_allclose(ours, stepwise_mlx_lm(load_mlx_lm(folder), TOKENS, 8), atol=1e-3)
