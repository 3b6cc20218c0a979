"""Adapters: logits and text are mlx-lm's with the same adapter, whoever drafts; what is no adapter is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm_families import FAMILIES, write
from planting import catches

# isort: split
import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tuner import utils
from mlx_lm.utils import load_model

import mlxspec
from mlxspec.cli.main import main
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.demo import TARGET
from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.weights import read_folder
from mlxspec.models import layers
from mlxspec.models.assemble import assemble_lazily
from mlxspec.models.fill import evaluate
from mlxspec.platform import memory

TOKENS = list(range(5, 29))
PROMPT = "def read_lines(path):\n"
SIZE = SamplingParams(max_tokens=24, ignore_eos=True)


DENSE = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"]


def write_adapter(folder: Path, model: Path, kind: str = "lora", *, seed: int = 1, **changes: Any) -> Path:
    """An adapter with random layers, made by mlx-lm's own conversion."""
    folder.mkdir()
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0} | changes
    trunk, _ = mlx_lm.load(str(model))
    utils.linear_to_lora_layers(trunk, 2, parameters, use_dora=kind == "dora")
    mx.random.seed(seed)
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


def test_a_quantized_model_is_adapted(tmp_path: Path) -> None:
    source = tmp_path / "4bit"
    assert main(["convert", "demo", "-o", str(source), "-q"]) == 0
    adapter = write_adapter(tmp_path / "adapter", source)
    plain = texts(source, adapter, SpecConfig())
    assert plain == texts(source, adapter, SpecConfig(drafters=("mtp",)))
    assert plain != texts(source, None, SpecConfig())


def logits_of(folder: Path, adapter: Path | None) -> np.ndarray:
    config = json.loads((folder / "config.json").read_text())
    path = None if adapter is None else str(adapter)
    made = assemble_lazily(config, lambda: read_folder(folder), mx.float32, adapter=path)
    evaluate([made.model])
    cache, rows = made.model.make_cache(1), FlatRows((len(TOKENS),))
    return np.array(made.model.forward(mx.array(TOKENS), rows, cache, certain=True).logits)


def random_adapter(
    folder: Path,
    model: Path,
    kind: str,
    size: float,
    *,
    seed: int = 1,
    rank: int = 4,
    keys: list[str] | None = None,
) -> np.ndarray:
    """Write an adapter as mlx-lm's training does, of every layer that it can adapt, or of those of `keys`; returns mlx-lm's logits with
    it."""
    theirs, _ = load_model(model)
    settings: dict[str, Any] = {"rank": rank, "scale": 2.0, "dropout": 0.0}
    if keys or kind == "dora":
        settings["keys"] = keys or DENSE
    utils.linear_to_lora_layers(theirs, 2, settings, use_dora=kind == "dora")
    mx.random.seed(seed)
    arrays = {}
    for name, value in tree_flatten(theirs.parameters()):
        part = name.rpartition(".")[2]
        if part in ("lora_a", "lora_b"):
            arrays[name] = size * mx.random.normal(value.shape)
        elif part == "m":
            arrays[name] = value * (1 + size * mx.random.normal(value.shape))
    assert arrays
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    theirs, _ = load_model(model)
    utils.load_adapters(theirs, str(folder))
    theirs.eval()
    return np.array(theirs(mx.array([TOKENS]))[0])


@catches(
    "a change to a quantized layer is dropped",
    "mlxspec.models.layers:AdaptedLinear.__call__",
    lambda right: lambda self, x: layers.project(self.base, x),
    case="packed-small-lora-qwen3]",
)
@catches(
    "a change to a quantized layer is rounded to its bits",
    "mlxspec.models.adapters:_beside",
    lambda right: lambda module, change: rounded(module, change),
    case="packed-small-lora-qwen3]",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("size", [0.03, 0.3], ids=["small", "large"])
@pytest.mark.parametrize("kept", ["packed", "floats"])
@pytest.mark.parametrize("bits", [4, 8, None], ids=["4-bit", "8-bit", "float"])
def test_every_family(
    bits: int | None,
    kept: str,
    size: float,
    kind: str,
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """packed: quantized weights stay as they are, as on every GPU."""
    if kept == "packed":
        if bits is None:
            pytest.skip("floats are not packed")
        monkeypatch.setattr(memory, "floats_fit", lambda *args, **options: False)
    if kind == "dora" and "moe" in family:
        pytest.skip("mlx-lm has no DoRA of experts")
    model = write(tmp_path / "model", family, bits)
    theirs = random_adapter(tmp_path / "adapter", model, kind, size)
    ours, base = logits_of(model, tmp_path / "adapter"), logits_of(model, None)
    scale = np.abs(theirs).max()
    difference = np.abs(ours - theirs).max() / scale
    assert difference < 1e-3
    assert np.abs(theirs - base).max() / scale > 10 * max(difference, 1e-5)
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def rounded(module: Any, change: Any) -> Any:
    whole = layers.weight_values(module) + change.scale * (change.a @ change.b).T
    made = mx.quantize(whole, module.group_size, module.bits)
    return layers.quantized_linear(*made, group_size=module.group_size, bits=module.bits, mode=module.mode)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_writes_the_same_change_otherwise(family: str, dora: bool, tmp_path: Path) -> None:
    model = write(tmp_path / "model", family)
    theirs = random_adapter(tmp_path / "adapter", model, "dora", 0.3)
    arrays = mx.load(str(tmp_path / "adapter" / "adapters.safetensors"))
    peft = {}
    for name, value in arrays.items():
        path, _, part = name.rpartition(".")
        path = f"base_model.model.{path.replace('language_model.model.', 'model.language_model.')}"
        names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
        peft[f"{path}.{names[part]}"] = mx.contiguous(value.T) if value.ndim == 2 else value
    if not dora:
        peft = {k: v for k, v in peft.items() if "magnitude" not in k}
    folder = tmp_path / "peft"
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), peft)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "use_rslora": True, "use_dora": dora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    ours = logits_of(model, folder)  # alpha / sqrt(r) is mlx-lm's scale of 2
    if dora:
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 1e-3
    else:
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        lora = tmp_path / "lora"
        lora.mkdir()
        mx.save_safetensors(
            str(lora / "adapters.safetensors"), {k: v for k, v in arrays.items() if not k.endswith(".m")}
        )
        (lora / "adapter_config.json").write_text(json.dumps(config | {"fine_tune_type": "lora"}))
        np.testing.assert_allclose(ours, logits_of(model, lora), rtol=1e-4, atol=1e-4)


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
        (damaged("c", "adapter_config.json", b"{}"), "has no .lora_parameters."),
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


@pytest.mark.parametrize(
    ("patterns", "scales"),
    [
        ({"q_proj": 8}, {"0.q": 2.0, "1.q": 2.0}),
        ({"layers.0.self_attn.q_proj": 8}, {"0.q": 2.0}),
        ({"model.layers.1.self_attn.v_proj": 2}, {"1.v": 0.5}),
        ({"^model.layers.0.self_attn.q_proj": 8}, {"0.q": 2.0}),
        ({r"layers\.[1-9]\..*_proj": 8}, {"1.q": 2.0, "1.v": 2.0}),
        ({r".*\.0\..*\.(q_proj|v_proj)": 12, "q_proj": 8}, {"0.q": 3.0, "0.v": 3.0, "1.q": 2.0}),
        (
            {"_proj": 8, "proj": 8, "attn.q_proj": 8, "self_attn": 8},
            {},
        ),  # not behind a dot, or not to the end
    ],
)
def test_pefts_patterns(patterns: dict[str, int], scales: dict[str, float], tmp_path: Path) -> None:
    """Keys of `alpha_pattern` are regular expressions for a module's name from any dot on; ranks are the tensors' own."""
    model = write(tmp_path / "model", "qwen3")
    place = "base_model.model.model.layers"
    mx.random.seed(1)
    peft = {}
    for layer in (0, 1):
        for name, out in (("q", 128), ("v", 64)):
            rank = 4 if (layer, name) != (1, "v") else 2
            path = f"{place}.{layer}.self_attn.{name}_proj"
            peft[f"{path}.lora_A.weight"] = 0.3 * mx.random.normal((rank, 64))
            peft[f"{path}.lora_B.weight"] = 0.3 * mx.random.normal((out, rank))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4,
        "rank_pattern": {"1.self_attn.v_proj": 2},
    }

    def logits(name: str, tensors: dict[str, mx.array], **more: Any) -> np.ndarray:
        folder = tmp_path / name
        folder.mkdir()
        mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
        (folder / "adapter_config.json").write_text(json.dumps(config | more))
        return logits_of(model, folder)

    scaled = {}
    for name, value in peft.items():
        layer, _, rest = name.removeprefix(f"{place}.").partition(".")
        scale = scales.get(f"{layer}.{rest.removeprefix('self_attn.')[0]}", 1.0)
        scaled[name] = value * scale if "lora_B" in name else value
    wanted = logits("scaled", scaled)
    np.testing.assert_allclose(logits("patterns", peft, alpha_pattern=patterns), wanted, atol=1e-4)
    assert (np.abs(wanted - logits("plain", peft)).max() > 1e-3) == bool(scales)


@pytest.mark.parametrize("pattern", ["(a+)+", "(", "[", "(.*)*x", ".*.*.*.*q_proj", "a" * 300])
def test_a_pattern_that_cannot_be_used(pattern: str, tmp_path: Path) -> None:
    """No regular expression, or one that may take very long."""
    model = write(tmp_path / "model", "qwen3")
    folder = tmp_path / "adapter"
    folder.mkdir()
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {f"{path}.lora_A.weight": mx.zeros((4, 64)), f"{path}.lora_B.weight": mx.zeros((128, 4))}
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), parts)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "alpha_pattern": {pattern: 8}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"the pattern .* of adapter_config\.json") as caught:
        logits_of(model, folder)
    assert "\n" not in str(caught.value)
