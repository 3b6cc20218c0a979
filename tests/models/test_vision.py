"""Vision towers: figures of Transformers' (stored), layouts of checkpoints, dtypes, quantization, and what makes a model text-only."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
import tiny_vision
from mlx.utils import tree_flatten
from tiny_vision import END, FAMILIES, IMAGE, START, Arrays
from vision_figures import FIGURES, SIZES, figures, picture

from mlxspec.images.gemma import Gemma3Images, Gemma4Images
from mlxspec.images.qwen import QwenImages
from mlxspec.models.vision import parts, settings
from mlxspec.platform import device


@cache
def folder_of(name: str) -> Path:
    return FAMILIES[name].write(Path(mkdtemp()) / name)


@cache
def loaded(name: str) -> Any:
    return tiny_vision.load(folder_of(name), mx.float32)


def rows(made: Any, size: tuple[int, int] = SIZES[0]) -> np.ndarray:
    assert made.vision is not None, made.no_images
    return np.array(made.vision.tower(made.vision.preprocessor.prepare(picture(*size))).astype(mx.float32))


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_transformers(name: str) -> None:
    assert np.allclose(figures(rows(loaded(name))), FIGURES[name], atol=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_have_the_text_models_dtype(name: str) -> None:
    made = tiny_vision.load(folder_of(name), mx.bfloat16)
    prepared = made.vision.preprocessor.prepare(picture(*SIZES[0]))
    found = made.vision.tower(prepared)
    assert (found.dtype, found.shape) == (mx.bfloat16, (prepared.tokens, made.model.hidden_size))
    exact = rows(loaded(name))
    assert np.abs(np.array(found.astype(mx.float32)) - exact).max() < 0.15 * np.abs(exact).max()


def channels_last(arrays: Arrays) -> Arrays:
    """As conversions to MLX store convolutions and name Qwen's tower."""
    turned = {
        k: np.ascontiguousarray(np.moveaxis(v, 1, -1)) if v.ndim in (4, 5) else v for k, v in arrays.items()
    }
    return {k.replace("model.visual.", "vision_tower."): v for k, v in turned.items()}


def without_model(arrays: Arrays) -> Arrays:
    return {k.removeprefix("model."): v for k, v in arrays.items()}


def deeper(arrays: Arrays) -> Arrays:
    """As Transformers 5 saves them."""
    named = {k.replace("vision_model.", ""): v for k, v in arrays.items()}
    if any("vision_embedder" in k for k in named):
        named = {k.replace("embed_vision.", "embed_vision.multimodal_embedder."): v for k, v in named.items()}
        named = {k.replace("vision_embedder.", "embed_vision."): v for k, v in named.items()}
    return named


@pytest.mark.parametrize("change", [channels_last, deeper])
@pytest.mark.parametrize("name", ["qwen-64", "gemma3", "gemma4-unified"])
def test_layouts(name: str, change: Callable[[Arrays], Arrays], tmp_path: Path) -> None:
    made = tiny_vision.load(FAMILIES[name].write(tmp_path, change), mx.float32)
    assert np.array_equal(rows(made), rows(loaded(name)))


def test_ranges_that_no_config_asks_for_are_not_used(tmp_path: Path) -> None:
    """Other formats need them; without use_clipped_linears nothing is clipped."""

    def with_ranges(arrays: Arrays) -> Arrays:
        name = "model.vision_tower.encoder.layers.0.mlp.up_proj."
        return arrays | {f"{name}{end}": np.array(0.0, np.float32) for end in ("input_max", "output_min")}

    made = tiny_vision.load(FAMILIES["gemma4-standard"].write(tmp_path, with_ranges), mx.float32)
    assert np.array_equal(rows(made), rows(loaded("gemma4-standard")))


def test_quantized_towers(tmp_path: Path) -> None:
    """Any matrices of it, and the table of positions, in MLX's way; rows are those of the matrices' values."""
    kept: dict[str, np.ndarray] = {}

    def quantized(arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for name, value in arrays.items():
            path = name.removesuffix(".weight")
            if ".visual." in name and value.ndim == 2 and value.shape[1] % 32 == 0:
                packed = mx.quantize(mx.array(value), 32, 8)
                for part, array in zip(("weight", "scales", "biases"), packed, strict=True):
                    out[f"{path}.{part}"] = np.array(array)
                kept[name] = np.array(mx.dequantize(*packed, 32, 8))
            else:
                out[name] = value
        return out

    made = tiny_vision.load(FAMILIES["qwen-64"].write(tmp_path / "packed", quantized), mx.float32)
    plain = tiny_vision.load(FAMILIES["qwen-64"].write(tmp_path / "plain", lambda a: a | kept), mx.float32)
    assert len(kept) > 8
    assert "model.visual.pos_embed.weight" in kept
    assert np.allclose(rows(made), rows(plain), atol=1e-5)


def test_packed_matrices_stay_packed_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quantized(arrays: Arrays) -> Arrays:
        name = "model.visual.merger.linear_fc2"
        packed = mx.quantize(mx.array(arrays[f"{name}.weight"]), 32, 4)
        named = zip(("weight", "scales", "biases"), map(np.array, packed), strict=True)
        return arrays | {f"{name}.{part}": value for part, value in named}

    folder = FAMILIES["qwen-64"].write(tmp_path, quantized)
    dequantized = rows(tiny_vision.load(folder, mx.float32))
    monkeypatch.setattr(device, "backend", lambda: "cuda")
    made = tiny_vision.load(folder, mx.float32)
    assert isinstance(made.vision.tower.merger.linear_fc2, nn.QuantizedLinear)
    assert np.allclose(rows(made), dequantized, atol=1e-4)


def test_pooled_rows_of_gemma4_may_leave_the_range_of_float16(tmp_path: Path) -> None:
    """They are scaled by the root of the width before std_scale makes them small again."""

    def large(arrays: Arrays) -> Arrays:
        top = "model.vision_tower."
        last = f"{top}encoder.layers.1.post_feedforward_layernorm.weight"
        scaled = {last: arrays[last] * 1e4, f"{top}std_scale": arrays[f"{top}std_scale"] * 1e-4}
        return arrays | scaled | {f"{top}std_bias": arrays[f"{top}std_bias"] * 1e4}

    folder = FAMILIES["gemma4-standard"].write(tmp_path, large)
    exact, half = rows(tiny_vision.load(folder, mx.float32)), rows(tiny_vision.load(folder, mx.float16))
    assert np.isfinite(half).all()
    assert np.abs(half - exact).max() < 0.05 * np.abs(exact).max()


# ---- preprocessing settings as they are published


def test_published_settings() -> None:
    third = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 0.00392156862745098}
    qwen = {
        **third,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    assert settings.qwen_images(qwen, 16, 2) == QwenImages()
    older = settings.qwen_images({**qwen, "min_pixels": 4096, "max_pixels": 65536}, 16, 2)
    assert (older.min_pixels, older.max_pixels) == (4096, 65536)
    gemma3 = {
        **third,
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_seq_length": 256,
        "resample": 2,
        "size": {"height": 896, "width": 896},
    }
    assert settings.gemma3_images(gemma3, 896, 14, 256) == Gemma3Images()
    gemma4 = {
        "do_convert_rgb": True,
        "do_normalize": False,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        "image_seq_length": 280,
        "max_soft_tokens": 280,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "resample": 3,
    }
    assert settings.gemma4_images(gemma4, 16, 3, 10240, joins_blocks=False) == Gemma4Images()
    assert settings.gemma4_images(gemma4, 16, 3, 1120, joins_blocks=True).joins_blocks


# ---- attention


@pytest.mark.parametrize("dim", [64, 72, 24, 160])
def test_padded_heads_give_the_same_rows(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Metal heads of 24 are padded to 64, for which it has a fused kernel; those of 72 have one, and larger ones than 128 stay."""
    q, k, v = (mx.random.normal((33, 2, dim), key=mx.random.key(i)) for i in range(3))
    plain = parts.attend(q, k, v, dim**-0.5)
    seen = []
    attention = mx.fast.scaled_dot_product_attention

    def watched(q: mx.array, *rest: Any, **options: Any) -> mx.array:
        seen.append(q.shape)
        return attention(q, *rest, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(device, "backend", lambda: "metal")
    padded = parts.attend(q, k, v, dim**-0.5)
    wide = {64: 64, 72: 72, 24: 64, 160: 160}[dim]
    assert seen == [(1, 2, 33, wide)]
    assert np.allclose(padded, plain, atol=1e-6)


def test_scores_in_parts_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (mx.random.normal((50, 2, 16), key=mx.random.key(i)) for i in range(3))
    whole = parts.attend(q, k, v, 0.25)
    monkeypatch.setattr(parts, "_SCORES_AT_MOST", 3000)  # 7 queries a part
    assert np.allclose(parts.attend(q, k, v, 0.25), whole, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_scratch_bytes_bound_what_a_tower_takes(name: str) -> None:
    """The estimate is never too low, and at most a few times what is used."""
    vision = loaded(name).vision
    prepared = vision.preprocessor.prepare(picture(330, 270))
    mx.eval(vision.tower(prepared))
    gc.collect()  # what other tests have left must not go meanwhile
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(vision.tower(prepared))
    taken = mx.get_peak_memory() - before
    told = vision.tower.scratch_bytes(prepared.tokens)
    assert taken <= told <= 6 * taken, (taken, told)


# ---- what a model has for images


def test_prompts_and_masks() -> None:
    found = {name: loaded(name).vision for name in FAMILIES}
    assert found["qwen-64"].prompt.expand([1, IMAGE, 2], [2]).tokens == [1, IMAGE, IMAGE, 2]
    assert found["gemma3"].prompt.expand([1, START, 2], [1]).tokens == [1, START, IMAGE, END, 2]
    assert found["gemma3"].prompt.framed("a<b>", "<b>") == "a\n\n<b>\n\n"
    assert found["gemma4-clipped"].prompt.expand([1, IMAGE], [2]).tokens == [1, START, IMAGE, IMAGE, END]
    assert found["gemma4-clipped"].prompt.lookup == 0
    masks = {name: vision.bidirectional for name, vision in found.items()}
    assert masks == {
        "qwen-64": "none",
        "qwen-72": "none",
        "gemma3": "all",
        "gemma4-clipped": "none",
        "gemma4-standard": "windowed",
        "gemma4-unified": "windowed",
    }


def test_bytes_of_a_tower() -> None:
    vision = loaded("qwen-64").vision
    assert vision.nbytes == sum(v.nbytes for _, v in tree_flatten(vision.tower.parameters())) > 4 * 10**5


def broken(name: str, folder: Path, **changes: Any) -> Any:
    """Loaded from a folder whose JSON files are changed: `vision` and `settings` are merged, other keys are the config's."""
    FAMILIES[name].write(folder)
    config = FAMILIES[name].config() | {k: v for k, v in changes.items() if k not in ("vision", "settings")}
    config["vision_config"] = config["vision_config"] | changes.get("vision", {})
    (folder / "config.json").write_text(json.dumps(config))
    settings = FAMILIES[name].settings | changes.get("settings", {})
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return tiny_vision.load(folder, mx.float32)


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepstack": ("qwen-64", {"vision": {"deepstack_visual_indexes": [1]}}, "deepstack_visual_indexes"),
    "no id": ("qwen-64", {"image_token_id": None}, "names no image_token_id"),
    "activation": ("gemma3", {"vision": {"hidden_act": "relu"}}, "hidden_act 'relu' is not supported"),
    "other width": ("qwen-64", {"vision": {"out_hidden_size": 32}}, "hidden_size is 64"),
    "too shallow": ("qwen-64", {"vision": {"depth": 1}}, "tensors are unknown"),
    "too deep": ("gemma4-clipped", {"vision": {"num_hidden_layers": 3}}, "tensors are missing"),
    "heads": ("qwen-64", {"vision": {"num_heads": 3}}, "3 heads of 128 numbers"),
    "pan and scan": ("gemma3", {"settings": {"do_pan_and_scan": True}}, "do_pan_and_scan True"),
    "other patches": ("qwen-64", {"settings": {"patch_size": 8}}, "patch_size is 8, but vision_config"),
    "budget": ("gemma4-clipped", {"settings": {"max_soft_tokens": 71}}, "max_soft_tokens is 71"),
    "positions": ("gemma4-clipped", {"settings": {"max_soft_tokens": 140}}, "more positions than the 300"),
    "mean": ("gemma3", {"settings": {"image_mean": [0.5]}}, "image_mean is"),
    "kernel": ("qwen-64", {"vision": {"patch_size": 8}, "settings": {"patch_size": 8}}, "has shape"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_vision_costs_only_the_images(case: str, tmp_path: Path) -> None:
    name, changes, why = BROKEN[case]
    made = broken(name, tmp_path, **changes)
    assert made.vision is None
    assert why in made.no_images, made.no_images
    assert "\n" not in made.no_images
    assert any("Only text is read" in notice and why in notice for notice in made.notices)
    made.model.embed(mx.array([1, 2]))


def test_a_folder_without_settings_reads_text(tmp_path: Path) -> None:
    FAMILIES["qwen-64"].write(tmp_path)
    (tmp_path / "preprocessor_config.json").rename(tmp_path / "elsewhere.txt")
    made = tiny_vision.load(tmp_path, mx.float32)
    assert "There is no preprocessor_config.json" in made.no_images
    nested = {"image_processor": FAMILIES["qwen-64"].settings, "video_processor": {"patch_size": 99}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert np.array_equal(rows(tiny_vision.load(tmp_path, mx.float32)), rows(loaded("qwen-64")))


def test_a_model_that_never_had_a_tower(tmp_path: Path) -> None:
    made = tiny_vision.load(tiny.write_text_only(tmp_path, tiny.SHAPES["tied"]), mx.float32)
    assert made.no_images == "This model reads no images: its folder holds no vision tower."


def test_a_conversion_without_a_tower_reads_text(tmp_path: Path) -> None:
    def only_text(arrays: Arrays) -> Arrays:
        return {k: v for k, v in arrays.items() if ".visual." not in k}

    made = tiny_vision.load(FAMILIES["qwen-64"].write(tmp_path, only_text), mx.float32)
    assert "its folder holds no vision tower, which conversions by mlx-lm drop." in made.no_images
    assert made.notices == ()
