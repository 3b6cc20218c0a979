"""Every key of a config.json is read, known to be without effect on text, or refused; what nobody knows is named in a notice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_assistant
import tiny_gemma
import tiny_qwen3
from compare import load_ours
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from planting import catches, rewritten

import mlxspec
from mlxspec.errors import ModelError
from mlxspec.models import gemma4_assistant, gemma_config, qwen3_5_config, qwen3_config
from mlxspec.models.config_values import Keys, Values, flattened
from mlxspec.models.gemma4_assistant import AssistantConfig
from mlxspec.models.layers import Rotary
from mlxspec.models.registry import architecture
from mlxspec.models.rotary_scaling import Scaling

FAMILIES: dict[str, tuple[Callable[[Any], Any], list[dict[str, Any]]]] = {
    "qwen": (qwen3_5_config.Qwen35Config.from_dict, [
        tiny.text_config(tiny.SHAPES["tied"]),
        {**tiny.text_config(tiny.SHAPES["moe"]), "layer_types": None},
    ]),
    "qwen3": (qwen3_config.qwen3_config, [tiny_qwen3.CONFIGS["qwen3"], tiny_qwen3.CONFIGS["qwen3-moe"]]),
    "qwen3-next": (qwen3_config.qwen3_next_config, [
        tiny_qwen3.CONFIGS["qwen3-next"], {**tiny_qwen3.CONFIGS["qwen3-next"], "layer_types": 4 * ["full_attention"]},
    ]),
    "gemma3": (gemma_config.gemma3_config, [tiny_gemma.CONFIGS["gemma3"]]),
    "gemma4": (gemma_config.gemma4_config, [
        tiny_gemma.CONFIGS[name] for name in ("gemma4-e", "gemma4-moe", "gemma4-dense")
    ]),
    "assistant": (AssistantConfig.from_dict, [
        tiny_assistant.config(tiny_gemma.CONFIGS["gemma4-dense"], num_centroids=tiny_gemma.VOCAB)
    ]),
}  # fmt: skip
QWEN, QWEN3 = qwen3_5_config.TEXT_KEYS, qwen3_config.QWEN3_KEYS
CLASSES: dict[str, tuple[str, Keys]] = {
    "Qwen3_5TextConfig": ("qwen", QWEN),
    "Qwen3_5MoeTextConfig": ("qwen", QWEN),
    "Qwen3_5Config": ("qwen", qwen3_5_config.OUTER_KEYS),
    "Qwen3_5MoeConfig": ("qwen", qwen3_5_config.OUTER_KEYS),
    "Qwen3Config": ("qwen3", QWEN3),
    "Qwen3MoeConfig": ("qwen3", QWEN3),
    "Qwen3NextConfig": ("qwen3-next", QWEN),
    "Gemma3TextConfig": ("gemma3", gemma_config.KEYS_OF_3),
    "Gemma3Config": ("gemma3", gemma_config.OUTER_KEYS),
    "Gemma4TextConfig": ("gemma4", gemma_config.KEYS_OF_4),
    "Gemma4UnifiedTextConfig": ("gemma4", gemma_config.KEYS_OF_4),
    "Gemma4Config": ("gemma4", gemma_config.OUTER_KEYS),
    "Gemma4UnifiedConfig": ("gemma4", gemma_config.OUTER_KEYS),
    "Gemma4AssistantConfig": ("assistant", gemma4_assistant.OWN_KEYS),
    "Gemma4UnifiedAssistantConfig": ("assistant", gemma4_assistant.OWN_KEYS),
}


class Recorded(dict):  # type: ignore[type-arg]
    """Knows which of its keys were looked up."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


def read_of(family: str) -> set[str]:
    """Keys that are read of some of a family's configs."""
    parse, configs = FAMILIES[family]
    seen: set[str] = set()
    for config in configs:
        recorded = Recorded(config)
        parse(recorded)
        seen |= recorded.seen
    return seen


@pytest.mark.parametrize("name", CLASSES)
def test_keys_of_transformers_are_read_or_idle(name: str) -> None:
    """What its classes declare, and what they write."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    kind, (family, keys) = getattr(transformers, name), CLASSES[name]
    declared = {f.name for f in dataclasses.fields(kind)}
    small = {"text_config": tiny_assistant.config(tiny_gemma.CONFIGS["gemma4-dense"])["text_config"]}
    written = set(kind(**(small if "Assistant" in name else {})).to_dict())
    assert len(declared) > 5
    assert not (declared | written) - read_of(family) - keys.idle - keys.only.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_whole_config_says_is_read(family: str) -> None:
    """No key of the families' own configs is unknown, whatever of it a shape uses."""
    parse, configs = FAMILIES[family]
    for config in configs:
        found = parse(config)
        assert getattr(found, "text", found).unread == ()


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"new_gate": None, "new_bias": False, "new_list": []}, []),
        ({"new_gate": "tanh", "a_scale": 0.5}, ["a_scale", "new_gate"]),
        ({"use_cache": True, "temperature": 0.3, "attention_dropout": 0.1}, []),
    ],
)
@pytest.mark.parametrize("layout", ["text", "hub"])
def test_what_nobody_knows_is_named(change: dict[str, Any], named: list[str], layout: str) -> None:
    s = tiny.SHAPES["tied"]
    config = tiny.hub_config(s) if layout == "hub" else tiny.text_config(s)
    text_of(config).update(change)
    assert architecture(config).parse(config).unread == tuple(named)
    gemma = {"model_type": "gemma3", "text_config": tiny_gemma.CONFIGS["gemma3"] | change}
    if layout == "text":
        gemma = gemma["text_config"]  # type: ignore[assignment]
    assert architecture(gemma).parse(gemma).unread == tuple(named)


def test_a_notice_names_them_at_load(tmp_path: Path) -> None:
    folder = tiny.write_text_only(tmp_path, tiny.SHAPES["tied"])
    config = json.loads((folder / "config.json").read_text())
    assert not [n for n in load_ours(folder).notices if "config.json" in n]
    config["rope_parameters"]["factor"] = 4.0  # says nothing beside rope_type default
    (folder / "config.json").write_text(json.dumps(config | {"residual_scale": 0.5}))
    found = [n for n in load_ours(folder).notices if "config.json" in n]
    assert found == [
        "These keys of config.json are not known here and were not used: factor, residual_scale."
    ]


# ---- MTP heads that cannot be run


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is true"),
    ],
)
def test_heads_that_cannot_be_run_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """The model loads without its head and says so; asked for its drafts it is refused."""
    from tests.models.test_load_pairs import add_tokenizer

    folder = tiny.write_text_only(tmp_path, tiny.SHAPES["tied"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    add_tokenizer(folder)
    engine = mlxspec.load(str(folder))
    assert "mtp" not in engine.spec.drafters
    (notice,) = [n for n in engine.notices if "MTP head" in n]
    assert notice.startswith(f"There is no drafting with this model's MTP head: {says}")
    with pytest.raises(ModelError, match=says) as caught:
        mlxspec.load(str(folder), draft="mtp")
    assert "\n" not in str(caught.value)


# ---- folders whose convolutions do not tell whether norms are shifted


@pytest.mark.parametrize("what", ["no convolutions", "kernels of one"])
def test_norms_of_raw_folders(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names tell: the same weights raw and as a converter writes them load as the same model."""
    shape = tiny.Shape(name="x", interval=1 if what == "no convolutions" else 4, tied=True, seed=7)
    if what == "kernels of one":
        monkeypatch.setattr(tiny, "CONV_KERNEL", 1)
    raw = tiny.write_text_only(tmp_path / "raw", shape)
    hub = tiny.write_hub(tmp_path / "hub", shape)
    converted = {}
    for name, value in mx.load(str(raw / "model.safetensors")).items():
        if name.startswith("mtp."):
            continue
        shifted = "norm" in name and ".linear_attn." not in name
        converted[f"language_model.{name}"] = value + 1 if shifted else value
    (tmp_path / "mlx").mkdir()
    mx.save_safetensors(str(tmp_path / "mlx/model.safetensors"), converted)
    (tmp_path / "mlx/config.json").write_text((raw / "config.json").read_text())
    expected = dict(tree_flatten(load_ours(tmp_path / "mlx").model.parameters()))
    for folder in (raw, hub):
        found = dict(tree_flatten(load_ours(folder).model.parameters()))
        for name, value in found.items():
            assert mx.array_equal(value, expected[name]), name


# ---- stretched positions

STRETCHED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn, own bounds": {
        "type": "yarn", "factor": 3.0, "original_max_position_embeddings": 300, "beta_fast": 16, "beta_slow": 2,
        "mscale": 0.7, "mscale_all_dim": 0.4,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STRETCHED)
def test_angles_are_those_of_mlx_lm(name: str) -> None:
    from mlx_lm.models.rope_utils import initialize_rope

    dims, theta, positions = 32, 1e4, [0, 1, 17, 200, 900]
    reference = initialize_rope(dims, theta, False, STRETCHED[name], 4096)
    ours = Rotary.of_first(dims, theta, dims, Scaling.of(Values(STRETCHED[name]), 4096))
    x = np.random.default_rng(1).standard_normal((len(positions), 1, dims)).astype(np.float32)
    cos, sin = ours.table(mx.array(positions, mx.int32))
    other = np.concatenate([x[..., dims // 2 :], x[..., : dims // 2]], axis=-1)
    got = x * np.array(cos) + other * np.array(sin)
    for i, position in enumerate(positions):
        wanted = reference(mx.array(x[i])[None, None], offset=position)[0, 0]
        np.testing.assert_allclose(got[i], np.array(wanted), atol=2e-4 * (1 + position / 200))


def test_pairs_that_are_not_turned_keep_their_length() -> None:
    """yarn's factor is for the turned part of a head."""
    rotary = Rotary.of_first(8, 1e4, 32, Scaling.of(Values(STRETCHED["yarn"]), 4096))
    cos, sin = (np.array(x)[0, 0] for x in rotary.table(mx.array([5], mx.int32)))
    lengths = np.hypot(cos, sin)
    amplitude = 0.1 * np.log(4.0) + 1
    np.testing.assert_allclose(lengths, ([amplitude] * 4 + [1.0] * 12) * 2, rtol=1e-5)


def test_older_and_newer_names_say_the_same() -> None:
    base = tiny.text_config(tiny.SHAPES["tied"])
    rope = base["rope_parameters"] | STRETCHED["yarn"]
    parse = qwen3_5_config.Qwen35Config.from_dict
    newer = parse(base | {"rope_parameters": rope})
    assert newer.rope_scaling.kind == "yarn"
    older = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor", "rope_type")}
    top = {k: rope[k] for k in ("rope_theta", "partial_rotary_factor")}
    assert newer == parse(base | {"rope_parameters": None, "rope_scaling": older | {"type": "yarn"}} | top)
    assert newer == parse(base | {"rope_parameters": rope, "rope_scaling": rope})
    bare = {k: v for k, v in base["rope_parameters"].items() if k not in top}
    assert parse(base) == parse(
        base | {"rope_parameters": bare} | {k: base["rope_parameters"][k] for k in top}
    )


def test_full_layers_of_gemma_4_with_heads_like_the_others() -> None:
    """As transformers saves them: an empty per_layer_config."""
    text = {k: v for k, v in tiny_gemma.CONFIGS["gemma4-dense"].items() if k != "global_head_dim"}
    text |= {"attention_k_eq_v": False, "num_global_key_value_heads": None}
    shapes = {}
    for name, change in {"hub": {}, "saved": {"per_layer_config": {}}}.items():
        parsed = gemma_config.gemma4_config(text | change)
        shapes[name] = [layer.head_dim for layer in parsed.layers]
    assert shapes == {"hub": [16, 16, 512] * 2, "saved": [16] * 6}


@pytest.mark.parametrize("order", [("rope_parameters", "rope_scaling"), ("rope_scaling", "rope_parameters")])
@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3"])
def test_a_default_description_beside_one_that_stretches(kind: str, order: tuple[str, str]) -> None:
    """transformers writes `rope_parameters` of the default kind while `rope_scaling` of an older file stays, or the other way round."""
    stretched = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 1024}
    stretched |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    plain = {"rope_type": "default", "rope_theta": 1e6, "factor": 1.0}
    base = {k: v for k, v in tiny_qwen3.CONFIGS["qwen3"].items() if not k.startswith("rope_")}
    alone = qwen3_config.qwen3_config(base | {"rope_theta": 1e6, "rope_scaling": stretched})
    for default in (plain, {"type": "default", "rope_theta": 1e6}, {"rope_theta": 1e6}):
        both = dict(zip(order, (default, stretched), strict=True))
        assert qwen3_config.qwen3_config(base | both) == alone
        assert qwen3_config.qwen3_config(base | both | {"rope_theta": 1e6}) == alone
    assert alone.rope_scaling.kind == kind
    for wrong in ({"rope_type": "dynamic", "rope_theta": 1e6}, plain | {"rope_theta": 5.0}):
        both = dict(zip(order, (wrong, stretched), strict=True))
        with pytest.raises(ModelError, match="two values of rope_t"):
            qwen3_config.qwen3_config(base | both | {"rope_theta": 1e6})


@catches(
    "a null hides the value of another object",
    "mlxspec.models.config_values:flattened",
    rewritten(" if value is not None}", "}"),
)
@catches(
    "earlier objects override later ones",
    "mlxspec.models.config_values:flattened",
    rewritten("for part in parts for key", "for part in reversed(parts) for key"),
)
@given(
    st.dictionaries(
        st.sampled_from(["", "inner", "other", "unread"]),
        st.dictionaries(st.sampled_from("abc"), st.sampled_from([None, 0, False, 1, 2]), max_size=3),
    ),
    st.permutations(["inner", "", "other"]),
)
def test_the_last_object_that_has_a_value_gives_it(
    objects: dict[str, dict[str, Any]], order: list[str]
) -> None:
    own = objects.pop("", {})
    found = flattened({**own, **objects}, *order)
    parts = {"": own | {"unread": objects["unread"]} if "unread" in objects else own, **objects}
    for key in "abc":
        told = [part[key] for name in order if (part := parts.get(name, {})).get(key) is not None]
        assert (key in found, found.get(key)) == (bool(told), told[-1] if told else None)
