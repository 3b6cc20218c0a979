"""Whole models over prompts with two images against Transformers': greedy text in chunks of every size, positions. Needs PyTorch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_vision
from vision_figures import picture

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import transformers  # noqa: E402

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.engine.image_prompt import PromptWithImages  # noqa: E402
from mlxspec.models.image_rows import ImageSpan, RowImages  # noqa: E402

CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
}
NUM = 20
NEVER = [
    tiny_vision.IMAGE,
    tiny_vision.START,
    tiny_vision.END,
]  # what Transformers counts as images, also in an answer
GREEDY = SamplingParams(
    max_tokens=NUM, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(NEVER, -100.0)
)
PLAIN = SpecConfig()


@cache
def both(name: str) -> tuple[Any, Any]:
    """(their model, ours assembled)"""
    family = tiny_vision.FAMILIES[name]
    folder = family.write(Path(mkdtemp()) / name)
    model = getattr(transformers, CLASSES[family.kind]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), tiny_vision.load(folder, mx.float32)


def prompt_for(name: str, seed: int = 1) -> PromptWithImages:
    """Text, an image, text, an image, text. Gemma 4's images have one size, because Transformers pads others."""
    vision, rng = both(name)[1].vision, np.random.default_rng(seed)
    sizes = ((40, 24), (24, 48)) if tiny_vision.FAMILIES[name].kind == "qwen3_5" else ((48, 40), (48, 40))
    prepared = [vision.preprocessor.prepare(picture(*size)) for size in sizes]
    tokens: list[int] = []
    for length in (9, 6):
        tokens += [*rng.integers(1, 180, length).tolist(), vision.prompt.placeholder]
    tokens += rng.integers(1, 180, 7).tolist()
    expanded = vision.prompt.expand(tokens, [p.tokens for p in prepared])
    return PromptWithImages(tokens=expanded.tokens, spans=expanded.spans, images=prepared)


def inputs(name: str, given: PromptWithImages, answer: list[int]) -> dict[str, Any]:
    """What Transformers takes of the same prompt; the pixels are ours, which equal theirs (tests/images)."""
    kind = tiny_vision.FAMILIES[name].kind
    tokens = [*given.tokens, *answer]
    kinds = torch.zeros((1, len(tokens)), dtype=torch.long)
    for span in given.spans:
        kinds[0, span.start : span.stop] = 1
    found: dict[str, Any] = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones_like(kinds)}
    pixels = [torch.from_numpy(p.pixels) for p in given.images]
    if kind == "qwen3_5":
        twice = [p.reshape(len(p), 3, 1, -1).repeat(1, 1, 2, 1).reshape(len(p), -1) for p in pixels]
        return found | {
            "pixel_values": torch.cat(twice),
            "image_grid_thw": torch.tensor([p.grid for p in given.images]),
            "mm_token_type_ids": kinds,
        }
    if kind == "gemma3":
        rows, columns = given.images[0].grid[1:]
        side = int((pixels[0].shape[1] // 3) ** 0.5)
        images = [p.reshape(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4) for p in pixels]
        whole = torch.stack([i.reshape(3, rows * side, columns * side) for i in images])
        return found | {"pixel_values": whole, "token_type_ids": kinds}
    rows, columns = given.images[0].grid[1:]
    places = torch.tensor([[[x, y] for y in range(rows) for x in range(columns)]] * len(pixels))
    found |= {"pixel_values": torch.stack(pixels), "image_position_ids": places, "mm_token_type_ids": kinds}
    return found | ({"attention_mask": declared_masks(name, kinds)} if kind == "gemma4_unified" else {})


def declared_masks(name: str, kinds: torch.Tensor) -> dict[str, torch.Tensor]:
    """The masks that Transformers declares for the unified model: blocks in layers with a window only, and within the window. Its forward
    of 5.23 makes others (blocks in all layers, the window not applied to them), unlike its forward of the other Gemma 4 models."""
    from transformers.models.gemma4_unified import modeling_gemma4_unified as unified

    config = both(name)[0].config.get_text_config()
    found: dict[str, torch.Tensor] = unified.create_masks_for_vision_model(
        config=config,
        inputs_embeds=torch.zeros((*kinds.shape, config.hidden_size)),
        attention_mask=torch.ones_like(kinds),
        cache=None,
        position_ids=None,
        block_sequence_ids=unified.get_block_sequence_ids_for_mask(kinds, device=kinds.device),
    )
    return found


@torch.no_grad()
def theirs(name: str, given: PromptWithImages) -> list[int]:
    model, answer = both(name)[0], []
    for _ in range(NUM):
        logits = model(**inputs(name, given, answer), use_cache=False).logits[0, -1]
        logits[NEVER] = -torch.inf
        answer.append(int(logits.argmax()))
    return answer


def engine(name: str, **config: Any) -> Engine:
    made = both(name)[1]
    return Engine(made.model, vision=made.vision, config=EngineConfig(**config))


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_greedy_text_over_two_images(name: str) -> None:
    given = prompt_for(name)
    wanted = theirs(name, given)
    for chunk in (16, 19, 32, 57, 512):
        result = engine(name, prefill_chunk=chunk).generate(given, GREEDY, spec=PLAIN)
        assert list(result.tokens) == wanted, chunk
    # a second turn through the prefix cache, and a row of text beside it
    e = engine(name)
    first = e.generate(given, GREEDY, spec=PLAIN)
    later = PromptWithImages(
        tokens=[*given.tokens, *first.tokens, 5, 6, 7], spans=given.spans, images=given.images
    )
    again = e.generate([later, [3, 4, 5, 6]], GREEDY, spec=PLAIN)
    assert list(again[0].tokens) == theirs(name, later)
    assert again[0].stats.num_cached >= len(given.tokens)
    assert e.features is not None
    assert e.features.num_runs == len({p.digest for p in given.images})


@pytest.mark.parametrize("seed", range(12))
def test_positions_are_those_of_get_rope_index(seed: int) -> None:
    """Random mixes of text and images, and the shift of what comes behind them."""
    model, made = both("qwen-64")
    rng, vision = np.random.default_rng(seed), made.vision
    tokens: list[int] = rng.integers(1, 180, int(rng.integers(0, 9))).tolist()
    prepared = []
    for _ in range(int(rng.integers(1, 5))):
        height, width = (int(8 * n) for n in rng.integers(2, 9, 2))
        prepared.append(vision.preprocessor.prepare(picture(height, width)))
        tokens += [tiny_vision.START, vision.prompt.placeholder, tiny_vision.END]
        tokens += rng.integers(1, 180, int(rng.integers(0, 12))).tolist()
    expanded = vision.prompt.expand(tokens, [p.tokens for p in prepared])
    kinds = torch.zeros((1, len(expanded.tokens)), dtype=torch.int)
    for span in expanded.spans:
        kinds[0, span.start : span.stop] = 1
    positions, delta = model.model.get_rope_index(
        torch.tensor([expanded.tokens]),
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor([p.grid for p in prepared]),
    )
    spans = [ImageSpan(s, p) for s, p in zip(expanded.spans, prepared, strict=True)]
    found = RowImages(spans, len(expanded.tokens), vision.prompt)
    length = len(expanded.tokens)
    assert (positions[:, 0].numpy() == found.positions(0, length).T).all()
    assert found.shift(length) == int(delta[0])
