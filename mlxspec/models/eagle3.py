"""EAGLE-3 drafters: one Llama layer that predicts the token after next from the target's own residual streams.

The cell of token x_p takes the token and the residual streams behind a few of the target's layers at x_{p-1}, and predicts x_{p+1}:
    g = fc(streams);  z = [input_layernorm(embed(x_p)) ; hidden_norm(g)]
    y = g + attention(z);  h' = y + mlp(post_attention_layernorm(y));  logits = head(norm(h'))
Further steps of one draft feed h' back in place of g. Variants, by config.json and tensors:
    norm_before_residual   y = hidden_norm(g) + attention(z)
    norm_before_fc         one norm of all streams together before fc (`input_norm`)
    fc_norm                EAGLE-3.1: a norm for each stream before fc
    norm_output            EAGLE-3.1: norm(h') is what the head sees and what is fed back
    q_norm, k_norm         queries and keys of each head are normed before they are turned, as in Qwen3
The head has rows for the draft's own vocabulary; row i means token i + d2t[i] of the target. Head and embedding are the drafter's own or,
where the folder has none, the target's. Rotary positions count cells; they are relative, so it makes no difference where they begin.
Knows its weights and its cache; knows nothing of drafts, rows' histories or acceptance.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.errors import ModelError
from mlxspec.loading.weights import Weights
from mlxspec.models.cell_head import CellHead
from mlxspec.models.config_values import Keys, Values, flag, flattened, read, short
from mlxspec.models.drafter_module import (
    KEYS_OF_ALL,
    AbsentTarget,
    DrafterFolder,
    check_sizes,
    sanitize_drafter,
)
from mlxspec.models.layers import Rotary, rms_norm
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_layers import Qwen35Attention, Qwen35DecoderLayer
from mlxspec.models.qwen3_config import plain_layers
from mlxspec.models.rotary_scaling import merged
from mlxspec.models.text_model import TextModel

_TELLING = re.compile(r"(?:model\.)?(?:midlayer|layers\.0)\.hidden_norm\.weight")
TITLE = "EAGLE-3 drafter"
_LAYERS = "eagle_aux_hidden_state_layer_ids"

KEYS = KEYS_OF_ALL | Keys(
    # who wrote it and how it was trained, and for which model
    idle=frozenset(
        """
        draft_num_hidden_layers embed_requires_grad enable_sp_ulysses has_no_defaults_at_init inference_type layer_types
        num_hidden_layers num_target_layers pretraining_tp speculators_model_type step_loss_decay target_model_name_or_path
        target_model_type ttt_length use_aux_hidden_state
        """.split()
    ),
    only={
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "sliding_window": (),
    },
)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The shape of an EAGLE-3 drafter. text: its layer; text.vocab_size is the target's. draft_vocab: rows of its language-model head.
    target_size: the target's hidden size. layers: layers of the target (0-based) whose residual streams it reads; empty for the usual ones,
    see `layers_of`. unread: keys of config.json that nothing uses."""

    text: Qwen35Config
    draft_vocab: int
    target_size: int
    layers: tuple[int, ...]
    norm_before_residual: bool = flag()
    norm_before_fc: bool = flag()
    fc_norm: bool = flag()
    norm_output: bool = flag()
    unread: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ModelError("config.json: norm_before_fc and fc_norm exclude each other.")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Return the shape from a config.json. Raises ModelError naming the first key that is missing, out of range or not supported."""
        get = Values(flattened(config, "transformer_layer_config", "eagle_config", ""), KEYS)
        rope, num_heads = merged(get), get.size("num_attention_heads")
        text = plain_layers(
            get,
            rope,
            num_layers=1,
            head_dim=get.size("head_dim", get.size("hidden_size") // num_heads),
            num_kv_heads=get.size("num_key_value_heads", num_heads),
            rope_theta=rope.number("rope_theta", 10000.0),
            max_context=get.size("max_position_embeddings", 2048),
        )

        text = replace(text, rope_dims=int(text.head_dim * rope.number("partial_rotary_factor", 1.0)))
        return read(
            cls,
            get,
            get,
            text=text,
            draft_vocab=get.size("draft_vocab_size", text.vocab_size),
            target_size=get.size("target_hidden_size", text.hidden_size),
            layers=_layers(get),
        )

    def layers_of(self, target: TextModel) -> tuple[int, ...]:
        """Return the layers of this target (0-based) that the drafter reads. Where the config has no list they are those of the first
        published drafters: 1, half of all minus 1, and all minus 4. Raises ModelError where the target does not have these layers."""
        num = target.num_layers
        found = self.layers or (1, num // 2 - 1, num - 4)
        if len(set(found)) != len(found) or min(found) < 0 or max(found) >= num:
            named = ", ".join(map(str, found))
            raise ModelError(
                f"The EAGLE-3 drafter reads layers {named} of its target (the first is 0), and this model has {num} layers."
            )
        return found

    def check_fits(self, target: TextModel) -> None:
        """Check that the drafter's sizes and layers fit this target. Raises ModelError where they do not."""
        check_sizes(TITLE, {"hidden_size": self.target_size, "vocab_size": self.text.vocab_size}, target)
        self.layers_of(target)


def _layers(get: Values) -> tuple[int, ...]:
    """Return the layers of the target (0-based) that config.json lists. Published lists are of three kinds. In `target_layer_ids`
    (DeepSpec), and in lists under the other key that begin with 1, an id names the layer whose output is read. In all other lists it counts
    the layers that have run before: 2 is the output of layer 1."""
    get.skip(_LAYERS, "target_layer_ids")
    name = _LAYERS if "target_layer_ids" not in get.raw else "target_layer_ids"
    ids = get.value(name)
    if ids is None:
        return ()
    if (
        not isinstance(ids, list)
        or not ids
        or any(isinstance(i, bool) or not isinstance(i, int) for i in ids)
    ):
        raise ModelError(f"config.json: {name} is {short(ids)}, which is no list of layer ids.")
    found = tuple(i if name != _LAYERS or ids[0] == 1 else i - 1 for i in ids)
    if min(found) < 0 or len(set(found)) != len(found):
        raise ModelError(
            f"config.json: {name} is {short(ids)}, which does not name different layers of the target."
        )
    return found


def is_eagle3(names: Collection[str], config: Mapping[str, Any] | None = None) -> bool:
    """Return whether a folder is an EAGLE-3 drafter, by the names of its tensors or its config.json."""
    if any(_TELLING.fullmatch(name) for name in names):
        return True
    kinds = (config or {}).get("architectures")
    named = [k for k in kinds if isinstance(k, str)] if isinstance(kinds, list) else []
    return (config or {}).get("speculators_model_type") == "eagle3" or any(
        "eagle3" in k.lower() for k in named
    )


class _Layer(Qwen35DecoderLayer):
    def __init__(self, c: Eagle3Config, norms_heads: bool) -> None:
        size = c.text.hidden_size
        super().__init__(c.text, Qwen35Attention(c.text, num_inputs=2 * size, norms_heads=norms_heads))
        self._adds_normed = c.norm_before_residual
        self.hidden_norm = nn.RMSNorm(size)

    def enter(self, embedded: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """Return the input (N, 2H) of attention, and the array (N, H) that attention's output is added to. embedded, hidden: (N, H) each,
        the two inputs of a cell."""
        normed = rms_norm(hidden, self.hidden_norm.weight, self._eps)
        both = mx.concatenate([self.normed(embedded), normed], axis=-1)
        return both, normed if self._adds_normed else hidden


class Eagle3Head(CellHead):
    """The module of an EAGLE-3 drafter. Parameter names are those of the speculators library. layers_read: layers of the target (0-based)
    that the drafter reads."""

    title = TITLE

    def __init__(self, config: Eagle3Config, target: TextModel, names: Collection[str]) -> None:
        """Build the module for `target`, without weights. names: the checkpoint's tensors under mlxspec's names, which tell whether the
        drafter has its own embedding, and whether queries and keys are normed. Raises ModelError where the drafter is for another
        target."""
        config.check_fits(target)
        if any(name.startswith("layers.1.") for name in names):
            raise ModelError(
                "The EAGLE-3 drafter cannot be loaded: such drafters have one layer, and it has more."
            )
        c, text = config, config.text
        rotary = Rotary.of_first(text.rope_dims, text.rope_theta, text.head_dim, text.rope_scaling)
        super().__init__(text, target, rotary)
        self.config = c
        self.layers_read = c.layers_of(target)
        num = len(self.layers_read)
        if "embed_tokens.weight" in names:
            self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        elif text.hidden_size != c.target_size:
            raise ModelError(
                "The EAGLE-3 drafter cannot be loaded: it has no embedding, and the target's is of another size."
            )
        if c.norm_before_fc:
            self.input_norm = nn.RMSNorm(num * c.target_size)
        if c.fc_norm:
            self.fc_norm = [nn.RMSNorm(c.target_size) for _ in range(num)]
        self.fc = nn.Linear(num * c.target_size, text.hidden_size, bias=False)
        self.layers = [_Layer(c, "layers.0.self_attn.q_norm.weight" in names)]
        self.norm = nn.RMSNorm(text.hidden_size)
        has_whole = c.draft_vocab == text.vocab_size and text.hidden_size == c.target_size
        if "lm_head.weight" in names or not has_whole:  # a reduced head is no part of the target's
            self.lm_head = nn.Linear(text.hidden_size, c.draft_vocab, bias=False)
        if c.draft_vocab != text.vocab_size or "d2t" in names:
            self.d2t = mx.zeros(c.draft_vocab, mx.int32)

    @property
    def summary(self) -> str:
        layers = ", ".join(map(str, self.layers_read))
        return f"reads layers {layers} and proposes over {self.num_proposed} tokens"

    @property
    def proposes_all(self) -> bool:
        return True

    @property
    def num_proposed(self) -> int:
        """Return the number of the target's tokens that the drafter can propose."""
        return self.config.draft_vocab

    def take(self, streams: mx.array) -> mx.array:
        """Return the second input (N, H) of the cells of known tokens, from residual streams (N, layers * target's H) of the target."""
        c = self.config
        x = streams.astype(self.dtype)
        if c.norm_before_fc:
            x = rms_norm(x, self.input_norm.weight, c.text.rms_eps)
        if c.fc_norm:
            parts = mx.split(x, len(self.layers_read), axis=-1)
            normed = [rms_norm(p, n.weight, c.text.rms_eps) for p, n in zip(parts, self.fc_norm, strict=True)]
            x = mx.concatenate(normed, axis=-1)
        return self.fc(x)  # type: ignore[no-any-return]

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits (N, R) of the cells' outputs (N, H)."""
        seen = hidden if self.config.norm_output else self._normed(hidden)
        if "lm_head" in self:
            return self.lm_head(seen)  # type: ignore[no-any-return]
        return self.target.head(seen.astype(self.target.dtype))  # type: ignore[no-any-return]

    def _normed(self, x: mx.array) -> mx.array:
        return rms_norm(x, self.norm.weight, self.config.text.rms_eps)

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (N, H) of tokens (N,): by the drafter's own embedding, or by the target's without the factor by which some
        models multiply it."""
        table = self.embed_tokens if "embed_tokens" in self else self.target.embedding
        return table(tokens).astype(self.dtype)  # type: ignore[no-any-return]

    def before(
        self, embedded: mx.array, hidden: mx.array, cos: mx.array, sin: mx.array
    ) -> tuple[mx.array, tuple[Any, ...]]:
        layer = self.layers[0]
        both, residual = layer.enter(embedded, hidden)
        return residual, layer.self_attn.project(both, cos, sin)

    def after(self, x: mx.array, attended: mx.array, gate: mx.array | None) -> mx.array:
        x = self.layers[0].after_attention(x, attended, gate)
        return self._normed(x) if self.config.norm_output else x


def _build(config: Mapping[str, Any], given: Weights, target: Any) -> tuple[Eagle3Head, Weights]:
    weights = sanitize_drafter(given)
    return Eagle3Head(Eagle3Config.from_dict(config), target, weights), weights


def _target(config: Mapping[str, Any], given: Weights) -> AbsentTarget:
    c = Eagle3Config.from_dict(config)
    return AbsentTarget(c.target_size, c.text.vocab_size, 1 + max(c.layers, default=63), config=c)


FOLDER = DrafterFolder(kind="eagle3", is_one=is_eagle3, build=_build, alone=_target)
