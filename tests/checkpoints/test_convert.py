"""`mlxspec convert`: what it writes loads in mlx-lm with the logits of mlx-lm's own conversion, and here with the MTP head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
import tiny_gemma
import tiny_qwen3
from mlx.utils import tree_flatten

from mlxspec.checkpoints import writing
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.inspect import InspectReport, inspect
from mlxspec.checkpoints.quantize import Format, quantize
from mlxspec.errors import ConfigError, ModelError, StorageError
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble import Assembled, assemble
from mlxspec.platform.resources import demo_folder

TOKENS = [5, 17, 3, 99, 101, 7, 8, 150, 11, 2, 60, 61, 62]
Q4 = Format(bits=4, group_size=32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Source folders by name, each written once: qwen, qwen-text, moe, moe-unfused, gemma3, gemma4-e, gemma4-moe, mlx-4bit."""
    root = tmp_path_factory.mktemp("sources")

    def write(name: str, path: Path) -> Path:
        family, _, kind = name.partition("/")
        if family.startswith("gemma"):
            config = tiny_gemma.CONFIGS[family]
            return (tiny_gemma.write_text if kind == "text" else tiny_gemma.write_hub)(path, config)
        if family in tiny_qwen3.CONFIGS:
            return tiny_qwen3.write(path, tiny_qwen3.CONFIGS[family])
        shape = tiny.SHAPES[family]
        if kind.startswith("mlx"):
            how = tiny.Quantization(bits=4, group_size=32) if kind == "mlx-4bit" else None
            return tiny.convert(folder(f"{family}/hub"), path, how)
        if kind.startswith("text"):
            return tiny.write_text_only(path, shape, unfused=kind == "text-unfused")
        return tiny.write_hub(path, shape)

    def folder(name: str) -> Path:
        path = root / name.replace("/", "-")
        return path if path.is_dir() else write(name, path)

    return folder


def ours(folder: Path) -> Assembled:
    return assemble(json.loads((folder / "config.json").read_text()), lambda: read_folder(folder))


def mlx_lm_logits(folder: Path) -> np.ndarray:
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return np.array(model(mx.array([TOKENS]))[0].astype(mx.float32))


def theirs(source: Path, folder: Path, how: Format) -> Path:
    """mlx-lm's own conversion."""
    quantization = tiny.Quantization(bits=how.bits, group_size=how.group_size, mode=how.mode)
    return tiny.convert(source, folder, quantization)


def logits(made: Assembled) -> np.ndarray:
    cache = made.model.make_cache(1)
    rows = FlatRows((len(TOKENS),))
    return np.array(made.model.forward(mx.array(TOKENS), rows, cache, certain=True).logits)


SOURCES = (
    *("tied/hub", "grouped/hub", "moe/hub", "gemma3/hub", "gemma4-e/hub", "gemma4-moe/hub"),
    *("qwen3-tied/text", "qwen3-moe/text", "qwen3-next/text"),
)
FORMATS = (Q4, Format.of("mxfp4"), Format(bits=8))
FAST = {("grouped/hub", Format.of("mxfp4")), ("moe/hub", Format(bits=8)), *((name, Q4) for name in SOURCES)}
PAIRS = [
    pytest.param(
        name, how, id=f"{name}-{how.mode}-{how.bits}", marks=() if (name, how) in FAST else pytest.mark.slow
    )
    for name in SOURCES
    for how in FORMATS
]


@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_mlx_lm_computes_what_its_own_conversion_does(
    name: str, how: Format, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    source = folders(name)
    made = convert(str(source), tmp_path / "ours", Wish(trunk=how))
    own = theirs(source, tmp_path / "theirs", how)
    a, b = mlx_lm_logits(made.folder), mlx_lm_logits(own)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= 1e-5 * max(1.0, np.abs(b).max())
    expected = json.loads((own / "config.json").read_text())["quantization"]
    found = json.loads((made.folder / "config.json").read_text())["quantization"]
    for path in {
        k for k in (*expected, *found) if "." in k and not k.startswith("mtp.")
    }:  # those that differ from the rest
        assert found.get(path, how.data) == {"mode": "affine"} | expected.get(path, how.data)
    assert how.data.items() <= found.items()
    assert how.data.items() <= expected.items()


@pytest.mark.parametrize(
    "name",
    [
        *("untied/text", "moe/text-unfused", "gemma3/text", "gemma4-dense/text"),
        *("qwen3/text", "qwen3-moe/text", "qwen3-next/text"),
    ],
)
def test_text_only_folders_become_what_mlx_lm_loads(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Raw text-only folders, which mlx-lm may not take as they are."""
    source = folders(name)
    has_head = ours(source).mtp is not None
    made = convert(str(source), tmp_path / "ours", Wish(head_bits=16 if has_head else None))
    assert np.abs(mlx_lm_logits(made.folder) - logits(ours(source))).max() <= 1e-3


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", ["grouped/hub", "moe/text-unfused", "qwen3-next/text"])
def test_the_head_comes_along(name: str, bits: int, folders: Callable[[str], Path], tmp_path: Path) -> None:
    source, out = folders(name), tmp_path / "out"
    convert(str(source), out, Wish(trunk=Q4, head_bits=bits))
    report, before, after = inspect(str(out)), ours(source), ours(out)
    assert isinstance(report, InspectReport)
    assert report.head.present
    assert max(report.head.formats, key=report.head.formats.__getitem__).startswith(
        {16: "float32"}.get(bits, f"{bits} bits")
    )
    assert before.mtp is not None
    assert after.mtp is not None
    old, new = (dict(tree_flatten(m.mtp.parameters())) for m in (before, after))
    assert old.keys() == new.keys()
    off = {4: 0.2, 8: 0.02, 16: 0.0}[bits]
    for key, value in old.items():
        size = mx.abs(value).max().item()
        assert mx.abs(value - new[key]).max().item() <= (0.0 if value.ndim == 1 else off * size), key


def test_a_head_is_grafted(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Raw onto converted, raw onto raw: the head computes with the very norms it has at home."""
    home = ours(folders("grouped/hub"))
    bare = tmp_path / "bare"
    shutil.copytree(folders("grouped/hub"), bare)
    index = json.loads((bare / "model.safetensors.index.json").read_text())
    for file in bare.glob("*.safetensors"):
        kept = {k: v for k, v in mx.load(str(file)).items() if not k.startswith("mtp.")}
        mx.eval(kept)
        mx.save_safetensors(str(file), kept)
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if not k.startswith("mtp.")}
    (bare / "model.safetensors.index.json").write_text(json.dumps(index))
    for i, source in enumerate((folders("grouped/mlx-4bit"), bare)):
        assert not inspect(str(source)).head.present
        out = tmp_path / f"out{i}"
        made = convert(str(source), out, Wish(head_bits=16, graft=str(folders("grouped/hub"))))
        assert made.head_bytes
        grafted = ours(out)
        assert grafted.mtp is not None
        expected = dict(tree_flatten(home.mtp.parameters()))
        for key, value in tree_flatten(grafted.mtp.parameters()):
            assert mx.allclose(value, expected[key], atol=1e-6).item(), key
        if i == 0:  # the trunk is untouched
            before, after = read_folder(source), read_folder(out)
            assert all(mx.array_equal(before[k], after[k]).item() for k in before)
            assert np.array_equal(mlx_lm_logits(source), mlx_lm_logits(out))


def test_dtype(folders: Callable[[str], Path], tmp_path: Path) -> None:
    convert(str(folders("tied/hub")), tmp_path / "out", Wish(dtype="bfloat16", head_bits=16))
    dtypes = {k: v.dtype for k, v in read_folder(tmp_path / "out").items()}
    trunk = {k: v for k, v in dtypes.items() if not k.startswith("mtp.")}
    assert all(v == (mx.float32 if k.endswith("A_log") else mx.bfloat16) for k, v in trunk.items())


@pytest.mark.parametrize(("group", "names"), [(64, {"mlp.gate", "up"}), (128, {"wide"})])
def test_rows_that_do_not_divide_into_groups_stay_floats(group: int, names: set[str]) -> None:
    """A router, too, though its own groups would divide it: as mlx-lm has it."""
    module = nn.Module()
    module.mlp = nn.Module()
    module.mlp.gate, module.up, module.wide = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(128, 32)
    weights = dict(tree_flatten(module.parameters()))
    found, formats = quantize(weights, module, Format(group_size=group))
    assert set(formats) == names | {"wide"}
    assert {name.removesuffix(".scales") for name in found if name.endswith(".scales")} == set(formats)
    assert "mlp.gate" not in formats or (formats["mlp.gate"].bits, formats["mlp.gate"].group_size) == (8, 64)


def test_each_shard_is_filled_before_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_AT_MOST", 100)
    sizes = {"a": 60, "b": 60, "c": 30, "d": 10, "e": 100, "f": 1}
    writing.save_model(
        tmp_path, {name: mx.zeros(size, mx.uint8) for name, size in sizes.items()}, lambda _: None
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    places = {name: int(file[6:11]) for name, file in index["weight_map"].items()}
    assert places == {"a": 1, "b": 2, "c": 2, "d": 2, "e": 3, "f": 4}
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_shards_and_their_index(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SHARD_AT_MOST", 100_000)
    out = convert(str(folders("untied/hub")), tmp_path / "a" / "b", Wish()).folder
    files = sorted(p.name for p in out.glob("model*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert np.abs(mlx_lm_logits(out) - logits(ours(folders("untied/hub")))).max() <= 1e-3
    assert not [p for p in (tmp_path / "a").iterdir() if p != out]


def test_memory_holds_a_shard_and_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source tensors are let go of one by one."""
    monkeypatch.setattr(writing, "SHARD_AT_MOST", 200_000)
    total = sum(v.nbytes for v in read_folder(demo_folder("target")).values())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert("demo", tmp_path / "out", Wish(trunk=Format()))
    assert mx.get_peak_memory() - before < total / 2


def edit(**values: Any) -> dict[str, Any]:
    return values


@pytest.mark.parametrize(
    ("source", "wish", "words"),
    [
        ("grouped/mlx-4bit", edit(trunk=Q4), "quantized already"),
        ("grouped/mlx-4bit", edit(head_bits=4), "no MTP head"),
        ("grouped/hub", edit(graft="demo"), "has an MTP head already"),
        ("gemma3/hub", edit(graft="demo"), "have no MTP head"),
        ("grouped/mlx-4bit", edit(graft="demo"), "MTP head cannot be loaded|shape"),
        ("grouped/mlx-4bit", edit(graft="{grouped/mlx}"), "holds no MTP head"),
        ("grouped/mlx-4bit", edit(graft="/no/such"), "no folder /no/such"),
    ],
)
def test_what_contradicts_the_source(
    source: str, wish: dict[str, Any], words: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    if str(wish.get("graft")).startswith("{"):
        wish = wish | {"graft": str(folders(wish["graft"].strip("{}")))}
    with pytest.raises((ConfigError, ModelError), match=words):
        convert(str(folders(source)), tmp_path / "out", Wish(**wish))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"bits": 7}, "--bits must be one of 2, 3, 4, 5, 6, 8"),
        ({"group_size": 33}, "--group-size must be one of 32, 64, 128"),
        ({"mode": "nvfp4", "bits": 8}, "--bits must be 4 for mode nvfp4"),
        ({"mode": "int4"}, "--mode must be one of affine"),
    ],
)
def test_formats_there_are_not(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Format.of(**values)
    for bad in ({"head_bits": 5}, {"dtype": "int8"}):
        with pytest.raises(ConfigError, match=r"--mtp-bits|--dtype"):
            Wish(**bad)


def test_nothing_is_left_half_done(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = str(folders("tied/hub")), tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        convert(source, out, Wish())
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "precious"]
    (out / "precious").unlink()

    class Stop(BaseException):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Stop

    with monkeypatch.context() as planted:
        planted.setattr(writing.mx, "save_safetensors", stop)
        with pytest.raises(Stop):
            convert(source, out, Wish())
    assert [p.name for p in tmp_path.rglob("*")] == ["out"]

    def cut(path: str, weights: dict[str, mx.array], metadata: dict[str, str]) -> None:
        save(path, weights, metadata=metadata)
        Path(path).write_bytes(Path(path).read_bytes()[:-100])

    save = mx.save_safetensors
    with monkeypatch.context() as planted:
        planted.setattr(writing.mx, "save_safetensors", cut)
        with pytest.raises(
            ModelError, match="cut short"
        ):  # what was written is read again before it gets its name
            convert(source, out, Wish())
    with monkeypatch.context() as planted:
        planted.setattr(writing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        with pytest.raises(StorageError, match="would take"):
            convert(source, out, Wish())
    assert [p.name for p in tmp_path.rglob("*")] == ["out"]
    convert(source, out, Wish())  # an empty folder is taken
    assert (out / "mtp.safetensors").is_file()


def test_a_disk_with_no_room_to_spare_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StorageError, match="left; free some"), writing.whole_folder(tmp_path / "x", 999):
        pass


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SHARD_AT_MOST", 100)
    weights = {"a": mx.zeros((64,)), "b": mx.zeros((8,)), "c": mx.zeros((64,))}
    writing.save_model(tmp_path, dict(weights), lambda _: None)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 3
