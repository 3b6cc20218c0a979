"""FP8 and NVFP4 as others publish them: they load as the numbers that they mean, head included, and everybody tells the same of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import published_formats as formats
import pytest
import tiny
from compare import load_mlx_lm, load_ours, stepwise, stepwise_mlx_lm, tokens_of
from planting import catches

from mlxspec.platform import device  # before mlx

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

import mlxspec
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.inspect import InspectReport, inspect
from mlxspec.checkpoints.memory import expected
from mlxspec.checkpoints.quantize import Format
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.demo import TARGET
from mlxspec.errors import ModelError
from mlxspec.loading import unpacking
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble import assemble_lazily
from mlxspec.models.runnable import judge

TOKENS = tokens_of(3, 24, tiny.VOCAB)
AT_MOST = 2.0**-22  # of a number: two roundings of float32, in another order


def write(folder: Path, shape: str, kind: str) -> tuple[Path, Path]:
    """(a folder in that format, the same numbers as floats), both as transformers names a text model, experts one by one."""
    pack, told = formats.FORMATS[kind]
    s = tiny.SHAPES[shape]
    tensors, meant = formats.packed(tiny.unfuse_experts(tiny.weights(s)), pack)
    config = tiny.text_config(s)
    for path, extra in ((folder / "packed", {"quantization_config": told}), (folder / "floats", {})):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | extra))
    formats.save(folder / "packed" / "model.safetensors", tensors)
    floats: formats.Tensors = {name: ("F32", value.astype(np.float32)) for name, value in meant.items()}
    formats.save(folder / "floats" / "model.safetensors", floats)
    return folder / "packed", folder / "floats"


def parameters(made: Any) -> dict[str, mx.array]:
    return dict(tree_flatten([made.model.parameters(), made.mtp.parameters()]))


@catches(
    "the first of two numbers in a byte is the high one",
    "mlxspec.loading.unpacking:_of_nvfp4",
    lambda right: lambda path, packed, *rest, **how: right(path, packed >> 4 | packed << 4, *rest, **how),
    case="NVFP4 of ModelOpt-grouped]",
)
@catches(
    "a scale divides",
    "mlxspec.loading.unpacking:_of_fp8",
    lambda right: lambda name, packed, scale, *rest: right(name, packed, 1 / scale, *rest),
    case="FP8 of Qwen-grouped]",
)
@pytest.mark.parametrize("shape", ["grouped", "moe", "tied"])
@pytest.mark.parametrize("kind", formats.FORMATS)
def test_it_loads_as_the_numbers_that_are_meant(kind: str, shape: str, tmp_path: Path) -> None:
    """Those that numpy computes by the format's definition, in the trunk and in the MTP head."""
    packed, floats = write(tmp_path, shape, kind)
    found, wanted = load_ours(packed), load_ours(floats)
    assert found.mtp is not None
    wanted_parameters = parameters(wanted)
    assert parameters(found).keys() == wanted_parameters.keys()
    for name, value in parameters(found).items():
        other = wanted_parameters[name]
        assert (mx.abs(value - other) <= AT_MOST * mx.abs(other)).all().item(), name
    ours, theirs = (stepwise(made.model, TOKENS, 8) for made in (found, wanted))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    said = [n for n in found.notices if "stored as" in n]
    assert len(said) == 1
    assert kind.partition(" ")[0] in said[0]
    assert not wanted.notices


@pytest.mark.parametrize("kind", formats.FORMATS)
def test_it_is_the_original_within_the_formats_error(kind: str, tmp_path: Path) -> None:
    """Each weight by the digits of the format, and logits no further off than random errors of that size."""
    packed, _ = write(tmp_path, "grouped", kind)
    original = {k: v for k, v in tiny.weights(tiny.SHAPES["grouped"]).items() if formats.is_packed(k, v)}
    relative, of_largest = formats.BOUNDS[kind.partition(" ")[0]]
    for name, value in read_folder(packed).items():
        if name in original:
            error = np.abs(np.array(value) - original[name])
            bound = relative * np.abs(original[name]) + of_largest * np.abs(original[name]).max()
            assert (error <= bound).all(), name
            assert error.max() > 0


def test_blocks_that_do_not_fill_a_matrix() -> None:
    """The sides of a block are told, or follow from how many there are."""
    value = np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32)
    for sides, told in (((128, 128), None), ((128, 128), (128, 128)), ((50, 70), (50, 70)), ((1, 64), None)):
        tensors, meant = formats.fp8(*sides)("x.weight", value)
        weights = {name: mx.array(array) for name, (_, array) in tensors.items()}
        stored = unpacking.unpack(
            weights,
            {name: dtype for name, (dtype, _) in tensors.items()},
            {"weight_block_size": told and list(told)},
        )
        np.testing.assert_allclose(np.array(weights.pop("x.weight")), meant, rtol=AT_MOST)
        assert not weights
        assert stored["x.weight"].nbytes == sum(array.nbytes for _, array in tensors.values())


def test_scales_that_are_powers_of_two_and_scales_of_others(tmp_path: Path) -> None:
    """A byte may hold an exponent. Scales of keys and values and of inputs are of what is computed in floats here."""
    value = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    exponents = np.array([[120, 121, 119], [122, 118, 120]], np.uint8)
    whole = np.exp2(exponents.astype(np.float32) - 127).repeat(32, 0).repeat(32, 1)
    codes, means = formats.to_e4m3(value / whole)
    tensors: formats.Tensors = {"x.weight": ("F8_E4M3", codes), "x.weight_scale_inv": ("F8_E8M0", exponents)}
    for name in ("x.input_scale", "k_proj.k_scale", "v_proj.v_scale", "attn.q_scale"):
        tensors[name] = ("F32", np.ones((), np.float32))
    formats.save(tmp_path / "model.safetensors", tensors)
    found = read_folder(tmp_path)
    assert found.keys() == {"x.weight"}
    np.testing.assert_array_equal(np.array(found["x.weight"]), means * whole)


@pytest.mark.parametrize("kind", ["FP8 in small blocks", "NVFP4 of ModelOpt", "NVFP4 of compressed-tensors"])
def test_parts_that_do_not_fit_are_refused(kind: str) -> None:
    value = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    tensors, _ = formats.FORMATS[kind][0]("x.weight", value)
    dtypes = {name: dtype for name, (dtype, _) in tensors.items()}
    for hurt in tensors:
        if "input" in hurt or hurt.endswith(("scale_2", "global_scale")):
            continue
        weights = {name: mx.array(array) for name, (_, array) in tensors.items()}
        weights[hurt] = weights[hurt][: weights[hurt].shape[0] // 2]
        with pytest.raises(ModelError, match="fit") as caught:
            unpacking.unpack(weights, dtypes, {"weight_block_size": [32, 16]})
        assert "\n" not in str(caught.value)


def test_stacks_of_experts() -> None:
    """As transformers' own FP8 has them: one tensor for all experts of a layer, and one of their scales."""
    value = np.random.default_rng(0).normal(size=(3, 64, 96)).astype(np.float32)
    for sides in ((32, 32), (64, 96)):
        tensors, meant = formats.fp8(*sides)("mlp.experts.gate_up_proj", value)
        weights = {name: mx.array(array) for name, (_, array) in tensors.items()}
        unpacking.unpack(
            weights, {name: dtype for name, (dtype, _) in tensors.items()}, {"weight_block_size": list(sides)}
        )
        np.testing.assert_allclose(np.array(weights["mlp.experts.gate_up_proj"]), meant, rtol=AT_MOST)


@pytest.mark.parametrize("kind", ["FP8 of Qwen", "NVFP4 of ModelOpt"])
def test_what_is_told_of_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` counts the bytes of the files and the numbers of each format; a plan counts what it takes unpacked."""
    packed, floats = write(tmp_path, "moe", kind)
    report, plain = inspect(str(packed)), inspect(str(floats))
    assert isinstance(report, InspectReport)
    assert isinstance(plain, InspectReport)
    name = kind.partition(" ")[0]
    assert any(found.startswith(name) for found in report.formats)
    assert sum(report.formats.values()) == report.parameters == sum(plain.formats.values())
    raw = (packed / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    held = {n: e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items() if n != "__metadata__"}
    assert report.file_bytes + report.head.bytes == sum(
        v for n, v in held.items() if not n.endswith("input_scale")
    )
    assert report.memory.weights == plain.memory.weights
    config = json.loads((packed / "config.json").read_text())
    estimate = expected(judge(config), sum(held.values()), unpacked=True)
    assert estimate.weights == expected(judge(json.loads((floats / "config.json").read_text())), 0).weights
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    assert expected(judge(config), sum(held.values()), unpacked=True).weights == estimate.weights // 2


def test_a_gpu_keeps_the_folders_own_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats stay as they are stored there, and unpacked ones are no wider than their neighbours."""
    packed, _ = write(tmp_path, "grouped", "FP8 of Qwen")
    weights = read_folder(packed)
    for name in weights.keys() - weights.stored.keys():
        weights[name] = weights[name].astype(mx.bfloat16)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    config = json.loads((packed / "config.json").read_text())
    made = assemble_lazily(config, lambda: weights)
    assert {v.dtype for _, v in tree_flatten(made.model.parameters()) if v.size > 8192} == {mx.bfloat16}
    assert any("as bfloat16" in notice for notice in made.notices)


@pytest.mark.parametrize("kind", formats.FORMATS)
def test_a_conversion_keeps_the_numbers(kind: str, tmp_path: Path) -> None:
    packed, floats = write(tmp_path, "moe", kind)
    (packed / "hf_quant_config.json").write_text("{}")
    made = convert(str(packed), tmp_path / "made", Wish(dtype="float32", head_bits=16))
    told = json.loads((made.folder / "config.json").read_text())
    assert "quantization" not in told
    assert "quantization_config" not in told
    assert not (made.folder / "hf_quant_config.json").exists()
    wanted = stepwise(load_ours(floats).model, TOKENS, 8)
    np.testing.assert_allclose(stepwise(load_ours(made.folder).model, TOKENS, 8), wanted, atol=1e-4)
    np.testing.assert_allclose(stepwise_mlx_lm(load_mlx_lm(made.folder), TOKENS, 8), wanted, atol=1e-3)
    smaller = convert(str(packed), tmp_path / "smaller", Wish(trunk=Format(bits=8, group_size=32)))
    np.testing.assert_allclose(
        stepwise_mlx_lm(load_mlx_lm(smaller.folder), TOKENS, 8),
        stepwise(load_ours(smaller.folder).model, TOKENS, 8),
        atol=1e-3,
    )


@pytest.mark.parametrize("kind", ["FP8 of Qwen", "NVFP4 of ModelOpt"])
def test_a_head_is_taken_out_of_it(kind: str, tmp_path: Path) -> None:
    """By a conversion that lacks one: as from a folder of the same numbers in floats."""
    packed, floats = write(tmp_path / "original", "grouped", kind)
    trunk = tiny.convert(tiny.write_hub(tmp_path / "hub", tiny.SHAPES["grouped"]), tmp_path / "trunk")
    heads = []
    for name, original in (("a", packed), ("b", floats)):
        wish = Wish(graft=str(original), head_bits=16, dtype="float32")
        made = load_ours(convert(str(trunk), tmp_path / name, wish).folder)
        assert made.mtp is not None
        heads.append(dict(tree_flatten(made.mtp.parameters())))
    for name, value in heads[0].items():
        np.testing.assert_allclose(np.array(value), np.array(heads[1][name]), rtol=AT_MOST, atol=1e-7)


def test_the_demo_in_fp8_drafts_and_answers(tmp_path: Path) -> None:
    """Rows of 192 numbers, whose last block is cut; the head is FP8 too, and its drafts are accepted."""
    folder = tmp_path / "demo"
    shutil.copytree(TARGET, folder)
    arrays = {
        k: np.array(v.astype(mx.float32)) for k, v in mx.load(str(TARGET / "model.safetensors")).items()
    }
    tensors, _ = formats.packed(arrays, formats.FORMATS["FP8 of Qwen"][0])
    (folder / "model.safetensors").unlink()
    formats.save(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    told = {"quantization_config": formats.FORMATS["FP8 of Qwen"][1]}
    (folder / "config.json").write_text(json.dumps(config | told))
    with mlxspec.load(str(folder), draft="mtp", spec=SpecConfig(policy="fixed")) as engine:
        result = engine.chat("what does os.path.join do?", SamplingParams(max_tokens=40))
    assert result.stats.num_accepted > result.stats.num_drafted // 2 > 0
    assert "path" in result.text
