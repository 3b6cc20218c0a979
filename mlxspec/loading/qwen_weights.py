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
from mlxspec.loading.weights import Weights, as_factor, rename, split_experts, without_tied_head

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
    """Return the tensors of the text model and of the MTP head of a Qwen3-Next or Qwen3.5 folder, under mlxspec's names and with norms
    as factors (not zero-centred). The head is empty where there is none, and unchanged where it is damaged. tied: whether the
    language-model head is the embedding; a stored head is then dropped."""
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
    """Return the tensors of a Qwen3 folder under mlxspec's names, and an empty dict in place of an MTP head, which the family does not
    have. tied: whether the language-model head is the embedding; a stored head is then dropped."""
    trunk = split_experts(rename(weights))
    return (without_tied_head(trunk) if tied else trunk), {}


def head_of(weights: Weights, qk_norms: Mapping[str, mx.array], *, raw: bool | None = None) -> Weights:
    """Return the tensors of the MTP head among `weights`, with norms as factors (not zero-centred); empty where there is none. qk_norms:
    weights of the text model's query and key norms, by their names before layers were fused. raw: whether the head's norms are
    zero-centred; None decides by the other tensors of `weights`, or by the values of the norms."""
    rest, head = split_mtp(weights)
    return normalize_mtp(head, qk_norms, raw=is_raw(rest) if raw is None else raw)


def split_mtp(weights: Weights) -> tuple[Weights, Weights]:
    """Return the tensors of the text model, and those of the MTP head with the prefix up to `mtp.` removed from their names. Raises
    ModelError where there are two heads."""
    trunk, head = _split(weights)
    if has_two(head):
        raise ModelError(f"The folder holds {TWO_HEADS}.")
    return trunk, head


def has_two(head: Iterable[str]) -> bool:
    """Return whether the names that `_split` gives the head's tensors are those of two MTP heads."""
    return any(HEAD.match(name) for name in head)


def _split(weights: Weights) -> tuple[Weights, Weights]:
    """Return the tensors of the text model and those of the MTP heads, as `split_mtp` does. The tensors of a second head keep their
    prefix."""
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
    """Return the text model's tensors under mlxspec's names and in its layouts, and whether the folder had zero-centred norms."""
    raw, named = is_raw(weights), rename(weights)
    if raw:
        named |= {k: mx.moveaxis(v, 2, 1) for k, v in named.items() if "conv1d.weight" in k and v.ndim == 3}
        named |= {k: as_factor(v) for k, v in named.items() if k.endswith(_NORMS)}
    return split_experts(named), raw


def is_raw(weights: Mapping[str, mx.array]) -> bool:
    """Return whether the norms of a text model are zero-centred, as in Hugging Face's folders.

    Converters that transpose the convolutions also shift the norms, so the layout of the convolutions decides; MTP tensors have no part
    in that. Where there is no convolution, or its kernel has one element, the prefix of the norms' names decides: converters write
    `language_model.`, Hugging Face writes `model.`.
    """
    kernels = [v.shape for k, v in weights.items() if "conv1d.weight" in k and v.ndim == 3]
    if any(shape[2] != 1 for shape in kernels):
        return True
    if any(shape[1] != 1 for shape in kernels):
        return False
    return any(k.startswith("model.") and k.endswith(_NORMS) for k in weights)


def normalize_mtp(head: Weights, trunk: Mapping[str, mx.array], *, raw: bool) -> Weights:
    """Return the tensors of an MTP head with norms as factors (not zero-centred). trunk: the text model's tensors, with norms as
    factors. raw: whether the head is from a folder with zero-centred norms; where it is not, its own norms may still be zero-centred,
    and their values decide.

    The weights of its query and key norms are compared with the trunk's, which have about the same mean when both are factors. Where the
    head's lie 1 below, all of its norms are shifted, except the last one: some converters shift that with the trunk, so its own mean
    decides.
    """
    shifted = set()
    if raw or _lies_below(head, trunk):
        shifted = {k for k in head if k.endswith((*_NORMS, *_MTP_NORMS)) and k != "norm.weight"}
    last = head.get("norm.weight")
    if last is not None and (raw or _mean([last]) < 0.5):
        shifted.add("norm.weight")
    return split_experts({k: as_factor(v) if k in shifted else v for k, v in head.items()})


def _lies_below(head: Mapping[str, mx.array], trunk: Mapping[str, mx.array]) -> bool:
    own, theirs = ([v for k, v in w.items() if k.endswith(QK_NORMS)] for w in (head, trunk))
    return bool(own and theirs) and _mean(own) < _mean(theirs) - 0.5


def _mean(values: Iterable[mx.array]) -> float:
    return float(mx.stack([v.astype(mx.float32).mean() for v in values]).mean().item())
