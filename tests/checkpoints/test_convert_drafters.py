"""`mlxspec convert` of drafters that read the target's layers: what it writes drafts for the same target, and is quantized."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
import tiny_dflash

import mlxspec
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.inspect import DrafterReport, inspect
from mlxspec.checkpoints.quantize import Format
from mlxspec.cli.main import main
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading.weights import read_folder
from tests.drafters import eagle3_checkpoints

VOCAB, SIZE, LAYERS = 2048, 192, (1, 3, 5)  # the demo target's
Q4 = Wish(trunk=Format(bits=4, group_size=32))
FEW = SamplingParams(max_tokens=12, ignore_eos=True)


def block(folder: Path, kind: str, dtype: mx.Dtype = mx.bfloat16) -> Path:
    sizes = {"hidden": SIZE, "vocab": VOCAB, "target_layers": 6, "layer_ids": LAYERS, "mask_id": 127}
    c = tiny_dflash.config(kind, **sizes)
    return tiny_dflash.write(folder, c, tiny_dflash.weights(kind, c), dtype=dtype)


def eagle(folder: Path) -> Path:
    folder.mkdir()
    kind = eagle3_checkpoints.Kind(layout="SafeAILab", rows=512, own_embedding=False)
    eagle3_checkpoints.write(folder, kind, VOCAB, SIZE, LAYERS)
    return folder


@pytest.mark.parametrize(
    "kind", ["eagle3", "DFlash", *(pytest.param(k, marks=pytest.mark.slow) for k in ("DFlash2", "DSpark"))]
)
def test_a_quantized_drafter_drafts_for_the_same_target(kind: str, tmp_path: Path) -> None:
    source = eagle(tmp_path / "source") if kind == "eagle3" else block(tmp_path / "source", kind)
    made = convert(str(source), tmp_path / "out", Q4)
    assert made.title == ("an EAGLE-3 drafter" if kind == "eagle3" else f"a {kind} drafter")
    given, written = (sum(v.nbytes for v in read_folder(f).values()) for f in (source, tmp_path / "out"))
    assert written < 0.5 * given
    report = inspect(str(tmp_path / "out"))
    assert isinstance(report, DrafterReport)
    assert report.kind == made.title
    name = "eagle3" if kind == "eagle3" else "dflash"
    wish = SpecConfig(policy="fixed", drafters=(name,))
    plain = mlxspec.load("demo", draft="off").generate("def add(", FEW)
    engine = mlxspec.load("demo", draft=name, draft_model=str(tmp_path / "out"))
    got = engine.generate("def add(", FEW, spec=wish)
    assert got.tokens == plain.tokens
    assert got.stats.drafters[name].num_drafted > 0
    assert not got.stats.notices


def test_a_dtype_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block drafter that is stored in float16 comes out in bfloat16: it is not computed in float16."""
    source = block(tmp_path / "source", "DFlash", mx.float16)
    assert main(["convert", str(source), "-o", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "of a DFlash drafter" in capsys.readouterr().out
    assert {v.dtype for v in read_folder(tmp_path / "out").values()} == {mx.bfloat16}


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (Wish(head_bits=4), "is a DFlash drafter and has no MTP head; leave --mtp-bits"),
        (Wish(graft="demo"), "leave --mtp-bits and --graft-mtp out"),
        (Wish(dtype="float16"), "is not computed in float16"),
    ],
)
def test_what_does_not_go_with_a_drafter(wish: Wish, says: str, tmp_path: Path) -> None:
    source = block(tmp_path / "source", "DFlash")
    with pytest.raises(ConfigError, match=says):
        convert(str(source), tmp_path / "out", wish)
    assert not (tmp_path / "out").exists()


def test_twice_and_by_halves(tmp_path: Path) -> None:
    source = block(tmp_path / "source", "DFlash")
    convert(str(source), tmp_path / "once", Q4)
    with pytest.raises(ConfigError, match="is quantized already"):
        convert(str(tmp_path / "once"), tmp_path / "twice", Q4)
    tensors = read_folder(source)
    del tensors["layers.1.mlp.up_proj.weight"]
    mx.eval(list(tensors.values()))
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    with pytest.raises(ModelError, match="The DFlash drafter cannot be loaded: tensors are missing"):
        convert(str(source), tmp_path / "half", Q4)
    assert not (tmp_path / "half").exists()
