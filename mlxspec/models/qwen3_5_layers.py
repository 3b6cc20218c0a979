"""Layers of Qwen3, Qwen3-Next and Qwen3.5 text models: full attention, Gated DeltaNet, dense and mixture-of-experts MLPs.

Parameter names are those that mlx-lm writes. Modules are built with separate projections, loaded, then fused in place (`fuse`); only fused
ones run. Knows no layer order, no caches' transactions, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.cache.attention import AttentionLayerCache
from mlxspec.cache.places import Places
from mlxspec.cache.rollback import Committed, RecurrentState, advance, last_replay
from mlxspec.kernels.activations import gated, gated_norm
from mlxspec.kernels.conv_ops import GdnShape
from mlxspec.kernels.conv_qkv import ConvWeights, LastInputs, columns, conv_qkv
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import RowLayout, gdn_round
from mlxspec.models.layers import FusedLinear, project, rms_norm, rotary_order, rotate, rows_of, swapped
from mlxspec.models.mlp import GatedMlp, make_experts_run
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.row_attention import attend_in_places


class RoundLayout(NamedTuple):
    """The rows of a forward, for Gated DeltaNet layers. widths: tokens of each row; here: the same as arrays. certain: whether all tokens
    will be committed. committed: how much of the last forward is committed; None where the incoming states have nothing deferred. room: for
    how many tokens kernels make tapes; None: for the forward's tokens."""

    widths: FlatRows
    certain: bool
    here: RowLayout
    committed: Committed | None = None
    room: int | None = None


class Qwen35Attention(nn.Module):
    """Full attention with norms of each head's queries and keys and, except in Qwen3, a sigmoid output gate."""

    def __init__(self, c: Qwen35Config, *, num_inputs: int | None = None, norms_heads: bool = True) -> None:
        """Build the layer without weights. num_inputs: inputs of the projections, None for the hidden size. norms_heads: whether queries
        and keys are normed."""
        super().__init__()
        self._c = c
        self.scale = c.head_dim**-0.5
        num_inputs = num_inputs or c.hidden_size
        num_parts = 2 if c.is_gated else 1  # of a head's outputs: its query, and its gate behind it
        self.q_proj = nn.Linear(num_inputs, num_parts * c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(num_inputs, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(num_inputs, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        if norms_heads:
            self.q_norm = nn.RMSNorm(c.head_dim)
            self.k_norm = nn.RMSNorm(c.head_dim)

    def fuse(self) -> None:
        c = self._c
        # queries and keys side by side are normed and turned by one operation
        query, gates = self.q_proj, []
        if c.is_gated:
            query, gate = (
                rows_of(self.q_proj, (c.num_heads, 2, c.head_dim), (slice(None), place)) for place in (0, 1)
            )
            gates = [gate]
        order = mx.array(rotary_order(c.head_dim, c.rope_dims))
        query, key = (
            rows_of(part, (num, c.head_dim), (slice(None), order))
            for part, num in ((query, c.num_heads), (self.k_proj, c.num_kv_heads))
        )
        self.qkv = FusedLinear(
            [query, key, *gates, self.v_proj],
            [
                num * c.head_dim
                for num in (c.num_heads + c.num_kv_heads, *([c.num_heads] * len(gates)), c.num_kv_heads)
            ],
        )
        if "q_norm" in self:
            query_norm, key_norm = self.q_norm.weight, self.k_norm.weight
            # of heads of 256 and 64 a power of two, which no dtype rounds: one operation less
            self._query_factor = self.scale if log2(self.scale).is_integer() else 1.0
            query_norm, self.scale = query_norm * self._query_factor, self.scale / self._query_factor
            self.qk_norm = mx.concatenate(
                [
                    mx.repeat(weight[None, order], num, axis=0)
                    for weight, num in ((query_norm, c.num_heads), (key_norm, c.num_kv_heads))
                ]
            ).astype(mx.float32)  # so that the product with it and the rotation are rounded once
            self.qk_norm_swapped = swapped(self.qk_norm)
            del self.q_norm, self.k_norm
        self.out = FusedLinear([self.o_proj])
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            delattr(self, name)

    def shifted(self, norm: mx.array, by: float) -> mx.array:
        """Return joined norm weights (heads, D), in the form of `qk_norm`, with `by` added to the weights of the query norm and the key
        norm."""
        c = self._c
        each = [self._query_factor] * c.num_heads + [1.0] * c.num_kv_heads
        return norm + by * mx.array(each)[:, None]

    def project(
        self, x: mx.array, cos: mx.array, sin: mx.array
    ) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """Return queries (1, N, Hq, D), keys and values (1, N, Hkv, D), and the gate (N, Hq * D) or None, for inputs x (N, H). Queries and
        keys are rotated; attention scores of the queries still need the factor `scale`."""
        c = self._c
        num_heads = c.num_heads + c.num_kv_heads
        qk, *gates, v = self.qkv.split(
            x,
            (1, -1, num_heads, c.head_dim),
            *([(c.num_heads * c.head_dim,)] if c.is_gated else []),
            (1, -1, c.num_kv_heads, c.head_dim),
        )
        other = swapped(qk)
        if "qk_norm" in self:
            normed = mx.fast.rms_norm(qk, None, c.rms_eps)
            qk, other = normed * self.qk_norm, swapped(normed) * self.qk_norm_swapped
        q, k = mx.split(rotate(qk, other, cos, sin).astype(x.dtype), [c.num_heads], axis=2)
        return q, k, v, gates[0] if gates else None

    def core(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        places: Places,
        cache: AttentionLayerCache,
        *,
        at_end: bool = False,
    ) -> mx.array:
        """Write keys and values at `places`, attend row by row, and return the attention's output (N, Hq * D). at_end: as in
        `attend_in_places`."""
        return attend_in_places(q, k, v, places, cache, self.scale, at_end=at_end)

    def finish(self, attended: mx.array, gate: mx.array | None) -> mx.array:
        """Return the layer's output (N, H) from the attention's output and the gate, (N, Hq * D) each."""
        return self.out(attended if gate is None else gated(attended, gate))


class GatedDeltaNet(nn.Module):
    """A layer of linear attention with a gated delta rule, after a short causal convolution."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self._c = c
        self._shape = GdnShape(c.num_k_heads, c.num_v_heads, c.k_head_dim, c.v_head_dim)
        for name, size in self._projections.items():
            self[name] = nn.Linear(c.hidden_size, size, bias=False)
        self.conv1d = nn.Conv1d(c.conv_dim, c.conv_dim, c.conv_kernel, groups=c.conv_dim, bias=False)
        self.dt_bias = mx.ones(c.num_v_heads)
        self.A_log = mx.zeros(c.num_v_heads)
        self.norm = nn.RMSNorm(c.v_head_dim)
        self.out_proj = nn.Linear(c.value_dim, c.hidden_size, bias=False)

    @property
    def _projections(self) -> dict[str, int]:
        """Return the number of outputs of each projection of the input, by its name in the checkpoint."""
        c = self._c
        if c.joins_projections:
            return {"in_proj_qkvz": c.conv_dim + c.value_dim, "in_proj_ba": 2 * c.num_v_heads}
        return {
            "in_proj_qkv": c.conv_dim,
            "in_proj_z": c.value_dim,
            "in_proj_b": c.num_v_heads,
            "in_proj_a": c.num_v_heads,
        }

    def fuse(self) -> None:
        c = self._c
        parts = [self[name] for name in self._projections]
        if c.joins_projections:
            num = c.num_v_heads // c.num_k_heads  # value heads to a key head
            each = (c.k_head_dim, c.k_head_dim, num * c.v_head_dim, num * c.v_head_dim), (num, num)
            parts = [
                rows_of(part, (-1,), _by_kind(c.num_k_heads, sizes))
                for part, sizes in zip(parts, each, strict=True)
            ]
        self.in_proj = FusedLinear(parts)
        self.out = FusedLinear([self.out_proj])
        self.conv_weight = mx.contiguous(self.conv1d.weight[:, :, 0].T)  # (K, C)
        self.taps = mx.split(self.conv_weight, c.conv_kernel)
        self.neg_a = -mx.exp(self.A_log.astype(mx.float32))
        self.dt_bias = self.dt_bias.astype(mx.float32)
        self.output_norm = mx.tile(self.norm.weight, c.num_v_heads)
        for name in (*self._projections, "out_proj", "conv1d", "A_log", "norm"):
            delattr(self, name)

    def __call__(
        self, x: mx.array, past: RecurrentState, layout: RoundLayout
    ) -> tuple[mx.array, RecurrentState]:
        """Return the layer's output (N, H) for x (N, H), and the recurrent state for the cache. past: the state that the cache holds."""
        committed, last_inputs = layout.committed, None
        if committed is not None and past.inputs is not None:
            last_inputs = LastInputs(past.inputs, committed.rows, committed.num_committed)
        projected = self.in_proj(x)
        weights = ConvWeights(self.conv_weight, self.neg_a, self.dt_bias, self.taps)
        inputs, window, conv_inputs = conv_qkv(
            projected,
            past.window,
            weights,
            self._shape,
            layout.here,
            last_inputs,
            certain=layout.certain,
            room=layout.room,
        )
        last = last_replay(past, committed)
        if layout.certain:
            y, state = advance(inputs, past.state, last, layout.here, layout.widths)
            future = RecurrentState(state, window)
        else:
            y, state, tape = gdn_round(inputs, past.state, layout.here, last)
            future = RecurrentState(state, window, conv_inputs, tape)
        return self._output(y, columns(projected, self._shape)[1]), future

    def _output(self, y: mx.array, z: mx.array) -> mx.array:
        """Return the layer's output (N, H) from the recurrence's output y (N, Hv, Dv) float32 and the gate z (N, Hv * Dv)."""
        return self.out(gated_norm(y, z, self.output_norm, self._c.rms_eps))


def _by_kind(num_heads: int, sizes: Sequence[int]) -> mx.array:
    """Return the indices that reorder outputs stored head by head, each head with parts of these sizes, so that the first parts of all
    heads are followed by the second parts, and so on."""
    places = mx.split(
        mx.arange(num_heads * sum(sizes)).reshape(num_heads, -1), np.cumsum(sizes)[:-1].tolist(), axis=1
    )
    return mx.concatenate([part.reshape(-1) for part in places])


class SparseMlp(nn.Module):
    """A mixture of experts: each token uses the top k of many small MLPs and, except in Qwen3, one shared MLP with a sigmoid gate."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        from mlx_lm.models.switch_layers import SwitchGLU  # slow to import, and only experts need it

        self._c = c
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.switch_mlp = SwitchGLU(c.hidden_size, c.expert_size, c.num_experts)
        if c.shared_expert_size:
            self.shared_expert = GatedMlp(c.hidden_size, c.shared_expert_size)
            self.shared_expert_gate = nn.Linear(c.hidden_size, 1, bias=False)

    def fuse(self) -> None:
        if self._c.shared_expert_size:
            self.shared_expert.fuse()
        make_experts_run(self.switch_mlp)

    def __call__(self, x: mx.array) -> mx.array:
        probs = mx.softmax(project(self.gate, x), axis=-1, precise=True)
        k = self._c.num_experts_per_token
        chosen = mx.stop_gradient(mx.argpartition(probs, kth=-k, axis=-1)[..., -k:])
        weights = mx.take_along_axis(probs, chosen, axis=-1)
        if self._c.norm_topk:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        mixed = (self.switch_mlp(x, chosen) * weights[..., None]).sum(axis=-2).astype(x.dtype)
        if not self._c.shared_expert_size:
            return mixed
        return mixed + mx.sigmoid(project(self.shared_expert_gate, x)) * self.shared_expert(x)


class Qwen35DecoderLayer(nn.Module):
    """A decoder layer: a token mixer (attention or Gated DeltaNet) and an MLP, each with a norm before it and added to the residual
    stream."""

    def __init__(self, c: Qwen35Config, mixer: GatedDeltaNet | Qwen35Attention) -> None:
        super().__init__()
        self._eps = c.rms_eps
        if isinstance(mixer, GatedDeltaNet):
            self.linear_attn = mixer
        else:
            self.self_attn = mixer
        self.input_layernorm = nn.RMSNorm(c.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size)
        self.mlp = SparseMlp(c) if c.num_experts else GatedMlp(c.hidden_size, c.intermediate_size)

    def fuse(self) -> None:
        mixer = self.linear_attn if "linear_attn" in self else self.self_attn
        mixer.fuse()
        self.mlp.fuse()

    def normed(self, x: mx.array) -> mx.array:
        """Return the input (N, H) of the token mixer: the norm of x (N, H)."""
        return rms_norm(x, self.input_layernorm.weight, self._eps)

    def normed_again(self, x: mx.array) -> mx.array:
        """Return the input (N, H) of the MLP: the norm of x (N, H)."""
        return rms_norm(x, self.post_attention_layernorm.weight, self._eps)

    def before_attention(
        self, x: mx.array, cos: mx.array, sin: mx.array
    ) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """Return queries, keys, values and output gate of an attention layer for x (N, H), as `Qwen35Attention.project` does."""
        return self.self_attn.project(self.normed(x), cos, sin)

    def after_attention(self, x: mx.array, attended: mx.array, gate: mx.array | None) -> mx.array:
        """Return the residual stream (N, H) after an attention layer. attended, gate: (N, Hq * D)."""
        return self.with_mlp(x + self.self_attn.finish(attended, gate))

    def with_mlp(self, x: mx.array) -> mx.array:
        """Return the residual stream x (N, H) with the MLP's output added."""
        return x + self.mlp(self.normed_again(x))
