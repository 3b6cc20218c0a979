"""Block drafters (DFlash, DFlash2, DSpark) as functions of their weights, for gradients: many blocks of a piece of text at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from mlxspec.models.dflash import DFlash
from mlxspec.models.layers import rms_norm
from mlxspec.models.registry import Trunk
from training.network import Head, Network, Scored
from training.states import Batch

_FLOOR, _DECAY = 0.15, 0.85  # of a depth's weight in the loss, and from one depth to the next


class BlockNetwork(Network):
    """A block begins at each chosen token, and sees the context cells of the tokens before it."""

    reach = 1.0

    def __init__(self, target: Trunk, new: Callable[[], Any], fixed: Head, like: DFlash) -> None:
        super().__init__(target, new, fixed, like.config.text, len(like.config.windows))
        self._config = like.config
        self.layers, self.ids = self._config.layer_ids, like.ids
        self.num_words = self._config.draft_vocab or self.num_words
        self.depths = tuple(_FLOOR * _DECAY**j for j in range(self._config.num_drafts))

    @property
    def head_copies(self) -> int:
        return 2 if self._config.kind != "DFlash" else 1

    def scored(self, head: Head, batch: Batch, places: mx.array, *, is_drafting: bool) -> Iterator[Scored]:
        module = self.module(head)
        hidden = self.blocks(module, batch, places)
        size, num = hidden.shape[:2]
        for j in range(len(self.depths)):
            drafted = hidden[:, :, j].reshape(size * num, -1)
            alone = module.head(drafted) if self._config.has_head else self.logits(drafted)
            own, before = alone, batch.tokens[:, places + j].reshape(-1)
            if module.picks_in_order and (is_drafting or self._config.kind == "DSpark"):
                own = module.follow(drafted, alone, before)
            elif module.picks_in_order:  # of all tokens, not of candidates: those that are none learn too
                selector = module.candidate_selector
                wanted = selector.predecessor_codebook(before) * selector.hidden_projection(drafted)
                own = alone + wanted @ selector.successor_codebook.weight.T
            right = self.right(batch, places + j)
            lone = alone.reshape(size, num, -1) if own is not alone and not is_drafting else None
            yield Scored(own.reshape(size, num, -1), right, lone)

    def blocks(self, module: DFlash, batch: Batch, places: mx.array) -> mx.array:
        """Hiddens (B, n, drafts, H) of the blocks whose newest known tokens are `places` (n,)."""
        c, (size, length), num = self._config, batch.tokens.shape, len(places)
        if batch.streams is None:
            raise ValueError("a block drafter needs what the target's layers gave out for every token")
        masks = 0 if c.starts_at_anchor else 1
        width = c.num_drafts + masks
        ids = mx.full((size, num, width), c.mask_id, mx.int32)
        ids[:, :, 0] = batch.tokens[:, places]
        inside = mx.tile(mx.arange(width), size * num)
        turns = module.rotary.table(mx.tile((places[:, None] + mx.arange(width)).reshape(-1), size))
        before = module.rotary.table(mx.tile(mx.arange(length), size))
        cells = module.cells(batch.streams.reshape(size * length, -1).astype(mx.float32))
        x = module.embed(ids.reshape(-1)).astype(mx.float32)
        for layer, window, is_causal in zip(module.layers, c.windows, c.causal, strict=True):
            q, k, v, taps = layer.enter(x, *turns, inside)
            own = [part.reshape(size, num, width, *part.shape[1:]) for part in (q, k, v)]
            context = [
                part.reshape(size, length, *part.shape[1:]) for part in layer.self_attn.keys(cells, *before)
            ]
            attended = _attend(own, context, places, window, is_causal=is_causal)
            x = layer.leave(x, attended, taps, inside)
        hidden = rms_norm(x, module.norm.weight, c.text.rms_eps).astype(batch.hidden.dtype)
        return hidden.reshape(size, num, width, -1)[:, :, masks:]


def _attend(
    own: list[mx.array], context: list[mx.array], places: mx.array, window: int | None, *, is_causal: bool
) -> mx.array:
    """(B * n * w, Hq * D). own: queries (B, n, w, Hq, D), keys and values (B, n, w, Hkv, D) of blocks; context: keys and values
    (B, T, Hkv, D) of cells; a block sees those before its place, within the window."""
    q, k, v = own
    size, num, width, heads, dim = q.shape
    groups, length = heads // k.shape[3], context[0].shape[1]
    q, k, v = (x.transpose(0, 3, 1, 2, 4) for x in (q, mx.repeat(k, groups, 3), mx.repeat(v, groups, 3)))
    keys, values = (mx.repeat(x, groups, 2).swapaxes(1, 2) for x in context)
    cells = mx.arange(length)
    seen = cells < places[:, None]
    inside = mx.tri(width, dtype=mx.bool_) if is_causal else mx.ones((width, width), mx.bool_)
    if window is not None:
        seen = seen & (cells > places[:, None] - window)
    flat = q.reshape(size, heads, num * width, dim) * dim**-0.5
    outside = (flat @ keys.swapaxes(2, 3)).reshape(size, heads, num, width, length)
    scores = [
        mx.where(seen[:, None], outside, -mx.inf),
        mx.where(inside, q * dim**-0.5 @ k.swapaxes(3, 4), -mx.inf),
    ]
    shares = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)
    out = (shares[..., :length].reshape(size, heads, -1, length) @ values).reshape(q.shape)
    out = out + shares[..., length:] @ v
    return out.transpose(0, 2, 3, 1, 4).reshape(size * num * width, heads * dim)
