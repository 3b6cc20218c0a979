"""float16 in the place of bfloat16 on a GPU that emulates the latter, through `load`: with weights and activations that float16 holds, and
with some that it does not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from planting import catches

import mlxspec
from mlxspec.checkpoints.inspect import inspect
from mlxspec.config import SamplingParams
from mlxspec.demo import DFLASH, DRAFT
from mlxspec.engine.engine import Engine
from mlxspec.engine.head_check import TEXT
from mlxspec.models.head_norms import TargetRun, score
from mlxspec.platform import device

# what `device_info` says of an architecture, and whether a GPU of that kind emulates bfloat16
MACHINES = {
    "applegpu_g13g": True,  # M1
    "applegpu_g13s": True,  # M1 Pro, Max
    "applegpu_g13d": True,  # M1 Ultra
    "applegpu_g14g": True,  # M2
    "applegpu_g14s": True,
    "applegpu_g14d": True,
    "applegpu_g15g": False,  # M3
    "applegpu_g15s": False,
    "applegpu_g15d": False,
    "applegpu_g16s": False,  # M4
    "applegpu_g17s": False,  # M5
    "": False,  # a virtual one
}
BEYOND_WEIGHT, BEYOND_PROMPT = 1e7, 3e4  # factors of the demo's last products in its MLPs
CHECKPOINTS = {
    "bfloat16": ({}, mx.float16),
    "float16": ({"dtype": mx.float16}, mx.float16),
    "float32": ({"dtype": mx.float32}, mx.float32),
    "4 bits": ({"bits": 4}, mx.float16),
    "mxfp4": ({"bits": 4, "mode": "mxfp4"}, mx.bfloat16),
    "large weights": ({"factor": BEYOND_WEIGHT}, mx.bfloat16),
    "large activations": ({"factor": BEYOND_PROMPT}, mx.bfloat16),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of generation 13, as far as anything asks."""
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "gpu_generation", lambda: 13)


def write(
    folder: Path,
    source: Path = DRAFT,
    *,
    dtype: mx.Dtype = mx.bfloat16,
    factor: float = 1.0,
    bits: int = 0,
    mode: str = "affine",
) -> Path:
    """A model folder with its floats in `dtype`. factor: of the MLPs' last products. bits: of the matrices, 0 for floats."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    weights = {k: v.astype(dtype) for k, v in mx.load(str(file)).items()}
    for name in [k for k in weights if k.endswith("mlp.down_proj.weight")]:
        weights[name] = (weights[name] * factor).astype(dtype)
    for name in [
        k for k, v in weights.items() if bits and v.ndim == 2 and k.endswith("weight") and not v.shape[1] % 32
    ]:
        parts = mx.quantize(weights.pop(name), 32, bits, mode)
        keys = ("weight", "scales", "biases")
        weights |= {name.removesuffix("weight") + key: part for key, part in zip(keys, parts, strict=False)}
    mx.save_safetensors(str(file), weights, metadata={"format": "pt"})
    return folder


def dtypes(engine: Engine) -> set[mx.Dtype]:
    named = tree_flatten(engine.model.parameters())
    kinds = (".weight", ".scales", ".biases")
    return {v.dtype for k, v in named if v.ndim > 1 and k.endswith(kinds) and v.dtype != mx.uint32}


@pytest.mark.parametrize("name", MACHINES)
def test_two_generations_emulate_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "backend", lambda: "metal")
    monkeypatch.setattr(mx, "device_info", lambda *given: {"architecture": name})
    device.gpu_generation.cache_clear()
    try:
        assert device.emulates_bfloat16() == MACHINES[name]
    finally:
        device.gpu_generation.cache_clear()


@pytest.mark.parametrize("name", CHECKPOINTS)
@catches(
    "weights are not looked at",
    "mlxspec.engine.load:weight_beyond",
    lambda right: lambda modules: None,
    case="large weights",
)
@catches(
    "no prompt is tried",
    "mlxspec.engine.load:prompt_beyond",
    lambda right: lambda *given: None,
    case="activations",
)
def test_what_a_checkpoint_is_computed_in(name: str, gpu: None, tmp_path: Path) -> None:
    """Also what `inspect` says before a load has tried it, and behind that; and that a second load tries nothing again."""
    written, wanted = CHECKPOINTS[name]
    folder = write(tmp_path / "model", **written)
    before = inspect(str(folder)).computed_in
    engine = mlxspec.load(str(folder), draft="off")
    assert engine.model.dtype == wanted
    assert mx.bfloat16 not in dtypes(engine) or wanted == mx.bfloat16
    assert (
        len(engine.generate("def mean(values):", SamplingParams(max_tokens=4, ignore_eos=True)).tokens) == 4
    )
    word = str(wanted).removeprefix("mlx.core.")
    notices = [notice for notice in engine.notices if "computed in" in notice]
    behind = inspect(str(folder)).computed_in
    if name.startswith("large"):
        assert len(notices) == 1
        what = {"large weights": "mlp.down.weight holds", "large activations": "a trial prompt gives"}[name]
        assert f"{what} a number that float16 cannot hold" in notices[0]
        assert "bfloat16 stays if" in before
        assert notices[0].endswith(behind)
    else:
        assert notices == []
        assert behind == before.partition(" bfloat16 stays if")[0]
    assert behind == engine.dtype_reason
    assert behind.startswith(word)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxspec.engine.load.prompt_beyond", lambda *given: pytest.fail("tried again"))
        again = mlxspec.load(str(folder), draft="off")
    assert (again.model.dtype, again.notices) == (wanted, engine.notices)


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("asked", ["float16", "bfloat16", "float32"])
def test_a_dtype_that_is_asked_for_is_taken(asked: str, bits: int, gpu: None, tmp_path: Path) -> None:
    """Scales of quantized matrices with it, and whatever fits."""
    folder = write(tmp_path / "model", bits=bits)
    engine = mlxspec.load(str(folder), draft="off", dtype=asked)
    assert dtypes(engine) == {getattr(mx, asked)}
    assert engine.dtype_reason == f"{asked}, as requested by --dtype (dtype)."


def test_other_machines_keep_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "model")
    engine = mlxspec.load(str(folder), draft="off")
    assert engine.dtype_reason == "float32, in which models are fastest without a GPU."
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    engine = mlxspec.load(str(folder), draft="off")
    assert engine.model.dtype == mx.bfloat16
    assert engine.dtype_reason == inspect(str(folder)).computed_in == "bfloat16, as stored."


def test_models_of_mlx_lms_code_are_cast_too(gpu: None, tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    engine = mlxspec.load(str(folder), draft="off", engine="mlx-lm")
    assert engine.model.dtype == mx.float16
    assert engine.dtype_reason.startswith("float16: this GPU")


def test_block_drafters_keep_bfloat16(gpu: None) -> None:
    """The sums of their layers overflow in float16."""
    engine = mlxspec.load("demo", draft="dflash", draft_model=str(DFLASH))
    drafter = engine.drafts.drafters["dflash"]
    found = {v.dtype for _, v in tree_flatten(drafter.model.parameters()) if v.ndim > 1}
    assert engine.model.dtype == mx.float16
    assert found == {mx.bfloat16}


def test_a_draft_model_that_float16_cannot_hold_is_found(gpu: None, tmp_path: Path) -> None:
    small = write(tmp_path / "small", factor=BEYOND_PROMPT)
    engine = mlxspec.load("demo", draft="draft-model", draft_model=str(small))
    assert engine.model.dtype == engine.drafts.drafters["draft-model"].model.dtype == mx.bfloat16


def test_the_head_is_as_often_right_in_every_dtype(gpu: None) -> None:
    """Along a given text, so that no tie decides what follows: within a point."""
    found = {}
    for dtype in ("float32", "bfloat16", None):
        engine = mlxspec.load("demo", draft="mtp", dtype=dtype)
        head = engine.drafts.drafters["mtp"].model
        tokens = engine.tokenizer.encode(TEXT)
        found[dtype] = score(head, TargetRun.over(engine.model, tokens)).accepted
    assert engine.model.dtype == head.dtype == mx.float16
    assert found["float32"] > 0.5
    assert max(found.values()) - min(found.values()) < 0.01
