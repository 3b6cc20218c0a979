"""Keys of config.json that mlx-lm's classes do not read: logits are transformers' with and without each. Needs PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

import mlx.core as mx  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from mlxspec.kernels.flat import FlatRows  # noqa: E402
from mlxspec.models.adapted.loading import load_adapted  # noqa: E402
from mlxspec.models.folder import ModelFolder  # noqa: E402

_SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 320, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "pad_token_id": None,
}  # fmt: skip
_LONG = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 4 for i in range(8)],
        "long_factor": [4.0 + i for i in range(8)], "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0,
    },
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_MUPS = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 1,
}
# transformers' type, its own values, those of the key, the longest context that is asked for
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int | None]] = {
    "windows of mistral": ("mistral", {"head_dim": 16, "sliding_window": None}, {"sliding_window": 16}, None),
    "windows of mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}, {"sliding_window": 16}, None),
    "windows of phi3": ("phi3", {"sliding_window": None}, {"sliding_window": 16}, None),
    "windows of starcoder2": ("starcoder2", {"sliding_window": None}, {"sliding_window": 16}, None),
    "windows of gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512}, {"sliding_window": 16}, None),
    "windows of qwen2": ("qwen2", {}, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, None),
    "short factors of longrope": ("phi3", {}, _LONG, 64),
    "long factors of longrope": ("phi3", {}, _LONG, None),
    "attention_factor of yarn": ("llama", {"head_dim": 16}, {"rope_parameters": _YARN | {"attention_factor": 2.0}}, None),
    "truncate of yarn": ("llama", {"head_dim": 16}, {"rope_parameters": _YARN | {"truncate": False}}, None),
    "truncate of gpt_oss": (
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
        {"rope_parameters": _YARN | {"truncate": False}},
        None,
    ),
    "partial_rotary_factor of glm": ("glm", {"head_dim": 16, "partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.5}, None),
    "key_multiplier of falcon_h1": ("falcon_h1", {"head_dim": 16, **_MUPS}, {"key_multiplier": 0.39}, None),
}  # fmt: skip
NUM = {"long factors of longrope": 80}


def make(kind: str, values: dict[str, Any], folder: Path) -> Any:
    """A model of transformers with random weights, saved there."""
    tied = kind in ("gemma2",)
    config = transformers.AutoConfig.for_model(
        kind, **{**_SHAPE, "tie_word_embeddings": tied, **values}, attn_implementation="eager"
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, value in model.named_parameters():
        if value.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(value, std=2 * value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, without, key, max_context = CASES[case]
    num = NUM.get(case, 48)
    tokens = np.random.default_rng(1).integers(33, 250, num).astype(np.int32)
    model = make(kind, without | key, tmp_path / "with")
    with torch.no_grad():
        theirs = model(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
        plain = make(kind, without, tmp_path / "without")
        other = plain(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    largest = np.abs(theirs).max()
    assert np.abs(theirs - other).max() > 1e-2 * largest  # the key says something
    assert_same(tmp_path / "with", tokens, theirs, max_context)


def assert_same(folder: Path, tokens: np.ndarray, theirs: np.ndarray, max_context: int | None = None) -> None:
    num, largest = len(tokens), np.abs(theirs).max()
    ours = load_adapted(ModelFolder(folder), mx.float32, max_context=max_context)
    assert set(ours.unread) <= {"rms_norm_eps", "num_attention_heads"}  # of `_SHAPE`
    cache = ours.make_cache(1)
    steps = (num - 4, 1, 1, 1, 1)
    found, at = [], 0
    for width in steps:
        found.append(ours.forward(mx.array(tokens[at : at + width]), FlatRows((width,)), cache).logits)
        cache.commit()
        at += width
    assert np.abs(np.concatenate([np.array(x) for x in found]) - theirs).max() < 2e-3 * largest
