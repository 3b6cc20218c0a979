"""Shape of a Gemma text model of either generation, layer by layer, as the model code wants it.

What config.json says in its various dialects is read by gemma3_config.py and gemma4_config.py; this file knows only what results, and
which shapes make no sense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxspec.errors import ModelError
from mlxspec.models.config_values import AROUND, EVERYWHERE, WIDEST, Keys, Values, mapping, short
from mlxspec.models.rotary_scaling import UNSCALED, Scaling, kind_of
from mlxspec.models.rotary_scaling import unread as unread_of_rope

_KINDS = ("sliding_attention", "full_attention")
TEXT_ONLY: Mapping[str, tuple[Any, ...]] = {
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


@dataclass(frozen=True, kw_only=True)
class RotaryShape:
    """Angle of pair i at position p is p * theta^(-2i / head_dim), stretched by `scaling`, for the first num_pairs of head_dim / 2 pairs; 0
    for others. Pair i is made of dimensions i and i + head_dim / 2.
    """

    head_dim: int
    theta: float
    num_pairs: int
    scaling: Scaling = UNSCALED

    @classmethod
    def of(cls, head_dim: int, get: Values, theta: float, max_context: int) -> RotaryShape:
        """From a config's description; `theta` where that says none. max_context: the config's max_position_embeddings."""
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
    """One decoder layer. window: tokens that a token sees, itself among them; None for all before it.

    keys_are_values: values are the key projection's outputs, before norm and rotation. source: the layer whose keys and values this
    one reads; None where it has its own.
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
    """Sizes in elements. What only one generation has is off by default.

    generation: 3 or 4, whose layers they are. scale: of attention scores. embed_scale: of embeddings. softcap: logits are bent to stay
    below it, None for straight ones.
    reads_both_ways: every token of a forward sees those behind it too, in windowed layers as many as before it.
    per_layer_size: width of the inputs that every layer gets from an embedding of its own, 0 for none; per_layer_vocab: that embedding's.
    unread: keys of config.json that say something and that nobody reads.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerShape, ...]
    num_heads: int
    scale: float
    embed_scale: float
    rms_eps: float
    max_context: int
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


def parts(config: Mapping[str, Any]) -> tuple[Values, Values]:
    """A config.json, and the text model's part of it: the same where it is of a text model alone."""
    outer = Values(config)
    text = outer.object("text_config")
    return outer, Values(text) if text else outer


def tied(outer: Values, text: Values) -> bool:
    """Gemma's head is its embedding unless a config says otherwise."""
    return outer.flag("tie_word_embeddings", text.flag("tie_word_embeddings", True))


def windowed_layers(get: Values, pattern: int) -> tuple[bool, ...]:
    """Which layers have a window: by layer_types, else all but every `pattern`-th."""
    num_layers, kinds = get.size("num_hidden_layers"), get.value("layer_types")
    if kinds is None:
        return tuple((i + 1) % pattern != 0 for i in range(num_layers))
    known = {"sliding_attention": True, "full_attention": False}
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(isinstance(k, str) and k in known for k in kinds)
    ):
        raise ModelError(
            "config.json: layer_types must name sliding_attention or full_attention once a layer."
        )
    return tuple(known[k] for k in kinds)


def rotary_descriptions(get: Values) -> tuple[Values, Values] | None:
    """(of windowed layers, of full ones) where a config has `rope_parameters` by kind of layer. Raises ModelError where it has others."""
    rope = get.object("rope_parameters")
    if not rope:
        return None
    if rope.keys() - set(_KINDS):
        raise ModelError(
            f"config.json: rope_parameters must describe {' and '.join(_KINDS)}, and nothing else."
        )
    return Values(mapping(rope, _KINDS[0])), Values(mapping(rope, _KINDS[1]))


def unread_keys(
    outer: Values, text: Values, keys: Keys, ropes: Iterable[Values], own: Keys = OUTER_KEYS
) -> tuple[str, ...]:
    """Keys of a config.json that say something and that nobody has read. keys: of the text model's part; own: of what is around it."""
    found = [*keys.unread(text), *(key for rope in ropes for key in unread_of_rope(rope))]
    found = own.unread(outer) + found if text is not outer else [k for k in found if k not in own.idle]
    return tuple(sorted(set(found)))
