"""Shape of a Gemma text model of either generation, layer by layer, read from config.json and checked.

Knows the dialects of the config and the defaults that published ones leave out; knows no weights. Gemma 3: rope_parameters by kind of
layer, or rope_theta, rope_local_base_freq and rope_scaling; layer_types, or sliding_window_pattern. Gemma 4: global_head_dim and
num_global_key_value_heads as on the hub, or per_layer_config as transformers saves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlxspec.errors import ModelError
from mlxspec.models.config_values import (
    AROUND,
    EVERYWHERE,
    WIDEST,
    Keys,
    Values,
    layer_kinds,
    mapping,
    number,
    read,
    short,
    size,
    text_part,
)
from mlxspec.models.rotary_scaling import LAYER_KINDS, UNSCALED, Scaling, kind_of, merged

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attn_logit_softcapping": (),
    "hidden_act": ("gelu_pytorch_tanh",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1, 1.0),
}
OUTER_KEYS = Keys(
    # vocab_size: read where a multimodal config's text model has none
    idle=EVERYWHERE
    | AROUND
    | frozenset(
        """
        audio_token_id boa_token_id boa_token_index boi_token_id boi_token_index eoa_token_id eoa_token_index eoi_token_id eoi_token_index
        image_token_id image_token_index is_encoder_decoder mm_tokens_per_image video_token_id vision_soft_tokens_per_image
        """.split()
    ),
)
KEYS_OF_3 = Keys(
    idle=EVERYWHERE,
    only={**_ONLY, "final_logit_softcapping": (), "use_bidirectional_attention": (False, True)},
)
KEYS_OF_4 = Keys(
    idle=EVERYWHERE,
    only={
        **_ONLY,
        "rope_local_base_freq": (),
        "rope_scaling": (),
        "rope_theta": (),
        "use_bidirectional_attention": ("vision",),  # text is causal then
    },
)
_WINDOWED, _FULL = LAYER_KINDS
_OF_A_LAYER = frozenset({"head_dim", "num_key_value_heads"})
_FULL_ROTARY = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


@dataclass(frozen=True, kw_only=True)
class RotaryShape:
    """The rotary positions of a layer. The angle of pair i at position p is p * theta^(-2i / head_dim), changed by `scaling`, for the first
    num_pairs of head_dim / 2 pairs, and 0 for the others. Pair i consists of dimensions i and i + head_dim / 2."""

    head_dim: int
    theta: float
    num_pairs: int
    scaling: Scaling = UNSCALED

    @classmethod
    def of(cls, head_dim: int, get: Values, theta: float, max_context: int) -> RotaryShape:
        """Return the shape that a config describes. theta: used where the config has none. max_context: the config's
        max_position_embeddings."""
        part, theta = get.number("partial_rotary_factor", 1.0), get.number("rope_theta", theta)
        proportional = kind_of(get) == "proportional"
        if part > 1.0 or (part != 1.0 and not proportional):
            raise ModelError(
                f"config.json: partial_rotary_factor {short(part)} is supported with rope_type 'proportional' only, up to 1."
            )
        if proportional:
            scaling = Scaling(kind="linear", factor=get.number("factor", 1.0))
        else:
            scaling = Scaling.of(get, max_context)
        return cls(
            head_dim=head_dim,
            theta=theta,
            num_pairs=int(part * head_dim // 2),
            scaling=scaling,
        )


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The shape of one decoder layer. window: how many tokens a token sees, itself included; None for all before it.

    keys_are_values: whether values are the key projection's outputs, before norm and rotation. source: the layer whose keys and values this
    layer reads; None where it has its own.
    """

    window: int | None
    head_dim: int
    num_kv_heads: int
    rotary: RotaryShape
    intermediate_size: int
    keys_are_values: bool = False
    source: int | None = None


@dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """The shape of a Gemma text model. Features of only one generation are off by default.

    generation: 3 or 4, by the kind of its layers. scale: factor of attention scores. embed_scale: factor of embeddings. softcap: c in
    logits = c * tanh(logits / c), None for unchanged logits. reads_both_ways: whether each token also sees later tokens, in layers with a
    window as many as earlier ones. per_layer_size: width of the additional input of every layer, 0 for none; per_layer_vocab: rows of the
    embedding that it is taken from. unread: keys of config.json that nothing uses.
    """

    vocab_size: int
    hidden_size: int = size()
    layers: tuple[LayerShape, ...]
    num_heads: int = size("num_attention_heads", 8)
    scale: float
    embed_scale: float
    rms_eps: float = number("rms_norm_eps", 1e-6)
    max_context: int = size("max_position_embeddings", 131072)
    tied: bool
    reads_both_ways: bool = False
    generation: Literal[3, 4] = 3
    softcap: float | None = None
    per_layer_size: int = 0
    per_layer_vocab: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_size: int = 0
    unread: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for layer in self.layers:
            self._check_layer(layer)
        if self.num_experts and not (0 < self.num_experts_per_token <= self.num_experts and self.expert_size):
            raise ModelError(
                "config.json: experts need a moe_intermediate_size and top_k_experts between 1 and num_experts."
            )
        if self.per_layer_size and self.per_layer_vocab < self.vocab_size:
            raise ModelError("config.json: vocab_size_per_layer_input is smaller than vocab_size.")
        if len(self.layers) * self.per_layer_size > WIDEST:
            raise ModelError("config.json: hidden_size_per_layer_input makes too wide an embedding.")

    def _check_layer(self, layer: LayerShape) -> None:
        if self.num_heads % layer.num_kv_heads:
            raise ModelError(
                "config.json: cannot divide num_attention_heads by num_key_value_heads "
                f"({self.num_heads} by {layer.num_kv_heads})."
            )
        if layer.head_dim % 2:
            raise ModelError(f"config.json: heads of {layer.head_dim} dimensions cannot be rotated.")
        if layer.source is not None:
            source = self.layers[layer.source]
            if (source.head_dim, source.num_kv_heads) != (layer.head_dim, layer.num_kv_heads):
                raise ModelError(
                    "config.json: layers that share keys and values have heads of different shapes."
                )
        if self.num_heads * layer.head_dim > WIDEST:
            raise ModelError(
                "config.json: num_attention_heads and head_dim make a projection of "
                f"{self.num_heads * layer.head_dim} outputs."
            )


def gemma3_config(config: Mapping[str, Any]) -> GemmaConfig:
    """Return the shape of a Gemma 3 model from its config.json. Raises ModelError naming the first key that is missing, out of range or not
    supported."""
    outer, get = text_part(config, KEYS_OF_3, OUTER_KEYS)
    pattern = get.size("sliding_window_pattern", get.size("_sliding_window_pattern", 6))
    head_dim, max_context = get.size("head_dim", 256), get.size("max_position_embeddings", 131072)
    full = RotaryShape.of(head_dim, merged(get, _FULL), 1e6, max_context)
    windowed = RotaryShape.of(
        head_dim, merged(get, _WINDOWED, theta="rope_local_base_freq"), 1e4, max_context
    )
    both_ways, window = get.value("use_bidirectional_attention") is True, get.size("sliding_window", 4096)
    if both_ways:
        window = window // 2 + 1  # the config counts both sides
    layer = LayerShape(
        window=None,
        head_dim=head_dim,
        num_kv_heads=get.size("num_key_value_heads", 4),
        rotary=full,
        intermediate_size=get.size("intermediate_size"),
    )
    near = replace(layer, window=window, rotary=windowed)
    return read(
        GemmaConfig,
        get,
        outer,
        vocab_size=get.size("vocab_size", outer.size("vocab_size", 262208)),
        layers=tuple(near if is_windowed else layer for is_windowed in layer_kinds(get, _WINDOWED, pattern)),
        scale=get.number("query_pre_attn_scalar", 256) ** -0.5,
        embed_scale=_to_bfloat16(get.size("hidden_size") ** 0.5),
        tied=_tied(outer, get),
        reads_both_ways=both_ways,
    )


def gemma4_config(config: Mapping[str, Any], *, borrows: bool = False, own: Keys = OUTER_KEYS) -> GemmaConfig:
    """Return the shape of a Gemma 4 model from its config.json. Raises ModelError naming the first key that is missing, out of range or not
    supported.

    borrows: whether all layers read keys and values of another model; the `source` of each layer is then the layer itself. own: accepted
    keys outside of `text_config`.
    """
    outer, get = text_part(config, KEYS_OF_4, own)
    has_experts, softcap = get.flag("enable_moe_block"), get.value("final_logit_softcapping")
    get.skip("num_experts", "top_k_experts", "moe_intermediate_size", "vocab_size_per_layer_input")
    has_inputs = bool(get.raw.get("hidden_size_per_layer_input", 256))
    return read(
        GemmaConfig,
        get,
        outer,
        vocab_size=get.size("vocab_size", outer.size("vocab_size", 262144)),
        layers=_layers_of_4(get, borrows),
        scale=1.0,
        embed_scale=get.size("hidden_size") ** 0.5,
        tied=_tied(outer, get),
        generation=4,
        softcap=None if softcap is None else get.number("final_logit_softcapping"),
        per_layer_size=get.size("hidden_size_per_layer_input", 256) if has_inputs else 0,
        per_layer_vocab=get.size("vocab_size_per_layer_input", 262144) if has_inputs else 0,
        num_experts=get.size("num_experts") if has_experts else 0,
        num_experts_per_token=get.size("top_k_experts") if has_experts else 0,
        expert_size=get.size("moe_intermediate_size") if has_experts else 0,
    )


def _tied(outer: Values, text: Values) -> bool:
    """Return whether the language-model head is the embedding, which Gemma's config.json has as its default."""
    return outer.flag("tie_word_embeddings", text.flag("tie_word_embeddings", True))


def _layers_of_4(get: Values, borrows: bool) -> tuple[LayerShape, ...]:
    kinds = list(layer_kinds(get, _WINDOWED, get.size("sliding_window_pattern", 6)))
    kinds[-1] = False  # the last layer always sees everything
    num_shared = get.size("num_kv_shared_layers", 0)
    sources = list(range(len(kinds))) if borrows else _sources(kinds, num_shared)
    theirs = get.object("per_layer_config")
    # then it says all; empty where full layers are like the others
    by_layer = get.value("per_layer_config") is not None
    other = sorted({key for i in theirs for key in mapping(theirs, i).keys() - _OF_A_LAYER})
    if other:
        raise ModelError(f"config.json: {short(other[0])} in per_layer_config is not supported.")
    ropes = merged(get, _FULL, default=_FULL_ROTARY), merged(get, _WINDOWED)
    max_context = get.size("max_position_embeddings", 131072)
    window, inner_size = get.size("sliding_window", 512), get.size("intermediate_size")
    same = get.flag("attention_k_eq_v")
    wide = 2 if get.flag("use_double_wide_mlp") else 1
    head_dim, num_kv_heads = get.size("head_dim", 256), get.size("num_key_value_heads", 4)
    full_head_dim, full_kv_heads = (
        get.size("global_head_dim", 512),
        get.size("num_global_key_value_heads", num_kv_heads),
    )
    layers = []
    for i, is_windowed in enumerate(kinds):
        own, is_own = Values(mapping(theirs, str(i))), is_windowed or by_layer
        dim = own.size("head_dim", head_dim if is_own else full_head_dim)
        heads = num_kv_heads if is_own or not same else full_kv_heads
        layers.append(
            LayerShape(
                window=window if is_windowed else None,
                head_dim=dim,
                num_kv_heads=own.size("num_key_value_heads", heads),
                rotary=RotaryShape.of(dim, ropes[is_windowed], 1e4 if is_windowed else 1e6, max_context),
                intermediate_size=inner_size if sources[i] is None else wide * inner_size,
                keys_are_values=same and not is_windowed,
                source=sources[i],
            )
        )
    return tuple(layers)


def _sources(kinds: list[bool], num_shared: int) -> list[int | None]:
    """Return for each layer the layer whose keys and values it reads, None where it has its own. The last num_shared layers read those of
    the last earlier layer of their kind. kinds: whether each layer has a window."""
    first = len(kinds) - num_shared
    if num_shared and (first <= 0 or set(kinds[first:]) - set(kinds[:first])):
        raise ModelError(
            "config.json: num_kv_shared_layers leaves no layer whose keys and values could be shared."
        )
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [last[kind] if i >= first else None for i, kind in enumerate(kinds)]


def _to_bfloat16(value: float) -> float:
    """Return `value` rounded to bfloat16. The models were trained with a factor that is rounded so, whatever dtype they are computed in
    now."""
    import numpy as np

    bits = int(np.asarray(value, np.float32).view(np.uint32))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.asarray(rounded, np.uint32).view(np.float32))
