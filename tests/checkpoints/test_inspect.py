"""`inspect` on a folder of every kind: what it says equals what loading and running it shows, and no weight is read for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
import tiny
import tiny_assistant
import tiny_gemma
from mlx.utils import tree_flatten

from mlxspec.checkpoints import memory
from mlxspec.checkpoints.inspect import DrafterReport, InspectReport, inspect
from mlxspec.cli.inspect import count
from mlxspec.cli.main import main
from mlxspec.errors import ConfigError, MlxspecError, ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.assemble import Assembled, assemble
from mlxspec.models.folder import ModelFolder
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import architecture
from mlxspec.models.runnable import judge
from mlxspec.models.sizes import bytes_of
from tests.models import adapted_zoo

QUANTIZED = {
    "mlx-4bit": tiny.Quantization(bits=4, group_size=32),
    "mlx-8bit": tiny.Quantization(bits=8, group_size=64),
    "mlx-mixed": tiny.Quantization(bits=4, group_size=32, mixed=True),
    "mlx-mxfp4": tiny.Quantization(bits=4, group_size=32, mode="mxfp4"),
    "mlx-nvfp4": tiny.Quantization(bits=4, group_size=16, mode="nvfp4"),
}
# attention, windowed, recurrent, shared
LAYERS = {
    "tied": (1, 0, 3, 0),
    "untied": (2, 0, 4, 0),
    "moe": (2, 0, 2, 0),
    "gemma3": (2, 4, 0, 0),
    "gemma4-dense": (2, 4, 0, 0),
    "gemma4-e": (1, 2, 0, 3),
    "gemma4-moe": (2, 4, 0, 0),
}
FIXTURES = [
    "tied/hub",
    "untied/text",
    "moe/hub",
    "moe/text-unfused",
    "tied/mlx",
    *(f"untied/{kind}" for kind in QUANTIZED),
    "moe/mlx-4bit",
    "gemma3/hub",
    "gemma3/mlx-4bit",
    "gemma4-dense/hub",
    "gemma4-e/text",
    "gemma4-moe/mlx-4bit",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders by NAME/DIALECT, each written once."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path, (model, dialect) = root / name.replace("/", "-"), name.split("/")
        if path.is_dir():
            return path
        if model.startswith("gemma"):
            if dialect.startswith("mlx"):
                return tiny_gemma.convert(folder(f"{model}/hub"), path, 4)
            write = tiny_gemma.write_hub if dialect == "hub" else tiny_gemma.write_text
            return write(path, tiny_gemma.CONFIGS[model])
        if dialect.startswith("mlx"):
            return tiny.convert(folder(f"{model}/hub"), path, QUANTIZED.get(dialect))
        if dialect == "hub":
            return tiny.write_hub(path, tiny.SHAPES[model])
        return tiny.write_text_only(path, tiny.SHAPES[model], unfused=dialect == "text-unfused")

    return folder


def drafters(report: InspectReport) -> dict[str, tuple[bool, str]]:
    return {d.name: (d.usable, d.why) for d in report.drafters}


def looked_at(path: Path | str, **options: int) -> InspectReport:
    report = inspect(str(path), **options)
    assert isinstance(report, InspectReport)
    return report


def loaded(path: Path) -> Assembled:
    folder = ModelFolder(path)
    return assemble(folder.config(), folder.read)


@pytest.mark.parametrize("name", FIXTURES)
def test_every_kind_of_folder(name: str, folders: Callable[[str], Path]) -> None:
    path = folders(name)
    report, made = looked_at(path), loaded(path)
    model, dialect = name.split("/")
    layers = report.layers
    assert (layers.attention, layers.windowed, layers.recurrent, layers.shared) == LAYERS[model]
    assert layers.total == len(made.model.language_model.model.layers)
    plain = architecture(ModelFolder(path).config()).build(made.config)
    assert report.parameters == sum(v.size for _, v in tree_flatten(plain.parameters()))
    assert sum(report.formats.values()) == report.parameters
    assert (report.active < report.parameters) == ("moe" in name)
    assert (
        report.head.present
        == (made.mtp is not None)
        == (not model.startswith("gemma") and "mlx" not in dialect)
    )
    if made.mtp is not None:
        head = Qwen35Mtp(made.config, plain)
        assert report.head.parameters == sum(v.size for _, v in tree_flatten(head.parameters()))
    on_disk = sum(v.nbytes for v in ModelFolder(path).read().values())
    assert report.file_bytes + report.head.bytes + report.skipped_bytes == on_disk
    assert (report.skipped_bytes > 0) == (dialect == "hub")
    modules = [m for m in (made.model, made.mtp) if m is not None]
    assert report.memory.weights + report.memory.drafter_weights == bytes_of(*modules)
    assert {d.name for d in report.drafters if d.usable} >= {"ngram-simple", "forced"}
    assert [d.usable for d in report.drafters if d.name == "mtp"] == [report.head.present]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_formats_are_read_off_the_tensors(kind: str, folders: Callable[[str], Path]) -> None:
    how, report = QUANTIZED[kind], looked_at(folders(f"untied/{kind}"))
    first = next(iter(report.formats))
    assert f"{how.bits} bits in groups of {how.group_size}" in first
    assert (how.mode in first) == (how.mode != "affine")
    assert ("8 bits in groups of 32" in report.formats) == how.mixed
    assert report.bits_per_weight < (
        13 if how.bits == 8 or how.mixed else 9
    )  # tiny matrices: much is not quantized


def test_a_head_beside_the_model(folders: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(folders("untied/mlx-4bit"), path)
    without = looked_at(path)
    assert "--graft-mtp" in without.head.advice
    head = {k: mx.array(v) for k, v in tiny.weights(tiny.SHAPES["untied"]).items() if k.startswith("mtp.")}
    mx.save_safetensors(str(path / "mtp.safetensors"), head)
    assert looked_at(path).head.present
    alone = tmp_path / "alone"
    alone.mkdir()
    (path / "mtp.safetensors").rename(alone / "model.safetensors")
    found = inspect(str(alone))
    assert isinstance(found, DrafterReport)
    assert found.kind == "an MTP head"
    beside = inspect(str(path), draft_model=str(alone))
    assert isinstance(beside, InspectReport)
    assert beside.memory.drafter_weights > without.memory.drafter_weights == 0
    assert drafters(without)["mtp"][0] is False
    usable, why = drafters(beside)["mtp"]
    assert usable
    assert f"the head in {alone}" in why
    usable, why = drafters(beside)["draft-model"]
    assert not usable
    assert "no model of its own" in why


def test_a_head_that_is_named_comes_before_the_own(folders: Callable[[str], Path], tmp_path: Path) -> None:
    own = folders("untied/text")
    head = {k: mx.array(v) for k, v in tiny.weights(tiny.SHAPES["untied"]).items() if k.startswith("mtp.")}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), head)
    report = inspect(str(own), draft_model=str(tmp_path))
    assert isinstance(report, InspectReport)
    assert drafters(report)["mtp"] == (True, f"the head in {tmp_path}, named with --draft-model")
    with pytest.raises(ModelError, match=r"Qwen3\.5 models only"):
        inspect(str(folders("gemma4-dense/text")), draft_model=str(tmp_path))


def test_a_whole_model_lends_its_head_where_there_is_none(folders: Callable[[str], Path]) -> None:
    bare, original, other = (folders(name) for name in ("untied/mlx-4bit", "untied/text", "tied/hub"))
    lent, not_lent, own = (
        inspect(str(model), draft_model=str(beside))
        for model, beside in ((bare, original), (bare, other), (original, original))
    )
    for report in (lent, not_lent, own):
        assert isinstance(report, InspectReport)
        assert drafters(report)["draft-model"][0]
    assert isinstance(lent, InspectReport)
    assert drafters(lent)["mtp"] == (True, f"the head of {original}, where `mtp` is asked for by name")
    assert isinstance(not_lent, InspectReport)
    assert drafters(not_lent)["mtp"] == (False, not_lent.head.advice)
    assert isinstance(own, InspectReport)
    assert drafters(own)["mtp"] == (True, "the model's own head")


def test_an_assistant(folders: Callable[[str], Path], tmp_path: Path) -> None:
    target = folders("gemma4-dense/text")
    config = tiny_assistant.config(tiny_gemma.CONFIGS["gemma4-dense"])
    path = tiny_assistant.write(tmp_path / "assistant", config)
    found = inspect(str(path))
    assert isinstance(found, DrafterReport)
    assert "assistant" in found.kind
    with_it = inspect(str(target), draft_model=str(path))
    assert isinstance(with_it, InspectReport)
    assert with_it.memory.drafter_weights > 0
    assert "assistant" in with_it.head.advice
    assert drafters(with_it)["mtp"] == (True, f"the assistant in {path}, named with --draft-model")
    assert drafters(with_it)["draft-model"] == (False, f"{path} is no model of its own; it drafts as mtp")
    assert drafters(looked_at(target))["mtp"][0] is False
    with pytest.raises(ModelError, match="Gemma 4 models only"):
        inspect(str(folders("untied/text")), draft_model=str(path))


def test_the_demo() -> None:
    report = looked_at("demo", context=1000, rows=3)
    assert (report.layers.attention, report.layers.recurrent) == (2, 4)
    assert report.head.present
    assert report.revision is None
    assert report.memory.fits
    assert (report.memory.context, report.memory.rows) == (1000, 3)
    assert report.memory.state == 3 * looked_at("demo", context=1000).memory.state


@pytest.mark.parametrize("name", ["untied/text", "gemma3/text", "gemma4-e/text"])
def test_no_state_is_larger_than_what_is_told(name: str, folders: Callable[[str], Path]) -> None:
    """Rows as the engine fills them: a prefill in chunks, then verifies of which a part stands."""
    made = loaded(folders(name))
    cache, chunk, verify = made.model.make_cache(1), 40, 9
    for width in (chunk, chunk, 7):
        made.model.forward(mx.arange(width) % 190, FlatRows((width,)), cache, certain=True)
        cache.commit()
    for kept in (1, verify, 4, 2, verify, verify, 3):
        out = made.model.forward(mx.arange(verify), FlatRows((verify,)), cache)
        mx.eval(out.logits)
        cache.commit([kept])
        mx.eval(cache.arrays)
        length, total = cache.lengths[0], 0
        for layer, empty in zip(cache.layers, made.model.make_cache(0).layers, strict=True):
            told = empty.bytes_for(length, verify if layer.is_recurrent else chunk)
            held = sum(x.nbytes for x in layer.arrays)
            assert 0.2 * told <= held <= told
            total += told
        assert made.model.make_cache(0).bytes_for(length, prefill=chunk, verify=verify) == total


def test_state_of_a_published_size() -> None:
    """Qwen3.5 27B: 151 MB of recurrent states a row, and 64 kB of keys and values a token."""
    config = {
        "model_type": "qwen3_5", "vocab_size": 248320, "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 17408,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4,
        "rope_parameters": {"rope_theta": 1e7},
    }  # fmt: skip
    kind = architecture(config)
    model = kind.build(kind.parse(config))
    model.set_dtype(mx.bfloat16)
    short, long = (memory.state_bytes(model, n, 1) for n in (32768, 65536))
    states = 151e6
    assert states < short - 2 * 16 * 4 * 256 * 2 * 32768 * 9 / 8 < states + 120e6
    assert long - short == 2 * 16 * 4 * 256 * 2 * 32768 * 9 // 8
    told = memory.expected(judge(config), 54 << 30, context=262144)
    assert told.weights >= 4 * 26e9 or told.weights == 54 << 30


def test_no_weight_is_read(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Zeros in the place of all matrices change nothing: only headers and a few norms are looked at."""
    path = tmp_path / "model"
    shutil.copytree(folders("untied/text"), path)
    before = looked_at(path)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin:] = bytes(len(content) - begin)
    file.write_bytes(content)
    assert looked_at(path) == before


def test_no_weight_of_a_drafter_is_read(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = {k: mx.array(v) for k, v in tiny.weights(tiny.SHAPES["untied"]).items() if k.startswith("mtp.")}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), head)
    assistant = tiny_assistant.write(
        tmp_path / "assistant", tiny_assistant.config(tiny_gemma.CONFIGS["gemma4-dense"])
    )
    pairs = [(folders("untied/text"), tmp_path), (folders("gemma4-dense/text"), assistant)]
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("arrays are evaluated"))
    for model, beside in pairs:
        inspect(str(model), draft_model=str(beside))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--context", "4096"], "context ends at 2048"),
        (["demo", "--context", "0"], "--context"),
        (["demo", "--rows", "0"], "--rows"),
        (["demo", "--rows", "many"], "--rows"),
        (["demo", "--revision", "main"], "revisions"),
        (["/no/such/folder"], "no folder"),
        (["owner/never-pulled"], "mlxspec pull owner/never-pulled"),
        (["demo", "--draft-model", "/no/such"], "no folder"),
        (["--json"], "MODEL"),
    ],
)
def test_what_cannot_be_inspected(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main(["inspect", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_what_cannot_be_loaded_cannot_be_inspected(folders: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(folders("untied/text"), path)
    config = json.loads((path / "config.json").read_text())
    for change, words in (
        ({"hidden_size": 128}, "shape"),
        ({"num_hidden_layers": 9, "layer_types": None}, "missing"),
    ):
        (path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=words):
            inspect(str(path))
    (path / "model.safetensors").unlink()
    with pytest.raises(MlxspecError, match=r"model\*\.safetensors"):
        inspect(str(path))
    with pytest.raises(ConfigError):
        inspect("")


def test_the_page_and_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", "--json", "--draft-model", "demo-draft"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"] == 3851232
    assert data["memory"]["fits"] is True
    assert data["memory"]["total"] > data["memory"]["weights"]
    assert {d["name"]: d["usable"] for d in data["drafters"]}["draft-model"] is True
    assert main(["inspect", "demo"]) == 0
    page = capsys.readouterr().out
    for words in ("6: 2 attention, 4 recurrent", "3.85M", "MTP head", "bfloat16", "this machine gives"):
        assert words in page


def test_a_missing_tokenizer_is_said(
    folders: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without one can be loaded for token ids, from Python; no command can use it."""
    assert main(["inspect", str(folders("tied/hub"))]) == 0
    assert "tokenizer     missing: there is neither tokenizer.json" in capsys.readouterr().out
    assert main(["inspect", "demo"]) == 0
    assert "tokenizer" not in capsys.readouterr().out


def test_counts_of_parameters_have_three_digits_and_no_exponent() -> None:
    for n, wanted in {
        0: "0", 999: "999", 1000: "1k", 4_320_000: "4.32M", 99_960_000: "100M", 270_000_000: "270M", 999_400_000: "999M",
        999_500_000: "1B", 999_999_999: "1B", 1_000_000_000: "1B", 27_400_000_000: "27.4B", 1_234_000_000_000: "1234B",
    }.items():  # fmt: skip
        assert count(n) == wanted, n


def test_a_format_of_others_that_mlx_lms_code_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AWQ: loading leaves the weights to mlx-lm's code, and so do inspecting and converting."""
    told = {"quant_method": "awq", "bits": 4, "group_size": 32}
    folder = adapted_zoo.write("llama", tmp_path / "awq", quantization_config=told)
    path, layer = folder / "model.safetensors", "model.layers.0.mlp.up_proj"
    weights = dict(mx.load(str(path)))
    mx.eval(weights)
    width, size = weights.pop(f"{layer}.weight").shape
    weights[f"{layer}.qweight"] = mx.full((size, width // 8), 0x7654321, mx.int32)
    weights[f"{layer}.qzeros"] = mx.full((size // 32, width // 8), 0x7777777, mx.int32)
    weights[f"{layer}.scales"] = mx.full((size // 32, width), 0.01, mx.float16)
    path.unlink()
    mx.save_safetensors(str(path), weights, {"format": "pt"})
    report = inspect(str(folder))
    assert isinstance(report, InspectReport)
    assert report.model_type.startswith("llama, by mlx-lm")
    for words in ("generate -p hi -n 3 -m", "convert -o made"):
        given = [str(tmp_path / w) if w == "made" else w for w in words.split()]
        assert main([*given, str(folder)]) == 0, capsys.readouterr().err
