"""The MTP head of Qwen3.5 models as a function of its weights, for gradients: whole pieces of text, drafts of several tokens.

The same mathematics as models/qwen3_5_mtp.py, in plain operations over weights as they are stored, not fused. A draft begins at every
position: its first cell takes the target's hidden, each further one the hidden of the cell before it, and the token that stands in the
text. A cell attends to the first cells of the positions up to its own, and to the cells of its own draft, as drafting does.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.errors import ModelError
from mlxspec.models.layers import FusedLinear, rotary_order, rotate, swapped, weight_values
from mlxspec.models.qwen3_5 import Qwen35, qwen_rotary
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp

Head = dict[str, mx.array]  # float32, by the names that a folder has behind `mtp.`; norms shifted (1 + w)

_LAYER = "layers.0."


class MtpNetwork:
    """A head's shape and what it shares with its target. Raises ModelError for a head with experts."""

    def __init__(self, config: Qwen35Config, target: Qwen35) -> None:
        if config.num_experts:
            raise ModelError("An MTP head with experts cannot be adapted yet.")
        self._config, self._target = config, target
        self._rotary = qwen_rotary(config)
        self._order = mx.array(rotary_order(config.head_dim, config.rope_dims))

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    def logits(self, hidden: mx.array) -> mx.array:
        """(..., H) -> (..., V) float32, by the target's language-model head."""
        part, flat = self._target.head_module, hidden.reshape(-1, hidden.shape[-1])
        if isinstance(part, FusedLinear):
            out = part.with_gradient(flat)
        else:  # the embedding
            out = part.as_linear(flat)
        return self._target.capped(out).astype(mx.float32).reshape(*hidden.shape[:-1], -1)

    def drafts(self, head: Head, tokens: mx.array, hidden: mx.array, depth: int) -> list[mx.array]:
        """tokens (B, T), hidden (B, T, H) of the target -> for each j < depth (B, T - 1 - j, H), what the head's cell number j of the draft
        that begins with token i + 1 gives: its logits are for the token behind i + 1 + j."""
        num = tokens.shape[1] - 1
        embedded = self._target.embed(tokens).astype(mx.float32)
        cells, seen = hidden[:, :-1].astype(mx.float32), list[tuple[mx.array, mx.array]]()
        found: list[mx.array] = []
        for j in range(depth):
            left = num - j
            cells, seen = self._cell(head, embedded[:, 1 + j :], cells[:, :left], seen, j)
            found.append(cells)
        return found

    def _cell(
        self,
        head: Head,
        embedded: mx.array,
        hidden: mx.array,
        seen: Sequence[tuple[mx.array, mx.array]],
        first: int,
    ) -> tuple[mx.array, list[tuple[mx.array, mx.array]]]:
        """One cell for each position (B, n, H). seen: keys and values (B, heads, n', D) of the cells before it in its draft. first: its
        first position."""
        c, eps = self._config, self._config.rms_eps
        e = mx.fast.rms_norm(embedded, head["pre_fc_norm_embedding.weight"], eps)
        h = mx.fast.rms_norm(hidden, head["pre_fc_norm_hidden.weight"], eps)
        x = mx.concatenate([e, h], axis=-1) @ head["fc.weight"].T
        normed = mx.fast.rms_norm(x, head[_LAYER + "input_layernorm.weight"], eps)
        num = x.shape[1]
        cos, sin = (t.swapaxes(0, 1) for t in self._rotary.table(mx.arange(first, first + num)))
        q, k, v = (normed @ head[f"{_LAYER}self_attn.{n}_proj.weight"].T for n in "qkv")
        gate = None
        if c.is_gated:
            q, gate = (
                part.reshape(*x.shape[:2], -1)
                for part in mx.split(q.reshape(*x.shape[:2], c.num_heads, -1), 2, axis=-1)
            )
        q, k = (
            self._turned(part, head[f"{_LAYER}self_attn.{n}_norm.weight"], cos, sin)
            for part, n in ((q, "q"), (k, "k"))
        )
        v = v.reshape(*x.shape[:2], -1, c.head_dim).swapaxes(1, 2)
        own = [(keys[:, :, :num], values[:, :, :num]) for keys, values in [*seen, (k, v)]]
        attended = _attend(q, own, c.head_dim**-0.5).swapaxes(1, 2).reshape(*x.shape[:2], -1)
        if gate is not None:
            attended = attended * mx.sigmoid(gate)
        x = x + attended @ head[_LAYER + "self_attn.o_proj.weight"].T
        normed = mx.fast.rms_norm(x, head[_LAYER + "post_attention_layernorm.weight"], eps)
        mlp = _LAYER + "mlp."
        inner = nn.silu(normed @ head[mlp + "gate_proj.weight"].T) * (normed @ head[mlp + "up_proj.weight"].T)
        x = x + inner @ head[mlp + "down_proj.weight"].T
        return mx.fast.rms_norm(x, head["norm.weight"], eps), own

    def _turned(self, x: mx.array, norm: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        """(B, n, heads * D) -> (B, heads, n, D), normed and rotated."""
        heads = x.reshape(*x.shape[:2], -1, self._config.head_dim)
        heads = mx.fast.rms_norm(heads, norm, self._config.rms_eps)[..., self._order].swapaxes(1, 2)
        return rotate(heads, swapped(heads), cos, sin)


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


def float_head(module: Qwen35Mtp, loaded: Qwen35Mtp | None = None) -> Head:
    """The weights of a head that is filled and not fused, in float32. loaded: the same head, fused, whose norms count, because loading may
    have shifted them."""
    found: Head = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear | nn.QuantizedLinear | nn.RMSNorm):
            found[f"{path}.weight"] = weight_values(part).astype(mx.float32)
    if loaded is not None:
        found |= _norms(loaded)
    mx.eval(found)
    return found


def _norms(loaded: Qwen35Mtp) -> Head:
    norms, found = loaded.norms(), Head()
    names = {
        "before fc": ("pre_fc_norm_embedding", "pre_fc_norm_hidden"),
        "layer": (_LAYER + "input_layernorm", _LAYER + "post_attention_layernorm"),
        "last": ("norm",),
    }
    for group, of in names.items():
        found |= {f"{n}.weight": w.astype(mx.float32) for n, w in zip(of, norms[group], strict=True)}
    attention = loaded.layers[0].self_attn
    for name, weight in zip(("q_norm", "k_norm"), attention.stored_norms(), strict=True):
        found[f"{_LAYER}self_attn.{name}.weight"] = weight.astype(mx.float32)
    return found
