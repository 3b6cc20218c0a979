"""What one command says of a model's config.json, every command says: `models WORD`, `pull`, and all that judge a folder that is here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planting import catches

from mlxspec.checkpoints import search
from mlxspec.checkpoints.cache import listing
from mlxspec.checkpoints.inspect import DrafterReport, inspect
from mlxspec.checkpoints.pull import memory_of
from mlxspec.errors import ModelError
from mlxspec.loading.download import File, Plan
from mlxspec.models.folder import ModelFolder
from mlxspec.models.runnable import Runnable, judge, judge_folder
from tests.drafters import eagle3_checkpoints

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 320, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
OURS, THEIRS = SIZES | {"model_type": "qwen3"}, SIZES | {"model_type": "llama"}
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "ours": (OURS, "model"),
    "by mlx-lm's code": (THEIRS, "by mlx-lm"),
    "a head alone": ({"model_type": "qwen3_5_mtp"}, "head"),
    "of no known type": (SIZES | {"model_type": "frobnicate"}, "not supported"),
    "Flash-Next": (SIZES | {"model_type": "qwen4_exp"}, "hyper-connections, an n-gram table and sparse attention"),
    "without a type": (SIZES, "no model_type"),
    "FP8, which is unpacked": (OURS | {"quantization_config": FP8}, "model"),
    "AWQ": (OURS | {"quantization_config": {"quant_method": "awq", "bits": 4}}, "model"),
    "EXL2": (OURS | {"quantization_config": {"quant_method": "exl2", "bits": 4}}, "not supported"),
    "AWQ by mlx-lm's code": (THEIRS | {"quantization_config": {"quant_method": "awq", "bits": 4}}, "by mlx-lm"),
    "bitsandbytes": (OURS | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "not supported"),
    "bitsandbytes by mlx-lm's code": (THEIRS | {"quantization_config": {"quant_method": "bitsandbytes"}}, "not supported"),
}  # fmt: skip


def judged(config: dict[str, Any]) -> str:
    try:
        runs = judge(config)
        runs.unpacked()
    except ModelError as error:
        return str(error)
    return "by mlx-lm" if runs.by_mlx_lm else runs.kind


@catches(
    "what mlx-lm's code cannot read is fetched",
    "mlxspec.models.runnable:Runnable.unpacked",
    lambda right: lambda self, *given, **named: "" if self.by_mlx_lm else right(self, *given, **named),
)
def test_commands_agree(tmp_path: Path) -> None:
    for name, (config, expected) in CASES.items():
        assert expected in judged(config), name
        is_run = expected in ("model", "by mlx-lm", "head")
        assert search._runs(SimpleNamespace(config=config)) == is_run, name
        (tmp_path / "config.json").write_text(json.dumps(config))
        plan = Plan("owner/name", None, "c" * 40, tmp_path, (File("model.safetensors", 10**6, False),))
        if is_run:
            assert (memory_of(plan) is None) == (expected == "head"), name
        else:
            with pytest.raises(ModelError, match="owner/name cannot be run: "):
                memory_of(plan)


def test_tensors_tell_what_a_config_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EAGLE-3 drafter whose config.json is a plain Llama's is listed as what `load` and `inspect` take it for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--owner--name"
    folder = home / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    eagle3_checkpoints.write(folder, eagle3_checkpoints.KINDS["SafeAILab"], 320, 64, (0, 1))
    (folder / "config.json").write_text(json.dumps(THEIRS))
    (entry,) = listing().entries
    assert (entry.model_type, entry.problem, entry.memory) == ("eagle3", "", None)
    assert judge_folder(ModelFolder(folder)).kind == "eagle3"
    found = inspect("owner/name")
    assert isinstance(found, DrafterReport)
    assert found.kind == "an EAGLE-3 drafter"


def test_mlx_lms_code_where_it_is_asked_for() -> None:
    assert judge(OURS, "mlx-lm") == Runnable(kind="model", by_mlx_lm=True, config=OURS)
    assert judge({"model_type": "qwen3_5_mtp"}, "mlx-lm").by_mlx_lm is False
