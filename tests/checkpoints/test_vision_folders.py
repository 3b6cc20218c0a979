"""Vision towers in folders: what `convert` keeps, and what `inspect` says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import numpy as np
import pytest
import tiny_vision
from mlx.utils import tree_flatten
from planting import catches, rewritten
from vision_figures import picture

from mlxspec.checkpoints import memory
from mlxspec.checkpoints.cache import listing
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.inspect import InspectReport, inspect
from mlxspec.checkpoints.quantize import Format
from mlxspec.loading import lm_studio
from mlxspec.loading.weights import is_of_vision, read_folder
from mlxspec.models.runnable import judge
from mlxspec.platform import device
from mlxspec.platform.resources import demo_folder

Q8 = Format(bits=8, group_size=32)


@cache
def source(name: str) -> Path:
    return tiny_vision.FAMILIES[name].write(Path(mkdtemp()) / name)


def looked_at(folder: Path) -> InspectReport:
    report = inspect(str(folder))
    assert isinstance(report, InspectReport)
    return report


def rows(folder: Path) -> np.ndarray:
    vision = tiny_vision.load(folder, mx.float32).vision
    return np.array(vision.tower(vision.preprocessor.prepare(picture(50, 34))))


@pytest.mark.parametrize("name", ["qwen-64", "gemma3", "gemma4-unified"])
def test_a_conversion_keeps_the_tower(name: str, tmp_path: Path) -> None:
    """To the bit, in a file of its own, also from a conversion; mlx-lm loads the folder without it."""
    from mlx_lm.utils import load_model

    first = convert(str(source(name)), tmp_path / "first", Wish(trunk=Q8))
    second = convert(str(first.folder), tmp_path / "second", Wish())
    for made in (first, second):
        assert made.vision_bytes == looked_at(made.folder).vision.bytes > 0
        assert (made.skipped, made.no_images) == (0, "")
        assert np.array_equal(rows(made.folder), rows(source(name)))
        assert not [k for k in mx.load(str(made.folder / "model.safetensors")) if is_of_vision(k)]
        load_model(made.folder)


@catches(
    "whatever lies beside a model is its head",
    "mlxspec.checkpoints.cache:_entry",
    rewritten("any(path.name != VISION_FILE for path in beside)", "bool(beside)"),
)
@catches(
    "nothing that lies beside a model is its head",
    "mlxspec.checkpoints.cache:_entry",
    rewritten("any(path.name != VISION_FILE for path in beside)", "False"),
)
def test_a_list_tells_of_the_heads_that_inspect_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of conversions with a head, with a tower, with both and with none, each in files of their own."""
    monkeypatch.setattr(lm_studio, "PLACES", (str(tmp_path),))
    monkeypatch.setattr("mlxspec.loading.repositories.cache_folder", lambda: tmp_path / "hub")
    found = {}
    for name in ("qwen-64", "gemma3"):
        for vision in (True, False):
            made = convert(str(source(name)), tmp_path / "owner" / f"{name}-{vision}", Wish(vision=vision))
            found[f"owner/{made.folder.name}"] = looked_at(made.folder).head.present
    convert(str(demo_folder("target")), tmp_path / "owner" / "demo", Wish())
    assert {e.name: e.has_head for e in listing().entries} == {**found, "owner/demo": True}
    assert set(found.values()) == {True, False}


def test_a_conversion_to_text(tmp_path: Path) -> None:
    made = convert(str(source("qwen-64")), tmp_path / "out", Wish(vision=False))
    assert (made.vision_bytes, made.no_images) == (0, "")
    assert made.skipped > 10
    assert not [k for k in read_folder(made.folder) if is_of_vision(k)]
    assert "vision_config" not in json.loads((made.folder / "config.json").read_text())
    assert not looked_at(made.folder).vision.present


def test_a_tower_that_cannot_be_used_is_left_out_with_the_reason(tmp_path: Path) -> None:
    folder = tiny_vision.FAMILIES["qwen-64"].write(tmp_path / "source")
    (folder / "preprocessor_config.json").unlink()
    made = convert(str(folder), tmp_path / "out", Wish())
    assert made.skipped > 10
    assert "There is no preprocessor_config.json" in made.no_images
    report = looked_at(folder)
    assert "There is no preprocessor_config.json" in report.vision.advice
    assert report.skipped_bytes > 0


def test_dtype_of_a_converted_tower(tmp_path: Path) -> None:
    made = convert(str(source("gemma3")), tmp_path / "out", Wish(trunk=Q8, dtype="bfloat16"))
    dtypes = {v.dtype for k, v in read_folder(made.folder).items() if is_of_vision(k)}
    assert dtypes == {mx.bfloat16}


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_inspect_counts_the_tower(name: str) -> None:
    folder = source(name)
    report, loaded = looked_at(folder), tiny_vision.load(folder)
    tower = [v for _, v in tree_flatten(loaded.vision.tower.parameters())]
    assert report.vision.present
    assert report.vision.parameters == sum(v.size for v in tower)
    assert report.memory.vision == sum(v.nbytes for v in tower)
    on_disk = {k: v.nbytes for k, v in read_folder(folder).items()}
    assert report.vision.bytes == sum(size for k, size in on_disk.items() if is_of_vision(k))
    parts = report.file_bytes + report.head.bytes + report.vision.bytes + report.skipped_bytes
    assert parts == sum(on_disk.values())
    prepared = loaded.vision.preprocessor.prepare(picture(1024, 1024))
    assert report.vision.square_tokens == prepared.tokens <= report.vision.max_tokens
    assert report.memory.reading == loaded.vision.tower.scratch_bytes(prepared.tokens) > 0


@pytest.mark.parametrize("name", ["qwen-64", "gemma3"])
def test_memory_is_told_before_a_download(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU weights become float32; on a GPU the tower is among the bytes of the files."""
    folder = source(name)
    config, there = json.loads((folder / "config.json").read_text()), looked_at(folder).memory
    told = memory.expected(judge(config), 10**6, context=there.context)
    assert told.vision == there.vision > 0
    assert told.reading > 0
    assert told.total > told.weights + told.vision + told.reading
    assert memory.expected(judge(config | {"vision_config": {}}), 10**6).vision == 0
    monkeypatch.setattr(device, "backend", lambda: "cuda")
    on_gpu = memory.expected(judge(config), 10**6)
    assert (on_gpu.weights, on_gpu.vision) == (10**6, 0)
    assert 0 < on_gpu.reading < told.reading  # 16 bits a number
