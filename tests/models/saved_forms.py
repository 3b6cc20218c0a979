"""Small random models of transformers' classes, each saved by `save_pretrained` in a form of its own, and what becomes of a folder here.

A form is a model_type and the values in which its config.json differs from a small model of that type. Needs PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.assemble import assemble_by_mlx_lm, assemble_folder
from mlxspec.models.folder import ModelFolder
from mlxspec.models.runnable import judge

_LAYERS = 4
# given where a type's config has the key; windows and chunks are shorter than a text
_SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": _LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "num_expert_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_start_index": 1, "moe_layer_end_index": _LAYERS - 1, "num_dense_layers": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_heads": 4, "linear_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_d_ssm": 128, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "mamba_dt_rank": 8, "state_size": 16,
    "time_step_rank": 8, "n_groups": 2, "num_heads": 8, "lru_width": 64, "attention_window_size": 16, "sliding_window": 16,
    "layer_types": None, "mlp_layer_types": None, "num_nextn_predict_layers": 0, "index_head_dim": 16, "index_n_heads": 2,
    "index_topk": 128, "n_embd": 64, "n_layer": _LAYERS, "n_head": 4, "n_positions": 512, "rotary_dim": 8, "model_max_length": 512,
    "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "num_layers": 2, "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 48, "zero_expert_num": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 96,
}  # fmt: skip
_ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
_LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
_LLAMA3 = {
    "rope_parameters": _ROPE
    | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
}
_YARN_ROPE = _ROPE | {"rope_type": "yarn", "factor": 4.0}
_YARN = {"rope_parameters": _YARN_ROPE}
_DEEPSEEK_YARN = {
    "rope_parameters": _YARN_ROPE
    | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0}
}


def _longrope(pairs: int, short_until: int, **more: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": short_until,
        "short_factor": [1.0 + i / 4 for i in range(pairs)], "long_factor": [4.0 + i for i in range(pairs)], **more,
    }  # fmt: skip
    return {"rope_parameters": rope, "original_max_position_embeddings": short_until}


_IN_TURN = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR_IN_TURN = {"layer_types": ["linear_attention", "full_attention"] * 2}
_MUPS = {
    "key_multiplier": 0.4, "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "mlp_multipliers": [0.9, 0.4],
    "attention_out_multiplier": 0.7, "attention_in_multiplier": 1.2, "ssm_multipliers": [0.4, 0.6, 0.8, 1.2, 0.7], "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.3,
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
}
_KINDS_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_TURNED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "global_head_dim": 32,
}


# by name, whose first word is the model_type: what differs from the small model of that type
FORMS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in (
        "afmoe", "apertus", "bitnet", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5",
        "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "glm",
        "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_oss", "gptj", "granite", "granitemoe",
        "helium", "hunyuan_v1_dense", "internlm3", "iquestcoder", "laguna", "llama", "longcat_flash", "mamba", "mellum",
        "minicpm3", "minimax", "minimax_m2", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3",
        "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
        "qwen3_next", "recurrent_gemma", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
    )},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neox": {"intermediate_size": 256},
    "mamba2": {},
    "mamba2 1 group": {"n_groups": 1},
    "mimo_v2_flash": {"rope_parameters": _TURNED, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "mistral4": {"head_dim": 16, "qk_nope_head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "bailing_hybrid": _LINEAR_IN_TURN,
    "kimi_linear": _LINEAR_IN_TURN | {"q_lora_rank": None},
    "granitemoehybrid": _LINEAR_IN_TURN | _GRANITE | {"mamba_n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "llama4_text": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "nemotron_h": {
        "moe_shared_expert_intermediate_size": 32, "sliding_window": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "olmo_hybrid": _LINEAR_IN_TURN | {"linear_num_key_heads": 4},
    **{kind: {} for kind in (
        "gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "mistral3", "llava", "qwen3_vl", "qwen3_vl_moe", "kimi_k25",
    )},
    **{kind: {"rope_parameters": _MROPE} for kind in ("qwen2_vl", "qwen2_5_vl")},
    "afmoe mup": {"mup_enabled": True, "route_scale": 2.5},
    "apertus plain": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "cohere norms": {"use_qk_norm": True},
    "cohere untied": {"tie_word_embeddings": False},
    "cohere2 layers": _IN_TURN,
    "deepseek_v2 yarn": _DEEPSEEK_YARN,
    "deepseek_v2 groups": {"topk_method": "group_limited_greedy", "n_group": 2, "routed_scaling_factor": 3.0},
    "deepseek_v2 lite": {"q_lora_rank": None, "norm_topk_prob": True},
    "deepseek_v3 yarn": _DEEPSEEK_YARN,
    "deepseek_v3 groups": {"n_group": 2, "num_local_experts": 8, "first_k_dense_replace": 0},
    "deepseek_v3 unnormed": {"norm_topk_prob": False, "q_lora_rank": None},
    "dots1 norms": {"norm_topk_prob": True, "routed_scaling_factor": 2.0},
    "ernie4_5 biases": {"use_bias": True, "tie_word_embeddings": False},
    "exaone4 llama3": _LLAMA3,
    "exaone4 full": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "falcon_h1 mups": _MUPS,
    "falcon_h1 norm": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "gemma untied": {"tie_word_embeddings": False},
    "gemma2 caps": {"attn_logit_softcapping": None, "final_logit_softcapping": 5.0},
    "gemma3_text ropes": {"rope_parameters": _KINDS_ROPE, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": _GEMMA4 | {"hidden_size_per_layer_input": 0},
    "gemma4_text E": _GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "gemma4_text experts": _GEMMA4 | {
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "gemma4_text one": _GEMMA4 | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "glm whole": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}, "attention_bias": True},
    "glm4_moe norms": {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
    "glm4_moe groups": {"n_group": 2, "num_local_experts": 8, "norm_topk_prob": False},
    "gpt2 scales": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode heads": {"multi_query": False},
    "gpt_neox in turn": {"intermediate_size": 256, "use_parallel_residual": False},
    "gpt_oss plain": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "layer_types": ["full_attention"] * 4},
    "granite mups": _GRANITE | {"attention_bias": True, "mlp_bias": True},
    "granitemoe mups": _GRANITE,
    "granitemoehybrid dense": _LINEAR_IN_TURN | {"num_local_experts": 0, "mamba_n_groups": 1},
    "granitemoehybrid groups": _LINEAR_IN_TURN,
    "granitemoehybrid rope": {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
    "hunyuan_v1_dense alpha": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    "internlm3 biases": {"qkv_bias": True, "bias": True},
    "internlm3 dynamic": _DYNAMIC,
    "jamba one": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1},
    "lfm2 sized": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "lfm2_moe unbiased": {
        "layer_types": ["full_attention", "conv"] * 2, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.0,
    },
    "llama attention_factor": {"rope_parameters": _YARN_ROPE | {"attention_factor": 2.0}},
    "llama biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama dynamic": _DYNAMIC,
    "llama linear": _LINEAR,
    "llama llama3": _LLAMA3,
    "llama longrope": _longrope(8, 16),
    "llama yarn": _YARN,
    "llama4_text dense": {
        "tie_word_embeddings": True, "num_local_experts": 0, "moe_layers": [], "attn_temperature_tuning": False, "use_qk_norm": False,
    },
    "llama4_text tuned": {"num_experts_per_tok": 1, "floor_scale": 8, "no_rope_layers": [1, 0, 1, 0]},
    "mamba2 time steps": {"n_groups": 1, "time_step_limit": [0.1, 0.5]},
    "minicpm3 untied": {"tie_word_embeddings": False},
    "minimax_m2 partial": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "ministral3 plain": {"sliding_window": None},
    "mistral whole": {"sliding_window": None},
    "mixtral whole": {"sliding_window": None},
    "nemotron partial": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "attention_bias": True},
    "olmo2 yarn": _YARN,
    "olmo3 yarn": {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": _YARN_ROPE | {"attention_factor": 1.2},
    }},
    "olmoe normed": {"norm_topk_prob": True},
    "olmoe clipped": {"clip_qkv": 0.5},
    "phi norms": {"qk_layernorm": True},
    "phi3 longrope": _longrope(8, 16),
    "phi3 longrope, short": _longrope(8, 64),
    "phi3 longrope, partial": _longrope(6, 16, partial_rotary_factor=0.75),
    "phi3 whole": {"sliding_window": None, "tie_word_embeddings": True},
    "phimoe longrope": _longrope(8, 64, short_mscale=1.2, long_mscale=1.3) | {"attention_bias": True, "lm_head_bias": True},
    "phimoe biases": {"attention_bias": True, "lm_head_bias": True},
    "qwen2 windows": {"use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True},
    "qwen2 yarn": _YARN,
    "qwen2_moe normed": {"norm_topk_prob": True},
    "qwen2_moe mixed": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3 biases": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3 dynamic": _DYNAMIC,
    "qwen3 llama3": _LLAMA3,
    "qwen3 windows": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3 yarn": {"rope_parameters": _YARN_ROPE | {"attention_factor": 1.3}},
    "qwen3_moe normed": {"norm_topk_prob": True, "head_dim": 16},
    "qwen3_moe mixed": {"mlp_only_layers": [1], "head_dim": 16},
    "qwen3_5_text layers": {"layer_types": ["full_attention", "linear_attention"] * 2, "tie_word_embeddings": True},
    "qwen3_5_text yarn": {"rope_parameters": _YARN_ROPE | {"partial_rotary_factor": 0.5}},
    "qwen3_next unnormed": {"norm_topk_prob": False, "decoder_sparse_step": 2},
    "recurrent_gemma one": {"num_key_value_heads": 1},
    "seed_oss biases": {"attention_out_bias": True, "mlp_bias": True},
    "smollm3 layers": {"no_rope_layers": [0, 1, 1, 0]},
    "smollm3 windows": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "stablelm parallel": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    "starcoder2 unbiased": {"use_bias": False, "sliding_window": None},
}  # fmt: skip
MAX_CONTEXT = {"phi3 longrope, short": 64, "phimoe longrope": 64}  # the longest text that is asked for


def kind_of(name: str) -> str:
    return name.split()[0]


def _small(default: Any) -> dict[str, Any]:
    """Return the values of `_SMALL` that a config of transformers has."""
    told = default.to_dict()
    names = {*told, *default.attribute_map} - ({"layer_types"} & {*default.attribute_map})
    small = {key: value for key, value in _SMALL.items() if key in names}
    if "qk_rope_head_dim" in told:
        small |= {"head_dim": small["qk_rope_head_dim"], "num_key_value_heads": small["num_attention_heads"]}
    return small


def make(name: str, folder: Path) -> Any:
    """Return a model of transformers with random weights, saved in the folder."""
    kind = kind_of(name)
    default = CONFIG_MAPPING[kind]()
    text = getattr(default, "text_config", None)
    values = _small(default if text is None else text) | FORMS[name]
    if text is not None:
        towers = {
            "vision_config": default.vision_config,
            "audio_config": getattr(default, "audio_config", None),
        }
        values = {"text_config": values, **{name: _small(tower) for name, tower in towers.items() if tower}}
    config = CONFIG_MAPPING[kind](**values)
    config._attn_implementation = "eager"
    title = type(config).__name__.removesuffix("Config") + (
        "ForCausalLM" if text is None else "ForConditionalGeneration"
    )
    maker = getattr(transformers, title, None) or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    torch.manual_seed(3)
    model = maker(config).float().eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if not value.is_floating_point():
                continue
            if value.ndim < 2 or "A_log" in key:
                value += 0.1 * torch.randn_like(value)
            else:
                torch.nn.init.normal_(value, std=1.0 if "embed" in key else 1.5 * value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


class Found(NamedTuple):
    """difference: of logits from transformers', over the largest of them; None where the folder is refused. said: notices, or the
    refusal."""

    difference: float | None
    said: tuple[str, ...]


def tried(name: str, folder: Path, num: int = 40) -> Found:
    """Save a model of this form, run it here over `num` tokens at once and in pieces with a cache, and return what was found."""
    tokens = np.random.default_rng(1).integers(33, 250, num).astype(np.int32)
    model = make(name, folder)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens[None].astype(np.int64)), use_cache=False).logits[0].numpy()
    found = ModelFolder(folder)
    try:
        if judge(found.config(), "auto", kind="model").by_mlx_lm:
            ours = assemble_by_mlx_lm(found, mx.float32, max_context=MAX_CONTEXT.get(name))
        else:
            ours = assemble_folder(found, mx.float32)
        mx.eval(ours.model.parameters())
    except ModelError as error:
        return Found(None, (str(error),))
    logits = [_logits(ours.model, tokens, widths) for widths in ((num,), (num - 23, 1, 9, 1, 12))]
    difference = max(float(np.abs(ours - theirs).max()) for ours in logits) / float(np.abs(theirs).max())
    return Found(difference, ours.notices)


def _logits(model: Any, tokens: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    cache, at, found = model.make_cache(1), 0, []
    for width in widths:
        logits = model.forward(mx.array(tokens[at : at + width]), FlatRows((width,)), cache).logits
        found.append(np.array(logits.astype(mx.float32)))
        cache.commit()
        at += width
    return np.concatenate(found)
