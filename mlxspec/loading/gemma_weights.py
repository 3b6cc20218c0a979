"""Renames tensors of Gemma folders to the names of our modules: raw Hugging Face and mlx-lm's conversions, multimodal or not."""

from __future__ import annotations

import re
from collections.abc import Collection

from mlxspec.loading.weights import Weights, as_factor, rename, split_experts, without_tied_head

STACKS = "experts.switch_glu."  # our name of stacks of experts
_RANGES = (".input_max", ".input_min", ".output_max", ".output_min")  # of activations, kept for other formats


def sanitize_gemma3(weights: Weights, *, tied: bool) -> Weights:
    """Return the text model's tensors of a Gemma 3 folder under mlxspec's names. Norm weights, which are zero-centred in every folder,
    become factors (1 is added). tied: whether the language-model head is the embedding; a stored head is then dropped."""
    trunk = rename(weights)
    trunk |= {k: as_factor(v) for k, v in trunk.items() if k.endswith("norm.weight")}
    return without_tied_head(trunk) if tied else trunk


def sanitize_gemma4(weights: Weights, *, tied: bool, without_keys: Collection[int] = ()) -> Weights:
    """Return the text model's tensors of a Gemma 4 folder under mlxspec's names. Stacked experts are split into gate, up and down
    projections. tied: whether the language-model head is the embedding; a stored head is then dropped. without_keys: numbers of
    layers that read another layer's keys and values; their own key and value tensors are dropped."""
    trunk = rename({k: v for k, v in weights.items() if not k.endswith(_RANGES) and "rotary_emb" not in k})
    unused = re.compile(r".*\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\..*")
    for name in list(trunk):
        found = unused.fullmatch(name)
        if found is not None and int(found[1]) in without_keys:
            del trunk[name]
    trunk = split_experts(trunk, STACKS)
    return without_tied_head(trunk) if tied else trunk
