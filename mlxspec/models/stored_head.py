"""Whether a model's language-model head is its embedding, by the tensors that its folder holds."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxspec.loading.weights import Weights, our_name
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.registry import Config

_HEAD, _TABLE = "language_model.lm_head.", "language_model.model.embed_tokens."


def head_as_stored(config: Config, weights: Weights) -> tuple[Config, tuple[str, ...]]:
    """Return the config with `tied` as the folder's tensors have it, and a notice where config.json differs from them.

    A stored head that differs from the embedding was trained by itself, so it is used, as transformers 5 and mlx-lm's Gemma 3 do; the
    values are compared. A Gemma whose folder has no head uses its embedding as the head.
    """
    head, table = _part(weights, _HEAD), _part(weights, _TABLE)
    if not head:
        return (replace(config, tied=True) if isinstance(config, GemmaConfig) else config), ()
    if not config.tied or _same(head, table):
        return config, ()
    rows, places = (part["weight"].shape[:1] if "weight" in part else () for part in (head, table))
    if not rows or rows != places:
        return config, ("The folder holds a language-model head of another shape, which is not used.",)
    says = "By config.json the language-model head is the embedding, but the folder holds one that differs; the stored one is used."
    return replace(config, tied=False), (says,)


def _part(weights: Weights, place: str) -> Weights:
    named = ((our_name(name), value) for name, value in weights.items())
    return {name.removeprefix(place): value for name, value in named if name.startswith(place)}


def _same(head: Weights, table: Weights) -> bool:
    """Return whether two modules have equal tensors, quantized or not."""
    return head.keys() == table.keys() and all(
        value.shape == table[part].shape and mx.array_equal(value, table[part]).item()
        for part, value in head.items()
    )
