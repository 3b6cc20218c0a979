"""The weights that the demo family's DFlash drafter begins with: close to what the target's MTP head drafts first.

The head mixes the newest token's embedding with the hidden before it, attends to the text, and has an MLP. Here the first layer brings the
embedding from the block's first place to its masks, the second brings the hidden from the last context cell, the third is the head's
attention and most of its MLP, and the fourth has the rest of its MLP. Attention by place is made of keys along one direction, whose sign a
linear fit chooses. Knows weights only, and no training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .network import LanguageModel, Layer, Shape
from .streams import streams_of
from .tuning import shifted

LOUDNESS = 3.0  # of what the layers write, against the mask's embedding, which says nothing
_SHARPNESS = 2.5  # of queries and keys, which have length 8
_NOISE = 0.02  # of weights that would be alike in all heads


def fitted(x: Tensor, y: Tensor, ridge: float = 1e-2) -> Tensor:
    """x (N, D), y (N, M) -> W (M, D) with x @ W.T near y."""
    square = x.T @ x / len(x)
    eased = square + ridge * square.diagonal().mean() * torch.eye(x.shape[1])
    return torch.linalg.solve(eased, x.T @ y / len(x)).T


def _by_place(
    attn: nn.Module, s: Shape, pairs: slice, wanted: Tensor, asking: Tensor, unwanted: Tensor
) -> None:
    """Let the rows `asking` (N, H) attend to the nearest of the rows `wanted`, and to none of `unwanted`. pairs: the rotated pairs that
    carry this, which say how the score falls with the distance. Values are the input as it is."""
    signs = torch.cat([torch.ones(len(wanted), 1), -torch.ones(len(unwanted), 1)])
    toward = fitted(torch.cat([wanted, unwanted]), signs)
    asked = fitted(asking, torch.ones(len(asking), 1))
    along = torch.zeros(s.head_dim // 2)
    along[pairs] = 1.0
    along = torch.cat([along, torch.zeros_like(along)])[:, None] * (s.head_dim / along.sum()).sqrt()
    for proj, vector in ((attn.q_proj, asked), (attn.k_proj, toward)):
        rows = (along @ vector).repeat(s.heads, 1)
        proj.weight.copy_(rows + _NOISE * torch.randn_like(rows))
    for norm in (attn.q_norm, attn.k_norm):
        norm.weight.fill_(_SHARPNESS)
    attn.v_proj.weight.copy_(torch.eye(s.hidden))


def _rotated_whole(head: Layer, s: Shape) -> tuple[Tensor, Tensor]:
    """Where a dimension of the head's attention, of which the first part is rotated, goes where all are: to a pair of the same rate, or, if
    it is not rotated, to one that is left. Returns (order (D,): of the head's dimensions; rates (D,))."""
    half, turned = s.head_dim // 2, int(s.head_dim * 0.25) // 2
    share = half // turned
    order = torch.full((s.head_dim,), -1)
    for m in range(turned):
        order[m * share], order[m * share + half] = m, m + turned
    weight = (1 + head.self_attn.q_norm.weight) * (1 + head.self_attn.k_norm.weight)
    left = 2 * turned + weight[2 * turned :].abs().argsort()  # the least of them are turned fastest
    free = (order < 0).nonzero()[:, 0]
    order[free[(free % half).argsort(stable=True)]] = left
    rates = s.rope_theta ** (-torch.arange(half).float() / half)
    rates = torch.where(torch.arange(half) % share == 0, rates, torch.zeros(()))
    return order, torch.cat([rates, rates])


def _attention_of(
    attn: nn.Module, target: LanguageModel, s: Shape, cells: Tensor, ids: Tensor, hidden: Tensor
) -> None:
    """The MTP head's attention, whose keys and values are fitted to the context cells, and with means in place of its gate."""
    mtp = target.mtp
    assert mtp is not None
    head: Layer = mtp.layers[0]  # type: ignore[assignment]
    theirs, size = head.self_attn, s.head_dim
    order, rates = _rotated_whole(head, s)
    mixed = mtp.mix(target.model.embed_tokens(ids), shifted(hidden))
    own = head.input_layernorm(mixed)
    gate = theirs.q_proj(own).view(*ids.shape, -1, 2 * size)[..., size:].sigmoid().mean((0, 1)).flatten()
    queries = theirs.q_proj.weight.view(s.heads, 2, size, -1)[:, 0]
    scale = (1 + theirs.q_norm.weight)[order]
    queries = queries[:, order] * scale[:, None]
    queries = queries / queries.norm(dim=(1, 2), keepdim=True) * queries.shape[1] ** 0.5
    # the head's cell stands one place before the mask that drafts in its stead
    low, high = queries.chunk(2, 1)
    cos, sin = rates[: size // 2].cos()[:, None], rates[: size // 2].sin()[:, None]
    queries = torch.cat([low * cos + high * sin, high * cos - low * sin], 1)
    attn.q_proj.weight.copy_(queries.flatten(0, 1))
    attn.q_norm.weight.fill_(float(scale.pow(2).mean().sqrt()))
    keys = theirs.k_norm(theirs.k_proj(own))[:, 1:].flatten(0, 1)[:, order]
    weight = (1 + theirs.k_norm.weight)[order]
    values = theirs.v_proj(own)[:, 1:].flatten(0, 1)
    seen = cells[:, 1:].flatten(0, 1)
    attn.k_proj.weight.copy_(fitted(seen, keys / weight).repeat(s.heads, 1))
    attn.k_norm.weight.copy_(weight)
    attn.v_proj.weight.copy_(fitted(seen, values).repeat(s.heads, 1))
    attn.o_proj.weight.copy_(LOUDNESS * theirs.o_proj.weight * gate)


def _divided_mlp(layers: list[nn.Module], head: Layer, x: Tensor) -> None:
    """The head's MLP: what matters most in the first of two layers, the rest in the second. x (..., H): its input."""
    theirs = head.mlp
    own = head.post_attention_layernorm(x)
    inner = torch.nn.functional.silu(theirs.gate_proj(own)) * theirs.up_proj(own)
    matter = inner.pow(2).mean((0, 1)) * theirs.down_proj.weight.pow(2).sum(0)
    most = matter.argsort(descending=True)
    size = layers[0].mlp.down_proj.weight.shape[1]
    for layer, chosen in zip(layers, (most[:size], most[size:]), strict=True):
        num = len(chosen)
        layer.mlp.gate_proj.weight[:num] = theirs.gate_proj.weight[chosen]
        layer.mlp.up_proj.weight[:num] = theirs.up_proj.weight[chosen]
        layer.mlp.down_proj.weight[:, :num] = LOUDNESS * theirs.down_proj.weight[:, chosen]
        layer.post_attention_layernorm.weight.copy_(1 + head.post_attention_layernorm.weight)


@torch.no_grad()
def begin_with(
    drafter: nn.Module, target: LanguageModel, ids: Tensor, starts: Tensor, block: int, mask: int
) -> None:
    """ids (B, T): a text for the fits; starts (B, blocks): where blocks of it begin."""
    s, mtp = drafter.s, target.mtp
    assert mtp is not None
    streams, hidden = streams_of(target, ids)
    outer = 1 + target.model.norm.weight
    drafter.fc.weight.mul_(0.02)
    drafter.fc.weight[:, -s.hidden :] += outer.diag()
    drafter.norm.weight.copy_(1 + mtp.norm.weight)
    cells = drafter.hidden_norm(drafter.fc(streams))
    batch, blocks = starts.shape
    tokens = torch.full((batch, blocks, block), mask)
    tokens[:, :, 0] = ids.gather(1, starts)
    x = target.model.embed_tokens(tokens.view(batch, -1))
    is_first = (torch.arange(x.shape[1]) % block) == 0
    of_embedding, of_hidden = mtp.fc.weight.chunk(2, 1)
    of_embedding = of_embedding * (1 + mtp.pre_fc_norm_embedding.weight)
    of_hidden = of_hidden * (1 + mtp.pre_fc_norm_hidden.weight)

    def split(layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Normed inputs of (first places, masks), as many of each."""
        normed = layer.input_layernorm(x)
        masks = normed[:, ~is_first].flatten(0, 1)
        return normed[:, is_first].flatten(0, 1).repeat_interleave(block - 1, 0), masks

    some = cells.flatten(0, 1)
    some = some[torch.randperm(len(some))[: batch * blocks * (block - 1)]]
    far, near = slice(24, 32), slice(0, 18)
    layer = drafter.layers[0]
    first, masks = split(layer)
    _by_place(layer.self_attn, s, far, wanted=first, asking=masks, unwanted=torch.cat([masks, some]))
    layer.self_attn.o_proj.weight.copy_(LOUDNESS * of_embedding)
    x = layer(x, cells, starts)
    layer = drafter.layers[1]
    first, masks = split(layer)
    _by_place(layer.self_attn, s, near, wanted=some, asking=masks, unwanted=torch.cat([masks, first]))
    layer.self_attn.o_proj.weight.copy_(LOUDNESS * of_hidden)
    layer, head = drafter.layers[2], mtp.layers[0]
    _attention_of(layer.self_attn, target, s, cells, ids, hidden)
    layer.input_layernorm.weight.copy_(1 + head.input_layernorm.weight)
    mixed = mtp.mix(target.model.embed_tokens(ids), shifted(hidden))
    _divided_mlp(list(drafter.layers[2:]), head, mixed + head.self_attn(head.input_layernorm(mixed)))
