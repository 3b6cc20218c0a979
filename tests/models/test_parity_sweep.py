"""Every family in every quantization that mlx-lm writes, and in folders as they lie about: logits are mlx-lm's. The counts are held."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compare import load_mlx_lm, stepwise, stepwise_mlx_lm, tokens_of
from mlx_lm_families import FAMILIES, write
from planting import catches

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

from mlxspec.errors import ModelError
from mlxspec.models.assemble import assemble
from mlxspec.models.folder import ModelFolder

pytestmark = pytest.mark.slow

TOKENS, NUM_STEPS = tokens_of(11, 30, 320), 6
QUANTIZED = {
    "4 bits, groups of 32": (4, 32, "affine"),
    "4 bits, groups of 64": (4, 64, "affine"),
    "6 bits": (6, 32, "affine"),
    "8 bits": (8, 32, "affine"),
    "mxfp4": (4, 32, "mxfp4"),
    "mxfp8": (8, 32, "mxfp8"),
    "nvfp4": (4, 16, "nvfp4"),
}


def tensors_of(folder: Path) -> dict[str, mx.array]:
    found = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(found)
    return found


def sharded(folder: Path, *, indexed: int | None) -> Path:
    """Two shards; indexed: of how many the index speaks, None for no index."""
    tensors = tensors_of(folder)
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        mx.save_safetensors(str(folder / file), {k: tensors[k] for k in part}, metadata={"format": "mlx"})
    if indexed is not None:
        files = [f"model-{i + 1:05d}-of-{indexed:05d}.safetensors" for i in range(indexed)]
        places = {name: files[i % indexed] for i, name in enumerate(names)}
        index = json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(index)
    return folder


def hidden_twins(folder: Path) -> Path:
    for path in list(folder.iterdir()):
        (folder / f"._{path.name}").write_bytes(b"\0\5\26\7" + bytes(4092))
    return folder


def links(folder: Path) -> Path:
    made = folder.with_name("links")
    made.mkdir()
    for path in folder.iterdir():
        (made / path.name).symlink_to(path)
    return made


def snapshot(folder: Path) -> Path:
    """Of a cache of the hub's layout on another drive."""
    home = folder.with_name("models--owner--name")
    made, blobs = home / "snapshots" / ("c" * 40), home / "blobs"
    made.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(folder.iterdir()):
        shutil.copy(path, blobs / f"{i:040x}")
        (made / path.name).symlink_to(Path("../../blobs") / f"{i:040x}")
    return made


def left_behind(folder: Path) -> Path:
    """A description of the format that the weights once had."""
    config = json.loads((folder / "config.json").read_text())
    told = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    return folder


ODD: dict[str, Callable[[Path], Path]] = {
    "two shards, no index": lambda folder: sharded(folder, indexed=None),
    "a stale index": lambda folder: sharded(folder, indexed=5),
    "hidden twins": hidden_twins,
    "links": links,
    "another hub cache": snapshot,
    "a description left behind": left_behind,
}


def test_there_are_as_many_as_ever() -> None:
    assert len(FAMILIES) * len(QUANTIZED) >= 48
    assert len(FAMILIES) * len(ODD) >= 42


def difference(folder: Path, theirs: np.ndarray) -> float:
    found = ModelFolder(folder)
    ours = stepwise(assemble(found.config(), found.read).model, TOKENS, NUM_STEPS)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@catches(
    "numbers of 8 bits are a little off",
    "mlxspec.loading.weights:_unpack",
    lambda right: lambda *parts, **how: right(*parts, **how) * 1.01,
    case="8 bits-qwen3]",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", QUANTIZED)
def test_quantized(how: str, family: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", family, *QUANTIZED[how])
    found = difference(folder, stepwise_mlx_lm(load_mlx_lm(folder), TOKENS, NUM_STEPS))
    print(f"| {family} | {how} | {found:.1e} |")
    assert found < 1e-3


@catches(
    "a stale index is believed",
    "mlxspec.loading.folder:stale_index",
    lambda right: lambda *_: False,
    case="a stale index-qwen3]",
    errors=(ModelError,),
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("odd", ODD)
def test_odd_folders(odd: str, family: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", family)
    theirs = stepwise_mlx_lm(load_mlx_lm(folder), TOKENS, NUM_STEPS)
    found = difference(ODD[odd](folder), theirs)
    print(f"| {family} | {odd} | {found:.1e} |")
    assert found < 1e-3
