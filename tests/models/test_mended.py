"""Keys of config.json that mlx-lm's classes do not read: each is mended, changes nothing, or is named in a notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import MODEL_REMAPPING
from planting import catches
from transformers import CONFIG_MAPPING

import mlxspec
from mlxspec.models.adapted.classes import has_code
from mlxspec.models.adapted.loading import load_adapted
from mlxspec.models.adapted.mended import mend, short_factors, unread
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


def mended_module(kind: str, **more: Any) -> tuple[Any, Any]:
    """The module of a config as mlx-lm makes it, and one with the same weights that is mended."""
    config = adapted_zoo.config_of(kind) | more
    model, arguments = adapted_zoo.classes_of(config)
    mx.random.seed(5)
    plain, own = model(arguments.from_dict(dict(config))), model(arguments.from_dict(dict(config)))
    drawn = [
        (name, mx.random.normal(value.shape)) for name, value in adapted_zoo.tree_flatten(plain.parameters())
    ]
    for module in (plain, own):
        module.load_weights(drawn)
    mend(own, config)
    return plain, own


def part_of(module: Any, kind: str) -> Any:
    return next(part for part in module.modules() if type(part).__name__ == kind)


@catches(
    "all groups are normed together",
    "mlxspec.models.adapted.mended:_IMPROVED",
    lambda right: {},
)
def test_groups_of_heads_are_normed_alone() -> None:
    plain, own = (part_of(m, "MambaRMSNormGated") for m in mended_module("mamba2", n_groups=2))
    x, gate = mx.random.normal((3, 64)), mx.random.normal((3, 64))
    halves = zip(mx.split(x, 2, -1), mx.split(gate, 2, -1), mx.split(plain.weight, 2), strict=True)
    expected = []
    for x_half, gate_half, weight in halves:
        plain.weight = weight
        expected.append(plain(x_half, gate_half))
    assert mx.allclose(own(x, gate), mx.concatenate(expected, -1), rtol=1e-5, atol=1e-5).item()


@catches(
    "shares do not add up to 1",
    "mlxspec.models.adapted.mended:_IMPROVED",
    lambda right: {},
)
@pytest.mark.parametrize(
    ("dtype", "bits"), [("float32", 32), ("float32", 4), ("bfloat16", 4), ("float16", 4)], ids=str
)
def test_shares_of_the_experts_chosen_add_up_to_1(dtype: str, bits: int) -> None:
    """Also where the last expert that is chosen and the first that is not have one logit, which 16 bits often give. A CPU has no product of
    16-bit floats for experts."""
    _, own = mended_module("qwen2_moe", norm_topk_prob=True)
    block = part_of(own, "Qwen2MoeSparseMoeBlock")
    for name, value in adapted_zoo.tree_flatten(block.parameters()):
        if name.startswith(("gate.", "switch_mlp.")):
            value[1] = value[2]
    block.set_dtype(getattr(mx, dtype))
    if bits == 4:
        nn.quantize(block, group_size=32, bits=4)
    x = mx.random.normal((40, 32)).astype(getattr(mx, dtype))
    logits = np.array(block.gate(x).astype(mx.float32))
    order = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(logits, order, -1)
    assert (ranked[:, 1] == ranked[:, 2]).any()
    shares = np.exp(ranked[:, :2] - ranked[:, :1])
    shares /= shares.sum(-1, keepdims=True)
    made = np.array(block.switch_mlp(x, mx.array(order[:, :2])).astype(mx.float32))
    shared = mx.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    expected = (made * shares[..., None]).sum(1) + np.array(shared.astype(mx.float32))
    roundings = (
        8 * mx.finfo(x.dtype).eps * (np.abs(made).sum(1) + np.abs(np.array(shared.astype(mx.float32))))
    )
    assert (np.abs(np.array(block(x).astype(mx.float32)) - expected) <= roundings).all()


@catches(
    "shares are of the experts chosen alone",
    "mlxspec.models.adapted.mended:_IMPROVED",
    lambda right: {},
)
def test_shares_are_of_all_experts() -> None:
    plain, own = (part_of(m, "JambaSparseMoeBlock") for m in mended_module("jamba"))
    x = mx.random.normal((5, 32))
    most = mx.softmax(plain.router(x), axis=-1).max(-1, keepdims=True)  # the one expert that is chosen
    assert mx.allclose(own(x), plain(x) * most, rtol=1e-5, atol=1e-5).item()


@catches(
    "an expert of a group that is not chosen may be chosen",
    "mlxspec.models.adapted.mended:mend",
    lambda right: lambda module, config: None,
)
@pytest.mark.parametrize(
    ("kind", "gate", "bias", "sizes"),
    [
        ("deepseek_v3", "MoEGate", "e_score_correction_bias", {"n_group": 2, "n_routed_experts": 8}),
        (
            "bailing_moe",
            "BailingMoeGate",
            "expert_bias",
            {"n_group": 2, "topk_group": 1, "num_experts": 8, "moe_router_enable_expert_bias": True},
        ),
    ],
)
def test_only_experts_of_chosen_groups_are_chosen(
    kind: str, gate: str, bias: str, sizes: dict[str, Any]
) -> None:
    _, own = mended_module(kind, **sizes)
    part, x = part_of(own, gate), mx.random.normal((9, 32))
    right = np.sort(np.array(part(x)[0]))
    setattr(part, bias, getattr(part, bias) - getattr(part, bias).max() - 2.0)  # no score is above 0
    mend(own, {"model_type": kind, **sizes})
    assert (np.sort(np.array(part(x)[0])) == right).all()
