"""Adapters as PEFT writes them give PEFT's logits: experts by target_parameters, whole embeddings and heads, grown vocabularies, rows of an
embedding, patterns. Needs PyTorch and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("peft", reason="needs PEFT")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:The following alpha_pattern keys:RuntimeWarning"),
]

import mlx.core as mx  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from mlxspec.errors import ModelError  # noqa: E402
from mlxspec.kernels.flat import FlatRows  # noqa: E402
from mlxspec.models.adapter_keys import PEFT_KEYS, PEFT_READ  # noqa: E402
from mlxspec.models.assemble import assemble_folder  # noqa: E402
from mlxspec.models.fill import evaluate  # noqa: E402
from mlxspec.models.folder import ModelFolder  # noqa: E402

_SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 320, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
MODELS: dict[str, Any] = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "llama": (transformers.LlamaConfig, {"head_dim": 16}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"head_dim": 32, **_EXPERTS}),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma4_text": (
        transformers.Gemma4TextConfig,
        {
            "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": True,
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48, "num_hidden_layers": 6,
        },
    ),
}  # fmt: skip
TOKENS = list(range(5, 29))


def make(family: str, folder: Path, *, tied: bool = False) -> Any:
    """A model of transformers with random weights, saved there."""
    kind, own = MODELS[family]
    config = kind(**{**_SHAPE, **own}, tie_word_embeddings=tied, attn_implementation="eager")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, value in model.named_parameters():
        if value.ndim > 1 and not name.endswith("embed_tokens.weight"):
            torch.nn.init.normal_(value, std=value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    if family == "gpt_oss":
        apart(folder / "model.safetensors")
    return model


def apart(path: Path) -> None:
    """Experts of gpt-oss under the names of mlx-lm, which reads transformers' stacks as MXFP4 only."""
    weights = mx.load(str(path))
    for name in [name for name in weights if ".experts." in name]:
        value, (place, part) = weights.pop(name), name.rsplit(".", 1)
        leaf = "bias" if part.endswith("_bias") else "weight"
        value = value if leaf == "bias" else value.swapaxes(1, 2)
        if part.startswith("down"):
            weights[f"{place}.down_proj.{leaf}"] = value
        else:
            weights[f"{place}.gate_proj.{leaf}"] = value[:, ::2]
            weights[f"{place}.up_proj.{leaf}"] = value[:, 1::2]
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    config = json.loads((path.parent / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (path.parent / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def adapted(model: Any, folder: Path, *, whole: Any = "auto", **settings: Any) -> np.ndarray:
    """Write an adapter with random values; returns PEFT's logits with it. whole: whether embedding and head are written, too."""
    made = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **settings})).eval()
    torch.manual_seed(4)
    for _, value in made.named_parameters():
        if value.requires_grad:
            value += 0.1 * torch.randn_like(value)
    made.save_pretrained(folder, save_embedding_layers=whole)
    logits: np.ndarray = made(torch.tensor([TOKENS])).logits[0].numpy()
    return logits


def logits_of(folder: Path, adapter: Path | None) -> np.ndarray:
    made = assemble_folder(ModelFolder(folder), adapter=adapter and str(adapter))
    evaluate([made.model])
    cache = made.model.make_cache(1)
    found = made.model.forward(mx.array(TOKENS), FlatRows((len(TOKENS),)), cache, logits_at="all").logits
    return np.array(found)


def assert_equal(model: Path, adapter: Path, theirs: np.ndarray) -> None:
    ours, base = logits_of(model, adapter), logits_of(model, None)
    assert np.abs(theirs - ours).max() < 2e-4 * np.abs(theirs).max()
    assert np.abs(theirs[:, : base.shape[1]] - base).max() > 2e-2 * np.abs(theirs).max()


ATTENTION = ["q_proj", "v_proj"]
FORMS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ATTENTION},
    "rslora and dora": {"target_modules": ATTENTION, "use_rslora": True, "use_dora": True},
    "patterns": {
        "target_modules": ATTENTION,
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 32},
    },
    "embedding": {"target_modules": [*ATTENTION, "embed_tokens"]},
    "whole head": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "whole embedding and head": {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]},
    "rows": {"target_modules": ATTENTION, "trainable_token_indices": [5, 7, 300]},
    "rows of both": {
        "target_modules": ATTENTION,
        "trainable_token_indices": {"embed_tokens": [6, 9], "lm_head": [3]},
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_logits_are_pefts(family: str, form: str, tmp_path: Path) -> None:
    model = make(family, tmp_path / "model")
    theirs = adapted(model, tmp_path / "adapter", **FORMS[form])
    assert_equal(tmp_path / "model", tmp_path / "adapter", theirs)


@pytest.mark.parametrize("names", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4_text"])
def test_stacked_experts(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """In Gemma 4 they are a part of the layer itself."""
    model = make(family, tmp_path / "model")
    place = "experts" if family == "gemma4_text" else "mlp.experts"
    wanted = [f"{place}.{name}" for name in names]
    pattern = {f"layers.0.{place}.{names[0]}": 24}
    settings = {"target_modules": [], "target_parameters": wanted, "alpha_pattern": pattern}
    theirs = adapted(model, tmp_path / "adapter", **settings)
    assert_equal(tmp_path / "model", tmp_path / "adapter", theirs)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_grown_vocabulary(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path / "model")
    model.resize_token_embeddings(336, mean_resizing=False)
    theirs = adapted(model, tmp_path / "adapter", whole=True, target_modules=ATTENTION)
    ours = logits_of(tmp_path / "model", tmp_path / "adapter")
    assert ours.shape == theirs.shape == (len(TOKENS), 336)
    assert_equal(tmp_path / "model", tmp_path / "adapter", theirs)


TIED = {
    "rows": ({"trainable_token_indices": [5, 7, 300]}, ""),
    "resized": ({}, ""),
    "shared": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, ""),
    "embedding alone": ({"modules_to_save": ["embed_tokens"]}, "which is the head of this model as well"),
    "lookups alone": ({"target_modules": ["embed_tokens"]}, "which is the head of this model as well"),
}


@pytest.mark.parametrize("form", TIED)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_an_embedding_that_is_the_head(family: str, form: str, tmp_path: Path) -> None:
    settings, said = TIED[form]
    model = make(family, tmp_path / "model", tied=True)
    if form == "resized":
        model.resize_token_embeddings(336, mean_resizing=False)
    whole = True if form == "resized" else "auto"
    theirs = adapted(model, tmp_path / "adapter", whole=whole, **{"target_modules": ATTENTION} | settings)
    if not said:
        assert_equal(tmp_path / "model", tmp_path / "adapter", theirs)
        return
    with pytest.raises(ModelError, match=said):
        logits_of(tmp_path / "model", tmp_path / "adapter")


def test_every_key_of_peft_is_classified() -> None:
    config = peft.LoraConfig(target_modules=ATTENTION).to_dict()
    assert set(config) <= PEFT_READ | PEFT_KEYS.idle | PEFT_KEYS.only.keys()
