"""Random checkpoints have the tensors, shapes and dtypes of real ones, load, decode, and give logits of a sane size."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import test_published_sizes as published
import tiny
import write_checkpoint

from mlxspec import load
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.loading.safetensors import check_header
from mlxspec.models.registry import architecture

NAMES = {
    "qwen3.5-0.8b": "Qwen3.5-0.8B",
    "qwen3.5-2b": "Qwen3.5-2B",
    "qwen3.5-4b": "Qwen3.5-4B",
    "qwen3.5-9b": "Qwen3.5-9B",
    "qwen3.6-27b": "Qwen3.5-27B",
    "qwen3.6-35b-a3b": "Qwen3.5-35B-A3B",
    "gemma-3-270m": "gemma-3-270m",
    "gemma-3-1b": "gemma-3-1b",
    "gemma-3-4b": "gemma-3-4b",
    "gemma-4-e2b": "gemma-4-E2B",
    "gemma-4-31b": "gemma-4-31B",
}


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= check_header(path)
    return found


def parsed(config: dict[str, Any]) -> Any:
    return architecture(config).parse(config)


@pytest.mark.parametrize("size", write_checkpoint.SIZES)
def test_shapes_are_the_published_ones(size: str) -> None:
    """Of which another test knows that they have the parameters of the files on the hub."""
    assert parsed(write_checkpoint.SIZES[size]) == parsed(published.SIZES[NAMES[size]][0])


@pytest.mark.parametrize("shape", ["tied", "untied", "moe"])
def test_a_raw_folder_has_the_tensors_of_the_hubs(shape: str, tmp_path: Path) -> None:
    config = tiny.hub_config(tiny.SHAPES[shape])
    config["text_config"]["vocab_size"] = 320
    write_checkpoint.write(tmp_path / "random", config, shard=200_000)
    theirs = headers(tiny.write_hub(tmp_path / "tiny", tiny.SHAPES[shape]))
    ours = headers(tmp_path / "random")
    del theirs["model.visual.patch_embed.proj.bias"]
    assert ours.keys() == theirs.keys()
    for name, (dtype, sizes) in ours.items():
        assert [320 if n == tiny.VOCAB else n for n in theirs[name][1]] == list(sizes), name
        assert dtype == ("F32" if name.endswith(("A_log", "linear_attn.norm.weight")) else "BF16"), name
    files = list((tmp_path / "random").glob("model-*"))
    assert len(files) > 2
    assert all(f.stat().st_size < 250_000 for f in files)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("shape", ["tied", "moe"])
def test_it_loads_and_drafts(shape: str, bits: int | None, tmp_path: Path) -> None:
    config = tiny.hub_config(tiny.SHAPES[shape])
    config["text_config"]["vocab_size"] = 320
    written = write_checkpoint.write(tmp_path / "random", config, bits=bits)
    engine = load(str(tmp_path / "random"), spec=SpecConfig(drafters=("mtp",), policy="fixed"))
    stored = sum(f.stat().st_size for f in (tmp_path / "random").glob("*.safetensors"))
    assert 0 < stored - written < 40_000  # headers
    result = engine.generate("some text", SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(result.tokens) == 12
    assert result.stats.num_drafted
    assert result.stats.notices == []


def test_quantized_matrices_have_the_deviation_of_raw_ones(tmp_path: Path) -> None:
    config = tiny.hub_config(tiny.SHAPES["untied"])
    config["text_config"]["vocab_size"] = 320
    write_checkpoint.write(tmp_path / "random", config, bits=4)
    tensors = mx.load(str(tmp_path / "random" / "model.safetensors"))
    path = "language_model.model.layers.0.mlp.down_proj"
    packed = [tensors[f"{path}.{part}"] for part in ("weight", "scales", "biases")]
    matrix = mx.dequantize(*packed, group_size=64, bits=4).astype(mx.float32)
    deviation = matrix.shape[-1] ** -0.5
    noise = deviation / math.sqrt(matrix.size)
    assert abs(matrix.mean().item()) < 5 * noise + 2**-7 * deviation  # of bfloat16 biases
    assert math.sqrt(matrix.square().mean().item()) == pytest.approx(deviation, rel=0.03)


def test_logits_have_a_deviation_of_about_one(tmp_path: Path) -> None:
    config = write_checkpoint.cut(tiny.hub_config(tiny.SHAPES["grouped"]), None, 4096)
    write_checkpoint.write(tmp_path / "random", config)
    engine = load(str(tmp_path / "random"), draft="off")
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=5)
    result = engine.generate("some text", params)
    # the likeliest of 4,096 words is about 3.5 deviations above the mean
    likeliest = result.logprobs[0].top[0].logprob
    assert 2.0 < likeliest + math.log(4096) + 0.5 < 5.5


def test_no_two_rows_are_alike(tmp_path: Path) -> None:
    """A tie between two words would make greedy texts depend on rounding."""
    config = write_checkpoint.cut(tiny.hub_config(tiny.SHAPES["tied"]), None, 140_000)  # more than the pool
    write_checkpoint.write(tmp_path / "random", config)
    [name] = [k for k in headers(tmp_path / "random") if "embed_tokens" in k]
    table = np.array(mx.load(str(tmp_path / "random" / "model.safetensors"))[name].view(mx.uint16))
    assert table.size > write_checkpoint._POOL
    whole = table.view(f"V{table.shape[1] * 2}").ravel()
    assert len(set(whole.tolist())) == len(table)


def test_words_have_texts_of_their_own(tmp_path: Path) -> None:
    config = write_checkpoint.cut(tiny.hub_config(tiny.SHAPES["tied"]), None, 3000)
    write_checkpoint.write(tmp_path / "random", config)
    tokenizer = load(str(tmp_path / "random"), draft="off").tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界")) == "Grüße, 世界"
    assert len({tokenizer.decode([i]) for i in range(256, 2997)}) == 2997 - 256


def test_a_cut_keeps_what_its_layers_need() -> None:
    config = write_checkpoint.cut(write_checkpoint.SIZES["gemma-4-e2b"], 20, 4096)
    whole = parsed(write_checkpoint.SIZES["gemma-4-e2b"])
    assert parsed(config).layers == whole.layers[:20]
    assert parsed(config).vocab_size == parsed(config).per_layer_vocab == 4096
    config = write_checkpoint.cut(write_checkpoint.SIZES["qwen3.6-27b"], 8, None)
    assert parsed(config).is_linear == (True, True, True, False) * 2


@pytest.mark.parametrize(
    "words", [("--layers", "3"), ("--layers", "25"), ("--vocab", "258"), ("--bits", "5"), ("--shard", "0")]
)
def test_bad_options(
    words: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["write_checkpoint.py", "qwen3.5-0.8b", str(tmp_path / "random"), *words]
    )
    with pytest.raises(SystemExit) as stopped:
        write_checkpoint.main()
    assert stopped.value.code == 2
    assert words[0] in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "random").exists()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(("size", "layers"), [("qwen3.5-0.8b", 4), ("gemma-3-270m", 6), ("gemma-4-e2b", 5)])
def test_cut_down_published_sizes_load(size: str, layers: int, bits: int | None, tmp_path: Path) -> None:
    """A layer of each kind, few words."""
    config = write_checkpoint.cut(write_checkpoint.SIZES[size], layers, 4096)
    write_checkpoint.write(tmp_path / "random", config, bits=bits)
    engine = load(str(tmp_path / "random"))
    assert len(engine.generate("some text", SamplingParams(max_tokens=4, ignore_eos=True)).tokens) == 4
    assert json.loads((tmp_path / "random" / "config.json").read_text())
