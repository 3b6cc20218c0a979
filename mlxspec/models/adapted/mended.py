"""Makes mlx-lm's modules do what config.json asks for and mlx-lm's classes do not read, as transformers does it; says what stays undone.

A key that a class reads, or that changes nothing about text (`IDLE`), or whose value is what the class has built in (`BUILT_IN`), needs
nothing. What is left over differs from the model as it was published: `unread` names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import YarnRoPE

from mlxspec.models.adapted.classes import names_key
from mlxspec.models.config_values import AROUND, EVERYWHERE, Values
from mlxspec.models.rotary_scaling import Scaling, kind_of

# They change nothing about text: training, precision, kernels, what is read elsewhere, and what shapes of tensors tell.
IDLE = frozenset(
    """
    attention_bias attention_softmax_in_fp32 audio_soft_tokens_per_image block_size chunk_size classifier_dropout expand
    final_w_init_variance_scale image_seq_length intermediate_size linear_a_log_max linear_dt_init_floor linear_dt_max linear_dt_min
    lm_head_bias mamba_chunk_size mamba_expand mamba_ssm_cache_dtype max_position_embeddings max_seq_len merged_hidden_size mlp_layer_types
    model_max_length moe_layers moe_norm_min moe_shared_expert_overlap multimodal_projector_bias num_channels num_hidden_layers
    num_key_value_heads num_local_experts num_logits_to_keep num_nextn_predict_layers num_sliding_attention_heads out_hidden_size
    patch_size pretraining_tp qk_head_dim qkv_bias rescale_prenorm_residual residual_in_fp32 rope_parameters rope_scaling
    router_aux_loss_coef router_jitter_noise scale_attention_softmax_in_fp32 spatial_merge_size tie_word_embeddings time_step_floor
    time_step_init_scheme time_step_max time_step_min time_step_scale use_associative_scan use_bias use_mamba_kernels
    w_init_variance_scale
    """.split()
)
_OF_OTHERS = re.compile(
    r"(_pdrop|_dropout|_token_id|_token_index)$|^(vision|audio|projector|projection|image|video|summary|mtp)_"
)
_SILU, _SQUARE = ("silu", "swish"), ("relu2",)
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # they differ by less than 16-bit floats tell
_ACTS = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3n", "gemma3n_text", "recurrent_gemma", "gpt_neox", "phi", "starcoder2"),
        _GELU,
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "pixtral", "phixtral"), _GELU),
    **dict.fromkeys(("bitnet", "nanochat", "nemotron"), _SQUARE),
    "apertus": ("xielu",),
    "*": _SILU,
}
# By key, the values that mlx-lm's class has built in, by model_type; "*": of all others.
BUILT_IN: dict[str, dict[str, tuple[Any, ...]]] = {
    "hidden_act": _ACTS,
    "hidden_activation": _ACTS,
    "activation_function": _ACTS,
    "mlp_hidden_act": {"nemotron_h": _SQUARE},
    "mamba_hidden_act": {"nemotron_h": _SILU},
    "conv1d_width": {"recurrent_gemma": (4,)},
    "decoder_sparse_step": {"qwen2_moe": (1,)},
    "final_logit_softcapping": {"nanochat": (15.0,)},
    "first_k_dense_replace": {"exaone_moe": (1,)},
    "global_attn_every_n_layers": {"afmoe": (4,)},
    "layer_norm_epsilon": {"mamba": (1e-5,), "falcon_mamba": (1e-5,)},
    "moe_renormalize": {"bailing_hybrid": (True,)},
    "no_rope_layer_interval": {"llama4": (4,), "llama4_text": (4,)},
    "num_experts_per_tok": {"llama4_text": (1,)},
    "query_pre_attn_scalar": {"step3p5": (128,)},
    "residual_gate_temperature": {"muse_spark": (0.3,)},
    "rms_norm_eps": {"nanochat": (1e-6,)},
    "rope_interleave": {"*": (True,)},
    "scale_attn_weights": {"*": (True,)},
    "swiglu_alpha": {"gpt_oss": (1.702,)},
    "swiglu_limit": {"gpt_oss": (7.0,)},
    **{
        f"{part}_{factor}_factor": {"minimax": (1,)}
        for part in ("full_attn", "linear_attn", "mlp")
        for factor in ("alpha", "beta")
    },
}
# By key, the model_types whose class reads the same from another key.
TOLD_TWICE: dict[str, tuple[str, ...]] = {
    "head_dim": ("deepseek_v2", "deepseek_v3", "helium", "kimi_k25", "longcat_flash", "minicpm3"),
    "indexer_types": ("glm_moe_dsa",),
    "layer_types": (
        "bailing_hybrid", "deepseek_v32", "exaone4", "glm_moe_dsa", "kimi_linear", "llama4", "llama4_text", "mimo_v2_flash", "minimax",
    ),
    **dict.fromkeys(("linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads"), ("bailing_hybrid", "kimi_linear")),
    **dict.fromkeys(("num_expert_group", "num_experts_per_token"), ("bailing_hybrid",)),
    "num_experts_per_tok": ("step3p5",),
    "rms_norm_eps": ("exaone", "mimo_v2_flash"),
    "sliding_window": ("mimo_v2_flash",),
    "sliding_window_pattern": ("exaone_moe",),
}  # fmt: skip

_WINDOWED = (
    "mistral",
    "ministral3",
    "phi3",
    "starcoder2",
    "gemma2",
    "qwen2",
    "qwen2_moe",
    "mixtral",
    "phimoe",
)
_OF_WINDOWS = ("sliding_window", "layer_types", "max_window_layers", "use_sliding_window")
_MENDED = {  # keys that `mend` or `differences` looks at
    "key_multiplier": ("falcon_h1",),
    "no_rope_layers": ("llama4",),
    "partial_rotary_factor": ("glm",),
    "norm_topk_prob": ("qwen2_moe",),
    "moe_use_aux_free": ("ernie4_5_moe",),
    "layer_types": ("cohere2",),
    "scale_attn_by_inverse_layer_idx": ("gpt2",),
}
# By key, the model_type whose class reads no list, the values of most layers and of every fourth layer, and what the class does.
_IN_FOURS: dict[str, tuple[str, Any, Any, str]] = {
    "layer_types": (
        "cohere2", "sliding_attention", "full_attention", "gives every fourth layer all tokens, and the others a window"
    ),
    "no_rope_layers": ("llama4", 1, 0, "gives all layers but every fourth one rotary positions"),
}  # fmt: skip
# By model_type and key, what mlx-lm's class has built in, what counts where config.json lacks the key, and what the class does.
_DIFFERENT: dict[tuple[str, str], tuple[Any, Any, str]] = {
    ("ernie4_5_moe", "moe_use_aux_free"): (False, True, "chooses experts without e_score_correction_bias"),
    ("falcon_h1", "attention_in_multiplier"): (1.0, 1.0, "multiplies queries and keys by it, and no values"),
    ("gpt_bigcode", "multi_query"): (True, True, "reads the queries of all heads first, and then the keys"),
}
LONG = ("longrope", "su")  # kinds of rotary positions with factors for short texts and for long ones


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as one object in which the keys of `text_config`, if there is one, override those of the same name."""
    inner = config.get("text_config")
    return {**config, **(inner if isinstance(inner, Mapping) else {})}


def rope_of(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions, from `rope_scaling` or `rope_parameters`; empty where there are none. Of settings for each
    kind of layers they are those of full attention."""
    found: Any = next((text[key] for key in ("rope_scaling", "rope_parameters") if text.get(key)), {})
    found = found if isinstance(found, Mapping) else {}
    whole = found.get("full_attention")
    return dict(whole if isinstance(whole, Mapping) else found)


def short_factors(config: Mapping[str, Any], max_context: int | None) -> dict[str, Any]:
    """Return the members to put into config.json so that mlx-lm uses LongRoPE's factors for short texts; it would use those for long texts
    at every length. Empty where a row may be longer than the short factors are for, or where there are none. max_context: the most tokens
    of a row; None where it is unknown."""
    text, words = text_of(config), dict[str, Any]()
    if max_context is None or not 0 < max_context <= _short_until(text):
        return {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if isinstance(rope, Mapping) and "short_factor" in rope:
            short = {key.replace("short", "long"): value for key, value in rope.items() if "short_" in key}
            words[key] = {**rope, **short}
    return words


def _short_until(text: Mapping[str, Any]) -> int:
    """Return the most tokens of a text for which LongRoPE's factors for short texts count; 0 where there are no such factors."""
    rope = rope_of(text)
    most = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    is_long = kind_of(Values(rope)) in LONG and rope.get("short_factor") != rope.get("long_factor")
    return most if is_long and isinstance(most, int) else 0


def mend(module: Any, config: Mapping[str, Any]) -> None:
    """Set the sliding windows, the rotary positions and the factors that config.json gives and that mlx-lm's class for the module does not
    read."""
    text = text_of(config)
    kinds = windowed_layers(text)
    if any(kinds):
        _put_windows(module, kinds, text["sliding_window"])
    rope = rope_of(text)
    theta = text.get("rope_theta") or rope.get("rope_theta")
    if kind_of(Values(rope)) == "yarn" and (rope.get("attention_factor") or rope.get("truncate") is False):
        for part in module.modules():
            if isinstance(part, YarnRoPE) and isinstance(theta, int | float):
                _put_yarn(part, Values(rope), float(theta), int(text.get("max_position_embeddings") or 0))
    kind, layers = text.get("model_type"), module.layers
    if kind == "glm" and isinstance(turned := _turned(text), float):
        for layer in layers:
            layer.self_attn.rope.dims = int(layer.self_attn.head_dim * turned)
    if kind == "falcon_h1":
        for layer in layers:  # mlx-lm looks for it under the name of another matrix
            layer.self_attn.scale *= float(text.get("key_multiplier") or 1.0)
    if kind == "gpt2" and text.get("scale_attn_by_inverse_layer_idx"):
        for i, layer in enumerate(layers):
            layer.attn.scale /= i + 1
    for part in module.modules():
        if (improve := _IMPROVED.get((kind, type(part).__name__))) is not None:
            improve(part, text)
        for name in ("e_score_correction_bias", "expert_bias"):
            if (text.get("n_group") or text.get("num_expert_group") or 1) > 1 and part.get(name) is not None:
                # mlx-lm gives experts of groups that are not chosen a score of 0: no other score may be less
                bias = part[name].astype(mx.float32)
                part[name] = bias - mx.minimum(bias.min(), 0.0)


def _norm_groups(norm: Any, text: Mapping[str, Any]) -> None:
    """Change a gated norm of a Mamba 2 layer so that it normalizes each group of heads by itself."""
    num, kind = text.get("mamba_n_groups") or text.get("n_groups") or 1, type(norm)
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    is_first = getattr(norm, "norm_before_gate", False)

    def call(self: Any, x: mx.array, gate: mx.array) -> mx.array:
        x = x if is_first else x * nn.silu(gate)
        x = mx.fast.rms_norm(mx.unflatten(x, -1, (num, -1)), None, eps).reshape(x.shape) * self.weight
        return x * nn.silu(gate) if is_first else x

    if num > 1:
        norm.__class__ = _with_call(kind, call)


def _share_among_all(mixture: Any, text: Mapping[str, Any]) -> None:
    """Change a mixture of experts so that the share of each chosen expert is of a softmax over all experts, as in Jamba."""

    def call(self: Any, x: mx.array) -> mx.array:
        shares = mx.softmax(self.router(x), axis=-1, precise=True)
        return _mixed(self.switch_mlp, x, *_largest(shares, self.num_experts_per_tok))

    mixture.__class__ = _with_call(type(mixture), call)


def _share_among_chosen(mixture: Any, text: Mapping[str, Any]) -> None:
    """Change a mixture of experts with a shared expert so that the shares of the chosen experts add up to 1, if config.json asks for it
    (`norm_topk_prob`)."""

    def call(self: Any, x: mx.array) -> mx.array:
        chosen, logits = _largest(self.gate(x), self.top_k)
        y = _mixed(self.switch_mlp, x, chosen, mx.softmax(logits, axis=-1, precise=True))
        return y + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)

    if text.get("norm_topk_prob"):
        mixture.__class__ = _with_call(type(mixture), call)


def _largest(values: mx.array, num: int) -> tuple[mx.array, mx.array]:
    """Return the places (..., num) of the largest values (..., N) in no order, and these values."""
    chosen = mx.argpartition(-values, kth=num - 1, axis=-1)[..., :num]
    return chosen, mx.take_along_axis(values, chosen, axis=-1)


def _mixed(experts: Any, x: mx.array, chosen: mx.array, shares: mx.array) -> mx.array:
    """Return the sum (..., D) of what the chosen experts (..., num) make of x (..., D), weighted by their shares (..., num)."""
    return (experts(x, chosen) * shares[..., None]).sum(axis=-2)


def _with_call(kind: Any, call: Any) -> Any:
    """Return a subclass of `kind` with this `__call__`."""
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


# By model_type and class, what changes a part of a module that has this class.
_IMPROVED: dict[tuple[Any, str], Callable[[Any, Mapping[str, Any]], None]] = {
    ("falcon_h1", "FalconH1RMSNormGated"): _norm_groups,
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated"): _norm_groups,
    ("jamba", "JambaSparseMoeBlock"): _share_among_all,
    ("mamba2", "MambaRMSNormGated"): _norm_groups,
    ("qwen2_moe", "Qwen2MoeSparseMoeBlock"): _share_among_chosen,
}


def _turned(text: Mapping[str, Any]) -> Any:
    """Return the share of each head that rotary positions turn (`partial_rotary_factor`); None where config.json does not give it."""
    return text.get("partial_rotary_factor") or rope_of(text).get("partial_rotary_factor")


def windowed_layers(text: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has a sliding window that mlx-lm's class ignores. Empty where the class reads the windows or where
    there are none."""
    kind, num, window = (text.get(key) for key in ("model_type", "num_hidden_layers", "sliding_window"))
    if kind not in _WINDOWED or not isinstance(num, int) or not isinstance(window, int) or window < 1:
        return []
    named = text.get("layer_types")
    if kind in ("mistral", "ministral3") and named:
        return []  # their classes read these
    if isinstance(named, list) and len(named) == num:
        return [name == "sliding_attention" for name in named]
    if kind == "gemma2":
        return [i % 2 == 0 for i in range(num)]
    if kind.startswith("qwen2"):
        first = text.get("max_window_layers", 28) if text.get("use_sliding_window") else num
        return [i >= first for i in range(num)]
    return [True] * num


def _put_windows(module: Any, kinds: list[bool], window: int) -> None:
    """Make the module's layers attend to a window: each layer for which `kinds` is true gets a cache of `window` tokens. Where the layers
    differ, each makes its mask from its own cache."""

    def make_cache() -> list[Any]:
        return [RotatingKVCache(max_size=window) if is_windowed else KVCache() for is_windowed in kinds]

    module.make_cache = make_cache
    if not all(kinds):
        masked = {kind: _masked(kind) for kind in map(type, module.layers)}
        for layer in module.layers:
            layer.__class__ = masked[type(layer)]


def _masked(kind: Any) -> Any:
    """Return a subclass of the layer class `kind` that makes its mask from its own cache and ignores the mask that it receives."""
    written_out = kind.__module__.endswith(".gemma2")

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        own = create_attention_mask(x, cache, return_array=written_out)
        return kind.__call__(self, x, own, cache)

    return _with_call(kind, call)


def _put_yarn(part: YarnRoPE, rope: Values, theta: float, max_context: int) -> None:
    """Set the angles and the amplitude of YaRN's rotary positions as transformers computes them, which reads two more keys than mlx-lm."""
    scaling = Scaling.of(rope, max_context)
    plain = theta ** -(np.arange(0, part.dims, 2) / part.dims)
    part._freqs = mx.array(1.0 / scaling.apply(plain, theta), mx.float32)
    part.mscale = scaling.amplitude


def differences(config: Mapping[str, Any], max_context: int) -> Iterator[str]:
    """Yield a sentence on each difference between the model as mlx-lm runs it and as it was published. max_context: the most tokens of a
    row."""
    text = text_of(config)
    kind, until = text.get("model_type"), _short_until(text)
    if 0 < until < max_context:
        yield (
            f"Texts of up to {until} tokens get the rotary positions for longer ones: --max-context {until} (max_context) gives those "
            "that the model was published with."
        )
    sizes = {text.get("dim_model_base"), text.get("hidden_size")}
    if kind == "minicpm3" and text.get("tie_word_embeddings") and len(sizes) > 1:
        yield "dim_model_base of config.json is not used: mlx-lm's code divides no logits where the head is the embedding."
    for (of, key), (built_in, default, done) in _DIFFERENT.items():
        if kind == of and text.get(key, default) != built_in:
            yield _unlike(key, done)
    for key, (of, most, fourth, done) in _IN_FOURS.items():
        named, step = text.get(key), text.get("sliding_window_pattern", 4)
        if config.get("model_type") != of or not isinstance(named, list) or not isinstance(step, int):
            continue
        if named != [fourth if (i + 1) % step == 0 else most for i in range(len(named))]:
            yield _unlike(key, done)


def _unlike(key: str, done: str) -> str:
    return f"{key} of config.json has not the effect that it has in transformers: mlx-lm's code {done}."


def unread(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of config.json that have an effect on text and that neither mlx-lm's class nor mlxspec uses."""
    text = text_of(config)
    return tuple(sorted(key for key, value in text.items() if not _is_used(config, text, key, value)))


def _is_used(config: Mapping[str, Any], text: Mapping[str, Any], key: str, value: Any) -> bool:
    says_nothing = value in (None, False, "", [], {}) or isinstance(value, Mapping)
    if says_nothing or key in EVERYWHERE | AROUND | IDLE or _OF_OTHERS.search(key):
        return True
    kinds, built_in = {config.get("model_type"), text.get("model_type")}, BUILT_IN.get(key, {})
    has_windows = any(name != "full_attention" for name in text.get("layer_types") or [""])
    return (
        any(value in built_in.get(kind, built_in.get("*", ())) for kind in kinds if isinstance(kind, str))
        or bool(kinds & {*TOLD_TWICE.get(key, ()), *_MENDED.get(key, ())})
        or (key in _OF_WINDOWS and (bool(kinds & {*_WINDOWED}) or not has_windows))
        or names_key(config, key)
    )
