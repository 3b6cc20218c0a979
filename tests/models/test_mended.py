"""Keys of config.json that mlx-lm's classes do not read: each is mended, changes nothing, or is named in a notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import MODEL_REMAPPING
from planting import catches
from transformers import CONFIG_MAPPING

import mlxspec
from mlxspec.models.adapted.classes import has_code
from mlxspec.models.adapted.loading import load_adapted
from mlxspec.models.adapted.mended import short_factors, unread
from mlxspec.models.folder import ModelFolder
from mlxspec.models.registry import ARCHITECTURES
from tests.models import adapted_zoo

NOT_TRIED = ("olmo",)  # its file in mlx-lm exits
KINDS = [
    kind
    for kind in CONFIG_MAPPING
    if kind not in {*ARCHITECTURES, *NOT_TRIED}
    and (has_code({"model_type": kind}) or kind in MODEL_REMAPPING)
]
# what stays different, and is named at load
LEFT = {
    "llama4_text": {"attention_chunk_size", "attn_scale", "attn_temperature_tuning", "floor_scale", "interleave_moe_layer_step"}
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_key_of_transformers_is_judged(kind: str) -> None:
    """Of transformers' own default of each model_type that mlx-lm has code for."""
    try:
        made = CONFIG_MAPPING[kind]()
    except Exception as error:  # whatever a class without defaults does
        pytest.skip(f"transformers has no default: {type(error).__name__}")
    assert set(unread(json.loads(made.to_json_string(use_diff=False)))) == LEFT.get(kind, set())


def folder_with(path: Path, kind: str = "llama", **more: Any) -> Path:
    folder = adapted_zoo.write(kind, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def windows(folder: Path, max_context: int | None = None) -> list[int | None]:
    model = load_adapted(ModelFolder(folder), max_context=max_context)
    assert model.seams is not None
    return [None if form is None else form.window for form in model.seams.forms]


@catches(
    "windows that a class does not read are not put in",
    "mlxspec.models.adapted.loading:mend",
    lambda right: lambda module, config: None,
)
def test_layers_have_the_windows_that_their_class_does_not_read(tmp_path: Path) -> None:
    assert windows(folder_with(tmp_path / "a", model_type="mistral", sliding_window=16)) == [16] * 4
    assert windows(folder_with(tmp_path / "b", model_type="mistral", sliding_window=None)) == [None] * 4
    assert windows(folder_with(tmp_path / "c", sliding_window=16)) == [None] * 4  # a Llama has none


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path / "a", heads_of_nobody=3, tie_of_nobody=None, model_type="mistral", sliding_window=16
    )
    engine = mlxspec.load(str(folder), draft="off")
    named = [notice for notice in engine.notices if "are not known here" in notice]
    engine.close()
    assert len(named) == 1
    assert "heads_of_nobody" in named[0]
    assert "sliding_window" not in named[0]
    assert "tie_of_nobody" not in named[0]


PHI3 = {
    "model_type": "phi3",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
}


def test_factors_for_short_texts_are_taken_where_no_text_can_be_long() -> None:
    assert short_factors(PHI3, None) == {}
    assert short_factors(PHI3, 65) == {}
    for context in (1, 64):
        assert short_factors(PHI3, context)["rope_scaling"]["long_factor"] == [1.0] * 8
    same = PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [2.0], "long_factor": [2.0]}}
    assert short_factors(same, 1) == {}


def test_a_longer_context_is_told_what_it_costs(tmp_path: Path) -> None:
    folder = tmp_path / "phi3"
    sizes = adapted_zoo.config_of("llama", adapted_zoo.DEMO_VOCAB) | {"head_dim": None}
    adapted_zoo.write("llama", folder)
    config = sizes | PHI3
    config["rope_scaling"] = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model, arguments = adapted_zoo.classes_of(config)
    weights = dict(adapted_zoo.tree_flatten(model(arguments.from_dict(dict(config))).parameters()))
    adapted_zoo.mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    for context, is_told in ((None, True), (64, False), (65, True)):
        notices = load_adapted(ModelFolder(folder), max_context=context).notices
        assert any("--max-context 64" in notice for notice in notices) == is_told
