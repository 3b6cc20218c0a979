"""Experts that are published in MXFP4 stay as they are when the rest of a model by mlx-lm's code is quantized."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.quantize import Format
from mlxspec.errors import ConfigError
from tests.models.mlx_lm_families import write_of

CONFIG = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "sliding_window": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def test_experts_in_mxfp4_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = write_of(tmp_path / "source", CONFIG)
    weights = {}
    for name, value in mx.load(str(source / "model.safetensors")).items():
        if ".experts." in name and name.endswith(".weight"):
            packed = mx.quantize(value, group_size=32, bits=4, mode="mxfp4")
            weights |= zip((name, name.replace(".weight", ".scales")), packed, strict=True)
        else:
            weights[name] = value
    mx.eval(weights)
    mx.save_safetensors(str(source / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = CONFIG | {"quantization_config": {"quant_method": "mxfp4"}}
    (source / "config.json").write_text(json.dumps(config))
    convert(str(source), out, Wish(trunk=Format.of("affine", 8, 32)))
    written = mx.load(str(out / "model.safetensors"))
    experts = [name for name in weights if "experts" in name]
    assert any(name.endswith("scales") for name in experts)
    assert all(mx.array_equal(written[name], weights[name]) for name in experts)
    assert written["model.layers.0.self_attn.q_proj.weight"].dtype == mx.uint32
    with pytest.raises(ConfigError, match="is quantized already"):
        convert(str(out), tmp_path / "again", Wish(trunk=Format.of("affine", 4, 32)))
