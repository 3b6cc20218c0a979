"""Formats of quantized weights: which load, by descriptions and by names, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest

from mlxspec.errors import ModelError
from mlxspec.loading.published import storage


def compressed(*weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {f"group_{i}": {"weights": w} for i, w in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


def modelopt(name: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": name, **more}


EIGHT, FOUR = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float", "group_size": 16}
INTEGERS = {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True, "actorder": None}
LAYERS = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}
LOADED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen's": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "FP8"),
    "without a block": ({"quant_method": "fp8"}, "FP8"),
    "ModelOpt's FP8": (modelopt("FP8"), "FP8"),
    "ModelOpt's NVFP4": (modelopt("NVFP4", group_size=16), "NVFP4"),
    "of its own file": ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
    "mixed": (modelopt("MIXED_PRECISION", quantized_layers=LAYERS), "FP8 and NVFP4"),
    "compressed FP8": (compressed(EIGHT, format="float-quantized"), "FP8"),
    "compressed NVFP4": (compressed(FOUR, format="nvfp4-pack-quantized"), "NVFP4"),
    "compressed, both": (compressed(EIGHT, FOUR, format="mixed-precision"), "FP8 and NVFP4"),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "AWQ"),
    "GPTQ": ({"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False}, "GPTQ"),
    "compressed integers": (compressed(INTEGERS, format="pack-quantized"), "integers"),
    "compressed MXFP4": (compressed(FOUR | {"group_size": 32}, format="mxfp4-pack-quantized"), "MXFP4"),
    "mxfp4": ({"quant_method": "mxfp4"}, ""),
    "MLX's": ({"group_size": 64, "bits": 4, "mode": "affine"}, ""),
    "empty": ({}, ""),
}
REFUSED: dict[str, dict[str, Any]] = {
    "gptq of 3 bits": {"quant_method": "gptq", "bits": 3, "group_size": 128},
    "gptq with its own order": {"quant_method": "gptq", "bits": 4, "desc_act": True},
    "gptq, layer by layer": {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}},
    "awq of 8 bits": {"quant_method": "awq", "bits": 8},
    "awq of another layout": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes, older": {"load_in_8bit": True},
    **{name: {"quant_method": name} for name in ("exl2", "exl3", "hqq", "aqlm", "eetq", "torchao", "quark")},
    "auto-round": {"quant_method": "auto-round", "bits": 4},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8"},
    "unheard of": {"quant_method": "unheard-of"},
    "no text": {"quant_method": 7},
    "E5M2": {"quant_method": "fp8", "fmt": "e5m2"},
    "compressed integers, not packed": compressed(INTEGERS, format="int-quantized"),
    "compressed integers in another order": compressed(
        INTEGERS | {"actorder": "group"}, format="pack-quantized"
    ),
    "compressed, one of two": compressed(EIGHT, {"num_bits": 8, "type": "int"}),
    "compressed, sparse": compressed(EIGHT, sparsity_config={"format": "sparse-24-bitmask"}),
    "compressed, nothing more": {"quant_method": "compressed-tensors"},
    "ModelOpt, nothing more": {"quant_method": "modelopt"},
    "ModelOpt's AWQ": modelopt("NVFP4_AWQ"),
    "ModelOpt's integers": modelopt("W4A16_AWQ"),
    "mixed, one unknown": modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "INT4"}}),
}


@pytest.mark.parametrize("place", ["quantization_config", "text_config", "hf_quant_config.json"])
@pytest.mark.parametrize("name", LOADED)
def test_what_loads(name: str, place: str) -> None:
    told, wanted = LOADED[name]
    if place == "hf_quant_config.json":
        assert storage({}, told) == wanted
    else:
        inner = {"quantization_config": told}
        assert storage(inner if place == "quantization_config" else {"text_config": inner}) == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    config = {"quantization_config": REFUSED[name]}
    with pytest.raises(ModelError, match="is not supported; take the original") as caught:
        storage(config)
    assert "\n" not in str(caught.value)
    # the tensors decide where they are known: these are floats
    assert storage(config, names=["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]) == ""
    # and MLX's own description says that a conversion left the other behind
    assert storage(config | {"quantization": {"bits": 4, "group_size": 64}}) == ""


def test_an_excerpt_lacks_details() -> None:
    """The hub's answer to a search names the method alone."""
    for method in ("compressed-tensors", "modelopt", "fp8"):
        assert storage({"quantization_config": {"quant_method": method}}, is_excerpt=True) in ("", "FP8")
    with pytest.raises(ModelError, match="hqq"):
        storage({"quantization_config": {"quant_method": "hqq"}}, is_excerpt=True)


def test_its_own_file_tells_what_config_json_leaves_out() -> None:
    config = {"quantization_config": {"quant_method": "modelopt"}}
    assert storage(config, {"quantization": {"quant_algo": "NVFP4"}}) == "NVFP4"
    with pytest.raises(ModelError, match="W4A8_AWQ"):
        storage(config, {"quantization": {"quant_algo": "W4A8_AWQ"}})


P = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        (("weight",), ""),
        (("weight", "scales", "biases"), ""),
        (("weight", "scales", "global_scale"), ""),
        (("weight", "weight_scale_inv"), "FP8"),
        (("weight", "weight_scale", "input_scale"), "FP8"),
        (("weight", "weight_scale", "weight_scale_2", "input_scale"), "NVFP4"),
        (("weight_packed", "weight_scale", "weight_global_scale"), "NVFP4"),
        (("qweight", "qzeros", "scales", "g_idx"), None),
        (("weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"), None),
        (("weight", "SCB"), None),
        (("_weight_qdata", "_weight_scale"), None),
        (("weight_packed", "weight_scale", "weight_shape"), None),
        (("weight_packed", "weight_scale"), None),
        (("q_weight", "q_scale_max"), None),
        (("trellis", "suh", "svh"), None),
        (("weight", "weight_scale", "weight_scale_2", "pre_quant_scale"), None),
    ],
)
def test_names_tell(parts: tuple[str, ...], wanted: str | None) -> None:
    names = [*(P + part for part in parts), "model.norm.weight"]
    if wanted is None:
        with pytest.raises(ModelError, match="is not supported"):
            storage({}, names=names)
    else:
        assert storage({}, names=names) == wanted
        if wanted:  # what tensors say counts only where the description does not speak against it
            with pytest.raises(ModelError, match="quark"):
                storage({"quantization_config": {"quant_method": "quark"}}, names=names)
    names += ["model.x.mlp.experts.down_proj_scale_inv"]
    if wanted is not None:
        assert "FP8" in storage({}, names=names)
