"""Folders as transformers 5 saves them, form by form: logits are transformers', or a notice or a refusal names the key that they depend on.
Needs PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
from planting import catches

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from saved_forms import FORMS, kind_of, tried  # noqa: E402

MOST = 2e-3  # of the largest logit: a GELU by tanh is further off than roundings
NOTICED = {
    "cohere2 layers": "layer_types",
    "ernie4_5_moe": "moe_use_aux_free",
    "falcon_h1 mups": "attention_in_multiplier",
    "gpt_bigcode heads": "multi_query",
    "llama4_text dense": "attention_chunk_size",
    "llama4_text tuned": "no_rope_layers",
    "minicpm3": "dim_model_base",
    "olmoe clipped": "clip_qkv",
}
REFUSED = {
    "bailing_hybrid": "group_norm_size",
    "bitnet": "quantization_config",
    "cohere untied": "tie_word_embeddings",
    "gemma untied": "tie_word_embeddings",
    "gemma2 caps": "attn_logit_softcapping",
    "gpt_oss plain": "layer_types",
    "internlm3 biases": "attention_bias",
    "kimi_k25": "model_type",
    "longcat_flash": "zero_expert_num",
    "minimax": "rotary_dim",
    "olmo": "model_type",
    "phi norms": "qk_layernorm",
    "phimoe": "attention_bias",
    "qwen2_moe mixed": "mlp_only_layers",
    "qwen3 biases": "attention_bias",
    "qwen3 dynamic": "dynamic",
    "qwen3 windows": "use_sliding_window",
    "qwen3_moe mixed": "mlp_only_layers",
    "qwen3_next unnormed": "decoder_sparse_step",
    "recurrent_gemma": "num_key_value_heads",
    "starcoder2 unbiased": "use_bias",
}


def test_there_are_as_many_as_ever() -> None:
    assert len({kind_of(name) for name in FORMS}) >= 92
    assert len(FORMS) - len(NOTICED) - len(REFUSED) >= 152


@catches(
    "norms of a Mamba 2 layer take all groups together",
    "mlxspec.models.adapted.loading:mend",
    lambda right: lambda module, config: None,
    case="granitemoehybrid groups]",
)
@catches(
    "a key that is not used as published is not named",
    "mlxspec.models.adapted.loading:differences",
    lambda right: lambda config, max_context: iter(()),
    case="gpt_bigcode heads]",
)
@catches(
    "an error of mlx-lm's code is told without the key",
    "mlxspec.models.adapted.loading:_concerned",
    lambda right: lambda error, config: ["model_type"],
    case="phi norms]",
)
@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_transformers_or_a_key_is_named(name: str, tmp_path: Path) -> None:
    found = tried(name, tmp_path)
    if name in REFUSED:
        assert found.difference is None
        assert REFUSED[name] in found.said[0]
    elif name in NOTICED:
        assert found.difference is not None
        assert found.difference > MOST
        assert any(NOTICED[name] in notice for notice in found.said)
    else:
        assert found.difference is not None, found.said
        assert found.difference < MOST
