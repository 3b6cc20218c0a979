"""Ten formats of four families: every command gives one verdict on a folder, and where it is "no", no tensor is opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

import mlxspec
from mlxspec.checkpoints.cache import listing
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.inspect import inspect
from mlxspec.checkpoints.pull import memory_of
from mlxspec.cli.main import main
from mlxspec.config import SamplingParams
from mlxspec.demo import TARGET
from mlxspec.errors import MlxspecError
from mlxspec.loading.download import File, Plan
from tests.loading.integers import FORMATS, integers, written
from tests.models.mlx_lm_families import write_of

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 2048, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 32,
    },
    "llama": {},
    "olmo2": {},
}


def floats8(path: str, value: np.ndarray) -> dict[str, mx.array]:
    scale = np.abs(value).max(axis=1, keepdims=True) / 448
    return {f"{path}.weight": mx.to_fp8(mx.array(value / scale)), f"{path}.weight_scale": mx.array(scale)}


def whole(name: str) -> Callable[[str, np.ndarray], dict[str, mx.array]]:
    def made(path: str, value: np.ndarray) -> dict[str, mx.array]:
        kind = FORMATS[name]
        parts = written(path, integers(*value.shape, kind.bits, 32, symmetric=kind.symmetric), kind)
        return {k: mx.array(v) for k, v in parts.items()}

    return made


def marked(*parts: str) -> Callable[[str, np.ndarray], dict[str, mx.array]]:
    return lambda path, value: {f"{path}.{part}": mx.zeros((8, 8), mx.uint8) for part in parts}


EIGHT = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
YES: dict[str, tuple[dict[str, Any], Any]] = {
    **{name: (FORMATS[name].told, whole(name)) for name in ("AWQ", "GPTQ-4", "GPTQ-8", "integers-4")},
    "FP8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": EIGHT},
        floats8,
    ),
}
NO: dict[str, tuple[dict[str, Any], Any]] = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        marked("weight", "weight.absmax"),
    ),
    "exl2": ({"quant_method": "exl2", "bits": 4.0}, marked("q_weight", "q_scale_max", "q_perm")),
    "hqq": ({"quant_method": "hqq"}, marked("W_q", "scale", "zero")),
    "quark": ({"quant_method": "quark"}, marked("weight", "weight_scale")),
    "auto-round": ({"quant_method": "auto-round", "bits": 4}, marked("qweight", "qzeros", "scales")),
}


def cached(hub: Path, family: str, told: dict[str, Any], pack: Any) -> Path:
    """A folder of the hub's cache, its projections packed."""
    home = hub / "models--owner--name"
    folder = home / "snapshots" / ("a" * 40)
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("a" * 40)
    config = SIZES | FAMILIES[family] | {"model_type": family}
    write_of(folder, config)
    weights: dict[str, mx.array] = {}
    for name, value in mx.load(str(folder / "model.safetensors")).items():
        if name.endswith("_proj.weight"):
            weights |= pack(name.removesuffix(".weight"), np.array(value, np.float32))
        else:
            weights[name] = value
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, folder)
    return folder


def verdicts(folder: Path, out: Path) -> dict[str, str]:
    """What each command says: "", or why not."""
    plan = Plan("owner/name", None, "c" * 40, folder, (File("model.safetensors", 10**6, False),))

    def load() -> None:
        engine = mlxspec.load(str(folder), draft="off")
        assert len(engine.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)).tokens) == 3

    def models() -> None:
        (entry,) = listing().entries
        if entry.problem:
            raise MlxspecError(entry.problem)

    commands: dict[str, Callable[[], Any]] = {
        "pull": lambda: memory_of(plan),
        "models": models,
        "inspect": lambda: inspect(str(folder)),
        "convert": lambda: convert(str(folder), out, Wish()),
        "load": load,
    }
    found = {}
    for name, command in commands.items():
        try:
            command()
            found[name] = ""
        except MlxspecError as error:
            found[name] = str(error).removeprefix("owner/name cannot be run: ")
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", YES)
def test_every_command_takes_it(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = cached(tmp_path, family, *YES[name])
    assert set(verdicts(folder, tmp_path / "out").values()) == {""}
    assert main(["generate", "--model", str(folder), "-p", "a", "--max-tokens", "2", "--draft", "off"]) == 0


@catches(
    "tensors alone decide",
    "mlxspec.loading.published:_by_description",
    lambda right: lambda told, **more: "",
    case="quark-llama]",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NO)
def test_every_command_refuses_it_unread(
    name: str,
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = cached(tmp_path, family, *NO[name])
    opened = []
    monkeypatch.setattr(mx, "load", opened.append)
    said, *others = set(verdicts(folder, tmp_path / "out").values())
    assert not others
    assert said.startswith("Its weights are quantized in the way of ")
    for command in (
        ["generate", "--model", str(folder), "-p", "a"],
        ["serve", "--model", str(folder), "--port", "0"],
    ):
        assert main(command) == 2
        assert said in capsys.readouterr().err
    assert not opened
