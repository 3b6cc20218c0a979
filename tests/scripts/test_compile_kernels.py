"""scripts/compile_kernels: which variants it writes, that their text is what the engine launches, and how it calls Apple's compiler."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import compile_kernels
import mlx.core as mx
import mlx.nn as nn
import pytest
import write_checkpoint

from mlxspec.kernels import launch, qmv_rows
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.quantized_weight import MICROSCALING
from mlxspec.models.registry import architecture

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "metal"))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernels") / "metal"
    assert compile_kernels.main(["--write-only", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def named(written) -> dict[str, dict]:
    return json.loads((written / "variants.json").read_text(encoding="utf-8"))


def values(named, kernel: str, key: str) -> set[str]:
    return {dict(v["template"])[key] for v in named.values() if v["kernel"] == kernel}


def test_every_kernel_is_written_in_every_dtype_and_size(written, named):
    assert {v["kernel"] for v in named.values()} == {p.stem for p in (ROOT / "metal").glob("*.metal")}
    assert set(named) == {p.name for p in written.glob("*.metal")}
    floats = {str(dtype).removeprefix("mlx.core.") for dtype in launch.FLOATS}
    for kernel in {v["kernel"] for v in named.values()}:
        assert values(named, kernel, "T") == floats, kernel
    heads = {str(shape.num_v_heads) for shape in compile_kernels.shapes()}
    assert heads == {"16", "32", "48"}
    for kernel in ("gdn_round", "gdn_prefill", "conv_qkv"):
        assert heads <= values(named, kernel, "Hv")
    assert values(named, "qmv_rows", "M") == {str(n) for n in range(1, qmv_rows.MAX_ROWS + 1)}
    formats = {("1", str(group), str(bits)) for group in (32, 64, 128) for bits in (4, 8)}
    formats |= {("0", str(group), str(bits)) for group, bits in MICROSCALING.values()}
    templates = [dict(v["template"]) for v in named.values() if v["kernel"] == "qmv_rows"]
    rows = {(*form, str(n)) for form in formats for n in range(1, qmv_rows.MAX_ROWS + 1)}
    assert {tuple(t[key] for key in ("AFFINE", "GROUP", "BITS", "M")) for t in templates} == rows
    for key in ("REPLAY", "FLUSH"):
        assert values(named, "gdn_round", key) == {"0", "1"}
    assert len(named) < 1500  # three runs of the compiler each


def test_a_file_is_the_whole_text_that_mlx_compiles(written, named):
    for name, variant in list(named.items())[::40]:
        text = (written / name).read_text(encoding="ascii")
        assert f"[[kernel]] void custom_kernel_mlxspec_{variant['kernel']}" in text
        assert "[[host_name(" in text


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, None])
def test_what_models_launch_is_among_them(named, monkeypatch, bits):
    """A variant that only a model launches would meet the compiler on a user's machine first. Forwards of a 0.8B's layers are built with
    every kernel in use: a prompt, verifies of which a part is accepted, and a plain step."""
    config = write_checkpoint.cut(write_checkpoint.SIZES["qwen3.5-0.8b"], 4, 512)
    config["text_config"] = config["text_config"] | {"hidden_size": 512, "intermediate_size": 512}
    kind = architecture(config)
    model = kind.build(kind.parse(config))
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
    model.fuse()
    recorder = compile_kernels.Recorder()
    used = {name: launch.KernelReport(name=name, in_use=True, reason="forced") for name in launch._checks}
    monkeypatch.setattr(launch, "_reports", used)
    monkeypatch.setattr(launch, "wins", lambda *_: True)
    with launch.using(recorder):
        cache = model.make_cache(1)
        for widths, certain, stood in (
            ((64,), True, None),
            ((5,), False, [2]),
            ((3,), False, [3]),
            ((1,), True, None),
        ):
            rows = FlatRows(widths)
            model.forward(mx.zeros(rows.num_tokens, mx.int32), rows, cache, certain=certain)
            cache.commit(stood)
    launched = {v.kernel for v in recorder.texts}
    assert launched >= {"conv_qkv", "gdn_round", *(["qmv_rows"] if bits else [])}
    known = {
        (v["kernel"], tuple(map(tuple, v["template"])), tuple(map(tuple, v["arguments"])))
        for v in named.values()
    }
    missing = {(v.kernel, v.template, v.arguments) for v in recorder.texts} - known
    assert not missing


@pytest.mark.slow
def test_every_variant_is_cpp_that_the_emulator_takes(written, named):
    """Not Apple's compiler, but a compiler: one variant of each template but the sizes."""
    import emulator
    from emulator.compiler import build
    from emulator.translate import parse, translate

    if reason := emulator.missing_compiler():
        pytest.skip(reason)
    seen = set()
    for name, variant in named.items():
        template = dict(variant["template"])
        kind = (
            variant["kernel"],
            *(template.get(key) for key in ("T", "REPLAY", "FLUSH", "FACTS", "BITS", "GROUP", "TILES")),
        )
        if kind not in seen:
            seen.add(kind)
            text = (written / name).read_text(encoding="ascii")
            body = launch.metal_source(variant["kernel"]).partition(launch.BODY)[2]
            build(translate(text, body, parse(text)), contract=False)
    assert len(seen) > 20


FAKE = """#!/bin/sh
for word in "$@"; do
  case "$word" in */qmv_rows-003.metal) file=$word ;; -std=metal4.0) standard=$word ;; esac
done
echo "$@" >> {log}
[ -z "$file" ] || [ -z "$standard" ] || {{ echo "$file:7:3: error: planted" >&2; exit 1; }}
"""


def test_the_compiler_sees_every_file_and_its_refusal_is_reported(written, monkeypatch, capsys, tmp_path):
    log = tmp_path / "log"
    fake = tmp_path / "xcrun"
    fake.write_text(FAKE.format(log=log))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    variants = {
        v.name: compile_kernels.Variant(kernel="k", template=(), arguments=())
        for v in list(written.glob("qmv_rows-00*.metal"))[:10]
    }
    assert "qmv_rows-003.metal" in variants
    assert not compile_kernels.compile_all(written, variants, ["metal3.1"])
    (said,) = compile_kernels.compile_all(written, variants, ["metal3.2", "metal4.0"])
    assert said.startswith("qmv_rows-003.metal does not compile as metal4.0")
    assert "error: planted" in said
    calls = log.read_text().splitlines()
    assert len(calls) == 3 * len(variants)
    assert all("-sdk macosx metal -x metal" in call and compile_kernels.HEADER in call for call in calls)


def test_the_header_that_mlx_compiles_before_a_kernel_is_there():
    assert (compile_kernels.INCLUDE / compile_kernels.HEADER).is_file()


def test_without_apples_compiler_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_kernels.main(["--out", str(tmp_path / "out")]) == 2
    assert "no xcrun" in capsys.readouterr().err


def test_a_folder_of_others_is_left_alone(capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert compile_kernels.main(["--write-only", "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").exists()
