"""Shape of a Qwen3.5 / 3.6 / 3.8 text model, read from config.json and checked.

Knows both dialects of the config (Hugging Face's `layer_types`, mlx-lm's `full_attention_interval`); knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.models.config_values import (
    AROUND,
    EVERYWHERE,
    WIDEST,
    Keys,
    flag,
    layer_kinds,
    number,
    read,
    size,
    text_part,
)
from mlxspec.models.rotary_scaling import UNSCALED, Scaling, merged, theta_of

TEXT_KEYS = Keys(
    # recurrent states are float32 here whatever mamba_ssm_dtype says; windows are off without use_sliding_window
    idle=EVERYWHERE
    | AROUND
    | {"mamba_ssm_dtype", "max_window_layers", "output_router_logits", "router_aux_loss_coef"},
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu"),
        "mlp_only_layers": ([],),
        "decoder_sparse_step": (1,),
        "use_sliding_window": (False,),
        "sliding_window": (),
        "is_encoder_decoder": (False,),
    },
)
OUTER_KEYS = Keys(
    idle=EVERYWHERE
    | AROUND
    | {
        "image_token_id",
        "is_encoder_decoder",
        "language_model_only",
        "video_token_id",
        "vision_end_token_id",
        "vision_start_token_id",
        "vocab_size",
    },
)

SECTIONS = 11, 11, 10  # of all published models


@dataclass(frozen=True, kw_only=True)
class Qwen35Config:
    """The shape of a Qwen3, Qwen3-Next or Qwen3.5 text model. is_linear: for each layer whether it is Gated DeltaNet, else full
    attention.

    rope_sections: how many rotary pairs each of a position's three axes (time, height, width) rotates, in the order of `interleaved_axes`.
    shared_expert_size: 0 where there is no expert that all tokens use. is_gated: whether attention has an output gate. joins_projections:
    whether a Gated DeltaNet layer's inputs are stored in two matrices, `in_proj_qkvz` and `in_proj_ba`, head by head. unread: keys of
    config.json that nothing uses.
    """

    is_linear: tuple[bool, ...]
    head_dim: int = size()
    rope_theta: float
    rope_dims: int
    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_heads: int = size("num_attention_heads")
    num_kv_heads: int = size("num_key_value_heads")
    num_k_heads: int = size("linear_num_key_heads", 0)
    num_v_heads: int = size("linear_num_value_heads", 0)
    k_head_dim: int = size("linear_key_head_dim", 0)
    v_head_dim: int = size("linear_value_head_dim", 0)
    conv_kernel: int = size("linear_conv_kernel_dim", 4)
    rms_eps: float = number("rms_norm_eps", 1e-6)
    max_context: int = size("max_position_embeddings", 262144)
    tied: bool = flag("tie_word_embeddings")
    num_experts: int = size("num_experts", 0)
    num_experts_per_token: int = size("num_experts_per_tok", 0)
    expert_size: int = size("moe_intermediate_size", 0)
    shared_expert_size: int = size("shared_expert_intermediate_size", 0)
    norm_topk: bool = flag("norm_topk_prob", True)
    num_mtp_layers: int = size("mtp_num_hidden_layers", 0)
    mtp_embeddings: bool = flag(
        "mtp_use_dedicated_embeddings"
    )  # whether the MTP head has an embedding of its own
    rope_scaling: Scaling = UNSCALED
    rope_sections: tuple[int, int, int] = SECTIONS
    is_gated: bool = True
    joins_projections: bool = False
    unread: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check()

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.k_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.v_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen35Config:
        """Return the shape of a Qwen3.5 model from its config.json. Raises ModelError naming the first key that is missing or out of
        range."""
        outer, get = text_part(config, TEXT_KEYS, OUTER_KEYS)
        num_experts = get.size("num_experts", 0)
        head_dim = get.size("head_dim", get.size("hidden_size") // get.size("num_attention_heads"))
        rope, max_context = merged(get), get.size("max_position_embeddings", 262144)
        made = read(
            cls,
            get,
            outer,
            is_linear=layer_kinds(get, "linear_attention", get.size("full_attention_interval", 4)),
            intermediate_size=get.size("intermediate_size", None if num_experts == 0 else 0),
            head_dim=head_dim,
            rope_theta=theta_of(rope),
            rope_dims=int(head_dim * rope.number("partial_rotary_factor", 0.25)),
            rope_scaling=Scaling.of(rope, max_context),
            rope_sections=_sections(rope.value("mrope_section")),
            tied=get.flag("tie_word_embeddings", outer.flag("tie_word_embeddings")),
        )
        if num_experts and made.shared_expert_size == 0:
            raise ModelError("config.json: experts need a shared_expert_intermediate_size.")
        return made

    @property
    def unsupported_head(self) -> str | None:
        """Return the reason why an MTP head of this model cannot be run; None where it can."""
        if not self.is_gated:
            return "models of this family have none"
        if self.num_mtp_layers > 1:
            return (
                f"mtp_num_hidden_layers is {self.num_mtp_layers}, and only heads of one layer are supported"
            )
        if self.mtp_embeddings:
            return "mtp_use_dedicated_embeddings is true, and only heads that share the model's embedding are supported"
        return None

    def _check(self) -> None:
        heads = [("num_attention_heads by num_key_value_heads", self.num_heads, self.num_kv_heads)]
        if any(self.is_linear):
            if not self.num_v_heads or not self.k_head_dim or not self.v_head_dim:
                raise ModelError(
                    "config.json: linear layers need linear_num_value_heads, linear_key_head_dim and linear_value_head_dim."
                )
            heads.append(
                ("linear_num_value_heads by linear_num_key_heads", self.num_v_heads, self.num_k_heads)
            )
        for what, a, b in heads:
            if b == 0 or a % b:
                raise ModelError(f"config.json: cannot divide {what} ({a} by {b}).")
        if self.rope_dims % 2 or self.head_dim % 2 or not 0 < self.rope_dims <= self.head_dim:
            raise ModelError(
                f"config.json: rotary dimensions {self.rope_dims} do not fit heads of {self.head_dim}."
            )
        if self.num_experts and not 0 < self.num_experts_per_token <= self.num_experts:
            raise ModelError("config.json: num_experts_per_tok must be between 1 and num_experts.")
        if self.num_experts and self.expert_size == 0:
            raise ModelError("config.json: experts need a moe_intermediate_size.")
        for what, width in (
            ("num_attention_heads and head_dim", 2 * self.num_heads * self.head_dim),
            ("num_key_value_heads and head_dim", self.num_kv_heads * self.head_dim),
            ("the heads and dimensions of linear layers", self.conv_dim),
        ):
            if width > WIDEST:
                raise ModelError(f"config.json: {what} make a projection of {width} outputs.")


def _sections(given: Any) -> tuple[int, int, int]:
    """Return the three rotary sections that config.json gives, or the default where its value is invalid: an invalid value does not change
    text, in which the three axes are equal."""
    if not isinstance(given, list) or len(given) != 3 or not all(type(n) is int and n >= 0 for n in given):
        return SECTIONS
    return given[0], given[1], given[2]


def interleaved_axes(num_pairs: int, sections: Sequence[int]) -> list[int]:
    """Return the axis that rotates each rotary pair: height (1) for pairs 1, 4, 7, ..., width (2) for pairs 2, 5, 8, ..., as many as their
    sections have, and time (0) for all others."""
    axes = [0] * num_pairs
    for axis in (1, 2):
        for i in range(axis, min(3 * sections[axis], num_pairs), 3):
            axes[i] = axis
    return axes
