"""PEFT's adapters of every target on models of transformers: the logits are those of the folder into which PEFT merged the adapter, or the
adapter is refused by a sentence that names the layer or the key. Needs PyTorch and PEFT."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("peft", reason="needs PEFT")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

import mlx.core as mx  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from mlxspec.errors import ModelError  # noqa: E402
from mlxspec.kernels.flat import FlatRows  # noqa: E402
from mlxspec.models.assemble import assemble_folder  # noqa: E402
from mlxspec.models.fill import evaluate  # noqa: E402
from mlxspec.models.folder import ModelFolder  # noqa: E402

_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 320, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
}  # fmt: skip
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MULTIPLIERS = {
    "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.65, "lm_head_multiplier": 0.039, "mlp_multipliers": [0.88, 0.5],
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.2357, "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.31],
}  # fmt: skip
_MAMBA = {
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_IN_TURN = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "mixtral": {"head_dim": 16, "num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 48},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, **_EXPERTS},
    "qwen3_next": {"head_dim": 32, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": {"head_dim": 32, **_LINEAR},
    "qwen3_5_moe_text": {"head_dim": 32, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 48},
    "gemma": {"tie_word_embeddings": True, "head_dim": 16},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 16, "sliding_window": 64},
    "gemma3_text": {"head_dim": 16, **_IN_TURN},
    "gemma4_text": {
        "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48, "num_hidden_layers": 6,
    },
    "phi3": {"eos_token_id": 2},
    "phi": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
    },
    "olmo2": {},
    "olmo3": _IN_TURN,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {
        "tie_word_embeddings": True,
        "head_dim": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4, "sliding_window": 16,
    },
    "glm4": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16, **_ROUTED},
    "deepseek_v3": {**_MLA, **_ROUTED, "num_key_value_heads": 4},
    "gpt_oss": {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_IN_TURN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "falcon_h1": {"head_dim": 16, **_MULTIPLIERS, **_MAMBA, "mamba_d_ssm": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4, **_EXPERTS, "num_dense_layers": 1,
        "tie_word_embeddings": True,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
        "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "head_dim": 16, "layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, **_ROUTED, "moe_shared_expert_intermediate_size": 48,
    },
    "ernie4_5": {"head_dim": 16},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "exaone4": {**_IN_TURN, "sliding_window_pattern": 2},
    "seed_oss": {"head_dim": 16},
    "apertus": {},
    "gpt_neox": {"intermediate_size": 256},
    "gpt2": {"tie_word_embeddings": True, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
}  # fmt: skip
TOKENS = list(range(5, 29))


def make(family: str, folder: Path) -> Any:
    """A model of transformers with random weights, saved there."""
    config = transformers.AutoConfig.for_model(family, **_SHAPE | MODELS[family])
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, value in model.named_parameters():
        if value.ndim > 1 and "embed" not in name and "conv" not in name:
            torch.nn.init.normal_(value, std=value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def targets(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each kind of layer alone, the stacked experts, and all linear layers with rsLoRA."""
    linear = (torch.nn.Linear, torch.nn.Embedding, transformers.pytorch_utils.Conv1D)
    for leaf in sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, linear)}):
        yield leaf, {"target_modules": [leaf]}
    stacks = {
        n.partition("layers.")[2].partition(".")[2]
        for n, p in model.named_parameters()
        if p.ndim == 3 and "conv" not in n
    }
    for name in sorted(stacks - {""}):
        yield name, {"target_modules": [], "target_parameters": [name]}
    yield "all linear", {"target_modules": "all-linear", "use_rslora": True}
    yield "attention by DoRA", {"target_modules": r".*\.[qk]_proj", "use_dora": True}


@torch.no_grad()
def write(family: str, settings: dict[str, Any], base: Path, adapter: Path, merged: Path) -> None:
    """Write an adapter with random values of the model in `base`, and the model into which PEFT has merged it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **settings)).eval()
    torch.manual_seed(4)
    for _, value in made.named_parameters():
        if value.requires_grad:
            value += 0.1 * torch.randn_like(value)
    made.save_pretrained(adapter)
    made.merge_and_unload().save_pretrained(merged)


def logits_of(folder: Path, adapter: Path | None = None) -> np.ndarray:
    made = assemble_folder(ModelFolder(folder), mx.float32, adapter=adapter and str(adapter))
    evaluate([made.model])
    cache = made.model.make_cache(1)
    return np.array(
        made.model.forward(mx.array(TOKENS), FlatRows((len(TOKENS),)), cache, logits_at="all").logits
    )


def outcome(family: str, name: str, settings: dict[str, Any], base: Path, folder: Path) -> str:
    """ "equal", or the sentence that refuses the adapter; else what is wrong, which begins with "silent"."""
    write(family, settings, base, folder / "adapter", folder / "merged")
    right, plain = logits_of(folder / "merged"), logits_of(base)
    largest = np.abs(right).max()
    try:
        found = logits_of(base, folder / "adapter")
    except ModelError as error:
        return str(error)
    off, change = np.abs(found - right).max() / largest, np.abs(right - plain).max() / largest
    return (
        "equal"
        if off < max(2e-4, 1e-2 * change) and off < 1e-2
        else f"silent: {off:.1e} of a change of {change:.1e}"
    )


@pytest.mark.parametrize("family", MODELS)
def test_every_target_is_merged_or_refused_by_name(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path / "base")
    logits_of(tmp_path / "base")
    found: dict[str, str] = {}
    for i, (name, settings) in enumerate(targets(model)):
        (folder := tmp_path / str(i)).mkdir()
        try:
            found[name] = outcome(family, name, settings, tmp_path / "base", folder)
        except ValueError as error:  # a layer that PEFT itself cannot adapt or merge
            found[name] = f"not made: {error}"
    print(json.dumps({family: found}))
    assert not {name: said for name, said in found.items() if said.startswith("silent")}
    assert Counter(found.values())["equal"] >= 2
