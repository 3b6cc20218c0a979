"""Every published size builds its module tree, without allocating it, with the parameters of the published checkpoint: not within a per
cent, but each one.

The totals are those of the repositories' safetensors on the hub (or of their indexes). What we leave out is counted by shape: vision
and audio towers, which are one constant for all sizes that share a tower plus one projection to the hidden size, and in Gemma 4 E2B and
E4B the key and value tensors of layers that read another layer's. That the constants agree between sizes is the check on them.

The "effective" sizes of E2B and E4B count something else: all of the checkpoint but its two embeddings.
"""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from published_shapes import CONFIGS, known

from mlxspec.checkpoints.memory import state_bytes, token_bytes
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.registry import architecture
from mlxspec.models.vision.blueprint import blueprint
from mlxspec.platform import device

# a tower: (its own parameters, those for each element of the hidden size)
QWEN_LARGE, QWEN_SMALL, QWEN_SMALLEST = (437_132_016, 4609), (323_025_920, 4097), (97_446_144, 3073)
GEMMA3, GEMMA4, GEMMA4_E = (416_867_184, 1152), (569_550_384, 1152), (472_189_216, 768 + 1536)
GEMMA4_12B = (52_379_904, 0)  # has no towers but projections
NONE = (0, 0)
TIED = (0, 151_936)  # a head in the files that is the embedding once more

PUBLISHED: dict[str, tuple[int, tuple[int, int]]] = {
    "Qwen3.5-0.8B": (873_438_784, QWEN_SMALLEST),
    "Qwen3.5-2B": (2_274_069_824, QWEN_SMALL),
    "Qwen3.5-4B": (4_659_865_088, QWEN_SMALL),
    "Qwen3.5-9B": (9_653_104_368, QWEN_LARGE),
    "Qwen3.5-27B": (27_781_427_952, QWEN_LARGE),
    "Qwen3.5-35B-A3B": (35_951_822_704, QWEN_LARGE),
    "Qwen3.5-122B-A10B": (125_086_497_008, QWEN_LARGE),
    "Qwen3.5-397B-A17B": (403_397_928_944, QWEN_LARGE),
    "Qwen3-0.6B": (751_632_384, TIED),
    "Qwen3-1.7B": (2_031_739_904, TIED),
    "Qwen3-4B": (4_022_468_096, NONE),
    "Qwen3-8B": (8_190_735_360, NONE),
    "Qwen3-14B": (14_768_307_200, NONE),
    "Qwen3-32B": (32_762_123_264, NONE),
    "Qwen3-30B-A3B": (30_532_122_624, NONE),
    "Qwen3-235B-A22B": (235_093_634_560, NONE),
    "Qwen3-Next-80B-A3B": (81_324_862_720, NONE),
    "gemma-3-270m": (268_098_176, NONE),
    "gemma-3-1b": (999_885_952, NONE),
    "gemma-3-4b": (4_300_079_472, GEMMA3),
    "gemma-3-12b": (12_187_325_040, GEMMA3),
    "gemma-3-27b": (27_432_406_640, GEMMA3),
    "gemma-4-E2B": (5_123_178_051, GEMMA4_E),
    "gemma-4-E4B": (7_996_156_490, GEMMA4_E),
    "gemma-4-12B": (11_959_730_224, GEMMA4_12B),
    "gemma-4-26B-A4B": (25_805_936_206, GEMMA4),
    "gemma-4-31B": (31_273_088_876, GEMMA4),
}
SIZES = {name: (CONFIGS[name][1], *counts) for name, counts in PUBLISHED.items()}


def count(module: Any, without: str = "-") -> int:
    return sum(prod(x.shape) for name, x in tree_flatten(module.parameters()) if without not in name)


def unread(config: Any, hidden: int) -> int:
    """Key and value projections and key norms of layers that read another's: in the files, and not ours."""
    if not isinstance(config, GemmaConfig):
        return 0
    shared = [layer for layer in config.layers if layer.source is not None]
    return sum(2 * hidden * s.num_kv_heads * s.head_dim + s.head_dim for s in shared)


def test_no_known_model_is_without_its_count() -> None:
    assert set(PUBLISHED) == set(CONFIGS)


def test_memory_of_known_models() -> None:
    """Of the 4B at 4 bits, reckoned by hand: 4.2 billion weights at 4.5 bits, a state, and keys and values of 8 layers."""
    found = {m.names[0]: m for m in known(8192)}
    four = found["Qwen/Qwen3.5-4B"]
    assert 4.1e9 < four.parameters < 4.3e9
    assert four.weights["4 bits"] == round(four.parameters * 4.5 / 8)
    assert 8 * 2 * 4 * 256 * 2 * 8192 < four.state < 0.6e9
    assert 0 < four.head_bytes < 0.1e9
    assert known(1 << 20)[0].context == 262144  # no more than the model has


@pytest.mark.parametrize("size", SIZES)
def test_every_parameter_of_the_published_checkpoint(size: str) -> None:
    config, published, (tower, to_hidden) = SIZES[size]
    before, kind = mx.get_active_memory(), architecture(config)
    parsed = kind.parse(config)
    model = kind.build(parsed)
    ours = count(model) + (count(kind.head(parsed, model)) if kind.head is not None else 0)
    assert ours + unread(parsed, model.hidden_size) + tower + to_hidden * model.hidden_size == published
    assert mx.get_active_memory() - before < 1 << 26  # nothing was allocated


_SIGLIP = {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
_GEMMA3_IDS = {"boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3}
_GEMMA4_IDS = {"boi_token_id": 1, "eoi_token_id": 2, "image_token_id": 3}


def _qwen_tower(depth: int, size: int, inner: int, heads: int) -> dict[str, Any]:
    vision = {"depth": depth, "hidden_size": size, "intermediate_size": inner, "num_heads": heads}
    return {"model_type": "qwen3_5", "image_token_id": 1, "vision_config": vision}


TOWERS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "27B": (_qwen_tower(27, 1152, 4304, 16), QWEN_LARGE),
    "4B": (_qwen_tower(24, 1024, 4096, 16), QWEN_SMALL),
    "0.8B": (_qwen_tower(12, 768, 3072, 12), QWEN_SMALLEST),
    "gemma-3": (
        {
            "model_type": "gemma3",
            "vision_config": {**_SIGLIP, "image_size": 896, "patch_size": 14},
            **_GEMMA3_IDS,
        },
        GEMMA3,
    ),
    "gemma-4": (
        {"model_type": "gemma4", "vision_config": {**_SIGLIP, "standardize": True}, **_GEMMA4_IDS},
        GEMMA4,
    ),
    "gemma-4-12B": (
        {"model_type": "gemma4_unified", "vision_config": {"mm_embed_dim": 3840}, **_GEMMA4_IDS},
        (GEMMA4_12B[0] - 640 * 3840, 0),  # without the projection of sound
    ),
}


@pytest.mark.parametrize("name", TOWERS)
def test_every_parameter_of_published_towers(name: str) -> None:
    config, (own, to_hidden) = TOWERS[name]
    hidden = 3840
    if config["model_type"] == "qwen3_5":
        config = config | {"vision_config": config["vision_config"] | {"out_hidden_size": hidden}}
    tower = blueprint(config, {}, hidden)[0].tower
    assert count(tower) == own + to_hidden * hidden


@pytest.mark.parametrize(("size", "billions"), [("gemma-4-E2B", 2.3), ("gemma-4-E4B", 4.5)])
def test_effective_parameters(size: str, billions: float) -> None:
    """What the model card calls effective: all but the embedding and the layers' own embedding. It cuts digits off: E2B has 2.37."""
    config, published, _ = SIZES[size]
    kind = architecture(config)
    model = kind.build(kind.parse(config))
    effective = (published - (count(model) - count(model, "embed_tokens"))) / 1e9
    assert billions <= effective < billions + 0.1


@pytest.mark.parametrize(
    ("size", "bytes_a_token", "constant"),
    [
        # keys and values of attention layers in bfloat16: layers * 2 * heads * dim * 2 bytes
        ("Qwen3.5-27B", 16 * 2 * 4 * 256 * 2, 48 * 48 * 128 * 128 * 4),
        ("Qwen3.5-35B-A3B", 10 * 2 * 2 * 256 * 2, 30 * 32 * 128 * 128 * 4),
        ("Qwen3-30B-A3B", 48 * 2 * 4 * 128 * 2, 0),
        ("Qwen3-Next-80B-A3B", 12 * 2 * 2 * 256 * 2, 36 * 32 * 128 * 128 * 4),
        ("gemma-4-31B", 10 * 2 * 4 * 512 * 2, 50 * 2 * 1024 * 16 * 256 * 2),
        ("gemma-4-E2B", 3 * 2 * 1 * 512 * 2, 12 * 2 * 512 * 1 * 256 * 2),
    ],
)
def test_memory_of_a_row(size: str, bytes_a_token: int, constant: int) -> None:
    """Keys and values of the layers that see everything, states and windows; and the room that buffers have to grow and for drafts. On a
    CPU up to 8 MB of the states that a verify passes are kept in a layer."""
    config = SIZES[size][0]
    kind = architecture(config)
    parsed = kind.parse(config)
    model = kind.build(parsed)
    model.set_dtype(mx.bfloat16)
    before = mx.get_active_memory()
    passed = sum(getattr(parsed, "is_linear", ())) * (8 << 20) if device.backend() == "cpu" else 0
    for length in (65536, 131072):
        least = length * bytes_a_token + constant
        assert least <= state_bytes(model, length, 1) < 1.3 * least + passed, length
    assert mx.get_active_memory() - before < 1 << 26


KV_BYTES = {  # a token, by bits: 2 * layers * heads * (256 * bits / 8 + 4 * 4 bytes of scales and biases)
    "Qwen3.5-0.8B": {16: 12_288, 8: 6_528, 4: 3_456},
    "Qwen3.5-4B": {16: 32_768, 8: 17_408, 4: 9_216},
    "Qwen3.5-9B": {16: 32_768, 8: 17_408, 4: 9_216},
    "Qwen3.5-27B": {16: 65_536, 8: 34_816, 4: 18_432},
    "Qwen3.5-35B-A3B": {16: 20_480, 8: 10_880, 4: 5_760},
}


@pytest.mark.parametrize("name", KV_BYTES)
def test_bytes_of_keys_and_values(name: str) -> None:
    """A token of the published size in bfloat16, as docs/how-it-works.md tells; and what a long row is reckoned to take grows by them."""
    config = CONFIGS[name][1]
    kind = architecture(config)
    model = kind.build(kind.parse(config))
    model.set_dtype(mx.bfloat16)
    found = {bits: token_bytes(model, bits) for bits in (16, 8, 4)}
    assert found == KV_BYTES[name]
    for bits, per_token in found.items():
        grown = state_bytes(model, 128 << 10, 1, bits) - state_bytes(model, 64 << 10, 1, bits)
        assert per_token << 16 <= grown <= 1.13 * (per_token << 16)
