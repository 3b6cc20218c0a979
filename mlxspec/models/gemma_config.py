"""Shape of a Gemma text model of either generation, layer by layer, as the model code wants it.

What config.json says in its various dialects is read by gemma3_config.py and gemma4_config.py; this file knows only what results, and
which shapes make no sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.models.config_values import WIDEST, Values, mapping, short


@dataclass(frozen=True, kw_only=True)
class RotaryShape:
    """Angle of pair i at position p is p / factor * theta^(-2i / head_dim), for the first num_pairs of head_dim / 2 pairs; 0 for others.

    Pair i is made of dimensions i and i + head_dim / 2.
    """

    head_dim: int
    theta: float
    num_pairs: int
    factor: float = 1.0

    @classmethod
    def of(cls, head_dim: int, rope: Mapping[str, Any], theta: float) -> RotaryShape:
        """From a config's description; `theta` where that says none."""
        kind, get = rope.get("rope_type", rope.get("type", "default")), Values(rope)
        part = get.number("partial_rotary_factor", 1.0)
        if (
            kind not in ("default", "linear", "proportional")
            or (kind != "proportional" and part != 1.0)
            or part > 1.0
        ):
            raise ModelError(
                f"Rotary positions of kind {short(dict(rope))} are not supported; only rope_type 'default' and 'linear' of whole "
                "heads and 'proportional' are."
            )
        factor = 1.0 if kind == "default" else get.number("factor", 1.0)
        return cls(
            head_dim=head_dim,
            theta=get.number("rope_theta", theta),
            num_pairs=int(part * head_dim // 2),
            factor=factor,
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

    scale: of attention scores. embed_scale: of embeddings. norms_values: values go through a norm without weight. scales_layers: each
    layer's output is multiplied by a number of its own. softcap: logits are bent to stay below it, None for straight ones.
    per_layer_size: width of the inputs that every layer gets from an embedding of its own, 0 for none; per_layer_vocab: that embedding's.
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
    norms_values: bool = False
    scales_layers: bool = False
    softcap: float | None = None
    per_layer_size: int = 0
    per_layer_vocab: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_size: int = 0

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


def text_values(config: Mapping[str, Any]) -> Values:
    """The text model's part of a config.json, multimodal or not."""
    return Values(mapping(config, "text_config") or config)


def tied(config: Mapping[str, Any], text: Values) -> bool:
    """Gemma's head is its embedding unless a config says otherwise."""
    return Values(config).flag("tie_word_embeddings", text.flag("tie_word_embeddings", True))


def check_common(get: Values) -> None:
    """Raise ModelError on options that Gemma configs have and no published text model uses."""
    get.only("hidden_activation", "gelu_pytorch_tanh")
    get.only("hidden_act", "gelu_pytorch_tanh")
    get.only("attention_bias", False)
    get.only("attn_logit_softcapping")


def windowed_layers(get: Values, pattern: int) -> tuple[bool, ...]:
    """Which layers have a window: by layer_types, else all but every `pattern`-th."""
    num_layers, kinds = get.size("num_hidden_layers"), get.raw.get("layer_types")
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


def rotary_descriptions(get: Values) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """(of windowed layers, of full ones) where a config has `rope_parameters` by kind of layer."""
    rope = mapping(get.raw, "rope_parameters")
    if not rope:
        return None
    return mapping(rope, "sliding_attention"), mapping(rope, "full_attention")
