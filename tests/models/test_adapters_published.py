"""Adapters of PEFT on models whose weights mlx-lm's code renames, splits or scales: the logits are those of the folder into whose published
weights the adapter is merged, or the adapter is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planting import catches

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.weights import Weights
from mlxspec.models.adapted.classes import classes_of
from mlxspec.models.adapted.loading import load_adapted
from mlxspec.models.adapted.published_weights import PublishedWeights
from mlxspec.models.folder import ModelFolder
from tests.models import adapted_zoo

TOKENS = list(range(5, 29))
_FALCON = adapted_zoo.config_of("falcon_h1") | {
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.65,
    "lm_head_multiplier": 0.039,
    "mlp_multipliers": [0.88, 0.5],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.2357,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.31],
    "tie_word_embeddings": False,
}
_LFM2 = adapted_zoo.config_of("lfm2") | {
    "model_type": "lfm2_moe",
    "layer_types": ["conv", "full_attention"] * 2,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_dense_layers": 1,
    "use_expert_bias": False,
}
CONFIGS = {
    "falcon_h1": _FALCON,
    "deepseek_v3": adapted_zoo.config_of("deepseek_v3"),
    "lfm2_moe": _LFM2,
    "baichuan_m1": adapted_zoo.config_of("baichuan_m1"),
    "nemotron_h": adapted_zoo.config_of("nemotron_h"),
    "gpt2": adapted_zoo.config_of("gpt2"),
}


def as_published(kind: str) -> Weights:
    """Random weights under the names and in the layouts of the model's own repository."""
    model, arguments = classes_of(CONFIGS[kind])
    mx.random.seed(2)
    found = {}
    for name, value in tree_flatten(model(arguments.from_dict(dict(CONFIGS[kind]))).parameters()):
        if value.ndim > 1:
            value = mx.random.normal(value.shape) * value.shape[-1] ** -0.5
        if "conv" in name and value.ndim == 3:
            value = value.swapaxes(1, 2)
        if kind == "lfm2_moe" and ("layers.0.feed_forward" in name or "switch_mlp" in name):
            for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
                name = name.replace(ours, theirs)
        if "switch_mlp" in name:
            found |= {name.replace("switch_mlp", f"experts.{i}"): part for i, part in enumerate(value)}
        elif "embed_q" in name:
            path = name.partition("embed_q")[0]
            found[f"{path}kv_b_proj.weight"] = mx.random.normal((4 * (8 + 16), 16)) * 0.25
        elif "unembed_out" not in name:
            found[name] = value
    return found


def write(folder: Path, kind: str, weights: Weights) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def write_adapter(folder: Path, name: str, shape: tuple[int, ...], **more: Any) -> mx.array:
    """Random layers for one matrix, as PEFT writes them; returns the change to it."""
    a, b = mx.random.normal((4, shape[1])) * 0.3, mx.random.normal((shape[0], 4)) * 0.3
    path = f"base_model.model.{name.removesuffix('.weight')}"
    folder.mkdir()
    parts = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    if "embed" in name:
        parts = {f"{path}.lora_embedding_A": b.T, f"{path}.lora_embedding_B": a.T}
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), parts)
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": []} | more
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return 2.0 * ((a.T @ b.T).T if "embed" not in name else b @ a)


def logits(folder: Path, adapter: str | dict[str, str] | None = None) -> np.ndarray:
    model = load_adapted(ModelFolder(folder), mx.float32, adapter)
    cache = model.make_cache(1)
    return np.array(model.forward(mx.array(TOKENS), FlatRows((len(TOKENS),)), cache).logits)


CASES = [
    *(
        ("falcon_h1", f"model.layers.1.{name}.weight")
        for name in ("self_attn.q_proj", "self_attn.o_proj", "feed_forward.gate_proj", "mamba.in_proj")
    ),
    ("falcon_h1", "model.embed_tokens.weight"),
    ("falcon_h1", "lm_head.weight"),
    ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight"),
    ("deepseek_v3", "model.layers.1.mlp.experts.3.down_proj.weight"),
    ("lfm2_moe", "model.layers.0.feed_forward.w1.weight"),
    ("lfm2_moe", "model.layers.1.feed_forward.experts.2.w2.weight"),
]


@catches(
    "a change does not follow the factors of the weight that it is to",
    "mlxspec.models.adapted.published_weights:PublishedWeights.factor",
    lambda right: lambda self, path: mx.array(1),
    case="falcon_h1-model.layers.1.self_attn.o_proj",
)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_logits_are_the_merged_folders(kind: str, name: str, tmp_path: Path) -> None:
    weights = as_published(kind)
    mx.eval(weights)
    base = logits(write(tmp_path / "base", kind, dict(weights)))
    change = write_adapter(tmp_path / "adapter", name, weights[name].shape)
    right = logits(write(tmp_path / "merged", kind, weights | {name: weights[name] + change}))
    found = logits(tmp_path / "base", str(tmp_path / "adapter"))
    largest = np.abs(right).max()
    assert np.abs(right - base).max() > 1e-2 * largest
    assert np.abs(found - right).max() < 1e-5 * largest


def test_what_cannot_follow_is_refused_by_name(tmp_path: Path) -> None:
    """A head whose rows are normed; a matrix that several adapters cannot have each for itself; lengths of a scaled one."""
    for kind, name, more, several in (
        ("baichuan_m1", "lm_head.weight", {}, False),
        ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight", {}, True),
        ("falcon_h1", "model.layers.1.self_attn.o_proj.weight", {"use_dora": True}, False),
    ):
        weights = as_published(kind)
        folder = write(tmp_path / f"{kind}-base", kind, weights)
        adapter = tmp_path / f"{kind}-adapter"
        write_adapter(adapter, name, weights[name].shape, **more)
        if more:
            path = adapter / "adapter_model.safetensors"
            lengths = {
                f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector": mx.ones((32,))
            }
            tensors = dict(mx.load(str(path)))
            mx.eval(tensors)
            path.unlink()
            mx.save_safetensors(str(path), tensors | lengths)
        part = name.split(".")[-2]
        if several:
            with pytest.raises(ModelError, match=f"{part}|one adapter"):
                logits(folder, {"one": str(adapter)})
        else:
            with pytest.raises(ModelError, match=part):
                logits(folder, str(adapter))


@pytest.mark.parametrize("kind", adapted_zoo.ARCHITECTURES)
def test_what_code_does_to_weights_is_known(kind: str) -> None:
    """Of every architecture: each matrix is left as it is, but for those that are named here."""
    published = PublishedWeights()
    model, arguments = published.classes_of(adapted_zoo.config_of(kind))
    module = model(arguments.from_dict(adapted_zoo.config_of(kind)))
    paths = [path for path, part in module.named_modules() if hasattr(part, "to_quantized")]
    factors = {path: published.factor(path) for path in paths}
    changed = {
        path.rpartition(".")[2] for path, f in factors.items() if f is None or f.size > 1 or f.item() != 1
    }
    scaled = {"embed_tokens", "gate_proj", "down_proj", "in_proj", "out_proj", "o_proj"}
    known = {"falcon_h1": scaled, "baichuan_m1": {"lm_head"}}
    assert changed <= known.get(kind, set())
    assert changed or kind not in known


@catches(
    "layers of an adapter have the names that mlx-lm's code reads",
    "mlxspec.models.adapted.published_weights:PublishedWeights.name_of",
    lambda right: lambda self, path: path,
    errors=(ModelError,),
)
@catches(
    "a pattern is compared with the name that mlx-lm's code reads",
    "mlxspec.models.adapter_files:_scale",
    lambda right: lambda config, name, rank: right(config, name.replace("model.", "backbone."), rank),
)
def test_an_adapter_may_have_the_names_of_transformers(tmp_path: Path) -> None:
    """Which renames layers when it loads a folder; patterns are compared with its names."""
    weights = as_published("nemotron_h")
    mx.eval(weights)
    name = next(name for name in weights if name.endswith("mixer.q_proj.weight"))
    theirs = name.replace("backbone.", "model.")
    patterns = {theirs.removesuffix(".weight"): 16}
    base = write(tmp_path / "base", "nemotron_h", dict(weights))
    change = 2 * write_adapter(tmp_path / "adapter", theirs, weights[name].shape, alpha_pattern=patterns)
    right = logits(write(tmp_path / "merged", "nemotron_h", weights | {name: weights[name] + change}))
    found = logits(base, str(tmp_path / "adapter"))
    assert np.abs(found - right).max() < 1e-5 * np.abs(right).max()
    assert np.abs(right - logits(base)).max() > 1e-2 * np.abs(right).max()


@catches(
    "every weight is stored with its outputs first",
    "mlxspec.models.adapter_files:_turned",
    lambda right: lambda path, change: change,
    case="attn.c_proj",
)
@pytest.mark.parametrize("part", ["attn.c_proj", "mlp.c_proj"])
def test_weights_may_be_stored_with_their_inputs_first(part: str, tmp_path: Path) -> None:
    """As GPT-2's are; the first is square, so that its shape does not tell."""
    weights = {
        name.removeprefix("model."): value.T if ".c_" in name and value.ndim == 2 else value
        for name, value in as_published("gpt2").items()
    }
    mx.eval(weights)
    name = f"h.1.{part}.weight"
    base = write(tmp_path / "base", "gpt2", dict(weights))
    shape = weights[name].shape[::-1]
    change = write_adapter(tmp_path / "adapter", f"transformer.{name}", shape, fan_in_fan_out=True).T
    right = logits(write(tmp_path / "merged", "gpt2", weights | {name: weights[name] + change}))
    found = logits(base, str(tmp_path / "adapter"))
    assert np.abs(found - right).max() < 1e-5 * np.abs(right).max()
    assert np.abs(right - logits(base)).max() > 1e-2 * np.abs(right).max()
