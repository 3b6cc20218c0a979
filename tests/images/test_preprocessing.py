"""Sizes, order of patches and values of every family, against numbers written out here and (slow) against Transformers' processors."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from planting import catches, rewritten

from mlxspec.errors import ConfigError, ImageError
from mlxspec.images.gemma import TOKEN_BUDGETS, Gemma3Images, Gemma4Images
from mlxspec.images.prepared import Preprocessor
from mlxspec.images.qwen import QwenImages

FAMILIES: dict[str, Preprocessor] = {
    "qwen": QwenImages(),
    "gemma3": Gemma3Images(),
    "gemma4": Gemma4Images(),
    "unified": Gemma4Images(joins_blocks=True),
}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


# (height, width) -> after resizing, as Transformers 5.23 says
QWEN_SIZES = {
    (1024, 1024): (1024, 1024),
    (1, 1): (256, 256),
    (1, 200): (32, 3648),
    (48, 80): (224, 352),  # 1.5 and 2.5 blocks: a half goes to the even number
    (720, 1280): (704, 1280),
    (6000, 8000): (3520, 4704),
}
GEMMA4_SIZES = {
    (1024, 1024): (768, 768),
    (1, 1): (768, 768),
    (1, 5000): (48, 13440),
    (100, 7): (3024, 192),
    (720, 1280): (576, 1056),
    (4000, 3000): (912, 672),
}


@pytest.mark.parametrize("size", QWEN_SIZES)
def test_sizes_of_qwen(size: tuple[int, int]) -> None:
    assert QwenImages().size(*size) == QWEN_SIZES[size]


@pytest.mark.parametrize("size", GEMMA4_SIZES)
def test_sizes_of_gemma4(size: tuple[int, int]) -> None:
    assert Gemma4Images().size(*size) == GEMMA4_SIZES[size]


def test_order_of_qwens_patches() -> None:
    """Of an image that needs no resizing, number by number: block row, block column, row and column in the block; channel, row, column."""
    family = QwenImages(patch_size=2, merge_size=2, min_pixels=16)
    image = picture(12, 8)
    prepared = family.prepare(image)
    assert (prepared.grid, prepared.tokens, prepared.num_positions) == ((1, 4, 6), 6, 3)
    values = np.asarray(image)
    order = itertools.product(range(2), range(3), range(2), range(2), range(3), range(2), range(2))
    expected = [
        (values[4 * r + 2 * i + y, 4 * c + 2 * j + x, channel] / 255 - 0.5) / 0.5
        for r, c, i, j, channel, y, x in order
    ]
    assert np.allclose(prepared.pixels.ravel(), expected, atol=1e-6)
    assert prepared.positions is not None
    assert prepared.positions.tolist() == [[0, r, c] for r in range(2) for c in range(3)]


def test_order_of_gemma3s_patches() -> None:
    image = picture(8, 8)
    prepared = Gemma3Images(image_size=8, patch_size=4, tokens=1).prepare(image)
    values = np.asarray(image).transpose(2, 0, 1) / 127.5 - 1
    assert np.allclose(prepared.pixels[1].reshape(3, 4, 4), values[:, :4, 4:], atol=1e-6)
    assert prepared.positions is None
    assert prepared.num_positions == prepared.tokens == 1


@pytest.mark.parametrize("joins_blocks", [False, True])
def test_order_of_gemma4s_patches(joins_blocks: bool) -> None:
    family = Gemma4Images(patch_size=2, pool=2, max_tokens=70, joins_blocks=joins_blocks)
    image = picture(40, 28)
    prepared = family.prepare(image)
    side = 4 if joins_blocks else 2
    assert (prepared.grid, prepared.tokens) == ((1, 28 // side, 40 // side), 70)
    values = np.asarray(image) / 255
    patch = prepared.pixels.reshape(28 // side, 40 // side, side, side, 3)[1, 2]
    assert np.allclose(patch, values[side : 2 * side, 2 * side : 3 * side], atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_digest_knows_pixels_and_settings(name: str) -> None:
    family, image = FAMILIES[name], picture(100, 60)
    digest = family.prepare(image).digest
    assert len(digest) == 32
    assert family.prepare(picture(100, 60)).digest == digest
    others = {
        family.prepare(picture(100, 60, seed=1)).digest,  # another picture of the same size
        *(other.prepare(image).digest for key, other in FAMILIES.items() if key != name),
    }
    assert len(others | {digest}) == 5


def test_a_digest_knows_the_shape() -> None:
    """Two pictures with the same bytes in another shape."""
    family = QwenImages(min_pixels=1024)
    flat = Image.new("RGB", (128, 32), (9, 9, 9))
    assert family.prepare(flat).digest != family.prepare(flat.resize((64, 64))).digest


def test_max_pixels() -> None:
    image = picture(640, 480)
    assert QwenImages().prepare(image, max_pixels=100_000).tokens == 88
    assert QwenImages().prepare(image, max_pixels=10**9).tokens == QwenImages().prepare(image).tokens
    assert QwenImages().prepare(picture(8, 8), max_pixels=1024).tokens == 1
    assert Gemma4Images().prepare(image, max_pixels=400_000).tokens <= 140
    assert Gemma3Images().prepare(image, max_pixels=896**2).tokens == 256
    for family, least in (
        (QwenImages(), "at least 1024 pixels"),
        (Gemma3Images(), "896 x 896, which is 802816 pixels"),
        (Gemma4Images(), "at least 161280 pixels"),
    ):
        with pytest.raises(ImageError, match=least):
            family.prepare(image, max_pixels=1000)


@catches(
    "a bound that is just met is not",
    "mlxspec.images.gemma:Gemma4Images._budget",
    rewritten("n * area <= max_pixels", "n * area < max_pixels"),
    errors=(ImageError,),
)
@catches(
    "a bound that is just not met is",
    "mlxspec.images.gemma:Gemma4Images._budget",
    rewritten("n * area <= max_pixels", "n * area <= max_pixels + 1"),
)
@pytest.mark.parametrize("tokens", TOKEN_BUDGETS)
def test_max_pixels_of_a_budget_give_that_budget(tokens: int) -> None:
    family, area = Gemma4Images(max_tokens=max(TOKEN_BUDGETS)), (16 * 3) ** 2
    square = picture(2000, 2000)
    found = family.tokens_of(2000, 2000, max_pixels=tokens * area)
    assert found == Gemma4Images(max_tokens=tokens).tokens_of(2000, 2000)
    assert family.prepare(square, max_pixels=tokens * area).tokens == found
    if tokens == min(TOKEN_BUDGETS):
        with pytest.raises(ImageError):
            family.tokens_of(2000, 2000, max_pixels=tokens * area - 1)
    else:
        assert family.tokens_of(2000, 2000, max_pixels=tokens * area - 1) < found


@pytest.mark.parametrize("name", FAMILIES)
def test_no_image_takes_more_than_max_tokens(name: str) -> None:
    family = FAMILIES[name]
    for size in ((3000, 2000), (1, 199), (30, 5999), (300, 299)):
        if name == "qwen":
            height, width = QwenImages().size(*size)
            assert height * width // 1024 <= family.max_tokens
        elif name != "gemma3":
            assert family.prepare(picture(*size)).tokens <= family.max_tokens


def test_narrow_images() -> None:
    with pytest.raises(
        ImageError, match="1 x 201 pixels; this model reads no image with a side more than 200"
    ):
        QwenImages().prepare(picture(1, 201))
    assert Gemma4Images().prepare(picture(1, 500)).tokens == 280


def test_budgets_of_gemma4() -> None:
    with pytest.raises(ConfigError, match="max_soft_tokens is 100; Gemma 4 has 70, 140"):
        Gemma4Images(max_tokens=100)


def test_many_threads_prepare_at_once() -> None:
    images = [picture(120 + 9 * i, 90, seed=i) for i in range(12)]
    family = QwenImages()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(family.prepare, images))
    for image, found in zip(images, together, strict=True):
        alone = family.prepare(image)
        assert found.digest == alone.digest
        assert np.array_equal(found.pixels, alone.pixels)


# ---- against Transformers


def sizes(longest: int) -> list[tuple[int, int]]:
    """40 sizes (width, height): tiny, odd, halves of a block, far from square, too large."""
    rng = random.Random(7)
    fixed = [
        (1, 1),
        (1, 199),
        (199, 1),
        (3, 500),
        (16, 16),
        (48, 48),
        (80, 48),
        (112, 240),
        (32, 31),
        (257, 255),
    ]
    fixed += [(1024, 768), (640, 480), (longest, longest // 2), (longest // 3, longest)]
    return fixed + [(rng.randint(2, 900), rng.randint(8, 900)) for _ in range(26)]


def theirs(module: str, name: str) -> Any:
    pytest.importorskip("transformers", reason="needs Transformers, which mlx-lm brings")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


@pytest.mark.slow
def test_qwen_against_transformers() -> None:
    processor = theirs("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")(
        size={"shortest_edge": 65_536, "longest_edge": 1_500_000},
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    family = QwenImages(max_pixels=1_500_000)
    for size in sizes(2500):
        image = picture(*size)
        expected = processor(images=[image], return_tensors="np")
        prepared = family.prepare(image)
        assert prepared.grid == tuple(expected["image_grid_thw"][0]), size
        twice = np.repeat(prepared.pixels.reshape(-1, 3, 1, 256), 2, axis=2).reshape(-1, 1536)
        assert np.abs(twice - expected["pixel_values"]).max() < 1e-6, size


@pytest.mark.slow
def test_gemma3_against_transformers() -> None:
    processor = theirs("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil")(
        size={"height": 896, "width": 896}
    )
    for size in sizes(2500):
        image = picture(*size)
        expected = np.asarray(processor(images=[image], return_tensors="np")["pixel_values"])[0]
        found = Gemma3Images().prepare(image).pixels.reshape(64, 64, 3, 14, 14)
        assert np.abs(found.transpose(2, 0, 3, 1, 4).reshape(3, 896, 896) - expected).max() < 1e-6, size


@pytest.mark.slow
@pytest.mark.parametrize("budget", [70, 280])
def test_gemma4_against_transformers(budget: int) -> None:
    processor = theirs("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil")(
        max_soft_tokens=budget
    )
    for size in sizes(2500):
        image = picture(*size)
        expected = processor(images=[image], return_tensors="np")
        prepared = Gemma4Images(max_tokens=budget).prepare(image)
        num = prepared.grid[1] * prepared.grid[2]
        assert prepared.tokens == expected["num_soft_tokens_per_image"][0], size
        positions = [[x, y] for y in range(prepared.grid[1]) for x in range(prepared.grid[2])]
        assert expected["image_position_ids"][0, :num].tolist() == positions, size
        assert (expected["image_position_ids"][0, num:] == -1).all()
        assert np.abs(prepared.pixels - expected["pixel_values"][0, :num]).max() < 1e-6, size
        joined = Gemma4Images(max_tokens=budget, joins_blocks=True).prepare(image)
        patches = prepared.pixels.reshape(joined.grid[1], 3, joined.grid[2], 3, 16, 16, 3)
        blocks = patches.transpose(0, 2, 1, 4, 3, 5, 6).reshape(joined.tokens, -1)
        assert np.array_equal(joined.pixels, blocks), size


@pytest.mark.torch
@pytest.mark.slow
def test_joined_blocks_against_transformers() -> None:
    """The module of its processor for models without a tower needs torchvision, its function that joins patches does not."""
    import torch

    pytest.importorskip("transformers", reason="needs Transformers, which mlx-lm brings")
    module = "transformers.models.gemma4_unified.image_processing_gemma4_unified"
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    kept = [node for node in tree.body if getattr(node, "name", "") == "patches_merge"]
    names: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(ast.Module(kept, []), found.origin, "exec"), names)
    merge = names["patches_merge"]
    for size in sizes(1500)[::4]:
        image = picture(*size)
        apart = Gemma4Images().prepare(image)
        joined = Gemma4Images(joins_blocks=True).prepare(image)
        _, rows, columns = apart.grid
        positions = torch.tensor([[[x, y] for y in range(rows) for x in range(columns)]])
        patches, places = merge(torch.from_numpy(apart.pixels)[None], positions, joined.tokens)
        assert np.array_equal(joined.pixels, patches[0].numpy()), size
        _, rows, columns = joined.grid
        assert places[0].tolist() == [[x, y] for y in range(rows) for x in range(columns)], size
