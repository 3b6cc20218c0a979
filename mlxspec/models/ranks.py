"""Tensor parallel forwards: each of several processes, the ranks, holds a share of every layer and computes with it.

A rank builds its model from `share`, a config with its own numbers of heads and widths, and fills it with `cut` weights. The layers' code
is the code of one process: `join` wraps the few modules whose results are parts of a sum or of a row of logits. One process alone has no
such wrapper, so it pays nothing.

How a model is divided:
- Attention: by query heads. A rank has the key and value heads that its query heads read; a key and value head that several ranks read is
  kept on each of them.
- Gated DeltaNet: by value heads in the same way, with the key heads that they read. Projections, convolution, decay, state and tape are
  the rank's own; nothing is exchanged before the output projection.
- MLP and experts: by width. Every rank chooses the same experts, because every rank has the whole router and the same input.
- Embeddings and language-model head: by vocabulary.
- Norms, routers and Gemma's projections of per-layer inputs: whole on each rank. They are at most 1.2 % of a model's weights (Gemma 4 E4B).
- Drafters: whole on each rank, the MTP head too. The head is 1.6 % of the 27B's weights, 2.4 % of the 35B-A3B's and 2.7 % of the 0.8B's, so
  that each of four ranks holds at most a tenth more than its share. Two sums for each drafted token, which dividing it would take, are
  saved. What the head embeds and its logits are the divided model's.

Invariants:
1. Every rank runs the same forwards in the same order, so sums and gathers meet in the same order.
2. The residual stream, the hiddens and the logits have the same bits on every rank: they come out of a sum or of a gather, or are computed
   from such by the same operations.
3. A forward sends two sums a layer (three in a Gemma layer with experts), one for each embedding, and one gather of logits (traffic.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading import gemma_weights
from mlxspec.loading.parts import Cut, Range
from mlxspec.loading.weights import STACKS, our_name, places_of
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.layers import project
from mlxspec.models.qwen3_5_config import Qwen35Config

Config = Qwen35Config | GemmaConfig
_UNITS = (
    128,
    64,
    32,
    16,
)  # widths are cut at a multiple of the largest of these that divides them and gives every rank some
_ROWS, _COLUMNS = -2, -1  # axes of a matrix (..., out, in), packed or not


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that run a model together. group: what joins them; None for a process alone, and where only sizes are
    asked for."""

    rank: int = 0
    size: int = 1
    group: mx.distributed.Group | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"There is no rank {self.rank} among {self.size}.")

    def sum(self, x: mx.array) -> mx.array:
        """The sum of every rank's x, with the same bits on each."""
        return mx.distributed.all_sum(x, group=self.group)

    def gather(self, x: mx.array) -> mx.array:
        """Every rank's x (N, W), side by side: (N, size * W)."""
        parts = mx.distributed.all_gather(x, group=self.group)  # one below the other
        return parts.reshape(self.size, *x.shape).swapaxes(0, 1).reshape(x.shape[0], -1)


ALONE = Ranks()


class Share(NamedTuple):
    """config: the rank's own. cuts: by the name of a module or of a tensor under our names; what is not among them is kept whole. stacks:
    our name of stacks of experts."""

    config: Any
    cuts: Mapping[str, Cut]
    stacks: str = STACKS

    def cut_of(self, name: str) -> Cut | None:
        """Of a tensor by its name in a folder of any layout; None for what is kept whole. Halves that lie one behind the other in a raw
        stack of experts are cut alike."""
        found = [self._cut(place) for place in places_of(our_name(name), self.stacks)]
        if None in found or len(found) == 1:
            return found[0]
        first, second = (cut for cut in found if cut is not None)
        behind = tuple((first.total + start, first.total + end) for start, end in second.ranges)
        return Cut(first.axis, first.ranges + behind, first.total + second.total)

    def _cut(self, place: str) -> Cut | None:
        path, _, kind = place.rpartition(".")
        # one number for each expert of a stack is not divided
        return None if kind == "global_scale" else self.cuts.get(place, self.cuts.get(path))


def share(config: Config, ranks: Ranks) -> Share:
    """A rank's part of a model. Raises ModelError, on every rank alike, where the model cannot be divided among so many."""
    if isinstance(config, GemmaConfig):
        return _share_of_gemma(config, ranks)
    return _share_of_qwen(config, ranks)


def head_ranges(num_heads: int, groups: Collection[int], size: int) -> list[Range]:
    """Which query heads each of `size` ranks has, as evenly as can be. groups: how many query heads read one key and value head, for each
    kind of layer. A rank's query heads read whole groups, or all read the same key and value head. Raises ModelError."""
    for unit in range(1, num_heads + 1):
        num_units = num_heads // unit
        if num_heads % unit or num_units < size:
            continue
        ends = [unit * (num_units * r // size) for r in range(size + 1)]
        found = list(zip(ends, ends[1:], strict=False))
        if all(_is_whole(span, group) for span in found for group in groups):
            return found
    raise ModelError(
        f"This model's {num_heads} heads cannot be divided among {size} ranks; use fewer of them."
    )


def _is_whole(heads: Range, group: int) -> bool:
    first, end = heads
    return (first % group == 0 and end % group == 0) or first // group == (end - 1) // group


def width_ranges(width: int, size: int) -> list[Range]:
    """Which part of a width each of `size` ranks has, cut where groups of quantized weights end. Raises ModelError."""
    unit = next((u for u in _UNITS if width % u == 0 and width // u >= size), 1)
    num_units = width // unit
    if num_units < size:
        raise ModelError(f"A width of {width} cannot be divided among {size} ranks; use fewer of them.")
    ends = [unit * (num_units * r // size) for r in range(size + 1)]
    return list(zip(ends, ends[1:], strict=False))


def vocabulary_ranges(num_tokens: int, size: int) -> list[Range]:
    """Which tokens' rows each of `size` ranks has: equally many, fewer on the last. Raises ModelError."""
    each = ceil(num_tokens / size)
    if (size - 1) * each >= num_tokens:
        raise ModelError(f"A vocabulary of {num_tokens} cannot be divided among {size} ranks; use fewer.")
    return [(r * each, min(num_tokens, (r + 1) * each)) for r in range(size)]


def _keys_of(heads: Range, group: int) -> Range:
    """The key and value heads that these query heads read."""
    return heads[0] // group, (heads[1] - 1) // group + 1


def _cut(axis: int, heads: Range, width: int, num: int) -> Cut:
    """Of an axis of `num` heads of `width` numbers each."""
    return Cut(axis, ((heads[0] * width, heads[1] * width),), num * width)


def _length(span: Range) -> int:
    return span[1] - span[0]


def _cuts_of_mlp(path: str, span: Range, width: int) -> dict[str, Cut]:
    inner, outer = Cut(_ROWS, (span,), width), Cut(_COLUMNS, (span,), width)
    return {f"{path}.gate_proj": inner, f"{path}.up_proj": inner, f"{path}.down_proj": outer}


def _cuts_of_attention(
    path: str, heads: Range, num: int, num_kv: int, head_dim: int, parts: int
) -> dict[str, Cut]:
    """parts: how many times head_dim outputs of `q_proj` a head has."""
    keys = _cut(_ROWS, _keys_of(heads, num // num_kv), head_dim, num_kv)
    return {
        f"{path}.q_proj": _cut(_ROWS, heads, parts * head_dim, num),
        f"{path}.k_proj": keys,
        f"{path}.v_proj": keys,
        f"{path}.o_proj": _cut(_COLUMNS, heads, head_dim, num),
    }


def _cuts_of_vocabulary(span: Range, num_tokens: int, *, tied: bool) -> dict[str, Cut]:
    rows = Cut(_ROWS, (span,), num_tokens)
    of_embedding = {"language_model.model.embed_tokens": rows}
    return of_embedding if tied else of_embedding | {"language_model.lm_head": rows}


def _share_of_qwen(c: Qwen35Config, ranks: Ranks) -> Share:
    r, size = ranks.rank, ranks.size
    group = c.num_heads // c.num_kv_heads
    heads = head_ranges(c.num_heads, (group,), size)[r]
    tokens = vocabulary_ranges(c.vocab_size, size)[r]
    changes: dict[str, Any] = {
        "num_heads": _length(heads),
        "num_kv_heads": _length(_keys_of(heads, group)),
        "vocab_size": _length(tokens),
    }
    linear: dict[str, Cut] = {}
    if any(c.is_linear):
        values = head_ranges(c.num_v_heads, (c.num_v_heads // c.num_k_heads,), size)[r]
        keys = _keys_of(values, c.num_v_heads // c.num_k_heads)
        changes |= {"num_v_heads": _length(values), "num_k_heads": _length(keys)}
        linear = _cuts_of_linear(c, values, keys)
    widths = {}
    for name in ("expert_size", "shared_expert_size") if c.num_experts else ("intermediate_size",):
        if getattr(c, name):
            widths[name] = width_ranges(getattr(c, name), size)[r]
            changes[name] = _length(widths[name])
    cuts = _cuts_of_vocabulary(tokens, c.vocab_size, tied=c.tied)
    for i, is_linear in enumerate(c.is_linear):
        path = f"language_model.model.layers.{i}"
        if is_linear:
            cuts |= {f"{path}.linear_attn.{name}": cut for name, cut in linear.items()}
        else:
            sizes = c.num_heads, c.num_kv_heads, c.head_dim, 2 if c.is_gated else 1
            cuts |= _cuts_of_attention(f"{path}.self_attn", heads, *sizes)
        for name, inside in (
            ("intermediate_size", "mlp"),
            ("expert_size", "mlp.switch_mlp"),
            ("shared_expert_size", "mlp.shared_expert"),
        ):
            if name in widths:
                cuts |= _cuts_of_mlp(f"{path}.{inside}", widths[name], getattr(c, name))
    return Share(replace(c, **changes), cuts)


def _cuts_of_linear(c: Qwen35Config, values: Range, keys: Range) -> dict[str, Cut]:
    """Of the modules and tensors of a Gated DeltaNet layer: queries, keys and values lie one behind the other, heads in order."""

    def of_keys(offset: int) -> Range:
        return offset + keys[0] * c.k_head_dim, offset + keys[1] * c.k_head_dim

    at = 2 * c.key_dim
    mixed = (
        of_keys(0),
        of_keys(c.key_dim),
        (at + values[0] * c.v_head_dim, at + values[1] * c.v_head_dim),
    )
    outputs = _cut(_ROWS, values, c.v_head_dim, c.num_v_heads)
    each, each_number = _cut(_ROWS, values, 1, c.num_v_heads), _cut(-1, values, 1, c.num_v_heads)
    return {
        "in_proj_qkv": Cut(_ROWS, mixed, c.conv_dim),
        "in_proj_z": outputs,
        "in_proj_b": each,
        "in_proj_a": each,
        "in_proj_qkvz": _cut_of_joined(c, values, keys, c.k_head_dim, c.v_head_dim),
        "in_proj_ba": _cut_of_joined(c, values, keys, 0, 1),
        "conv1d": Cut(-3, mixed, c.conv_dim),
        "A_log": each_number,
        "dt_bias": each_number,
        "out_proj": _cut(_COLUMNS, values, c.v_head_dim, c.num_v_heads),
    }


def _cut_of_joined(c: Qwen35Config, values: Range, keys: Range, key_width: int, value_width: int) -> Cut:
    """Of outputs that lie key head by key head: its query, its key, and two parts of each of its value heads, kind by kind."""
    group = c.num_v_heads // c.num_k_heads
    block = 2 * key_width + 2 * group * value_width
    ranges: list[Range] = []
    for head in range(*keys):
        start, behind = head * block, head * block + 2 * key_width
        first, end = (min(max(v - head * group, 0), group) for v in values)
        if key_width:
            ranges.append((start, behind))
        for part in (0, 1):
            at = behind + part * group * value_width
            ranges.append((at + first * value_width, at + end * value_width))
    return Cut(_ROWS, tuple(ranges), c.num_k_heads * block)


def _share_of_gemma(c: GemmaConfig, ranks: Ranks) -> Share:
    r, size = ranks.rank, ranks.size
    heads = head_ranges(c.num_heads, {c.num_heads // shape.num_kv_heads for shape in c.layers}, size)[r]
    tokens = vocabulary_ranges(c.vocab_size, size)[r]
    cuts, layers = _cuts_of_vocabulary(tokens, c.vocab_size, tied=c.tied), []
    changes: dict[str, Any] = {"num_heads": _length(heads), "vocab_size": _length(tokens)}
    if c.per_layer_size:
        own = vocabulary_ranges(c.per_layer_vocab, size)[r]
        cuts["language_model.model.embed_tokens_per_layer"] = Cut(_ROWS, (own,), c.per_layer_vocab)
        changes["per_layer_vocab"] = _length(own)
    for i, shape in enumerate(c.layers):
        path = f"language_model.model.layers.{i}"
        width = width_ranges(shape.intermediate_size, size)[r]
        cuts |= _cuts_of_mlp(f"{path}.mlp", width, shape.intermediate_size)
        attention = _cuts_of_attention(
            f"{path}.self_attn", heads, c.num_heads, shape.num_kv_heads, shape.head_dim, 1
        )
        if shape.source is not None:  # it reads another layer's keys and values; its own are not used
            attention = {k: v for k, v in attention.items() if not k.endswith(("k_proj", "v_proj"))}
        cuts |= attention
        keys = _keys_of(heads, c.num_heads // shape.num_kv_heads)
        layers.append(replace(shape, num_kv_heads=_length(keys), intermediate_size=_length(width)))
        if c.num_experts:
            span = width_ranges(c.expert_size, size)[r]
            cuts |= _cuts_of_mlp(f"{path}.experts.switch_glu", span, c.expert_size)
            changes["expert_size"] = _length(span)
    return Share(replace(c, layers=tuple(layers), **changes), cuts, gemma_weights.STACKS)


class Summed(nn.Module):
    """A module of which every rank computes a part of a sum."""

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part, self._ranks = part, ranks

    def __call__(self, *inputs: mx.array) -> mx.array:
        """The module's result, whole, with the same bits on every rank."""
        return self._ranks.sum(self.part(*inputs))


class DividedEmbedding(nn.Module):
    """An embedding of which every rank has the rows of some tokens."""

    def __init__(self, part: nn.Module, first: int, ranks: Ranks) -> None:
        """part: the rank's rows; first: the token of the first."""
        super().__init__()
        self.part, self._first, self._ranks = part, first, ranks

    def __call__(self, tokens: mx.array) -> mx.array:
        """(N,) int32 -> (N, H). One rank's row and zeros add up to the row, without rounding."""
        at = tokens - self._first
        is_own = (at >= 0) & (at < self.part.weight.shape[0])
        rows = self.part(mx.where(is_own, at, 0))
        return self._ranks.sum(mx.where(is_own[:, None], rows, mx.zeros_like(rows)))


class DividedHead(nn.Module):
    """A language-model head of which every rank has the rows of some tokens."""

    def __init__(self, part: nn.Module, num_tokens: int, ranks: Ranks, *, is_embedding: bool) -> None:
        """part: the rank's rows. num_tokens: of all ranks. is_embedding: `part` is the parameter of the embedding already."""
        super().__init__()
        if is_embedding:
            self._shared = (part,)
        else:
            self.part = part
        self._num_tokens, self._ranks = num_tokens, ranks

    def __call__(self, hidden: mx.array) -> mx.array:
        """(N, H) -> (N, V)"""
        part = self.get("part")
        logits = project(self._shared[0] if part is None else part, hidden)
        missing = ceil(self._num_tokens / self._ranks.size) - logits.shape[1]
        if missing:  # ranks gather equally many
            logits = mx.pad(logits, [(0, 0), (0, missing)])
        return self._ranks.gather(logits)[:, : self._num_tokens]


def join(model: Any, config: Config, ranks: Ranks) -> None:
    """Have a rank's model, loaded and fused, exchange parts with the others from here on. config: the whole model's. Call once."""
    inner, stack = model.language_model, model.language_model.model
    for layer in stack.layers:
        mixer = layer["linear_attn"] if "linear_attn" in layer else layer["self_attn"]
        mixer.out = Summed(mixer.out, ranks)
        layer.mlp = Summed(layer.mlp, ranks)
        if "experts" in layer:
            layer.experts = Summed(layer.experts, ranks)
    own, tied = stack.embed_tokens, "lm_head" not in inner
    head = own if tied else inner.lm_head
    inner.lm_head = DividedHead(head, config.vocab_size, ranks, is_embedding=tied)
    first = vocabulary_ranges(config.vocab_size, ranks.size)[ranks.rank][0]
    stack.embed_tokens = DividedEmbedding(own, first, ranks)
    if isinstance(config, GemmaConfig) and config.per_layer_size:
        first = vocabulary_ranges(config.per_layer_vocab, ranks.size)[ranks.rank][0]
        stack.embed_tokens_per_layer = DividedEmbedding(stack.embed_tokens_per_layer, first, ranks)
    model.vocab_size = config.vocab_size


def is_divided(model: Any) -> bool:
    """Whether a model has been joined with other ranks' parts."""
    return isinstance(model.language_model.model.embed_tokens, DividedEmbedding)
