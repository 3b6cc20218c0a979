"""Tiny models of every family by name, with what drafts for them: for tests that are parametrised over families.

QWEN and GEMMA hold their configs, ADAPTED those that run by mlx-lm's code (tests/models/adapted_zoo.py); NAMES are all of them. `target`
makes a model in one of the forms of tiny_models.FORMS, once; `drafting` says which drafters there are for it.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec.models.base import Model
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma4_assistant import AssistantConfig, Gemma4Assistant
from mlxspec.models.gemma_config import GemmaConfig, LayerShape, RotaryShape
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.platform.host import numbers
from tests import tiny_models
from tests.models import adapted_zoo

_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_token": 2,
    "expert_size": 32,
    "shared_expert_size": 32,
    "intermediate_size": 0,
}
QWEN: dict[str, Qwen35Config] = {
    **{name: tiny_models.config(is_linear) for name, is_linear in tiny_models.STACKS.items()},
    "moe": replace(tiny_models.config((True, False, True)), **_EXPERTS),
    "moe-attention-first": replace(tiny_models.config((False, True)), **_EXPERTS, norm_topk=False),
    "qwen3-next": replace(tiny_models.config((True, False)), **_EXPERTS, joins_projections=True),
    "qwen3-moe": tiny_models.QWEN3_MOE,
    "qwen3": tiny_models.QWEN3,
    "wide": tiny_models.WIDE,  # heads of 64, which keys and values in few bits need
}
_SMALLER = {"qwen3-moe": "qwen3"}  # a draft model of another family; others are the target with noise

_LOCAL = RotaryShape(head_dim=16, theta=1e4, num_pairs=8)
_GLOBAL = RotaryShape(head_dim=32, theta=1e6, num_pairs=4)


def gemma_layer(window: int | None, **more) -> LayerShape:
    dim = {"head_dim": 32, "rotary": _GLOBAL} if window is None else {"head_dim": 16, "rotary": _LOCAL}
    return LayerShape(window=window, num_kv_heads=2, intermediate_size=96, **dim, **more)


def gemma_config(*layers: LayerShape, **more) -> GemmaConfig:
    sizes = {"vocab_size": tiny_models.VOCAB, "hidden_size": 64, "num_heads": 4, "max_context": 2048}
    return GemmaConfig(layers=layers, scale=0.25, embed_scale=1.0, rms_eps=1e-6, tied=False, **sizes, **more)


_GEMMA4 = {"generation": 4, "softcap": 30.0}
GEMMA: dict[str, GemmaConfig] = {
    "gemma3": gemma_config(gemma_layer(11), gemma_layer(7), gemma_layer(None), gemma_layer(11)),
    "gemma4-dense": gemma_config(gemma_layer(11), gemma_layer(None, keys_are_values=True), **_GEMMA4),
    "gemma4-e": gemma_config(
        gemma_layer(9),
        gemma_layer(None),
        gemma_layer(9, source=0),
        gemma_layer(None, source=1),
        per_layer_size=32,
        per_layer_vocab=tiny_models.VOCAB,
        **_GEMMA4,
    ),
    "gemma4-moe": gemma_config(
        gemma_layer(11),
        gemma_layer(None, keys_are_values=True),
        num_experts=4,
        num_experts_per_token=2,
        expert_size=32,
        **_GEMMA4,
    ),
}
ADAPTED = (*adapted_zoo.FEW, "llama alone", "gpt_oss alone")
NAMES = (*QWEN, *GEMMA, *ADAPTED)
HAS_EXPERTS = frozenset(name for name, c in (QWEN | GEMMA).items() if c.num_experts)
_ASSISTED = ("gemma4-dense", "gemma4-e", "gemma4-moe")
CLUSTERS = {"gemma4-dense": 12}  # of an assistant's head; the others score all tokens


def drafting(name: str) -> tuple[str, ...]:
    """The drafters that run a model of their own for this family; "mtp" is an assistant for Gemma 4."""
    if name in ADAPTED:
        return ()
    if name in GEMMA:
        return (*(("mtp",) if name in _ASSISTED else ()), "dflash", "draft-model")
    return (*(("mtp",) if QWEN[name].num_mtp_layers else ()), "eagle3", "dflash", "draft-model")


@functools.cache
def target(name: str, form: str = "float32") -> Model:
    """Made once. form: a key of tiny_models.FORMS; models that run by mlx-lm's code are float32."""
    if name in ADAPTED:
        return adapted_zoo.model_of(name, tiny_models.VOCAB)
    if name in tiny_models.STACKS:
        return tiny_models.stack(name, form=form)
    return make_gemma(name, form=form) if name in GEMMA else tiny_models.make(QWEN[name], form=form)


@functools.cache
def draft_model(name: str, form: str = "float32") -> Model:
    """A smaller model of the same family, or the target with noise on its weights: right often, but not always."""
    if name in GEMMA:
        return make_gemma(name, drift=0.1, form=form)
    return tiny_models.make(QWEN[_SMALLER.get(name, name)], drift=0.1, form=form, like=QWEN[name])


def dense(name: str) -> Qwen35Config:
    """The sizes of a block drafter's layers for one of QWEN."""
    return replace(QWEN[name], is_linear=(False, False), is_gated=False, num_mtp_layers=0)


def make_gemma(name: str, *, drift: float = 0.0, form: str = "float32") -> Gemma:
    """Decisive and led by the last token, as tiny_models.make; drift: matrices are off by noise of so many parts of their entries."""
    model, rng, noise = Gemma(GEMMA[name]), np.random.default_rng(3), np.random.default_rng(4)
    filled = []
    for key, value in tree_flatten(model.parameters()):
        if value.ndim == 1:
            new = rng.uniform(0.7, 1.3, value.shape) * (0.3 if ".post_" in key else 1.0)
        else:
            new = rng.normal(0.0, 1.0 if "embed_tokens" in key else value.shape[-1] ** -0.5, value.shape)
            new *= tiny_models.HEAD_SCALE if "lm_head" in key else 1.0
            new *= 1.0 + drift * noise.standard_normal(value.shape)
        filled.append((key, mx.array(new.astype(np.float32))))
    model.update(tree_unflatten(filled))
    tiny_models.finish(model, form)
    return model


def make_assistant(target: Gemma, clusters: int = 0, form: str = "float32") -> Gemma4Assistant:
    """Mostly passes its token's embedding on to the target's own head, so that it is right often, but not always."""
    own = [shape for shape in target.config.layers if shape.source is None]
    text = gemma_config(*(gemma_layer(shape.window, source=i) for i, shape in enumerate(own)), generation=4)
    chosen = AssistantConfig(
        text=text, target_size=64, num_centroids=clusters, num_chosen=max(1, clusters // 4)
    )
    assistant, rng, filled = Gemma4Assistant(chosen, target), np.random.default_rng(6), []
    for key, value in tree_flatten(assistant.parameters()):
        new = np.ones(value.shape)
        if value.ndim > 1:
            new = rng.normal(0.0, value.shape[-1] ** -0.5, value.shape)
        if key == "pre_projection.weight":
            new = np.concatenate([np.eye(64), np.zeros((64, 64))], axis=1) + 0.3 * new
        elif "embed_tokens" in key:  # however the target's head is kept
            new = numbers(target.language_model.lm_head(mx.eye(64).astype(target.dtype))).T
        elif ".post_" in key:
            new = 0.2 * new
        elif "token_ordering" in key:
            filled.append((key, mx.array(rng.permutation(value.shape[0])).astype(mx.int32)))
            continue
        filled.append((key, mx.array(new.astype(np.float32))))
    assistant.update(tree_unflatten(filled))
    tiny_models.finish(assistant, form)
    return assistant
