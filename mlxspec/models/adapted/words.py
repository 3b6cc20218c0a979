"""Says a config.json and tensors in the words of mlx-lm's classes, where transformers 5 writes other ones: rotary positions in
`rope_parameters`, new names of layers and sizes, and no key for what a class has built in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import mlx.core as mx

from mlxspec.loading.weights import Weights
from mlxspec.models.adapted.classes import classes_of

Part = Mapping[str, Any]
_FULL, _WINDOWED = "full_attention", "sliding_attention"


def older_words(config: Part) -> dict[str, Any]:
    """Return the members to add to a config.json, also to its `text_config`, for classes of mlx-lm that do not know the keys of
    transformers 5 and would use defaults or fail."""
    plain = {key: plain_value(value) for key, value in config.items()}
    words = {key: value for key, value in plain.items() if value != config[key]}
    _, arguments = classes_of(dict(config))
    knows_rope = "rope_parameters" in signature(arguments).parameters
    words |= _absent(plain, ({} if knows_rope else _rope(plain)) | _of_kind(plain))
    text = plain.get("text_config")
    if isinstance(text, Mapping):
        inner = _absent(text, _rope(text) | _of_kind(text))
        if config.get("tie_word_embeddings") is not None:
            inner["tie_word_embeddings"] = config["tie_word_embeddings"]
        if inner:
            words["text_config"] = {**text, **inner}
    return words


def plain_value(value: Any) -> Any:
    """Return a value of config.json in which each object that transformers writes for a float outside of JSON, such as infinity, is that
    float."""
    if isinstance(value, Mapping):
        named = value.get("__float__")
        return float(named) if isinstance(named, str) else {k: plain_value(v) for k, v in value.items()}
    return [plain_value(item) for item in value] if isinstance(value, list) else value


def _absent(part: Part, words: Part) -> dict[str, Any]:
    return {key: value for key, value in words.items() if part.get(key) is None or key in _RENAMED}


def _rope(part: Part) -> dict[str, Any]:
    """Return the older keys for `rope_parameters`, which may be for all layers or for each kind of layers."""
    rope = part.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    if isinstance(rope.get(_FULL), Mapping):
        theta = {"rope_local_base_freq": rope[_WINDOWED].get("rope_theta")} if _WINDOWED in rope else {}
        return _scaled(rope[_FULL]) | theta
    return {} if any(isinstance(value, Mapping) for value in rope.values()) else _scaled(rope)


def _scaled(rope: Part) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    said = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    said["rope_scaling"] = None
    if kind != "default":
        said["rope_scaling"] = {"type": kind, **{k: v for k, v in rope.items() if k not in said}}
    return said


def _of_kind(part: Part) -> dict[str, Any]:
    words, own = (
        _head_dim(part.get("hidden_size"), part.get("num_attention_heads")),
        _WORDS.get(str(part.get("model_type"))),
    )
    return words if own is None else words | own(part)


def _head_dim(hidden: Any, heads: Any) -> dict[str, Any]:
    is_known = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    return {"head_dim": hidden // heads} if is_known else {}


def _share_turned(part: Part, default: float = 1.0) -> float:
    rope = part.get("rope_parameters")
    found = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return float(found or part.get("partial_rotary_factor") or default)


def _neox(part: Part) -> dict[str, Any]:
    return {
        "rotary_emb_base": (part.get("rope_parameters") or {}).get("rope_theta", 10000),
        "rotary_pct": _share_turned(part, 0.25),
    }


def _granite(part: Part) -> dict[str, Any]:
    names = {"linear_attention": "mamba", _FULL: "attention"}
    named = [names.get(name, name) for name in part.get("layer_types") or []]
    position = part.get("position_embedding_type") or "nope"
    words: dict[str, Any] = {"layer_types": named, "position_embedding_type": position}
    if not part.get("num_local_experts"):
        words["intermediate_size"] = part.get("shared_intermediate_size")
    return words


def _exaone4(part: Part) -> dict[str, Any]:
    named = part.get("layer_types") or []
    letters = "".join("L" if name == _WINDOWED else "G" for name in named)
    return {"sliding_window_pattern": letters if _WINDOWED in named else None} if letters else {}


def _kimi(part: Part) -> dict[str, Any]:
    named = list(part.get("layer_types") or [])
    return {
        "rope_theta": 10000.0,
        "first_k_dense_replace": list(part.get("mlp_layer_types") or []).count("dense"),
        "linear_attn_config": {
            "kda_layers": [i + 1 for i, name in enumerate(named) if name == "linear_attention"],
            "full_attn_layers": [i + 1 for i, name in enumerate(named) if name != "linear_attention"],
            "num_heads": part.get("linear_num_heads"),
            "head_dim": part.get("linear_head_dim"),
            "short_conv_kernel_size": part.get("linear_conv_kernel_dim"),
        },
    }


def _mimo(part: Part) -> dict[str, Any]:
    layers = {"swa_" + key: part.get(key) for key in ("head_dim", "num_attention_heads", "v_head_dim")}
    rope = part.get("rope_parameters") or {}
    return {
        **layers,
        "swa_num_key_value_heads": 2 * part.get("num_key_value_heads", 0),
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [int(name == _WINDOWED) for name in part.get("layer_types") or []],
        "layernorm_epsilon": part.get("rms_norm_eps"),
        "moe_layer_freq": [int(name == "sparse") for name in part.get("mlp_layer_types") or []],
        "n_shared_experts": None,
        "partial_rotary_factor": (rope.get(_FULL) or {}).get("partial_rotary_factor"),
        "sliding_window_size": part.get("sliding_window"),
        "swa_rope_theta": (rope.get(_WINDOWED) or {}).get("rope_theta"),
        **_DEEPSEEK,
    }


def _unstretched(part: Part, factor: Mapping[str, Any]) -> dict[str, Any]:
    """Return `factor` as `rope_scaling` for a model without scaled rotary positions, whose class requires such settings. factor: settings
    that scale by 1."""
    rope = part.get("rope_parameters") or {}
    is_plain = not part.get("rope_scaling") and rope.get("rope_type", "default") == "default"
    return {"rope_scaling": dict(factor)} if is_plain else {}


def _has_experts(part: Part) -> bool:
    """Return whether this Llama 4 has experts. mlx-lm's class for the text model alone does not have them."""
    return bool(part.get("num_local_experts", 16)) and part.get("moe_layers") != []


def _llama4(part: Part) -> dict[str, Any]:
    return {"model_type": "llama4", "text_config": {**part, **_absent(part, _rope(part))}}


_DEEPSEEK = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# By model_type, what mlx-lm's class wants to be told beside.
_WORDS: dict[str, Callable[[Part], dict[str, Any]]] = {
    "apertus": lambda part: {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "deepseek_v2": lambda part: _unstretched(part, {"type": "yarn", "factor": 1.0}),
    "exaone": lambda part: {
        "num_layers": part.get("num_hidden_layers"),
        "layer_norm_epsilon": part.get("rms_norm_eps"),
    },
    "exaone4": _exaone4,
    "exaone_moe": lambda part: {"is_moe_layer": [k == "sparse" for k in part.get("mlp_layer_types") or []]},
    "glm_moe_dsa": lambda part: {**_DEEPSEEK, "moe_layer_freq": 1},
    "gpt2": lambda part: {"n_ctx": part.get("n_positions")},
    "gpt_bigcode": lambda part: {"n_inner": 4 * part.get("n_embd", 0)},
    "gpt_neox": _neox,
    "granitemoehybrid": _granite,
    "kimi_linear": _kimi,
    "lfm2": lambda part: {"block_dim": part.get("hidden_size")},
    "llama4_text": lambda part: _llama4(part) if _has_experts(part) else {},
    "longcat_flash": lambda part: {
        "attention_method": "MLA",
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "zero_expert_type": "identity",
    },
    "mamba2": lambda part: {"intermediate_size": part.get("expand", 2) * part.get("hidden_size", 0)},
    "mellum": lambda part: {"num_experts": part.get("num_local_experts")},
    "minicpm3": lambda part: _unstretched(
        part,
        {"type": "longrope", "original_max_position_embeddings": part.get("max_position_embeddings")},
    ),
    "mimo_v2_flash": _mimo,
    "minimax_m2": lambda part: {
        "rotary_dim": int(part.get("head_dim", 0) * _share_turned(part)),
        "shared_intermediate_size": 0,
    },
    "nemotron_h": lambda part: (
        {"time_step_limit": [part["time_step_min"], float("inf")]}
        if part.get("time_step_min") and (part.get("layers_block_type") or not part.get("time_step_limit"))
        else {}
    ),
    "qwen3_vl_moe_text": lambda part: {"num_experts": part.get("num_local_experts"), "norm_topk_prob": True},
    "solar_open": lambda part: {
        "first_k_dense_replace": 0,
        "intermediate_size": part.get("moe_intermediate_size"),
        "partial_rotary_factor": 1.0,
    },
}
_RENAMED = (
    "intermediate_size",
    "layer_types",
    "model_type",
    "sliding_window_pattern",
    "time_step_limit",
)  # whose values have other names, not only the key


def older_names(kind: Any, weights: Weights) -> Weights:
    """Return a folder's tensors under the names that mlx-lm's code for this model_type reads. kind: the model_type."""
    if kind == "gpt_oss":
        return _apart(weights)
    if kind == "qwen3_vl_moe":
        return _inputs_first(weights)
    return {older_name(kind, name): value for name, value in weights.items()} if kind in _NAMES else weights


def older_name(kind: Any, name: str) -> str:
    """Return the name that mlx-lm's code for this model_type reads for a tensor, or for a path that ends with a dot. kind: the
    model_type."""
    for old, new in _NAMES.get(str(kind), ()):
        name = re.sub(old, new, name)
    return name


_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt2": ((r"^transformer\.", ""),),
    "kimi_linear": ((r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),),
    "llama4": ((r"^(model|lm_head)\.", r"language_model.\1."),),
    "mixtral": ((r"\.mlp\.gate\.", ".block_sparse_moe.gate."),),
    "nanochat": (
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.layers\.(\d+)\.self_attn\.o_", r"transformer.h.\1.attn.c_"),
        (r"^model\.layers\.(\d+)\.self_attn\.([qkv])_proj", r"transformer.h.\1.attn.c_\2"),
        (r"^model\.layers\.(\d+)\.mlp\.fc1", r"transformer.h.\1.mlp.c_fc"),
        (r"^model\.layers\.(\d+)\.mlp\.fc2", r"transformer.h.\1.mlp.c_proj"),
    ),
    "mimo_v2_flash": ((r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),),
    "nemotron_h": ((r"^model\.", "backbone."),),
    "olmo_hybrid": (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
}


_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")


def _apart(weights: Weights) -> Weights:
    """Return the float tensors of gpt-oss as mlx-lm's code reads them: each stack (E, in, out), whose columns alternate between gate and
    up, becomes stacks (E, out, in)."""
    found: Weights = {}
    for name, value in weights.items():
        stack = _STACK.fullmatch(name)
        if stack is None or not mx.issubdtype(value.dtype, mx.floating):
            found[name] = value
            continue
        value = value if stack[3] else value.swapaxes(1, 2)
        leaf = "bias" if stack[3] else "weight"
        if stack[2] == "down_proj":
            found[f"{stack[1]}.down_proj.{leaf}"] = value
        else:
            found[f"{stack[1]}.gate_proj.{leaf}"] = value[:, ::2]
            found[f"{stack[1]}.up_proj.{leaf}"] = value[:, 1::2]
    return found


def _inputs_first(weights: Weights) -> Weights:
    """Return the experts of Qwen3-VL as mlx-lm's code reads them: stacks (E, in, out). transformers 5 saves (E, out, in)."""
    found = dict(weights)
    for name, both in weights.items():
        down = name.removesuffix("gate_up_proj") + "down_proj"
        if name.endswith(".experts.gate_up_proj") and both.shape[1:] == (
            2 * weights[down].shape[2],
            weights[down].shape[1],
        ):
            found |= {name: both.swapaxes(1, 2), down: weights[down].swapaxes(1, 2)}
    return found
