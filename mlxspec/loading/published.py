"""Finds the formats of quantized weights that a repository holds, and decides whether they load, for every command alike.

config.json (or ModelOpt's own file) says it before anything is fetched; the tensors' names say it once they are known, and then they
decide, because descriptions are often left behind by those who convert. Floats and MLX's formats load as they are, FP8 and NVFP4 are
unpacked (unpacking.py), integers of AWQ, GPTQ and compressed-tensors are repacked (repacking.py), and all others are refused. Knows
descriptions and names; reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable

MODELOPT_FILE = "hf_quant_config.json"
_FP8, _NVFP4, _MXFP4, _INTEGERS = "FP8", "NVFP4", "MXFP4", "integers"
_OF_MLX = ("mxfp4", "mxfp8")  # methods whose tensors are MLX's own
_ALGORITHMS = {
    "FP8": _FP8,
    "FP8_PB_WO": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
_MARKS = {  # last part of a tensor's name -> whose format it is of, of those that are not read
    **dict.fromkeys(("absmax", "nested_absmax", "quant_map", "SCB"), "bitsandbytes"),
    **dict.fromkeys(("q_weight", "q_scale_max", "q_perm", "q_invperm"), "EXL2"),
    **dict.fromkeys(("trellis", "suh", "svh"), "EXL3"),
    "weight_g_idx": "compressed-tensors (actorder)",
    "pre_quant_scale": "NVFP4_AWQ",
    "W_q": "HQQ",
    **dict.fromkeys(("_weight_qdata", "_weight_scale"), "torchao"),
    "codebooks": "AQLM",
}


def storage(
    config: Mapping[str, Any],
    modelopt: Mapping[str, Any] | None = None,
    *,
    names: Iterable[str] | None = None,
    is_excerpt: bool = False,
) -> str:
    """Return the names of the formats, such as "FP8" or "AWQ", that loading unpacks or repacks, joined by " and "; "" for floats and
    MLX's own formats.

    config: config.json; modelopt: the content of MODELOPT_FILE; names: names of the tensors, which decide where they are known;
    is_excerpt: whether config may lack details, as in the hub's answers to a search. Raises ModelError for a format that is not read.
    """
    told = description(config, modelopt)
    if names is None:
        return _by_description(told, is_excerpt=is_excerpt)
    found = _by_names(list(names), told)
    if found and told.get("quant_method") is not None:
        _by_description(told)
    return found


def _by_description(told: Mapping[str, Any], *, is_excerpt: bool = False) -> str:
    method = told.get("quant_method")
    if method == "fp8":
        found = [_FP8 if told.get("fmt", "e4m3") == "e4m3" else None]
    elif method == "compressed-tensors":
        found = _of_compressed_tensors(told)
    elif isinstance(method, str) and method.startswith("modelopt"):
        found = _of_modelopt(told)
    elif method in ("awq", "gptq"):
        found = [_of_integers(told)]
    elif method in _OF_MLX:
        found = []
    else:
        found = [] if method is None else [None]
        is_excerpt = False
    if is_excerpt and found == [None] and len(told) <= 2:
        return ""
    if None in found:
        detail = told.get("quant_algo") or told.get("format")
        raise refusal(f"{method} ({detail})" if isinstance(detail, str) else str(method))
    return " and ".join(sorted({name for name in found if name is not None}))


def description(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the description of a quantization in a format other than MLX's, with its `quant_method`; empty where there is none. config:
    config.json; modelopt: the content of MODELOPT_FILE."""
    if isinstance(config.get("quantization"), Mapping):
        return {}  # MLX's
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    told = config.get("quantization_config") or inner or modelopt
    if not isinstance(told, Mapping):
        return {}
    if (
        modelopt
        and "quant_algo" not in told
        and str(told.get("quant_method", "modelopt")).startswith("modelopt")
    ):
        told = modelopt
    nested = told.get("quantization")
    told = {**told, **nested} if isinstance(nested, Mapping) else dict(told)
    if told.get("quant_method") is None:
        if "quant_algo" in told:
            told["quant_method"] = "modelopt"
        elif told.get("load_in_4bit") or told.get("load_in_8bit"):
            told["quant_method"] = "bitsandbytes"
    return told


def of_mlx(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry of config.json on quantization in a format of MLX (`bits`, `group_size` and `mode`), empty where there is none."""
    found = config.get("quantization") or config.get("quantization_config")
    return found if isinstance(found, Mapping) and "quant_method" not in found else {}


def refusal(method: str) -> ModelError:
    """Return the error for weights in a format that is not read. method: name of the format."""
    return ModelError(
        f"Its weights are quantized in the way of {printable(method)}, which is not supported; take the original, or a conversion for MLX."
    )


def is_unpacked(formats: str) -> bool:
    """Return whether loading turns weights in these formats into floats. formats: names as `storage` returns them."""
    return _FP8 in formats or _NVFP4 in formats


def _by_names(names: list[str], told: Mapping[str, Any]) -> str:
    paths: dict[str, set[str]] = {}  # by last part of a name
    for name in names:
        path, _, part = name.rpartition(".")
        method = "bitsandbytes" if part.startswith("bitsandbytes__") else _MARKS.get(part)
        if method is not None:
            raise refusal(str(told.get("quant_method") or method))
        if "weight_" in part or part == "qweight" or part.endswith("_scale_inv"):
            paths.setdefault(part, set()).add(path)
    twice = paths.pop("weight_scale_2", set()) | paths.pop("weight_global_scale", set())
    formats: list[str] = []
    if paths.pop("qweight", None):
        method = told.get("quant_method")
        found = _of_integers(told) if method in ("awq", "gptq") else None
        if found is None:
            raise refusal(str(method or "GPTQ or AWQ"))
        formats.append(found)
    packed = paths.pop("weight_packed", set()) - twice
    if packed:
        found = next((f for f in _of_compressed_tensors(told) if f in (_INTEGERS, _MXFP4)), None)
        if found is None:
            raise refusal("compressed-tensors of integers")
        formats.append(found)
        twice |= packed
    scaled = any(found - twice for part, found in paths.items() if part.endswith(("_scale", "_scale_inv")))
    return " and ".join(formats + [_FP8] * scaled + [_NVFP4] * bool(twice - packed))


def _of_compressed_tensors(told: Mapping[str, Any]) -> list[str | None]:
    """Return the format of the weights of each group of layers, None for one that is not read. told: the description of a
    compressed-tensors model."""
    groups = told.get("config_groups")
    schemes = (
        [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    sparse = told.get("sparsity_config")
    if not schemes or (isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense"):
        return [None]
    found: list[str | None] = []
    for scheme in schemes:
        how = scheme if isinstance(scheme, Mapping) else {}
        is_float = how.get("type") == "float"
        groups_of_16 = is_float and how.get("num_bits") == 4 and how.get("group_size") == 16
        groups_of_32 = is_float and how.get("num_bits") == 4 and how.get("group_size") == 32
        integers = how.get("type", "int") == "int" and how.get("num_bits") in (4, 8)
        is_packed = (
            integers
            and told.get("format") == "pack-quantized"
            and how.get("actorder") in (None, False, "weight", "static")
        )
        if is_float and how.get("num_bits") == 8:
            found.append(_FP8)
        else:
            found.append(
                _NVFP4 if groups_of_16 else _MXFP4 if groups_of_32 else _INTEGERS if is_packed else None
            )
    return found


def _of_integers(told: Mapping[str, Any]) -> str | None:
    """Return "AWQ" or "GPTQ", None for a variant that is not repacked. told: the description of an AWQ or GPTQ model."""
    bits = told.get("bits", told.get("w_bit", 4))
    if told.get("quant_method") == "awq":
        return "AWQ" if bits == 4 and str(told.get("version", "gemm")).lower() == "gemm" else None
    is_plain = not told.get("desc_act") and not told.get("dynamic")
    return "GPTQ" if bits in (2, 4, 8) and is_plain else None


def _of_modelopt(told: Mapping[str, Any]) -> list[str | None]:
    algorithm, layers = told.get("quant_algo"), told.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" and isinstance(layers, Mapping) and layers:
        of_layers = [how.get("quant_algo") if isinstance(how, Mapping) else None for how in layers.values()]
        return [_ALGORITHMS.get(str(name)) for name in of_layers]
    return [_ALGORITHMS.get(str(algorithm))]
