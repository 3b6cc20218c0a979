"""Tiny Qwen3.5 models with random weights, and a tokenizer for them, for tests of everything that meets a model.

Random models are decisive here (the head is scaled up), so that float rounding rarely decides a token. What a layer
adds to the residual stream is scaled down, so that the last token says much about the next: an MTP head that passes
its token's embedding on is then right often, but not always. A draft model that is right often is the target with
noise on its weights (`echo`).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import decoders, models, pre_tokenizers

from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.loading.weights import cast
from mlxspec.models.dflash import DFlash
from mlxspec.models.dflash_config import DFlashConfig
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import Trunk
from mlxspec.models.shard import join, own_config, own_weights

VOCAB = 96
EOS = 95
BRANCH = 0.3
HEAD_SCALE = 12.0  # logits with a spread of several units: decisive, yet not one-hot

# As few layers as show what there is to get wrong (a layer of either kind first, last, behind its like and behind the other): what a round
# costs here is graph nodes, and thousands of rounds are played.
STACKS = {
    "attention": (False, False),
    "recurrent": (True, True),
    "hybrid": (True, True, False),
    "ends-linear": (True, False, False, True),
}


class Form(NamedTuple):
    """How weights are kept: matrices and activations of `dtype`; quantized ones as mlx-lm writes them, bits 0 for none."""

    dtype: mx.Dtype
    bits: int = 0
    group_size: int = 32
    mode: str = "affine"


FORMS = {
    "float32": Form(mx.float32),
    "bfloat16": Form(mx.bfloat16),
    "float16": Form(mx.float16),
    "4bit": Form(mx.bfloat16, 4),
    "8bit": Form(mx.float16, 8),
    "4bit-float32": Form(mx.float32, 4),
    # formats whose scales are bytes compute in what MLX unpacks them to
    "mxfp4": Form(mx.bfloat16, 4, 32, "mxfp4"),
    "mxfp8": Form(mx.bfloat16, 8, 32, "mxfp8"),
    "nvfp4": Form(mx.bfloat16, 4, 16, "nvfp4"),
}


def config(
    is_linear: tuple[bool, ...] = STACKS["hybrid"],
    *,
    hidden: int = 64,
    vocab: int = VOCAB,
    max_context: int = 2048,
    tied: bool = False,
) -> Qwen35Config:
    """Grouped heads everywhere: 4 query heads on 2, 4 value heads on 2 key heads, of 32 each."""
    return Qwen35Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        is_linear=is_linear,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_k_heads=2,
        num_v_heads=4,
        k_head_dim=32,
        v_head_dim=32,
        conv_kernel=4,
        rms_eps=1e-6,
        rope_theta=1e4,
        rope_dims=16,
        max_context=max_context,
        tied=tied,
        num_experts=0,
        num_experts_per_token=0,
        expert_size=0,
        shared_expert_size=0,
        norm_topk=True,
        num_mtp_layers=1,
    )


def _randomize(module, rng: np.random.Generator, head_scale: float, branch: float = BRANCH) -> None:
    """Fill with numbers that keep activations around 1; gates with decays from near 0 to near 1. Call before `fuse`."""
    filled = []
    for name, value in tree_flatten(module.parameters()):
        if name.endswith("A_log"):
            new = rng.uniform(-3.0, 1.5, value.shape)
        elif name.endswith("dt_bias"):
            new = rng.uniform(-3.0, 1.0, value.shape)
        elif value.ndim == 1:
            new = rng.uniform(0.7, 1.3, value.shape)
        elif "conv1d" in name:
            new = rng.normal(0.0, 0.6, value.shape)
        elif "embed_tokens" in name:
            new = rng.normal(0.0, 1.0, value.shape)
        else:
            new = rng.normal(0.0, value.shape[-1] ** -0.5, value.shape)
            if "lm_head" in name:
                new = new * head_scale
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                new = new * branch
        filled.append((name, mx.array(new.astype(np.float32))))
    module.update(tree_unflatten(filled))


def pack(module, form: str) -> None:
    """Weights in the form that a loader gives them: norms stay float32, all matrices are quantized, the embedding too."""
    how = FORMS[form]
    if how.dtype != mx.float32:
        kept = cast(dict(tree_flatten(module.parameters())), how.dtype)
        module.update(tree_unflatten(list(kept.items())))
    if how.bits:
        nn.quantize(module, group_size=how.group_size, bits=how.bits, mode=how.mode)


def finish(module, form: str) -> None:
    """`pack`, and the module is ready to run."""
    pack(module, form)
    module.fuse()
    mx.eval(module.parameters())


def make(
    c: Qwen35Config,
    seed: int = 0,
    *,
    head_scale: float = HEAD_SCALE,
    drift: float = 0.0,
    form: str = "float32",
    like: Qwen35Config | None = None,
    group: mx.distributed.Group | None = None,
) -> Qwen35:
    """`form`: a key of FORMS. `drift`: every matrix is off by noise of so many parts of its entries. Equal seeds give equal weights,
    whatever the vocabulary: rows of embedding and head are cut from, or padded to, those of VOCAB tokens. `like`: a model whose embedding
    and head this one has, before the noise, though its layers may be of another kind."""
    whole = Qwen35(replace(c, vocab_size=VOCAB))
    _randomize(whole, np.random.default_rng(seed), head_scale)
    given = {}
    if like is not None and like != c:
        other = Qwen35(replace(like, vocab_size=VOCAB))
        _randomize(other, np.random.default_rng(seed), head_scale)
        given = {k: v for k, v in tree_flatten(other.parameters()) if "embed_tokens" in k or "lm_head" in k}
    rng, values = np.random.default_rng(seed + 1000), []
    for name, value in tree_flatten(whole.parameters()):
        new = np.asarray(given.get(name, value))
        if drift and new.ndim > 1:
            new = new * (1.0 + drift * rng.standard_normal(new.shape).astype(np.float32))
        if "embed_tokens" in name or "lm_head" in name:
            new = np.pad(new[: c.vocab_size], [(0, max(0, c.vocab_size - VOCAB)), (0, 0)])
        values.append((name, mx.array(new)))
    model = Qwen35(c)
    model.update(tree_unflatten(values))
    if group is not None:
        return _divided(model, c, form, group)
    finish(model, form)
    return model


def _divided(whole: Qwen35, c: Qwen35Config, form: str, group: mx.distributed.Group) -> Qwen35:
    """A rank's part of a model, joined with the others'."""
    pack(whole, form)
    model = Qwen35(own_config(c, group.size()))
    pack(model, form)
    kept = own_weights(dict(tree_flatten(whole.parameters())), c, group)
    model.update(tree_unflatten(list(kept.items())))
    model.fuse()
    join(model, group)
    mx.eval(model.parameters())
    return model


QWEN3 = replace(config((False, False)), is_gated=False, rope_dims=32, num_mtp_layers=0)
QWEN3_MOE = replace(QWEN3, num_experts=4, num_experts_per_token=2, expert_size=64)


@functools.cache
def qwen3_moe(form: str = "float32") -> Qwen35:
    """A plain Qwen3 model with a mixture of experts in every layer."""
    return make(QWEN3_MOE, form=form)


@functools.cache
def qwen3(form: str = "float32") -> Qwen35:
    """A dense Qwen3 draft model for `qwen3_moe`: the same embedding and head, nearly; layers of its own."""
    return make(QWEN3, drift=0.1, form=form, like=QWEN3_MOE)


def make_mtp(c: Qwen35Config, target: Qwen35, seed: int = 1, *, form: str = "float32") -> Qwen35Mtp:
    """A head that mostly passes its token's embedding on, with a little of the hidden and of its layer."""
    head = Qwen35Mtp(c, target)
    rng = np.random.default_rng(seed)
    _randomize(head, rng, 1.0)
    size = c.hidden_size
    fc = np.concatenate([np.eye(size), np.zeros((size, size))], axis=1) + rng.normal(
        0.0, 0.03, (size, 2 * size)
    )
    head.fc.weight = mx.array(fc.astype(np.float32))
    finish(head, form)
    return head


def make_dflash(
    target: Trunk,
    kind: str = "DFlash",
    seed: int = 5,
    *,
    form: str = "float32",
    drafts: int = 6,
    window: int | None = 9,
    like: Qwen35Config | None = None,
) -> DFlash:
    """A block drafter of two layers, the second with a window that short texts fill, or without one. like: a dense Qwen3 of its sizes, None
    for QWEN3."""
    text = replace(like or QWEN3, max_context=target.max_context, vocab_size=target.vocab_size)
    num_layers = len(target.language_model.model.layers)
    c = DFlashConfig(
        kind=kind,
        text=text,
        windows=(None, window),
        causal=(kind == "DSpark", window is not None),
        layer_ids=(0, num_layers - 1),
        num_target_layers=num_layers,
        mask_id=3,
        num_drafts=drafts,
        starts_at_anchor=kind == "DSpark",
        conv_kernel=2 if kind == "DFlash2" else 0,
        conv_group=16 if kind == "DFlash2" else 0,
        top_k=16 if kind == "DFlash2" else 0,
        rank=0 if kind == "DFlash" else 32,
        has_confidence=kind == "DSpark",
    )
    made = DFlash(c, target)
    _randomize(made, np.random.default_rng(seed), 1.0)
    finish(made, form)
    return made


@functools.cache
def dflash(kind: str = "DFlash", form: str = "float32", window: int | None = 9) -> DFlash:
    return make_dflash(target(form), kind, form=form, window=window)


@functools.cache
def stack(name: str, seed: int = 0, form: str = "float32") -> Qwen35:
    """One of STACKS, made once."""
    return make(config(STACKS[name]), seed, form=form)


@functools.cache
def target(form: str = "float32") -> Qwen35:
    return stack("hybrid", form=form)


@functools.cache
def mtp_head(form: str = "float32") -> Qwen35Mtp:
    return make_mtp(config(), target(form), form=form)


def make_eagle3(
    c: Qwen35Config | GemmaConfig,
    target: Qwen35 | Gemma,
    head: np.ndarray,
    embedding: np.ndarray,
    *,
    seed: int = 2,
    form: str = "float32",
    layers: tuple[int, ...] = (),
    ids: np.ndarray | None = None,
    own_embedding: bool = False,
    **more,
) -> Eagle3Head:
    """A drafter that mostly passes its token's embedding on: each cell attends to itself. head, embedding: the target's (V, H), norms
    included. ids: of the tokens it has rows for, None for all. more: of Eagle3Config."""
    size, vocab = c.hidden_size, c.vocab_size
    wanted = layers or tuple(range(target.num_layers))[:3]
    sizes = {
        "hidden_size": size,
        "vocab_size": vocab,
        "intermediate_size": 2 * size,
        "num_attention_heads": 2,
        "head_dim": size // 2,
        "draft_vocab_size": vocab if ids is None else len(ids),
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in wanted],
    }
    own = replace(Eagle3Config.from_dict(sizes), layers=wanted, **more)
    names = {"lm_head.weight"} | ({"d2t"} if ids is not None else set())
    made, rng = (
        Eagle3Head(own, target, names | ({"embed_tokens.weight"} if own_embedding else set())),
        np.random.default_rng(seed),
    )
    _randomize(made, rng, 1.0)
    mixer, wide = made.layers[0].self_attn, np.zeros((size, size))
    turned = 3.0 * rng.normal(0.0, size**-0.5, (size, size))
    values = {
        "q_proj": np.concatenate([turned, wide], axis=1),
        "k_proj": np.concatenate([turned, wide], axis=1),
        "v_proj": np.concatenate([np.eye(size), wide], axis=1),
        "o_proj": np.eye(size),
    }
    for name, value in values.items():
        mixer[name].weight = mx.array((value + rng.normal(0.0, 0.01, value.shape)).astype(np.float32))
    made.fc.weight = made.fc.weight * 0.2
    made.lm_head.weight = mx.array((head if ids is None else head[ids]).astype(np.float32))
    made.layers[0].input_layernorm.weight = mx.ones(size)
    made.norm.weight = mx.ones(size)
    if own_embedding:
        made.embed_tokens.weight = mx.array(embedding.astype(np.float32))
    if ids is not None:
        made.d2t = mx.array((ids - np.arange(len(ids))).astype(np.int32))
    finish(made, form)
    return made


def _ends(c: Qwen35Config) -> tuple[np.ndarray, np.ndarray]:
    """Embedding and head of the target that `make` makes, the head with the final norm."""
    whole = Qwen35(c)
    _randomize(whole, np.random.default_rng(0), HEAD_SCALE)
    model = whole.language_model
    norm = np.asarray(model.model.norm.weight)
    return np.asarray(model.model.embed_tokens.weight), np.asarray(model.lm_head.weight) * norm


def eagle3_for(c: Qwen35Config, target: Qwen35, *, form: str = "float32", **more) -> Eagle3Head:
    """For a target of `make` with seed 0."""
    embedding, head = _ends(c)
    return make_eagle3(c, target, head, embedding, form=form, **more)


@functools.cache
def eagle3(form: str = "float32") -> Eagle3Head:
    """For `target`: over three quarters of its vocabulary."""
    ids = np.sort(np.random.default_rng(5).permutation(VOCAB)[: 3 * VOCAB // 4])
    return eagle3_for(config(), target(form), form=form, ids=ids)


# heads of 64: what keys and values in few bits need
WIDE = replace(config(hidden=128), head_dim=64, rope_dims=32)


class WideFamily(NamedTuple):
    """A target with heads of 64, and one drafter of each kind that runs a model."""

    target: Qwen35
    mtp: Qwen35Mtp
    eagle3: Eagle3Head
    echo: Qwen35
    dflash: DFlash


@functools.cache
def wide(form: str = "float32") -> WideFamily:
    """Made once."""
    target = make(WIDE, form=form)
    dense = replace(WIDE, is_linear=(False, False), is_gated=False, num_mtp_layers=0)
    return WideFamily(
        target,
        make_mtp(WIDE, target, form=form),
        eagle3_for(WIDE, target, form=form),
        make(WIDE, drift=0.1, form=form),
        make_dflash(target, form=form, like=dense),
    )


@functools.cache
def small(vocab: int = VOCAB, max_context: int = 2048) -> Qwen35:
    """A hybrid draft model of another size, with weights of its own."""
    return make(config((True, False), hidden=32, vocab=vocab, max_context=max_context), seed=7)


@functools.cache
def echo(vocab: int = VOCAB, max_context: int = 2048, *, drift: float = 0.1, form: str = "float32") -> Qwen35:
    """A draft model that mostly agrees with the target; another `vocab` cuts or pads what it knows."""
    return make(config(vocab=vocab, max_context=max_context), drift=drift, form=form)


@functools.cache
def tokenizer() -> Tokenizer:
    """Ids 0..94 are the printable ASCII characters from the space on, 95 ends a text."""
    vocab = {chr(32 + i): i for i in range(EOS)} | {"<end>": EOS}
    inner = InnerTokenizer(models.WordLevel(vocab, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, frozenset({EOS}), None)
