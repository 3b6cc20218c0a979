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
from test_gemma_config import SIZES as GEMMAS

from mlxspec.checkpoints.memory import state_bytes
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.registry import architecture
from mlxspec.platform import device


def qwen(
    hidden: int, layers: int, heads: int, kv: int, linear: int, *, tied: bool = False, **ffn: int
) -> dict[str, Any]:
    """As on the hub. heads, kv: of attention; linear: value heads of Gated DeltaNet."""
    text = {
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": linear,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": tied,
        "mtp_num_hidden_layers": 1,
    }
    kind = "qwen3_5_moe" if "num_experts" in ffn else "qwen3_5"
    return {"model_type": kind, "text_config": text | ffn}


def experts(num: int, each: int, size: int) -> dict[str, int]:
    sizes = {"moe_intermediate_size": size, "shared_expert_intermediate_size": size}
    return {"num_experts": num, "num_experts_per_tok": each, **sizes}


# a tower: (its own parameters, those for each element of the hidden size)
QWEN_LARGE, QWEN_SMALL, QWEN_SMALLEST = (437_132_016, 4609), (323_025_920, 4097), (97_446_144, 3073)
GEMMA3, GEMMA4, GEMMA4_E = (416_867_184, 1152), (569_550_384, 1152), (472_189_216, 768 + 1536)
GEMMA4_12B = (52_379_904, 0)  # has no towers but projections
NONE = (0, 0)

SIZES: dict[str, tuple[dict[str, Any], int, tuple[int, int]]] = {
    "Qwen3.5-0.8B": (qwen(1024, 24, 8, 2, 16, tied=True, intermediate_size=3584), 873_438_784, QWEN_SMALLEST),
    "Qwen3.5-2B": (qwen(2048, 24, 8, 2, 16, tied=True, intermediate_size=6144), 2_274_069_824, QWEN_SMALL),
    "Qwen3.5-4B": (qwen(2560, 32, 16, 4, 32, tied=True, intermediate_size=9216), 4_659_865_088, QWEN_SMALL),
    "Qwen3.5-9B": (qwen(4096, 32, 16, 4, 32, intermediate_size=12288), 9_653_104_368, QWEN_LARGE),
    "Qwen3.6-27B, 3.8-27B": (qwen(5120, 64, 24, 4, 48, intermediate_size=17408), 27_781_427_952, QWEN_LARGE),
    "Qwen3.6-35B-A3B": (qwen(2048, 40, 16, 2, 32, **experts(256, 8, 512)), 35_951_822_704, QWEN_LARGE),
    "Qwen3.5-122B-A10B": (qwen(3072, 48, 32, 2, 64, **experts(256, 8, 1024)), 125_086_497_008, QWEN_LARGE),
    "Qwen3.5-397B-A17B": (qwen(4096, 60, 32, 2, 64, **experts(512, 10, 1024)), 403_397_928_944, QWEN_LARGE),
    "gemma-3-270m": (GEMMAS["gemma3-270m"], 268_098_176, NONE),
    "gemma-3-1b": (GEMMAS["gemma3-1b"], 999_885_952, NONE),
    "gemma-3-4b": (GEMMAS["gemma3-4b"], 4_300_079_472, GEMMA3),
    "gemma-3-12b": (GEMMAS["gemma3-12b"], 12_187_325_040, GEMMA3),
    "gemma-3-27b": (GEMMAS["gemma3-27b"], 27_432_406_640, GEMMA3),
    "gemma-4-E2B": (GEMMAS["gemma4-e2b"], 5_123_178_051, GEMMA4_E),
    "gemma-4-E4B": (GEMMAS["gemma4-e4b"], 7_996_156_490, GEMMA4_E),
    "gemma-4-12B": (GEMMAS["gemma4-12b"], 11_959_730_224, GEMMA4_12B),
    "gemma-4-26B-A4B": (GEMMAS["gemma4-26b-a4b"], 25_805_936_206, GEMMA4),
    "gemma-4-31B": (GEMMAS["gemma4-31b"], 31_273_088_876, GEMMA4),
}


def count(module: Any, without: str = "-") -> int:
    return sum(prod(x.shape) for name, x in tree_flatten(module.parameters()) if without not in name)


def unread(config: Any, hidden: int) -> int:
    """Key and value projections and key norms of layers that read another's: in the files, and not ours."""
    if not isinstance(config, GemmaConfig):
        return 0
    shared = [layer for layer in config.layers if layer.source is not None]
    return sum(2 * hidden * s.num_kv_heads * s.head_dim + s.head_dim for s in shared)


@pytest.mark.parametrize("size", SIZES)
def test_every_parameter_of_the_published_checkpoint(size: str) -> None:
    config, published, (tower, to_hidden) = SIZES[size]
    before, kind = mx.get_active_memory(), architecture(config)
    parsed = kind.parse(config)
    model = kind.build(parsed)
    ours = count(model) + (count(kind.head(parsed, model)) if kind.head is not None else 0)
    assert ours + unread(parsed, model.hidden_size) + tower + to_hidden * model.hidden_size == published
    assert mx.get_active_memory() - before < 1 << 26  # nothing was allocated


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
        ("Qwen3.6-27B, 3.8-27B", 16 * 2 * 4 * 256 * 2, 48 * 48 * 128 * 128 * 4),
        ("Qwen3.6-35B-A3B", 10 * 2 * 2 * 256 * 2, 30 * 32 * 128 * 128 * 4),
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
