"""Targets in two bits and Gemma 4's assistants in few bits: they load, draft, and the text is that of plain decoding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

import mlxspec
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.quantize import Format
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.demo import TARGET
from tests.models import adapted_zoo, tiny_assistant, tiny_gemma

VOCAB = 2048  # of the built-in tokenizer
FEW = SamplingParams(max_tokens=24, ignore_eos=True)
FORMATS = {"4 bits": {"bits": 4, "group_size": 32}, "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}


def quantized(folder: Path, how: dict[str, object]) -> Path:
    """Quantize in place, as mlx-lm does, each matrix that divides into groups."""
    path = folder / "model.safetensors"
    found = dict[str, mx.array]()
    for name, value in mx.load(str(path)).items():
        if value.ndim != 2 or value.shape[1] % 32 or not name.endswith(".weight"):
            found[name] = value
            continue
        parts = mx.quantize(value, **how)
        leaves = ("weight", "scales", "biases")
        found |= {name.removesuffix("weight") + leaf: part for leaf, part in zip(leaves, parts, strict=False)}
    mx.eval(found)
    path.unlink()
    mx.save_safetensors(str(path), found, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": how}))
    return folder


@pytest.mark.parametrize("centroids", [0, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["4 bits", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_a_quantized_assistant_drafts(form: str, centroids: int, tmp_path: Path) -> None:
    c = {**tiny_gemma.CONFIGS["gemma4-dense"], "vocab_size": VOCAB}
    target = tiny_gemma.write_text(tmp_path / "target", c)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, target)
    helper = tiny_assistant.write(tmp_path / "assistant", tiny_assistant.config(c, centroids, 8))
    quantized(helper, FORMATS[form])
    plain = mlxspec.load(str(target), draft="off").generate([5, 6, 7], FEW)
    engine = mlxspec.load(str(target), draft="mtp", draft_model=str(helper))
    got = engine.generate([5, 6, 7], FEW, spec=SpecConfig(policy="fixed", drafters=("mtp",)))
    assert got.tokens == plain.tokens
    assert got.stats.drafters["mtp"].num_drafted > 0
    assert not got.stats.notices


@pytest.mark.parametrize("name", ["demo", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_target_in_two_bits_drafts(name: str, tmp_path: Path) -> None:
    source = name if name == "demo" else str(adapted_zoo.write(name, tmp_path / "source"))
    out = tmp_path / "out"
    convert(source, out, Wish(trunk=Format(bits=2, group_size=32)))
    assert json.loads((out / "config.json").read_text())["quantization"]["bits"] == 2
    prompt = [5, 6, 7, 8] * 4
    plain = mlxspec.load(str(out), draft="off").generate(prompt, FEW)
    engine = mlxspec.load(str(out), draft="ngram-simple")
    got = engine.generate(prompt, FEW, spec=SpecConfig(policy="fixed", drafters=("ngram-simple",)))
    assert got.tokens == plain.tokens
    assert got.stats.drafters["ngram-simple"].num_drafted > 0
