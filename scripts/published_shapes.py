"""Shapes of published models, and the memory they take, for tests and for scripts/write_checkpoint.

A shape here is a config.json as the hub has it. Tests hold each against the number of parameters of the published checkpoint, so the
memory is computed and not copied from anywhere. Knows shapes and names; asks nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxspec.checkpoints.memory import DEFAULT_CONTEXT, state_bytes
from mlxspec.models.registry import architecture

BITS = {"4 bits": 4.5, "8 bits": 8.5, "bfloat16": 16.0}  # a weight takes with its share of a scale and a bias


def _qwen(
    hidden: int, layers: int, heads: int, kv: int, linear: int, ffn: int | dict[str, int], tied: bool = False
) -> dict[str, Any]:
    """heads, kv: of attention; linear: value heads of Gated DeltaNet; ffn: width of the feed-forward layers, or their experts."""
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
    if isinstance(ffn, int):
        return {"model_type": "qwen3_5", "text_config": text | {"intermediate_size": ffn}}
    return {"model_type": "qwen3_5_moe", "text_config": text | ffn}


def _qwen3(
    hidden: int, layers: int, heads: int, kv: int, ffn: int | dict[str, int], tied: bool = False
) -> dict[str, Any]:
    """Plain Qwen3. ffn: width of the feed-forward layers, or their experts."""
    text = {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }
    if isinstance(ffn, int):
        return {"model_type": "qwen3", "intermediate_size": ffn, **text}
    ffn = {k: v for k, v in ffn.items() if not k.startswith("shared_")}
    return {"model_type": "qwen3_moe", "norm_topk_prob": True, **text, **ffn}


def _qwen3_next() -> dict[str, Any]:
    text: dict[str, Any] = _qwen(2048, 48, 16, 2, 32, _experts(512, 10, 512))["text_config"]
    return text | {"model_type": "qwen3_next", "vocab_size": 151936}


def _experts(num: int, each: int, size: int) -> dict[str, int]:
    sizes = {"moe_intermediate_size": size, "shared_expert_intermediate_size": size}
    return {"num_experts": num, "num_experts_per_tok": each, **sizes}


def _gemma3(
    hidden: int, layers: int, heads: int, kv: int, ffn: int, window: int, dim: int, vocab: int
) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "sliding_window": window,
        "head_dim": dim,
    }


def _gemma4(
    hidden: int, layers: int, heads: int, kv: int, ffn: int, interval: int, **more: Any
) -> dict[str, Any]:
    """As on the hub: a multimodal config around it."""
    kinds = ["sliding_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    text = {
        "vocab_size": 262144,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "layer_types": kinds,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }
    return {"model_type": "gemma4", "text_config": text | more}


_E = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "sliding_window": 512}
_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_SAME = {"attention_k_eq_v": True, "sliding_window": 1024}

# By shape. The names are the repositories' that have it; instruction-tuned Gemmas end in -it.
CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "Qwen3.5-0.8B": (("Qwen/Qwen3.5-0.8B",), _qwen(1024, 24, 8, 2, 16, 3584, tied=True)),
    "Qwen3.5-2B": (("Qwen/Qwen3.5-2B",), _qwen(2048, 24, 8, 2, 16, 6144, tied=True)),
    "Qwen3.5-4B": (("Qwen/Qwen3.5-4B",), _qwen(2560, 32, 16, 4, 32, 9216, tied=True)),
    "Qwen3.5-9B": (("Qwen/Qwen3.5-9B",), _qwen(4096, 32, 16, 4, 32, 12288)),
    "Qwen3.5-27B": (
        ("Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"),
        _qwen(5120, 64, 24, 4, 48, 17408),
    ),
    "Qwen3.5-35B-A3B": (
        ("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"),
        _qwen(2048, 40, 16, 2, 32, _experts(256, 8, 512)),
    ),
    "Qwen3.5-122B-A10B": (
        ("Qwen/Qwen3.5-122B-A10B",),
        _qwen(3072, 48, 32, 2, 64, _experts(256, 8, 1024)),
    ),
    "Qwen3.5-397B-A17B": (
        ("Qwen/Qwen3.5-397B-A17B",),
        _qwen(4096, 60, 32, 2, 64, _experts(512, 10, 1024)),
    ),
    "Qwen3-0.6B": (("Qwen/Qwen3-0.6B",), _qwen3(1024, 28, 16, 8, 3072, tied=True)),
    "Qwen3-1.7B": (("Qwen/Qwen3-1.7B",), _qwen3(2048, 28, 16, 8, 6144, tied=True)),
    "Qwen3-4B": (
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"),
        _qwen3(2560, 36, 32, 8, 9728, tied=True),
    ),
    "Qwen3-8B": (("Qwen/Qwen3-8B",), _qwen3(4096, 36, 32, 8, 12288)),
    "Qwen3-14B": (("Qwen/Qwen3-14B",), _qwen3(5120, 40, 40, 8, 17408)),
    "Qwen3-32B": (("Qwen/Qwen3-32B",), _qwen3(5120, 64, 64, 8, 25600)),
    "Qwen3-30B-A3B": (
        (
            "Qwen/Qwen3-30B-A3B",
            "Qwen/Qwen3-30B-A3B-Instruct-2507",
            "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        ),
        _qwen3(2048, 48, 32, 4, _experts(128, 8, 768)),
    ),
    "Qwen3-235B-A22B": (
        ("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B-Instruct-2507"),
        _qwen3(4096, 94, 64, 4, _experts(128, 8, 1536)),
    ),
    "Qwen3-Next-80B-A3B": (("Qwen/Qwen3-Next-80B-A3B-Instruct",), _qwen3_next()),
    "gemma-3-270m": (("google/gemma-3-270m-it",), _gemma3(640, 18, 4, 1, 2048, 512, 256, 262144)),
    "gemma-3-1b": (("google/gemma-3-1b-it",), _gemma3(1152, 26, 4, 1, 6912, 512, 256, 262144)),
    "gemma-3-4b": (("google/gemma-3-4b-it",), _gemma3(2560, 34, 8, 4, 10240, 1024, 256, 262208)),
    "gemma-3-12b": (("google/gemma-3-12b-it",), _gemma3(3840, 48, 16, 8, 15360, 1024, 256, 262208)),
    "gemma-3-27b": (("google/gemma-3-27b-it",), _gemma3(5376, 62, 32, 16, 21504, 1024, 128, 262208)),
    "gemma-4-E2B": (
        ("google/gemma-4-E2B-it",),
        _gemma4(1536, 35, 8, 1, 6144, 5, num_kv_shared_layers=20, use_double_wide_mlp=True, **_E),
    ),
    "gemma-4-E4B": (
        ("google/gemma-4-E4B-it",),
        _gemma4(2560, 42, 8, 2, 10240, 6, num_kv_shared_layers=18, **_E),
    ),
    "gemma-4-12B": (
        ("google/gemma-4-12B-it",),
        _gemma4(3840, 48, 16, 8, 15360, 6, num_global_key_value_heads=1, **_SAME),
    ),
    "gemma-4-26B-A4B": (
        ("google/gemma-4-26B-A4B-it",),
        _gemma4(2816, 30, 16, 8, 2112, 6, num_global_key_value_heads=2, **_SAME, **_EXPERTS),
    ),
    "gemma-4-31B": (
        ("google/gemma-4-31B-it",),
        _gemma4(5376, 60, 32, 16, 21504, 6, num_global_key_value_heads=4, **_SAME),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Known:
    """One shape. names: repositories that have it. parameters: of the text model, without head; weights: its bytes by format; state: of one
    row of `context` tokens in bfloat16. head_bytes: of the MTP head at 4 bits, 0 where there is none."""

    names: tuple[str, ...]
    parameters: int
    weights: dict[str, int]
    state: int
    context: int
    head_bytes: int


def known(context: int | None = None) -> list[Known]:
    """All of them. context: tokens of the row that the memory is for (default 8192). Allocates nothing."""
    return [_known(names, config, context or DEFAULT_CONTEXT) for names, config in CONFIGS.values()]


def _known(names: tuple[str, ...], config: dict[str, Any], context: int) -> Known:
    kind = architecture(config)
    parsed = kind.parse(config)
    model = kind.build(parsed)
    head = 0 if kind.head is None else _count(kind.head(parsed, model))
    parameters = _count(model)
    model.set_dtype(mx.bfloat16)
    context = min(context, parsed.max_context)
    state = state_bytes(model, context, 1)
    weights = {name: round(parameters * bits / 8) for name, bits in BITS.items()}
    head_bytes = round(head * BITS["4 bits"] / 8)
    return Known(
        names=names,
        parameters=parameters,
        weights=weights,
        state=state,
        context=context,
        head_bytes=head_bytes,
    )


def _count(module: Any) -> int:
    return sum(prod(value.shape) for _, value in tree_flatten(module.parameters()))
