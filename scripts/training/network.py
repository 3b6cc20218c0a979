"""Drafters as functions of their weights, for gradients. The module that drafts is made anew of the weights in every step, so a layer's
mathematics are the drafter's own; only attention is spelled out, for whole pieces of text and a draft behind every position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxspec.models.eagle3 import Eagle3Head
from mlxspec.models.layers import FusedLinear, head_rows, weight_values
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import Trunk
from training.states import LENGTH, Batch

# of a step, at most: two pieces, each with three depths, or with blocks that have three times as many tokens as the piece
_CELLS = 8 * LENGTH
Head = dict[str, mx.array]  # float32, by the names that a folder has; an MTP head's norms shifted (1 + w)


class Scored(NamedTuple):
    """Of one depth of the drafts that begin at n places. own: the drafter's logits (B, n, R); right: the target's log-probabilities
    (B, n, R) of the same tokens; alone: a block drafter's own (B, n, R) without what it knows of the token before, None where it knows
    nothing of it."""

    own: mx.array
    right: mx.array
    alone: mx.array | None = None


class Network(ABC):
    """A drafter as a function of its weights, beside its target. depths: weight of the loss at each depth; reach: weight, at each depth, of
    the chance that a draft is accepted so far; pace: factor of the learning rate. layers: of the target, 0-based, whose residual streams it
    reads. ids (R,) int32: the target's tokens that its logits are of; None: all of them. fixed: tensors that are not trained.
    begins_behind: the draft of place p follows token p + begins_behind."""

    depths: tuple[float, ...] = (1.0, 0.7, 0.5)
    reach, pace = 0.0, 1.0
    begins_behind = 0

    def __init__(
        self, target: Trunk, new: Callable[[], Any], fixed: Head, sizes: Any, num_layers: int
    ) -> None:
        """new: makes the drafter's module, neither filled nor fused. sizes: of its layers."""
        self.target, self.fixed, self._new = target, fixed, new
        self.layers: tuple[int, ...] = ()
        self.num_words: int = target.vocab_size  # logits of the drafter
        a_token = 64 * sizes.hidden_size + 16 * (sizes.intermediate_size + sizes.num_heads * LENGTH)
        self.layer_bytes = num_layers * _CELLS * a_token  # what layers hold for the way back
        self.ids: mx.array | None = None
        self._rows: nn.Module | None = None  # of the target's head, those of `ids`

    @property
    def head_copies(self) -> int:
        """How many logits of a token are held at once."""
        return 1

    def module(self, head: Head) -> Any:
        made = self._new()
        made.load_weights([*head.items(), *self.fixed.items()])
        made.fuse()
        return made

    def logits(self, hidden: mx.array, part: nn.Module | None = None) -> mx.array:
        """(..., H) -> (..., V) float32, by the target's language-model head, or (..., R) by a part of its rows."""
        part, flat = part or self.target.head_module, hidden.reshape(-1, hidden.shape[-1])
        if isinstance(part, FusedLinear):
            out = part.with_gradient(flat)
        else:  # the embedding, or rows
            out = part(flat) if isinstance(part, nn.Linear | nn.QuantizedLinear) else part.as_linear(flat)
        return self.target.capped(out).astype(mx.float32).reshape(*hidden.shape[:-1], -1)

    def right(self, batch: Batch, places: mx.array) -> mx.array:
        """The target's log-probabilities (B, n, R) of the drafter's tokens behind `places` (n,)."""
        if self.ids is not None and self._rows is None:
            self._rows = head_rows(self.target.head_module, self.ids)
        found = self.logits(batch.hidden[:, places], self._rows)
        mass = mx.logsumexp(found, axis=-1) if batch.mass is None else batch.mass[:, places]
        return mx.stop_gradient(found - mass[..., None])

    @abstractmethod
    def scored(self, head: Head, batch: Batch, places: mx.array, *, is_drafting: bool) -> Iterator[Scored]:
        """Depth by depth, of the drafts that begin behind tokens `places` (n,) and what they need. is_drafting: logits as the drafter draws
        from them, else as it learns."""


class ChainNetwork(Network):
    """An MTP head or an EAGLE-3 drafter. A draft begins at every position: its first cell takes what the target had, each further one the
    hidden of the cell before it, and the token that stands in the text. A cell attends to the first cells of the positions up to its own,
    and to the cells of its own draft, as drafting does."""

    begins_behind = 1

    def __init__(
        self, target: Trunk, new: Callable[[], Any], fixed: Head, like: Qwen35Mtp | Eagle3Head
    ) -> None:
        sizes = like.config.text if isinstance(like, Eagle3Head) else like.config
        super().__init__(target, new, fixed, sizes, 1)
        if isinstance(like, Eagle3Head):
            self.layers, self.ids, self.num_words = like.layers_read, like.ids, like.num_proposed

    def scored(self, head: Head, batch: Batch, places: mx.array, *, is_drafting: bool) -> Iterator[Scored]:
        module = self.module(head)
        for j, cell in enumerate(self.drafts(module, batch, len(self.depths))):
            chosen = cell[:, places]
            if isinstance(module, Eagle3Head):
                own = module.head(chosen.reshape(-1, chosen.shape[-1])).reshape(*chosen.shape[:2], -1)
            else:
                own = self.logits(chosen.astype(batch.hidden.dtype))
            yield Scored(own, self.right(batch, places + 1 + j))

    def drafts(self, module: Any, batch: Batch, depth: int) -> list[mx.array]:
        """For each j < depth (B, T - 1 - j, H), what cell number j of the draft that begins with token i + 1 gives: its logits are for the
        token behind i + 1 + j."""
        size, length = batch.tokens.shape
        embedded = _split(module.embed(batch.tokens.reshape(-1)).astype(mx.float32), size)
        cells = batch.hidden.astype(mx.float32)
        if batch.streams is not None:
            cells = _split(module.take(batch.streams.reshape(size * length, -1)), size)
        scale = module.layers[0].self_attn.scale
        seen, found = list[tuple[mx.array, mx.array]](), list[mx.array]()
        for j in range(depth):
            num = length - 1 - j
            turns = module.rotary.table(mx.tile(mx.arange(j, j + num), size))
            given = (x.reshape(size * num, -1) for x in (embedded[:, 1 + j :], cells[:, :num]))
            residual, (q, k, v, gate) = module.before(*given, *turns)
            q, k, v = (_split(x[0], size).swapaxes(1, 2) for x in (q, k, v))
            seen = [(keys[:, :, :num], values[:, :, :num]) for keys, values in [*seen, (k, v)]]
            attended = _attend(q, seen, scale).swapaxes(1, 2).reshape(size * num, -1)
            cells = _split(module.after(residual, attended, gate), size)
            found.append(cells)
        return found


def _split(x: mx.array, size: int) -> mx.array:
    """(B * n, ...) -> (B, n, ...)"""
    return x.reshape(size, -1, *x.shape[1:])


def _attend(q: mx.array, seen: Sequence[tuple[mx.array, mx.array]], scale: float) -> mx.array:
    """q (B, Hq, n, D). seen: keys and values (B, Hkv, n, D), of the first cells, all up to a position's own, and of each further cell of
    its draft, of which it sees its own position's."""
    groups, num = q.shape[1] // seen[0][0].shape[1], q.shape[2]
    spread = [tuple(mx.repeat(part, groups, axis=1) for part in pair) for pair in seen]
    keys, values = spread[0]
    causal = mx.array(np.tril(np.ones((num, num), bool)))
    scores = [mx.where(causal, scale * q @ keys.swapaxes(2, 3), -mx.inf)]
    scores += [scale * (q * k).sum(axis=-1, keepdims=True) for k, _ in spread[1:]]
    shares = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)
    out = shares[..., :num] @ values
    for i, (_, v) in enumerate(spread[1:]):
        out = out + shares[..., num + i : num + i + 1] * v
    return out


def float_weights(module: nn.Module, loaded: nn.Module | None = None) -> tuple[Head, Head]:
    """The weights of a drafter that is filled and not fused, in float32, and those that are no floats, which are not trained. loaded: the
    same drafter, fused, whose norms count where it is an MTP head, because loading may have shifted them."""
    packed = {path: part for path, part in module.named_modules() if "scales" in part}
    every: Head = {f"{path}.weight": weight_values(part) for path, part in packed.items()}
    every |= {
        name: value
        for name, value in tree_flatten(module.parameters())
        if name.rpartition(".")[0] not in packed
    }
    if isinstance(loaded, Qwen35Mtp):
        every |= _norms(loaded)
    head = {n: v.astype(mx.float32) for n, v in every.items() if mx.issubdtype(v.dtype, mx.floating)}
    mx.eval(head)
    return head, {name: value for name, value in every.items() if name not in head}


def _norms(loaded: Qwen35Mtp) -> Head:
    norms, found, layer = loaded.norms(), Head(), "layers.0."
    names = {
        "before fc": ("pre_fc_norm_embedding", "pre_fc_norm_hidden"),
        "layer": (layer + "input_layernorm", layer + "post_attention_layernorm"),
        "last": ("norm",),
    }
    for group, of in names.items():
        found |= {f"{n}.weight": w for n, w in zip(of, norms[group], strict=True)}
    attention = loaded.layers[0].self_attn
    for name, weight in zip(("q_norm", "k_norm"), attention.stored_norms(), strict=True):
        found[f"{layer}self_attn.{name}.weight"] = weight
    return found
