"""Our vision towers against Transformers', image by image, from the same folders. Needs PyTorch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_vision
from vision_figures import FIGURES, SIZES, figures, picture

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import transformers  # noqa: E402

CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
}


@cache
def both(name: str) -> tuple[Any, Any, Path]:
    """(their model, ours, the folder)"""
    family = tiny_vision.FAMILIES[name]
    folder = family.write(Path(mkdtemp()) / name)
    model, report = getattr(transformers, CLASSES[family.kind]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not [k for k in report["missing_keys"] if "lm_head" not in k], report["missing_keys"]
    return model.eval(), tiny_vision.load(folder, mx.float32), folder


@torch.no_grad()
def theirs(name: str, prepared: Any) -> np.ndarray:
    """Rows of the projector, from what our preprocessing made: that equals theirs (tests/images)."""
    model, kind = both(name)[0], tiny_vision.FAMILIES[name].kind
    pixels, (_, rows, columns) = torch.from_numpy(prepared.pixels), prepared.grid
    if kind == "qwen3_5":
        twice = pixels.reshape(len(pixels), 3, 1, -1).repeat(1, 1, 2, 1).reshape(len(pixels), -1)
        found = model.model.get_image_features(twice, torch.tensor([[1, rows, columns]])).pooler_output
        return torch.cat(list(found)).numpy()
    if kind == "gemma3":
        side = int((pixels.shape[1] // 3) ** 0.5)
        image = pixels.reshape(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4)
        image = image.reshape(1, 3, rows * side, columns * side)
        return model.model.get_image_features(image).pooler_output[0].numpy()
    places = torch.tensor([[[x, y] for y in range(rows) for x in range(columns)]])
    found = model.model.get_image_features(pixels[None], places).pooler_output
    found = torch.cat(list(found)) if isinstance(found, (tuple, list)) else found
    return found.reshape(-1, found.shape[-1]).numpy()


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_towers(name: str) -> None:
    vision, worst = both(name)[1].vision, 0.0
    for size in SIZES:
        prepared = vision.preprocessor.prepare(picture(*size))
        ours, expected = np.array(vision.tower(prepared)), theirs(name, prepared)
        assert ours.shape == expected.shape == (prepared.tokens, 64), size
        worst = max(worst, float(np.abs(ours - expected).max()))
    print(f"{name}: largest difference {worst:.1e} of rows up to {np.abs(expected).max():.1f}")
    assert worst < 1e-4


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_stored_figures_are_theirs(name: str) -> None:
    prepared = both(name)[1].vision.preprocessor.prepare(picture(*SIZES[0]))
    found = figures(theirs(name, prepared))
    assert np.allclose(FIGURES[name], found, atol=2e-4), f"{name!r}: {json.dumps(found)},"


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_folders_that_transformers_saved(name: str, tmp_path: Path) -> None:
    """Their names and layouts: Gemma 3's tower without `vision_model.`, a projection one level deeper."""
    model, ours, folder = both(name)
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text((folder / "preprocessor_config.json").read_text())
    again = tiny_vision.load(tmp_path, mx.float32)
    prepared = ours.vision.preprocessor.prepare(picture(50, 34))
    assert np.array_equal(again.vision.tower(prepared), ours.vision.tower(prepared))
