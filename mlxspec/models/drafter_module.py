"""The base of the modules of MTP heads, EAGLE-3 and block drafters: their target, their ends, a vocabulary of their own.

A drafter's own vocabulary is told by `d2t`: row i of its language-model head stands for token i + d2t[i] of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.loading.weights import Weights
from mlxspec.models.config_values import AROUND, EVERYWHERE, Keys
from mlxspec.models.layers import FusedLinear, compute_dtype
from mlxspec.platform.host import numbers

# what every drafter's config.json may hold beside what is read
KEYS_OF_ALL = Keys(
    idle=EVERYWHERE
    | AROUND
    | {"max_window_layers", "speculators_config", "speculators_version", "tie_word_embeddings"},
    only={"attention_bias": (False,), "hidden_act": ("silu",)},
)


class AbsentTarget(NamedTuple):
    """The sizes of a target that is not loaded, as drafters read them when they are built. config: an object with the target's softcap."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    config: Any


@dataclass(frozen=True, kw_only=True)
class DrafterFolder:
    """How drafters of one kind are loaded from a folder of their own.

    kind: the name in drafter_kinds.py. is_one: whether tensors of these names, or this config.json, are a drafter of this kind. build:
    returns the module for a target, without weights, and the folder's tensors under its names; raises ModelError. alone: returns the sizes
    of the target that a drafter was made for, from its config and tensors; None: the drafter cannot be built without its target, so it
    cannot be converted. title: returns the title with its article from the names of tensors; None: the title in drafter_kinds.py.
    keeps_bfloat16: whether the drafter is never computed in float16. is_quantized: whether its floats are quantized at load where the
    target is quantized.
    """

    kind: str
    is_one: Callable[[Collection[str], Mapping[str, Any]], bool]
    build: Callable[[Mapping[str, Any], Weights, Any], tuple[Any, Weights]]
    alone: Callable[[Mapping[str, Any], Weights], AbsentTarget] | None = None
    title: Callable[[Collection[str]], str] | None = None
    keeps_bfloat16: bool = False
    is_quantized: bool = False


class DrafterModule(nn.Module):
    """The base class of the modules of MTP heads, EAGLE-3 drafters and block drafters. A subclass has `layers` with a method `fuse` (or an
    empty list), `fc` without a bias, and perhaps `lm_head` and `d2t`. title: its name in messages. ids (R,) int32: the target's tokens that
    its logits are for; None: all tokens in order. bits_at_load: bits to which its matrices were quantized when it was loaded, None where
    they are as stored."""

    title = "drafter"

    def __init__(self, target: Any) -> None:
        """Prepare a module that drafts for the model `target`."""
        super().__init__()
        self._target = (target,)  # in a tuple: the target's parameters are not ours
        self._dtype: mx.Dtype | None = None
        self.ids: mx.array | None = None
        self.bits_at_load: int | None = None

    def fuse(self) -> None:
        """Join projections of the same input, after loading. Call this once. Raises ModelError where d2t names a token that the target does
        not have, or a token twice."""
        self._dtype = self.dtype
        for layer in self.layers:
            layer.fuse()
        for name in ("fc", "lm_head"):
            if name in self:
                self[name] = FusedLinear([self[name]])
        if "d2t" in self:
            self.ids = self._target_ids(self.d2t)
            del self.d2t

    @property
    def target(self) -> Any:
        return self._target[0]

    @property
    def summary(self) -> str:
        """Return a clause about the drafter that `inspect` prints after its title."""
        return ""

    @property
    def proposes_all(self) -> bool:
        """Return whether the drafter always proposes over its whole vocabulary, so that `--draft-vocab` has no effect."""
        return "lm_head" in self

    @property
    def head_owner(self) -> Any:
        """Return the module whose language-model head gives the logits: this drafter where it has one, else the target."""
        return self if "lm_head" in self else self.target

    @property
    def dtype(self) -> mx.Dtype:
        """Return the dtype in which the drafter computes: that of its own matrices."""
        return compute_dtype(self.fc) if self._dtype is None else self._dtype

    def _target_ids(self, d2t: mx.array) -> mx.array:
        """Return the target's token (R,) int32 of each row of the drafter's head. d2t (R,): the difference between token and row. Raises
        ModelError where a token does not exist or is named twice."""
        ids, vocab_size = numbers(d2t).astype(np.int64) + np.arange(len(d2t)), self.target.vocab_size
        beyond = ids[(ids < 0) | (ids >= vocab_size)]
        if len(beyond):
            raise ModelError(
                f"The {self.title} cannot be loaded: its d2t names token {beyond[0]}, and the target has tokens 0 to {vocab_size - 1}."
            )
        if len(np.unique(ids)) != len(ids):
            raise ModelError(f"The {self.title} cannot be loaded: its d2t names a token twice.")
        return mx.array(ids.astype(np.int32))


def check_sizes(title: str, needed: Mapping[str, int | None], target: Any) -> None:
    """Raise ModelError unless the target has the sizes that a drafter needs. title: the drafter's name in the message. needed: sizes by the
    target's attribute; None: any size fits."""
    for name, size in needed.items():
        found = getattr(target, name)
        if size is not None and size != found:
            what = _SIZES[name]
            raise ModelError(
                f"The {title} is for another model: its target's {what} is {size}, and this model's {found}."
            )


_SIZES = {"hidden_size": "hidden size", "vocab_size": "vocabulary", "num_layers": "number of layers"}


def sanitize_drafter(weights: Weights) -> Weights:
    """Return a drafter's tensors under mlxspec's names: without the prefix `model.`, and with codebooks named as embeddings. Tensors that
    only other engines use (`t2d`, the target's own head and norm) are left out. Raises ModelError where two tensors get the same name."""
    out: Weights = {}
    for given, value in weights.items():
        name = given.removeprefix("model.")
        if name == "t2d" or name.startswith("verifier_"):
            continue
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        name = f"{name}.weight" if name.endswith("_codebook") else name
        if name in out:
            raise ModelError(
                f"The drafter's folder has two tensors for one place: {printable(given)} and another."
            )
        out[name] = value.astype(mx.int32) if name == "d2t" and value.dtype == mx.int64 else value
    return out
