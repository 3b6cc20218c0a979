"""Our Qwen3.5 against transformers' over text-only folders: logits of a prefill and of 20 cached steps. Needs PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from compare import assert_same_logits, load_ours, stepwise, stepwise_rows, tokens_of
from zoo import Zoo

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

import transformers_hub  # noqa: E402
import transformers_side  # noqa: E402

NUM_STEPS = 20
TOKENS = tokens_of(21, 41 + NUM_STEPS, tiny.VOCAB)


@pytest.mark.parametrize("dialect", ["text", "text-bfloat16"])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_text_only_checkpoints(zoo: Zoo, shape: str, dialect: str) -> None:
    """Stored bfloat16 weights are computed with in float32 on both sides."""
    theirs = transformers_side.load(zoo.folder(shape, dialect), tiny.SHAPES[shape])
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    ours = stepwise(zoo.ours(shape, dialect).model, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{shape}, {dialect}")


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_three_ragged_rows(zoo: Zoo, shape: str) -> None:
    theirs = transformers_side.load(zoo.folder(shape, "text"), tiny.SHAPES[shape])
    rows = [tokens_of(31 + r, n + NUM_STEPS, tiny.VOCAB) for r, n in enumerate((23, 1, 41))]
    for r, ours in enumerate(stepwise_rows(zoo.ours(shape, "text").model, rows, NUM_STEPS)):
        reference = transformers_side.stepwise(theirs, rows[r], NUM_STEPS)
        assert_same_logits(ours, reference, f"{shape}, row {r} of three")


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_folders_saved_by_transformers(zoo: Zoo, shape: str, tmp_path: Path) -> None:
    """What `save_pretrained` writes (its own config, one tensor an expert) loads as it is."""
    theirs = transformers_side.load(zoo.folder(shape, "text"), tiny.SHAPES[shape])
    theirs.save_pretrained(tmp_path)
    ours = stepwise(load_ours(tmp_path).model, TOKENS, NUM_STEPS)
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{shape}, saved by transformers")


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_multimodal_folders_saved_by_transformers(shape: str, tmp_path: Path) -> None:
    """As on the hub: names behind `model.language_model.`, a vision tower beside them."""
    theirs = transformers_hub.save_qwen(tmp_path, tiny.SHAPES[shape])
    found = load_ours(tmp_path)
    assert any("passed over" in notice for notice in found.notices)
    ours = stepwise(found.model, TOKENS, NUM_STEPS)
    reference = transformers_side.stepwise(theirs, TOKENS, NUM_STEPS)
    assert_same_logits(ours, reference, f"{shape}, multimodal, saved by transformers")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def older_names(config: dict[str, Any]) -> None:
    """As configs were written before `rope_parameters`."""
    rope = config.pop("rope_parameters")
    config |= {k: rope[k] for k in ("rope_theta", "partial_rotary_factor")}
    config["rope_scaling"] = {k: v for k, v in YARN.items() if k != "rope_type"} | {"type": "yarn"}


def outside(config: dict[str, Any]) -> None:
    config["partial_rotary_factor"] = 0.5
    config["rope_parameters"].pop("partial_rotary_factor")
    config["rope_parameters"]["mrope_section"] = [4, 2, 2]


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "linear": lambda c: c["rope_parameters"].update({"rope_type": "linear", "factor": 4.0}),
    "yarn": lambda c: c["rope_parameters"].update(YARN),
    "yarn, all of its keys": lambda c: c["rope_parameters"].update(
        YARN | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}
    ),
    "yarn, its own attention factor": lambda c: c["rope_parameters"].update(YARN | {"attention_factor": 1.4}),
    "llama3": lambda c: c["rope_parameters"].update(LLAMA3),
    "older names": older_names,
    "partial_rotary_factor outside": outside,
}


@pytest.mark.parametrize("name", EDITS)
def test_rotary_positions(name: str, tmp_path: Path) -> None:
    same_as_transformers(tmp_path, tiny.SHAPES["untied"], EDITS[name], name)


@pytest.mark.parametrize("tied", [False, True])
def test_all_layers_are_attention(tmp_path: Path, tied: bool) -> None:
    shape = tiny.Shape(name="full", interval=1, tied=tied, seed=9)
    same_as_transformers(tmp_path, shape, lambda c: None, "all layers are attention")


def test_convolutions_of_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "CONV_KERNEL", 1)
    same_as_transformers(tmp_path, tiny.SHAPES["tied"], lambda c: None, "convolutions of one token")


def same_as_transformers(
    folder: Path, shape: tiny.Shape, edit: Callable[[dict[str, Any]], Any], what: str
) -> None:
    tiny.write_text_only(folder, shape)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    reference = transformers_side.stepwise(transformers_side.load(folder, shape), TOKENS, NUM_STEPS)
    assert_same_logits(stepwise(load_ours(folder).model, TOKENS, NUM_STEPS), reference, what)
