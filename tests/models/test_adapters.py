"""LoRA adapters: the text is mlx-lm's with the same adapter, whoever drafts; what is no adapter is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tuner import utils

import mlxspec
from mlxspec.cli.main import main
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.demo import TARGET
from mlxspec.errors import ModelError

PROMPT = "def read_lines(path):\n"
SIZE = SamplingParams(max_tokens=24, ignore_eos=True)


def write_adapter(folder: Path, model: Path, kind: str = "lora", **changes: Any) -> Path:
    """An adapter with random layers, made by mlx-lm's own conversion."""
    folder.mkdir()
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0} | changes
    trunk, _ = mlx_lm.load(str(model))
    utils.linear_to_lora_layers(trunk, 2, parameters, use_dora=kind == "dora")
    mx.random.seed(1)
    wanted = {
        k: v for k, v in tree_flatten(trunk.parameters()) if k.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")
    }
    arrays = {k: v if k.endswith(".m") else 0.05 * mx.random.normal(v.shape) for k, v in wanted.items()}
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def texts(model: Path, adapter: Path | None, spec: SpecConfig) -> list[int]:
    engine = mlxspec.load(str(model), adapter=adapter and str(adapter), spec=SpecConfig(policy="fixed"))
    return list(engine.generate(PROMPT, SIZE, spec=spec).tokens)


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_the_text_is_mlx_lms(tmp_path: Path, kind: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", TARGET, kind)
    engine = mlxspec.load("demo", adapter=str(adapter), spec=SpecConfig(policy="fixed"))
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(PROMPT)
    plain = engine.generate(prompt, SIZE, spec=SpecConfig())
    drafted = engine.generate(prompt, SIZE)
    theirs, _ = mlx_lm.load(str(TARGET), adapter_path=str(adapter))
    tokens = list(prompt)
    for _ in range(SIZE.max_tokens):
        tokens.append(int(mx.argmax(theirs(mx.array([tokens]))[0, -1])))
    assert list(plain.tokens) == tokens[len(prompt) :]
    assert drafted.tokens == plain.tokens
    assert drafted.stats.num_drafted > 0
    without = mlxspec.load("demo", draft="off").generate(prompt, SIZE)
    assert without.tokens != plain.tokens


def test_a_quantized_model_is_quantized_again(tmp_path: Path) -> None:
    source = tmp_path / "4bit"
    assert main(["convert", "demo", "-o", str(source), "-q"]) == 0
    adapter = write_adapter(tmp_path / "adapter", source)
    plain = texts(source, adapter, SpecConfig())
    assert plain == texts(source, adapter, SpecConfig(drafters=("mtp",)))
    assert plain != texts(source, None, SpecConfig())


def test_what_is_no_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_adapter(tmp_path / "good", TARGET)
    (tmp_path / "empty").mkdir()

    def damaged(name: str, file: str, content: bytes) -> Path:
        folder = Path(shutil.copytree(good, tmp_path / name))
        (folder / file).write_bytes(content)
        return folder

    config = json.loads((good / "adapter_config.json").read_text())
    other = write_adapter(tmp_path / "other", TARGET, rank=8)
    shutil.copy(good / "adapter_config.json", other)
    cases = [
        (tmp_path / "absent", "There is no folder"),
        (tmp_path / "empty", "lacks adapter_config.json"),
        (damaged("a", "adapter_config.json", b"{"), "cannot be used"),
        (damaged("b", "adapter_config.json", b"[]"), "cannot be used"),
        (damaged("c", "adapter_config.json", b"{}"), "cannot be used"),
        (
            damaged("d", "adapter_config.json", json.dumps(config | {"lora_parameters": {}}).encode()),
            "has no",
        ),
        (damaged("e", "adapters.safetensors", b"x" * 100), "cannot be used"),
        (other, "does not match"),
    ]
    for folder, says in cases:
        with pytest.raises(ModelError, match=says) as caught:
            mlxspec.load("demo", adapter=str(folder))
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith(".")
    assert main(["generate", "-p", "x", "--adapter", str(tmp_path / "absent")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "There is no folder" in said
