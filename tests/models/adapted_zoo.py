"""Random tiny modules of mlx-lm's architectures and of our own, one or more for each kind of cache, and what mlx-lm itself gives for a
prompt.

Windows and chunks have 16 tokens, so that texts of the tests leave them behind.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step

from mlxspec.demo import TARGET
from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.models.adapted.classes import classes_of
from mlxspec.models.adapted.model import AdaptedConfig, AdaptedModel
from mlxspec.sampling.sampler import BatchSampler

VOCAB, DEMO_VOCAB = 97, 2048
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "attention_bias": False,
}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 8,
}
_MAMBA2 = {
    "mamba_proj_bias": False,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
}
_IN_TURN = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
_PLAIN = _SIZES | {
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_SPARSE = _PLAIN | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_GRANITE = _PLAIN | {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
}
_BAILING = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "llama windows": _SIZES | _IN_TURN,
    "mistral3": {
        "text_config": _SIZES
        | _IN_TURN
        | {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            },
        }
    },
    "gpt_oss": _SIZES | _IN_TURN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": _SIZES | {"attention_bias": False, "partial_rotary_factor": 0.5},
    "glm4_moe": _SIZES
    | _EXPERTS
    | {
        "rope_scaling": None,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": _SIZES | _EXPERTS | _MLA,
    "deepseek_v32": _SIZES | _EXPERTS | _MLA | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 512},
    "lfm2": _SIZES
    | {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 64,
        "full_attn_idxs": [1, 3],
    },
    "granitemoehybrid": _SIZES
    | {
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "shared_intermediate_size": 64,
    },
    "nemotron_h": _SIZES
    | _MAMBA2
    | {
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "hybrid_override_pattern": ["M", "*", "-", "M"],
    },
    "falcon_h1": _SIZES
    | {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_hidden_layers": 3,
    },
    "mamba": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 3,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": _MAMBA2
    | {
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 16,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "jamba": _SIZES
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "rwkv7": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "norm_eps": 1e-5,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "recurrent_gemma": _SIZES
    | {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
        "embeddings_scale_by_sqrt_dim": True,
    },
    "gemma2": _SIZES,
    "gemma3_text": _SIZES | {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gemma3n": {
        "text_config": _SIZES
        | _IN_TURN
        | {
            "model_type": "gemma3n_text",
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 4,
            "intermediate_size": [64] * 4,
        }
    },
    "qwen3_next": _SIZES
    | {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "full_attention_interval": 2,
    },
    "phi3": _SIZES | {"rope_scaling": None},
    "olmo3": _SIZES | _IN_TURN,
    "minimax": _SIZES
    | {
        "layer_types": _IN_TURN["layer_types"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
        "max_position_embeddings": 512,
        "use_qk_norm": True,
        "rotary_dim": 8,
        "scoring_func": "sigmoid",
    },
    "kimi_linear": _SIZES
    | {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "model_max_length": 4096,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "bailing_moe": _SIZES | _BAILING,
    "bailing_moe_linear": _SIZES | _BAILING | {"layer_group_size": 2, "group_norm_size": 1},
    "hunyuan_v1_dense": _SIZES,
    "smollm3": _SIZES | {"no_rope_layer_interval": 4},
    "starcoder2": _SIZES | {"norm_epsilon": 1e-5},
    "cohere2": _SIZES | {"hidden_size": 64, "sliding_window": 16, "sliding_window_pattern": 2},
    "llama4": {
        "text_config": _SIZES
        | {
            "model_type": "llama4_text",
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "use_qk_norm": True,
            "attn_temperature_tuning": 0,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
        }
    },
    "exaone4": _SIZES
    | {
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "default"},
        "sliding_window": 16,
        "sliding_window_pattern": "LG",
    },
    "ernie4_5": _SIZES | {"use_bias": False, "tie_word_embeddings": True},
    "seed_oss": _SIZES,
    "gpt_neox": _SIZES
    | {
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.5,
    },
    "baichuan_m1": _SIZES | {"sliding_window": 16, "sliding_window_layers": [0, 2], "conv_window": 2},
    "iquestloopcoder": _SIZES | {"loop_num": 2, "loop_window_size": 16},
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _SPARSE,
    "qwen2_moe": _SPARSE | {"shared_expert_intermediate_size": 32},
    "olmo2": _PLAIN,
    "olmoe": _SPARSE,
    "cohere": _PLAIN | {"layer_norm_eps": 1e-5, "logit_scale": 0.1, "use_qk_norm": False},
    "granite": _GRANITE,
    "granitemoe": _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": _PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": _PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi": _PLAIN | {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "stablelm": _PLAIN
    | {
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": False,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
    },
    "gemma": _PLAIN,
    "gemma4_text": _SIZES
    | {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "sliding_window_pattern": 3,
    },
    "internlm2": _PLAIN | {"bias": False},
    "internlm3": _PLAIN | {"bias": False, "qkv_bias": False},
    "glm": _PLAIN,
    "nemotron": _PLAIN | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "minicpm": _PLAIN | {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "helium": _PLAIN,
    "apertus": _PLAIN | {"post_norm": False, "qk_norm": True, "rope_scaling": {"rope_type": "default"}},
    "dots1": _SPARSE | _ROUTED,
    "deepseek": _SPARSE | _ROUTED | {"moe_layer_freq": 1},
    "ernie4_5_moe": _PLAIN
    | {
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "gpt2": {
        "n_ctx": 512,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCAB,
    },
    "mimo": _PLAIN | {"num_nextn_predict_layers": 0},
    "mimo_v2_flash": _SPARSE
    | _ROUTED
    | {
        "sliding_window": 16,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "swa_rope_theta": 1e4,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 16,
        "moe_layer_freq": [0, 1, 1, 1],
        "n_shared_experts": None,
        "partial_rotary_factor": 0.5,
        "layernorm_epsilon": 1e-5,
        "attention_value_scale": None,
    },
    "hunyuan": _SPARSE
    | {
        "num_shared_expert": 1,
        "moe_topk": 2,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "nanochat": _PLAIN | {"hidden_size": 64},
    "telechat3": _PLAIN,
    "laguna": _SPARSE | _IN_TURN,
    "talkie": _PLAIN,
    "afmoe": _SPARSE | _IN_TURN,
    "gptj": _PLAIN
    | {
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 512,
        "rotary_dim": 8,
        "layer_norm_epsilon": 1e-5,
    },
}
_STATES, _LOOKS = "keeps other things than keys and values", "computes with keys"
# those whose rows do not share all of a forward, and a part of the reason
BY_ROWS = {
    **dict.fromkeys(
        (
            *(
                "deepseek_v32",
                "lfm2",
                "granitemoehybrid",
                "nemotron_h",
                "falcon_h1",
                "mamba",
                "mamba2",
                "jamba",
                "rwkv7",
            ),
            *("recurrent_gemma", "qwen3_next", "kimi_linear", "bailing_moe_linear", "llama4", "baichuan_m1"),
        ),
        _STATES,
    ),
    "deepseek_v3": _LOOKS,
    "gemma2": _LOOKS,
}
WHOLE = ("deepseek_v32", "llama4")  # those of them of which no part can be shared
# a slice of every kind of cache: growing, windows, chunks, recurrent states, states and keys in one CacheList
FEW = ("llama", "gpt_oss", "lfm2", "mamba2")


def module_type(name: str) -> str:
    return name.split()[0]


def config_of(name: str, vocab: int = VOCAB) -> dict[str, Any]:
    """Its config.json."""

    def sized(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: vocab if k.startswith("vocab_size") else sized(v) for k, v in value.items()}

    return sized({"model_type": module_type(name)} | ARCHITECTURES[name])


@functools.cache
def module_of(name: str, vocab: int = VOCAB) -> nn.Module:
    """float32, with weights that decide clearly."""
    config = config_of(name, vocab)
    model, arguments = classes_of(config)
    mx.random.seed(7)
    module = model(arguments.from_dict(config))

    def drawn(p: mx.array) -> mx.array:
        return mx.random.normal(p.shape) * 0.2 if p.ndim > 1 else p + 0.1 * mx.random.normal(p.shape)

    module.update(tree_map(drawn, module.parameters()))
    mx.eval(module.parameters())
    module.eval()
    return module


def adapted(module: nn.Module, max_context: int = 512, *, alone: bool = False) -> AdaptedModel:
    """alone: rows run one by one, whatever the module can."""
    config = AdaptedConfig(model_type="tiny", made_by="mlx-lm", told="", max_context=max_context)
    model = AdaptedModel(module, config)
    if alone:
        model.seams, model.parts, model.by_rows = None, None, "a test wants it so"
    return model


def model_of(name: str, vocab: int = VOCAB) -> AdaptedModel:
    """Of an architecture; with "alone" behind its name its rows run one by one."""
    return adapted(module_of(name.removesuffix(" alone"), vocab), alone=name.endswith(" alone"))


def write(name: str, folder: Path, **more: Any) -> Path:
    """A checkpoint of it as mlx-lm writes one, with the tokenizer of the built-in model."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TARGET / file, folder / file)
    (folder / "config.json").write_text(json.dumps(config_of(name, DEMO_VOCAB) | more))
    weights = dict(tree_flatten(module_of(name, DEMO_VOCAB).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def theirs(module: nn.Module, prompt: Sequence[int], num: int) -> list[int]:
    """What mlx-lm's own loop gives."""
    return [int(token) for token, _ in generate_step(mx.array(prompt), module, max_tokens=num)]


class Noisy(Drafter):
    """Drafts texts that it knows, often with a wrong token somewhere."""

    name = "noisy"

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts, self._random = [list(t) for t in texts], random.Random(3)

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [Draft.of(self._draft(list(ask.history), ask.limit)) for ask in asks]

    def _draft(self, history: list[int], limit: int) -> list[int]:
        text = next((t for t in self._texts if t[: len(history)] == history), [])
        draft = text[len(history) : len(history) + min(limit, self._random.randint(1, 7))]
        if draft and self._random.random() < 0.6:
            at = self._random.randrange(len(draft))
            draft[at] = (draft[at] + 1) % VOCAB
        return draft
