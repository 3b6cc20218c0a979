"""A model folder's tensors under the names our modules use, whichever dialect the folder speaks.

Knows what all architectures share, and the dialects of Qwen3.5 checkpoints: raw Hugging Face (norm weights zero-centred, convolution
(C, 1, K), fused experts) and mlx-lm's conversions (shifted, (C, K, 1), switch_mlp); gemma_weights.py knows Gemma's. Decides from the
tensors, never from the config. Knows no module classes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.errors import ModelError
from mlxspec.loading.safetensors import check_header

Weights = dict[str, mx.array]

_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_MTP_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight", "layernorm.weight")
_PREFIXES = (  # longest first
    ("model.language_model.", "language_model.model."),
    ("language_model.model.", "language_model.model."),
    ("language_model.lm_head.", "language_model.lm_head."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "language_model.model."),
)
_NOT_TEXT = re.compile(
    r"(model\.)?(visual|vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio|multi_modal_projector)\."
)


def read_folder(folder: Path) -> Weights:
    """All tensors of a folder, lazily read. Raises ModelError when a shard is missing, truncated or malformed."""
    weights: Weights = {}
    for path in _shards(folder):
        names = check_header(path)
        try:
            loaded = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{path.name} cannot be read: {shown(error)}.") from error
        if set(loaded) != set(names):
            raise ModelError(f"{path.name} holds other tensors than its header names.")
        twice = sorted(weights.keys() & loaded.keys())
        if twice:
            raise ModelError(f"{path.name} holds {shown(twice[0])}, which another file holds too.")
        weights |= loaded
    return weights


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        found = sorted(folder.glob("model*.safetensors"))
        if not found:
            raise ModelError(f"There are no model*.safetensors files in {folder}.")
        return found
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index.name} is damaged.") from error
    if not names:
        raise ModelError(f"{index.name} names no shard.")
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII):
            raise ModelError(f"{index.name} names a shard {shown(name)}, which is no plain file name.")
        if not (folder / name).is_file():
            raise ModelError(f"The shard {name} is missing in {folder}.")
    return sorted(folder / name for name in names)


def split_mtp(weights: Weights) -> tuple[Weights, Weights]:
    """(the trunk's tensors, the MTP head's with everything up to `mtp.` taken off)."""
    head = {
        k.split("mtp.", 1)[1]: v
        for k, v in weights.items()
        if re.match(r"(model\.|language_model\.)*mtp\.", k)
    }
    trunk = {k: v for k, v in weights.items() if not re.match(r"(model\.|language_model\.)*mtp\.", k)}
    return trunk, head


def normalize_trunk(weights: Weights) -> tuple[Weights, bool]:
    """Our names and layouts, and whether the folder was raw (zero-centred norms)."""
    convolutions = {k for k, v in weights.items() if "conv1d.weight" in k and v.ndim == 3}
    raw = any(weights[k].shape[-1] != 1 for k in convolutions)
    named = rename(weights)
    if raw:
        named |= {k: mx.moveaxis(v, 2, 1) for k, v in named.items() if "conv1d.weight" in k and v.ndim == 3}
        named |= {k: v.astype(mx.float32) + 1.0 for k, v in named.items() if k.endswith(_NORMS)}
    return split_experts(named), raw


def rename(weights: Weights) -> Weights:
    """The text model's tensors behind `language_model.`, whatever wrapper they come from. Raises ModelError if two have one place."""
    named: Weights = {}
    for given, value in weights.items():
        if _NOT_TEXT.match(given):
            continue
        name = our_name(given)
        if name in named:
            raise ModelError(f"The folder has two tensors for one place: {shown(given)} and another.")
        named[name] = value
    return named


def our_name(name: str) -> str:
    """Of a tensor or a module path."""
    for prefix, ours in _PREFIXES:
        if name.startswith(prefix):
            return ours + name[len(prefix) :]
    return name


def without_tied_head(trunk: Weights) -> Weights:
    """A head that is the embedding once more is not read."""
    return {k: v for k, v in trunk.items() if not k.startswith("language_model.lm_head.")}


def sanitize_qwen3_5(weights: Weights, *, tied: bool) -> tuple[Weights, Weights]:
    """All tensors of a folder -> (the trunk's, the MTP head's, empty where there is none), under our names."""
    trunk, head = split_mtp(weights)
    trunk, raw = normalize_trunk(trunk)
    return without_tied_head(trunk) if tied else trunk, normalize_mtp(head, raw=raw) if head else {}


def normalize_mtp(head: Weights, *, raw: bool) -> Weights:
    """The head's tensors with shifted norms.

    A head kept beside an already converted trunk may be raw or converted: zero-centred weights lie around 0, shifted ones around 1.
    """
    norms = [k for k in head if k.endswith((*_NORMS, *_MTP_NORMS))]
    if not raw and norms:
        means = mx.stack([head[k].astype(mx.float32).mean() for k in norms])
        raw = means.mean().item() < 0.5
    if raw:
        head = {k: v.astype(mx.float32) + 1.0 if k in norms else v for k, v in head.items()}
    return split_experts(head)


def split_experts(weights: Weights, into: str = "switch_mlp.") -> Weights:
    """Raw experts (E, 2I, H), or one tensor an expert, to three stacks under the name `into`."""
    out: Weights = {}
    single: dict[str, dict[int, mx.array]] = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj") and value.ndim == 3 and value.shape[1] % 2 == 0:
            gate, up = mx.split(value, 2, axis=1)
            base = name.removesuffix("experts.gate_up_proj") + into
            out[base + "gate_proj.weight"], out[base + "up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            out[f"{name.removesuffix('experts.down_proj')}{into}down_proj.weight"] = value
        elif found := re.fullmatch(r"(.*)experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight", name):
            single.setdefault(f"{found[1]}{into}{found[3]}.weight", {})[int(found[2])] = value
        else:
            out[name] = value
    for name, parts in single.items():
        if sorted(parts) != list(range(len(parts))):
            raise ModelError(f"Experts are missing for {shown(name)}.")
        if len({(v.shape, v.dtype) for v in parts.values()}) > 1:
            raise ModelError(f"Experts differ in shape or dtype for {shown(name)}.")
        out[name] = mx.stack([parts[i] for i in range(len(parts))])
    return out


def dequantize(weights: Weights, quantization: Mapping[str, Any], dtype: mx.Dtype) -> Weights:
    """Replace every quantized matrix by its values. `quantization` is config.json's, with overrides by module path.

    Raises ModelError when a matrix is not in the format that the config names.
    """
    out = {k: v for k, v in weights.items() if not k.endswith((".scales", ".biases"))}
    for name in (k.removesuffix(".scales") for k in weights if k.endswith(".scales")):
        how = format_of(name, quantization)
        packed, scales = weights.get(name + ".weight"), weights[name + ".scales"]
        if packed is None:
            raise ModelError(f"There are scales but no weights for {shown(name)}.")
        try:
            values = mx.dequantize(packed, scales, weights.get(name + ".biases"), dtype=dtype, **how)
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"{shown(name)} is not quantized as config.json says.") from error
        out[name + ".weight"] = values
    return out


def format_of(name: str, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """group_size, bits, mode of one module. Raises ModelError when the config does not say."""
    own = quantization.get(name)
    how = own if isinstance(own, Mapping) else quantization
    group_size, bits, mode = how.get("group_size"), how.get("bits"), how.get("mode", "affine")
    if type(group_size) is not int or type(bits) is not int or not isinstance(mode, str):
        raise ModelError(f"config.json does not say how {shown(name)} is quantized.")
    if not (0 < group_size < 1 << 16 and 0 < bits <= 32):
        raise ModelError(f"config.json: {bits} bits in groups of {group_size} is no format of quantization.")
    return {"group_size": group_size, "bits": bits, "mode": mode}


def cast(weights: Weights, dtype: mx.Dtype | None) -> Weights:
    """Matrices to `dtype` (None: as stored), norms and gates to float32, where rounding hurts and size does not matter."""
    out = {}
    for name, value in weights.items():
        if not mx.issubdtype(value.dtype, mx.floating):
            out[name] = value
        elif value.ndim == 1:
            out[name] = value.astype(mx.float32)
        else:
            out[name] = (
                value if dtype is None or name.endswith((".scales", ".biases")) else value.astype(dtype)
            )
    return out


def missing_and_extra(expected: Iterable[str], given: Iterable[str]) -> str | None:
    """One sentence on how two sets of tensor names differ, or None."""
    expected, given = set(expected), set(given)
    missing, extra = sorted(expected - given), sorted(given - expected)
    if not missing and not extra:
        return None
    parts = []
    if missing:
        parts.append(f"tensors are missing ({_some(missing)})")
    if extra:
        parts.append(f"tensors are unknown ({_some(extra)})")
    return " and ".join(parts)


def shown(what: object) -> str:
    """A name or a message out of somebody's file, fit for one line of ours."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(str(what).split())).rstrip(".")
    return text if len(text) <= 120 else f"{text[:117]}..."


def _some(names: list[str]) -> str:
    return ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
