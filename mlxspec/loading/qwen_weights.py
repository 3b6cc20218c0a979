"""Renames tensors of Qwen3, Qwen3-Next and Qwen3.5 folders to the names of our modules, and finds MTP heads wherever they lie.

Raw Hugging Face folders of Qwen3-Next and Qwen3.5 have zero-centred norm weights and convolutions (C, 1, K); mlx-lm's conversions have
shifted ones and (C, K, 1). The tensors and their names tell which it is, never the config. Qwen3's norms are not zero-centred, and it has
no convolutions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import mlx.core as mx

from mlxspec.errors import ModelError
from mlxspec.loading.weights import Weights, rename, split_experts, without_tied_head

_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_MTP_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight", "layernorm.weight")
QK_NORMS = (".q_norm.weight", ".k_norm.weight")
TWO_HEADS = "two MTP heads; keep one"
HEAD = re.compile(r"(?:model\.|language_model\.)*mtp\.")


def sanitize_qwen3_5(weights: Weights, *, tied: bool) -> tuple[Weights, Weights]:
    """All tensors of a folder -> (the trunk's, the MTP head's, empty where there is none), under our names."""
    trunk, head = _split(weights)
    trunk, raw = normalize_trunk(trunk)
    trunk = without_tied_head(trunk) if tied else trunk
    try:
        return trunk, normalize_mtp(head, trunk, raw=raw)
    except (
        ModelError
    ):  # a damaged head must not cost the trunk: whoever fills a module with it is told what is wrong
        return trunk, head


def sanitize_qwen3(weights: Weights, *, tied: bool) -> tuple[Weights, Weights]:
    """All tensors of a plain Qwen3 folder -> (the trunk's, none: it has no MTP head), under our names."""
    trunk = split_experts(rename(weights))
    return (without_tied_head(trunk) if tied else trunk), {}


def head_of(weights: Weights, qk_norms: Mapping[str, mx.array], *, raw: bool | None = None) -> Weights:
    """The MTP head out of a folder of its own, or out of another model's. Empty where there is none. qk_norms: the trunk's weights of query
    and key norms, before its layers were fused. raw: whether the head's norms are zero-centred; None: the other tensors of `weights` tell,
    or its own values."""
    rest, head = split_mtp(weights)
    return normalize_mtp(head, qk_norms, raw=is_raw(rest) if raw is None else raw)


def split_mtp(weights: Weights) -> tuple[Weights, Weights]:
    """(the trunk's tensors, the MTP head's with everything up to `mtp.` taken off). Raises ModelError if there are two heads."""
    trunk, head = _split(weights)
    if has_two(head):
        raise ModelError(f"The folder holds {TWO_HEADS}.")
    return trunk, head


def has_two(head: Iterable[str]) -> bool:
    """Whether these names are of two MTP heads: the second one's are whole."""
    return any(HEAD.match(name) for name in head)


def _split(weights: Weights) -> tuple[Weights, Weights]:
    """Split tensors as `split_mtp` does. Names of a second head are kept whole."""
    trunk: Weights = {}
    head: Weights = {}
    for name, value in weights.items():
        bare = HEAD.sub("", name, count=1)
        if bare == name:
            trunk[name] = value
        else:
            head[name if bare in head else bare] = value
    return trunk, head


def normalize_trunk(weights: Weights) -> tuple[Weights, bool]:
    """Our names and layouts, and whether the folder was raw (zero-centred norms)."""
    raw, named = is_raw(weights), rename(weights)
    if raw:
        named |= {k: mx.moveaxis(v, 2, 1) for k, v in named.items() if "conv1d.weight" in k and v.ndim == 3}
        named |= {k: v.astype(mx.float32) + 1.0 for k, v in named.items() if k.endswith(_NORMS)}
    return split_experts(named), raw


def is_raw(weights: Mapping[str, mx.array]) -> bool:
    """Whether the norms of a trunk are zero-centred. Whoever turns the convolutions around shifts the norms in the same pass; MTP tensors
    beside them say nothing of it. Where no convolution tells, because there is none or its kernel has one element, names do: converters
    write `language_model.` in front, and Hugging Face writes `model.`."""
    kernels = [v.shape for k, v in weights.items() if "conv1d.weight" in k and v.ndim == 3]
    if any(shape[2] != 1 for shape in kernels):
        return True
    if any(shape[1] != 1 for shape in kernels):
        return False
    return any(k.startswith("model.") and k.endswith(_NORMS) for k in weights)


def normalize_mtp(head: Weights, trunk: Mapping[str, mx.array], *, raw: bool) -> Weights:
    """The head's tensors with shifted norms. raw: it comes from a raw folder; a head from elsewhere may be raw or converted.

    `trunk` has shifted norms. There the weights of query and key norms lie around the same value as the head's once both are shifted, and
    1 above it where the head's are not. The head's other norms tell nothing by themselves (both before `fc` lie below 1/2 in either form),
    so they go with those; only the last one, which some converters shift with the trunk, is judged alone.
    """
    shifted = set()
    if raw or _lies_below(head, trunk):
        shifted = {k for k in head if k.endswith((*_NORMS, *_MTP_NORMS)) and k != "norm.weight"}
    last = head.get("norm.weight")
    if last is not None and (raw or _mean([last]) < 0.5):
        shifted.add("norm.weight")
    return split_experts({k: v.astype(mx.float32) + 1.0 if k in shifted else v for k, v in head.items()})


def _lies_below(head: Mapping[str, mx.array], trunk: Mapping[str, mx.array]) -> bool:
    own, theirs = ([v for k, v in w.items() if k.endswith(QK_NORMS)] for w in (head, trunk))
    return bool(own and theirs) and _mean(own) < _mean(theirs) - 0.5


def _mean(values: Iterable[mx.array]) -> float:
    return float(mx.stack([v.astype(mx.float32).mean() for v in values]).mean().item())
