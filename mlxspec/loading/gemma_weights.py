"""Renames tensors of Gemma folders to the names of our modules: raw Hugging Face and mlx-lm's conversions, multimodal or not."""

from __future__ import annotations

import re
from collections.abc import Collection

import mlx.core as mx

from mlxspec.loading.weights import Weights, rename, split_experts, without_tied_head

STACKS = "experts.switch_glu."  # our name of stacks of experts
_RANGES = (".input_max", ".input_min", ".output_max", ".output_min")  # of activations, kept for other formats


def sanitize_gemma3(weights: Weights, *, tied: bool) -> Weights:
    """Norm weights are zero-centred in every dialect (mlx-lm adds the 1 when it computes), and become factors."""
    trunk = rename(weights)
    trunk |= {k: v.astype(mx.float32) + 1.0 for k, v in trunk.items() if k.endswith("norm.weight")}
    return without_tied_head(trunk) if tied else trunk


def sanitize_gemma4(weights: Weights, *, tied: bool, without_keys: Collection[int] = ()) -> Weights:
    """Stacked experts become three. Layers `without_keys` read those of others; what folders hold of their own is not used."""
    trunk = rename({k: v for k, v in weights.items() if not k.endswith(_RANGES) and "rotary_emb" not in k})
    unused = re.compile(r".*\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\..*")
    for name in list(trunk):
        found = unused.fullmatch(name)
        if found is not None and int(found[1]) in without_keys:
            del trunk[name]
    trunk = split_experts(trunk, STACKS)
    return without_tied_head(trunk) if tied else trunk
