"""Over how many tokens drafters propose: by default only where the head is much of what a drafted token reads, and always told; loading,
inspecting and the memory's account agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from test_published_sizes import SIZES

import mlxspec
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.inspect import InspectReport, inspect
from mlxspec.checkpoints.quantize import Format
from mlxspec.cli.main import main
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.mtp import Mtp
from mlxspec.errors import ConfigError
from mlxspec.models import proposal_rows
from mlxspec.models.assemble import assemble_lazily
from mlxspec.models.folder import ModelFolder
from mlxspec.models.head_rows import HeadRows
from mlxspec.models.reads import drafted_reads
from mlxspec.models.registry import architecture
from mlxspec.models.sizes import bytes_of
from mlxspec.platform import memory
from mlxspec.platform.resources import demo_folder

FIXED = SpecConfig(policy="fixed")
ASKED = SamplingParams(max_tokens=24, ignore_eos=True)
QWEN = [name for name, (config, *_) in SIZES.items() if config["model_type"].startswith("qwen3_5")]
DENSE = next(name for name in QWEN if "27B" in name)


def built(size: str, bits: int | None) -> tuple[Any, Any]:
    """Target and MTP head of a published size, in bfloat16 or quantized; nothing is allocated."""
    kind = architecture(SIZES[size][0])
    parsed = kind.parse(SIZES[size][0])
    target = kind.build(parsed)
    assert kind.head is not None
    head = kind.head(parsed, target)
    for module in (target, head):
        module.set_dtype(mx.bfloat16)
        if bits is not None:
            nn.quantize(module, 64, bits)
    return target, head


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("size", QWEN)
def test_large_vocabularies_are_proposed_from_in_part(size: str, bits: int | None) -> None:
    target, head = built(size, bits)
    found = proposal_rows.proposing(head, target, None, 4)
    assert found is not None
    assert (found.num_rows, found.vocab_size) == (32_768, 248_320)
    whole_head = drafted_reads(head).head
    assert found.row_bytes * 248_320 == whole_head * 32_768  # packed rows with their scales, and nothing else
    assert found.whole - found.reduced == whole_head - found.row_bytes
    assert found.whole > 1.5 * found.reduced
    every = proposal_rows.proposing(head, target, 0, 4)
    assert every is not None
    assert (every.num_rows, every.row_bytes, every.reduced) == (0, 0, found.whole)


def test_a_head_of_floats_beside_a_quantized_model_is_copied_in_4_bits() -> None:
    target, head = built(DENSE, None)
    rows = proposal_rows.proposing(head, target, None, 4)
    nn.quantize(
        target, 64, 4, class_predicate=lambda path, m: hasattr(m, "to_quantized") and "lm_head" not in path
    )
    packed, left = (proposal_rows.proposing(head, target, None, bits) for bits in (4, 16))
    assert rows is not None
    assert packed is not None
    assert left is not None
    assert left.row_bytes == rows.row_bytes == 32_768 * 5120 * 2
    assert packed.row_bytes == 32_768 * 5120 * 9 // 16


@pytest.mark.parametrize(
    ("asked", "wanted"), [(None, 0), (0, 0), (5, 5), (2047, 2047), (2048, 0), (10**6, 0)]
)
def test_small_vocabularies_are_not_unless_asked_for(asked: int | None, wanted: int) -> None:
    made = assemble_lazily(
        ModelFolder(demo_folder("target")).config(), ModelFolder(demo_folder("target")).read
    )
    assert proposal_rows.num_rows(asked, 2048, drafted_reads(made.mtp)) == wanted


def test_a_head_that_is_little_of_the_bytes_stays_whole() -> None:
    target, head = built(DENSE, 4)
    whole = drafted_reads(head)
    assert proposal_rows.num_rows(None, 100_000, whole) == 32_768
    assert proposal_rows.num_rows(None, 99_999, whole) == 0
    fewer = type(whole)(dense=whole.dense, head=int(0.4 * whole.dense))
    assert proposal_rows.num_rows(None, 248_320, fewer) == 0
    del target


def parts_of(engine: mlxspec.Engine) -> HeadRows:
    drafter = engine.drafts.drafters["mtp"]
    assert isinstance(drafter, Mtp)
    assert drafter.reduced is not None
    return drafter.reduced.head


def test_loading_takes_rows_and_says_so() -> None:
    plain = mlxspec.load("demo", draft="off")
    whole = mlxspec.load("demo", draft="mtp", spec=FIXED)
    assert not any("proposes" in n for n in whole.notices)
    made = mlxspec.load("demo", draft="mtp", spec=SpecConfig(policy="fixed", draft_vocab=512))
    (notice,) = (n for n in made.notices if "proposes" in n)
    assert "The drafter mtp proposes over 512 of 2048 tokens" in notice
    assert "--draft-vocab 0" in notice
    rows = parts_of(made)
    assert len(rows.ids) == 512
    assert set(made.tokenizer.added_tokens()) <= set(rows.ids.tolist())
    assert made.memory.weights - whole.memory.weights == bytes_of(rows) > 0
    for prompt in ("def main():\n", "import os"):
        wanted = plain.generate(prompt, ASKED)
        got = made.generate(prompt, ASKED)
        assert (got.tokens, got.text) == (wanted.tokens, wanted.text)
        assert not got.stats.notices
        assert 0 < got.stats.num_accepted < got.stats.num_drafted


def test_the_default_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of the rule scaled to the demo."""
    monkeypatch.setattr(proposal_rows, "LEAST_VOCABULARY", 2048)
    monkeypatch.setattr(proposal_rows, "DEFAULT_ROWS", 700)
    made = mlxspec.load("demo", draft=("mtp", "draft-model"), spec=FIXED)
    assert len([n for n in made.notices if "proposes over 700 of 2048" in n]) == 2
    assert len(parts_of(made).ids) == 700
    every = mlxspec.load("demo", draft="mtp", spec=SpecConfig(policy="fixed", draft_vocab=0))
    assert every.drafts.drafters["mtp"].reduced is None
    report = inspect("demo", draft_model=str(demo_folder("draft")))
    assert isinstance(report, InspectReport)
    told = {d.name: d.proposing for d in report.drafters if d.proposing is not None}
    assert told.keys() == {"mtp", "draft-model"}
    for name, drafter in made.drafts.drafters.items():
        assert told[name].num_rows == 700
        assert told[name].reduced == int(drafter.reads.bytes())
    assert report.memory.drafter_weights == sum(d.weight_bytes for d in made.drafts.drafters.values())


def test_inspecting_tells_what_a_drafted_token_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo"]) == 0
    assert "proposes over all 2048 tokens; a drafted token reads" in capsys.readouterr().out
    assert main(["inspect", "demo", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (mtp,) = (d for d in data["drafters"] if d["name"] == "mtp")
    assert mtp["proposing"]["num_rows"] == 0
    assert mtp["proposing"]["whole"] == mtp["proposing"]["reduced"] > 0


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "-p", "def f(x):", "--max-tokens", "12", "--draft", "mtp", "--policy", "fixed"]
    assert main([*command, "--draft-vocab", "0"]) == 0
    wanted = capsys.readouterr()
    assert "proposes" not in wanted.err
    assert main([*command, "--draft-vocab", "600"]) == 0
    got = capsys.readouterr()
    assert got.out == wanted.out
    assert "mtp proposes over 600 of 2048 tokens" in got.err
    for wrong in (["--draft-vocab", "-1"], ["--draft-bits", "5"]):
        assert main([*command, *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("bits", [2, 5, 12, 17, True])
def test_bits_that_there_are_not(bits: int) -> None:
    with pytest.raises(ConfigError, match="draft_bits"):
        SpecConfig(draft_bits=bits)


@pytest.mark.slow
def test_a_head_of_floats_is_kept_in_4_bits_beside_a_quantized_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU quantized weights stay packed where floats would not fit; that is said to be so here."""
    monkeypatch.setattr(memory, "floats_fit", lambda *_: False)
    folder = tmp_path / "mixed"
    convert(str(demo_folder("target")), folder, Wish(trunk=Format(bits=4, group_size=64), head_bits=16))
    prompt = "def main():\n"
    wanted = mlxspec.load(str(folder), draft="off").generate(prompt, ASKED)
    for bits, packed in ((4, True), (8, True), (16, False)):
        spec = SpecConfig(policy="fixed", draft_bits=bits, draft_vocab=512)
        made = mlxspec.load(str(folder), draft="mtp", spec=spec)
        head = made.drafts.drafters["mtp"].model
        names = [name for name, _ in tree_flatten(head.parameters()) if name.endswith(".scales")]
        assert bool(names) == packed
        assert any("kept in" in n for n in made.notices) == packed
        assert head.bits_at_load == (bits if packed else None)
        got = made.generate(prompt, ASKED)
        assert got.tokens == wanted.tokens
        assert got.stats.num_accepted > 0
        (part,) = parts_of(made).rows.parts
        assert part.bits == 4  # packed rows are taken as they are
