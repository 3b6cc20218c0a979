"""Block drafters: DFlash, and what DFlash2 and DSpark add to it. A whole draft comes from one forward.

The drafter reads the residual stream behind chosen layers of its target. For each committed token a context cell is made of it, once:
    c = hidden_norm(fc([r_1 ; ... ; r_n]))                        the same for every layer; a layer keeps its keys and values of c
A draft is a block: the newest known token, which the target has not seen, and masks behind it. Positions go on behind the context.
    x = embed(block);  per layer: x += attention(norm(x) over [context ; block]);  x += mlp(norm(x));  h = norm(x)
Every place of a block sees all of the block, but in causal layers only what lies before it. logits = head(h), of the masks' places
(of all places where the block starts at its anchor). Embedding and language-model head are the target's unless the checkpoint has its own.
Only context cells are kept, and they are made of committed tokens, so nothing is ever rolled back. A shorter block is another block, not
the beginning of a longer one.

DFlash2 puts short convolutions along the block before and behind each sublayer, and picks tokens from left to right among the likeliest
of each place by how well they follow one another. DSpark adds to each place's logits what its Markov head says behind the token before,
and says how sure it is. Knows weights, cells and blocks; knows no histories, no acceptance and no sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.places import Places
from mlxspec.cache.quantized import PLAIN, attention_cache
from mlxspec.cache.windowed import WindowedLayerCache
from mlxspec.kernels.attention import attend_tailed
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.weights import Weights
from mlxspec.models.base import Output
from mlxspec.models.dflash_config import DFlashConfig, is_block_drafter, kind_of
from mlxspec.models.drafter_module import AbsentTarget, DrafterFolder, DrafterModule, sanitize_drafter
from mlxspec.models.layers import FusedLinear, Parts, Rotary, project, rms_norm, rotate, swapped
from mlxspec.models.qwen3_5_layers import Qwen35Attention, Qwen35DecoderLayer
from mlxspec.models.registry import Trunk
from mlxspec.models.segments import LayerPiece, Segments

_OF_A_LAYER = 16  # kernels that Metal launches for a layer of a block, for `device.start`


class DFlashAttention(Qwen35Attention):
    """The attention of a block drafter: plain Qwen3's, whose keys and values are made of two inputs, the context cells and the block."""

    def fuse(self) -> None:
        self.queries_of = FusedLinear([self.q_proj])
        self.keys_of = FusedLinear([self.k_proj, self.v_proj])
        self.out = FusedLinear([self.o_proj])
        for name in ("q_norm", "k_norm"):
            self[f"{name}_weight"] = self[name].weight.astype(mx.float32)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            delattr(self, name)

    def queries(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        """Return the queries (N, Hq, D) of inputs (N, H), normed and rotated."""
        part = self.queries_of(x).reshape(x.shape[0], -1, self._c.head_dim)
        return self._turned(part, self.q_norm_weight, cos, sin)

    def keys(self, x: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values (N, Hkv, D) of inputs (N, H); keys are normed and rotated."""
        k, v = (part.reshape(x.shape[0], -1, self._c.head_dim) for part in self.keys_of.split(x))
        return self._turned(k, self.k_norm_weight, cos, sin), v

    def _turned(self, part: mx.array, weight: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(part, None, self._c.rms_eps)
        return rotate(normed * weight, swapped(normed) * swapped(weight), cos, sin).astype(part.dtype)


class BlockConv(nn.Module):
    """Two causal convolutions along a block, one before a sublayer and one after it. The taps are learned constants plus values that are
    computed, for each group of channels, from the input of the first convolution."""

    def __init__(self, hidden_size: int, kernel: int, group: int) -> None:
        super().__init__()
        self._shape = 2, kernel, hidden_size // group
        self.base_kernel = mx.zeros((2, kernel, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel * (hidden_size // group), bias=False)

    def taps(self, x: mx.array) -> mx.array:
        """Return the input-dependent taps (N, 2, K, groups) of both convolutions for inputs (N, H) of the sublayer."""
        return project(self.kernel_projection, x).reshape(-1, *self._shape)

    def apply(self, which: int, x: mx.array, taps: mx.array, places: mx.array) -> mx.array:
        """Return the output (N, H) of the convolution before the sublayer (which 0) or after it (which 1). places (N,) int32: the number of
        tokens of its block before each token."""
        _, num_taps, groups = self._shape
        wide = x.reshape(x.shape[0], groups, -1)
        base = self.base_kernel[which].astype(x.dtype).reshape(num_taps, groups, -1)
        out = mx.zeros_like(wide)
        for t in range(num_taps):
            seen = wide
            if t:
                seen = (
                    mx.concatenate([mx.zeros_like(wide[:t]), wide[:-t]])
                    if t < x.shape[0]
                    else mx.zeros_like(wide)
                )
                seen = mx.where((places >= t)[:, None, None], seen, 0)
            out = out + (base[t] + taps[:, which, t, :, None]) * seen
        return out.reshape(x.shape)


class DFlashLayer(Qwen35DecoderLayer):
    """A layer of a block drafter: attention over context and block, and an MLP. DFlash2 has convolutions before and after each."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__(c.text, DFlashAttention(c.text))
        if c.conv_kernel:
            self.attention_conv = BlockConv(c.text.hidden_size, c.conv_kernel, c.conv_group)
            self.mlp_conv = BlockConv(c.text.hidden_size, c.conv_kernel, c.conv_group)

    def enter(
        self, x: mx.array, cos: mx.array, sin: mx.array, places: mx.array
    ) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """Compute a layer up to attention for inputs (N, H). Return queries, keys and values of the block, and the taps of the convolution
        after attention, None where there is none."""
        seen, taps = self.normed(x), None
        if "attention_conv" in self:
            taps = self.attention_conv.taps(seen)
            seen = self.attention_conv.apply(0, seen, taps, places)
        k, v = self.self_attn.keys(seen, cos, sin)
        return self.self_attn.queries(seen, cos, sin), k, v, taps

    def leave(self, x: mx.array, attended: mx.array, taps: mx.array | None, places: mx.array) -> mx.array:
        """Return the residual stream (N, H) after the layer. x (N, H): the layer's input; attended (N, Hq * D): attention's output; taps:
        as `enter` returned them."""
        mixed = self.self_attn.out(attended)
        if taps is not None:
            mixed = self.attention_conv.apply(1, mixed, taps, places)
        x = x + mixed
        if "mlp_conv" not in self:
            return self.with_mlp(x)
        seen = self.normed_again(x)
        taps = self.mlp_conv.taps(seen)
        out = self.mlp(self.mlp_conv.apply(0, seen, taps, places))
        return x + self.mlp_conv.apply(1, out, taps, places)


class CandidateSelector(nn.Module):
    """The part of DFlash2 that scores how well each candidate token follows the token before it."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(c.text.vocab_size, c.rank)
        self.successor_codebook = nn.Embedding(c.text.vocab_size, c.rank)
        self.hidden_projection = nn.Linear(c.text.hidden_size, c.rank, bias=False)

    def __call__(self, hidden: mx.array, before: mx.array, candidates: mx.array) -> mx.array:
        """Return the scores (N, k) of candidates (N, k) int32. hidden (N, H): hidden states of their places; before (N,) int32: the tokens
        before them."""
        wanted = self.predecessor_codebook(before) * project(self.hidden_projection, hidden)
        return (wanted[:, None] * self.successor_codebook(candidates)).sum(axis=-1)


_KEYS = LayerPiece("keys", lambda layer, cells, *turns: (cells, layer.self_attn.keys(cells, *turns)))
_ENTER = LayerPiece("enter", lambda layer, x, *given: (x, layer.enter(x, *given)))
_LEAVE = LayerPiece(
    "leave", lambda layer, x, *given: (layer.leave(x, *given), None), num_launches=_OF_A_LAYER
)


class DFlash(DrafterModule):
    """The module of a block drafter (DFlash, DFlash2 or DSpark). Parameter names are the checkpoint's. It never computes in float16, as
    sums of several layers' outputs exceed its range."""

    def __init__(self, config: DFlashConfig, target: Trunk) -> None:
        """Build the module for `target`, without weights. Raises ModelError where the drafter is for another model."""
        super().__init__(target)
        config.check_fits(target)
        self.config, self.title, c = config, f"{config.kind} drafter", config.text
        self.rotary = Rotary.of_first(c.rope_dims, c.rope_theta, c.head_dim, c.rope_scaling)
        self.fc = nn.Linear(len(config.layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(c.hidden_size)
        self.layers = [DFlashLayer(config) for _ in config.windows]
        self.norm = nn.RMSNorm(c.hidden_size)
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if config.has_head:
            self.lm_head = nn.Linear(c.hidden_size, config.draft_vocab or c.vocab_size, bias=False)
        if config.draft_vocab is not None:
            self.d2t = mx.zeros(config.draft_vocab, mx.int32)
        if config.kind == "DFlash2":
            self.candidate_selector = CandidateSelector(config)
        if config.kind == "DSpark":
            # logits of a token by the one before it, which is one of the target's
            self.markov_head = Parts(
                markov_w1=nn.Embedding(c.vocab_size, config.rank),
                markov_w2=nn.Linear(config.rank, config.draft_vocab or c.vocab_size, bias=False),
            )
            if config.has_confidence:  # how likely a drafted token is accepted
                seen = c.hidden_size + config.confidence_sees_markov * config.rank
                self.confidence_head = Parts(proj=nn.Linear(seen, 1))
        self._segments = Segments(self.layers)

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """Return an empty cache of context cells for `num_rows` rows: cell i is made from the target's token i. kv_bits: as in
        models.base.Model."""
        c = self.config
        heads = c.text.num_kv_heads, c.text.head_dim
        return ModelCache(
            [
                attention_cache(*heads, self.dtype, num_rows, kv_bits)
                if window is None
                else WindowedLayerCache(*heads, window, self.dtype, num_rows)
                for window in c.windows
            ],
            num_rows,
        )

    def remember(
        self, features: mx.array, rows: FlatRows, cache: ModelCache, *, certain: bool = True
    ) -> Output:
        """Append context cells for the next tokens of each row, leave the cache's transaction open, and return an Output without logits
        whose hidden (N, H) are the cells. A cell is a token's features, projected to H numbers and normalized; each layer's cache
        gets keys and values computed from it. features (N, n * H): the outputs of the target's layers that the drafter reads.
        certain: all tokens are committed, none can be rejected."""
        places, run = cache.begin(rows, certain=certain), self._segments.begin(rows)
        turns = self.rotary.table(places.turns)
        cells = self._segments.runners.get("cells", self.cells, rows)(features.astype(self.dtype))
        for i in range(len(self.layers)):
            run.add(i, _KEYS, *turns)
            _, (keys, values) = run.through(cells)
            cache.attention(i).append(keys, values, places)
        return Output(logits=None, hidden=cells, is_warm=run.is_warm)

    def block(self, tokens: mx.array, rows: FlatRows, cache: ModelCache) -> Output:
        """Run a block for each row, and return an Output whose hidden (N, H) is the input of the language-model head, in the target's
        dtype. tokens (N,) int32: for each row its newest token, then mask tokens. The cache must have no open transaction and is not
        changed; where its lengths are upper bounds, a block sees only the cells that are committed."""
        run = self._segments.begin(rows)
        turns = self.rotary.table(Places(rows, cache.lengths, cache.exact).turns)
        places = mx.array(np.concatenate([np.arange(w) for w in rows.widths]).astype(np.int32))
        x = self.embed(tokens).astype(self.dtype)
        masks: dict[object, mx.array | None] = {}
        for i in range(len(self.layers)):
            run.add(i, _ENTER, *turns, places)
            x, (q, k, v, taps) = run.through(x)
            attended = self._attend(i, q, k, v, rows, cache, masks)
            run.add(i, _LEAVE, attended, taps, places)
        x, _ = run.through(x)
        hidden = rms_norm(x, self.norm.weight, self.config.text.rms_eps).astype(self.target.dtype)
        return Output(logits=None, hidden=hidden, is_warm=run.is_warm)

    def cells(self, features: mx.array) -> mx.array:
        return rms_norm(self.fc(features), self.hidden_norm.weight, self.config.text.rms_eps)

    def embed(self, tokens: mx.array) -> mx.array:
        return self.embed_tokens(tokens) if "embed_tokens" in self else self.target.embed(tokens)

    def _attend(
        self,
        i: int,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        rows: FlatRows,
        cache: ModelCache,
        masks: dict[object, mx.array | None],
    ) -> mx.array:
        """Return the attention's output (N, Hq * D) in layer i over each row's context and block. masks: the masks that earlier layers
        made, reused by layers of the same kind."""
        layer, window, outs = cache.attention(i), self.config.windows[i], []
        scale = self.config.text.head_dim**-0.5
        for r in rows.active:
            start, end = rows.starts[r], rows.starts[r + 1]
            length, width = cache.lengths[r], rows.widths[r]
            if isinstance(layer, WindowedLayerCache):
                least = length if cache.least is None else cache.least[r]
                most = min(layer.window - 1 + length - least, length)
                keys, values = (x[:, :, x.shape[2] - most :] for x in layer.view(r, length, least))
            else:
                keys, values = layer.view(r, length)
            own = [x[None, start:end].swapaxes(1, 2) for x in (q, k, v)]
            form = r, keys.shape[2], window, self.config.causal[i]
            if form not in masks:
                masks[form] = _seen(r, width, cache, length - keys.shape[2], window, self.config.causal[i])
            out = attend_tailed(own[0], keys, values, own[1], own[2], scale, masks[form])
            outs.append(out.swapaxes(1, 2).reshape(end - start, -1))
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    # --- from hiddens of a block to logits

    @property
    def summary(self) -> str:
        return f"drafts up to {self.config.num_drafts} tokens at once"

    @property
    def proposes_all(self) -> bool:
        return self.picks_in_order or super().proposes_all

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits (N, R) of hidden states (N, H), each place by itself."""
        if "lm_head" in self:
            return self.target.capped(self.lm_head(hidden.astype(self.dtype)).astype(hidden.dtype))
        return self.target.head(hidden)

    @property
    def picks_in_order(self) -> bool:
        """Return whether a token's logits depend on the drafted token before it, as in DFlash2 and DSpark. `follow` computes them then."""
        return self.config.kind != "DFlash"

    def follow(
        self, hidden: mx.array, logits: mx.array, before: mx.array, candidates: mx.array | None = None
    ) -> mx.array:
        """Return the logits (N, R) of places after the tokens `before` (N,) int32. logits: each place's logits by itself. candidates (N, k)
        int32: the likeliest tokens of each place, of which DFlash2 chooses, and `logits` (N, k) are those of the candidates; None: `logits`
        are of all tokens."""
        if self.config.kind == "DSpark":
            return logits + project(self.markov_head.markov_w2, self.markov_head.markov_w1(before))
        if candidates is None:
            k = self.config.top_k
            candidates = mx.argpartition(logits, kth=-k, axis=-1)[:, -k:].astype(mx.int32)
            logits = mx.take_along_axis(logits, candidates, axis=-1)
        scores = logits + self.candidate_selector(hidden.astype(self.dtype), before, candidates)
        nothing = mx.full((len(scores), self.config.text.vocab_size), -mx.inf, scores.dtype)
        return mx.put_along_axis(nothing, candidates, scores, axis=-1)

    def sureness(self, hidden: mx.array, before: mx.array) -> mx.array | None:
        """Return the probability (N,) float32 that each place's token is accepted, from DSpark's confidence head; None where the drafter
        has no such head. before: the tokens before the places."""
        if "confidence_head" not in self:
            return None
        seen = hidden.astype(self.dtype)
        if self.config.confidence_sees_markov:
            seen = mx.concatenate([seen, self.markov_head.markov_w1(before).astype(self.dtype)], axis=-1)
        return mx.sigmoid(project(self.confidence_head.proj, seen)[:, 0].astype(mx.float32))


def _seen(
    row: int, width: int, cache: ModelCache, begin: int, window: int | None, is_causal: bool
) -> mx.array | None:
    """Return the mask (width, lengths[row] - begin + width) bool of the cells from `begin` on and the block's tokens that each token of a
    row's block sees; None where each sees all. window: how many cells and tokens the block's first token sees, None for all."""
    length, sees = cache.lengths[row], None
    if cache.exact is not None:
        exact, places = cache.exact[row], mx.arange(begin, length + width)
        sees = places < exact
        if window is not None:
            sees = sees & (places > exact - window)
        sees = mx.broadcast_to(sees | (places >= length), (width, length - begin + width))
    if not is_causal:
        return sees
    earlier = mx.tri(width, length - begin + width, length - begin, dtype=mx.bool_)
    return earlier if sees is None else sees & earlier


def sanitize_dflash(weights: Weights) -> Weights:
    """Return a folder's tensors as `sanitize_drafter` names them, with float16 replaced by bfloat16."""
    halves = {name: value for name, value in weights.items() if value.dtype == mx.float16}
    return sanitize_drafter(weights | {name: value.astype(mx.bfloat16) for name, value in halves.items()})


def _build(config: Mapping[str, Any], given: Weights, target: Any) -> tuple[DFlash, Weights]:
    weights = sanitize_dflash(given)
    return DFlash(DFlashConfig.from_dict(config, weights.keys()), target), weights


def _target(config: Mapping[str, Any], given: Weights) -> AbsentTarget:
    c = DFlashConfig.from_dict(config, sanitize_dflash(given).keys())
    num_layers = c.num_target_layers or 1 + max(c.layer_ids)
    return AbsentTarget(c.text.hidden_size, c.text.vocab_size, num_layers, config=c)


FOLDER = DrafterFolder(
    kind="dflash",
    is_one=is_block_drafter,
    build=_build,
    alone=_target,
    title=lambda names: f"a {kind_of(names)} drafter",
    keeps_bfloat16=True,
    is_quantized=True,
)
