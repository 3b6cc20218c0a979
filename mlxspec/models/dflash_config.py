"""Shape of a block drafter (DFlash, DFlash2, DSpark), read from config.json and checked.

What such a checkpoint is, its tensors tell: `candidate_selector.*` is in DFlash2 only, `markov_head.*` in DSpark only. config.json has one
of two layouts: the authors' (sizes at the top level, `dflash_config` beside them) or the speculators library's
(`transformer_layer_config`, and `aux_hidden_state_layer_ids` that count the layers that have run: 2 is the output of layer 1). A window of
the authors' counts the block's first token too, the library's only what lies before it. A causal layer is one in which a token of the block
sees no later one: config.json says which are, and where it does not they are those with a window (vLLM, SGLang).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlxspec.errors import ModelError
from mlxspec.models.config_values import Keys, Values, flattened, layer_kinds, mapping, short
from mlxspec.models.drafter_module import KEYS_OF_ALL, check_sizes
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_config import plain_layers
from mlxspec.models.rotary_scaling import merged
from mlxspec.models.text_model import TextModel

BlockKind = Literal["DFlash", "DFlash2", "DSpark"]
KEYS = KEYS_OF_ALL | Keys(
    # how long other engines' drafts are, and which heads there are: the tensors tell
    idle=frozenset(
        """
        block_size_policy dflash_initial_block_size draft_window_size enable_confidence_head max_anchors num_anchors
        prefer_requested_block_size projector_type runtime_block_size swa_window_size use_sliding_window
        """.split()
    ),
    only={
        "attention_sink_bias": (False,),
        "dspark_bonus_anchor": (False,),
        "input_embedding_scale": (1, 1.0),
        "is_encoder_decoder": (False,),
        "markov_head_type": ("vanilla",),
        "output_multiplier": (1, 1.0),
        "rope_is_neox_style": (True,),
    },
)


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """The shape of a block drafter. text: its layers, which are plain Qwen3's. windows: for each layer how many tokens a token sees, the
    block's first token included; None for all. causal: for each layer whether a token of the block sees no later token. layer_ids: layers
    of the target (0-based) whose outputs the drafter reads. mask_id: the mask token. num_drafts: tokens of its longest draft.
    starts_at_anchor: whether the place of the newest known token predicts the first drafted token, in place of the first mask. softcap: of
    the target's logits, None where the config does not have it. conv_kernel, conv_group: of DFlash2's convolutions. top_k: candidates of
    DFlash2's selector. rank: of that selector or of DSpark's Markov head. draft_vocab: rows of the drafter's own language-model head, whose
    tokens `d2t` names; None where it proposes all of the target's tokens. unread: keys of config.json that nothing uses."""

    kind: BlockKind
    text: Qwen35Config
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    layer_ids: tuple[int, ...]
    num_target_layers: int | None
    mask_id: int
    num_drafts: int
    starts_at_anchor: bool = False
    softcap: float | None = None
    conv_kernel: int = 0
    conv_group: int = 0
    top_k: int = 0
    rank: int = 0
    has_confidence: bool = False
    confidence_sees_markov: bool = True
    has_embedding: bool = False
    has_head: bool = False
    draft_vocab: int | None = None
    unread: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], names: Collection[str]) -> DFlashConfig:
        """Return the shape from a config.json. names: names of the checkpoint's tensors. Raises ModelError naming the first key that is
        missing, out of range or not supported."""
        get = Values(_in_one_layout(config), KEYS)
        kind = kind_of(names)
        has_vocabulary = "d2t" in names or get.size("draft_vocab_size", get.size("vocab_size")) != get.size(
            "vocab_size"
        )
        starts_at_anchor = _starts_at_anchor(get, kind)
        if get.size("target_hidden_size", get.size("hidden_size")) != get.size("hidden_size"):
            raise ModelError(
                "config.json: target_hidden_size differs from hidden_size, which is not supported."
            )
        made = cls(
            kind=kind,
            text=plain_layers(get, merged(get)),
            windows=(windows := _windows(get)),
            causal=_causal(get, windows),
            layer_ids=_layer_ids(get),
            num_target_layers=get.size("num_target_layers") if get.value("num_target_layers") else None,
            mask_id=_index(get, "mask_token_id"),
            num_drafts=get.size("block_size", 16) - (0 if starts_at_anchor else 1),
            starts_at_anchor=starts_at_anchor,
            softcap=get.number("final_logit_softcapping") if get.value("final_logit_softcapping") else None,
            conv_kernel=get.size("conv_kernel_size") if kind == "DFlash2" else 0,
            conv_group=get.size("conv_group_size") if kind == "DFlash2" else 0,
            top_k=get.size("selector_top_k") if kind == "DFlash2" else 0,
            rank=get.size(_RANKS[kind]) if kind in _RANKS else 0,
            has_confidence="confidence_head.proj.weight" in names,
            confidence_sees_markov=get.flag("confidence_head_with_markov", True),
            has_embedding="embed_tokens.weight" in names,
            has_head="lm_head.weight" in names,
            draft_vocab=get.size("draft_vocab_size") if has_vocabulary else None,
        )
        made._check()
        get.skip(*_OF_KINDS)
        return replace(made, unread=get.unread())

    def _check(self) -> None:
        if not 1 <= self.num_drafts <= MOST_DRAFTS:
            raise ModelError(f"config.json: block_size must leave 1 to {MOST_DRAFTS} tokens to draft.")
        if self.mask_id >= self.text.vocab_size:
            raise ModelError(f"config.json: mask_token_id {self.mask_id} is no token of the vocabulary.")
        if self.conv_group and self.text.hidden_size % self.conv_group:
            raise ModelError("config.json: conv_group_size must divide hidden_size.")
        if self.top_k > self.text.vocab_size:
            raise ModelError("config.json: selector_top_k is more than the vocabulary has.")
        if self.draft_vocab is not None and self.kind == "DFlash2":  # its selector counts the target's tokens
            raise ModelError("config.json: draft_vocab_size of a DFlash2 drafter is not supported.")
        if self.draft_vocab is not None and not self.has_head:
            raise ModelError(
                "The drafter has a vocabulary of its own (d2t) and no language-model head (lm_head) for it."
            )

    def check_fits(self, target: TextModel) -> None:
        """Check that the drafter's sizes fit this target. Raises ModelError where they do not."""
        num_layers, title = target.num_layers, f"{self.kind} drafter"
        sizes = {"hidden_size": self.text.hidden_size, "vocab_size": self.text.vocab_size}
        check_sizes(title, {**sizes, "num_layers": self.num_target_layers}, target)
        cap = getattr(getattr(target, "config", None), "softcap", None)
        if self.softcap is not None and self.softcap != cap:
            raise ModelError(f"The {title} is for another model: its target caps logits at {self.softcap:g}.")
        beyond = [i for i in self.layer_ids if i >= num_layers]
        if beyond:
            raise ModelError(
                f"The {title} reads layer {beyond[0]} of its target, which has layers 0 to {num_layers - 1}."
            )


MOST_DRAFTS = 64
_SPECULATORS = ("dflash", "dflash2", "dspark")  # values of speculators_model_type
_RANKS: Mapping[str, str] = {"DFlash2": "selector_rank", "DSpark": "markov_rank"}
# read of some kinds only
_OF_KINDS = "conv_kernel_size", "conv_group_size", "selector_top_k", "draft_vocab_size", *_RANKS.values()


def kind_of(names: Collection[str]) -> BlockKind:
    """Return which of the three kinds of block drafters a checkpoint with these tensors is."""
    if any(name.startswith("candidate_selector.") for name in names):
        return "DFlash2"
    return "DSpark" if any(name.startswith("markov_head.") for name in names) else "DFlash"


def is_block_drafter(names: Collection[str], config: Mapping[str, Any] | None = None) -> bool:
    """Return whether a checkpoint is a block drafter, by its config.json or by the names of its tensors: an `fc` and one norm for what it
    reads of its target, and layers with query and key norms."""
    bare = {name.removeprefix("model.") for name in names}
    is_one = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= bare
    config = config or {}
    return is_one or "dflash_config" in config or config.get("speculators_model_type") in _SPECULATORS


def _in_one_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of config.json in the authors' layout, flattened to one level. A config in the speculators library's layout is
    converted: its layer ids are lowered by 1, and its window is raised by 1. Raises ModelError where a nested section is not an object."""
    found = flattened(config, "transformer_layer_config", "", "dflash_config")
    if not mapping(config, "transformer_layer_config"):
        return found
    ids = found.pop("aux_hidden_state_layer_ids", None)
    is_list = isinstance(ids, list) and all(type(i) is int for i in ids)
    found["target_layer_ids"] = [i - 1 for i in ids] if isinstance(ids, list) and is_list else ids
    if type(found.get("sliding_window")) is int:
        found["sliding_window"] += 1
    return found


def _index(get: Values, key: str) -> int:
    """Return the number under `key`, which may be 0."""
    return get.size(key, None if get.value(key) is None else 0)


def _layer_ids(get: Values) -> tuple[int, ...]:
    found = get.value("target_layer_ids")
    whole = isinstance(found, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in found)
    if not whole or not found or found[0] < 0 or sorted(set(found)) != found or len(found) > 64:
        raise ModelError(
            f"config.json: target_layer_ids is {short(found)}, which is no rising list of layers."
        )
    return tuple(found)


def _starts_at_anchor(get: Values, kind: BlockKind) -> bool:
    """Return whether the newest known token's own place predicts the first drafted token, by either name of the key. Without a key: true
    for DSpark, and for DFlash drafters of DSpark's trainer (DeepSpec), whose architecture is also named DSpark."""
    said = {
        get.flag(name, False)
        for name in ("query_zero_predicts_next", "sample_from_anchor")
        if name in get.raw
    }
    if len(said) == 2:
        raise ModelError(
            "config.json: query_zero_predicts_next and sample_from_anchor contradict each other."
        )
    if said:
        return said.pop()
    names = get.value("architectures")
    return kind == "DSpark" or (isinstance(names, list) and any("DSpark" in str(name) for name in names))


def _causal(get: Values, windows: Sequence[int | None]) -> tuple[bool, ...]:
    """Return for each layer whether a token of the block sees no later token. is_causal and its other names apply to all layers; the
    speculators library's sliding_window_non_causal applies to layers with a window, and its default for DFlash2 differs from the
    others'."""
    names = "is_causal", "causal", "dflash_query_causal"
    get.skip(*names, "sliding_window_non_causal")
    for name in names:
        if get.value(name) is not None:
            return (get.flag(name),) * len(windows)
    library = get.value("speculators_model_type")
    sees_all = library is not None and get.flag("sliding_window_non_causal", library == "dflash2")
    return tuple(window is not None and not sees_all for window in windows)


def _windows(get: Values) -> tuple[int | None, ...]:
    has_window = layer_kinds(get, "sliding_attention")
    get.skip("sliding_window")
    window = get.size("sliding_window") if any(has_window) else None
    if window is not None and window < 2:
        raise ModelError("config.json: sliding_window must be at least 2.")
    return tuple(window if windowed else None for windowed in has_window)
