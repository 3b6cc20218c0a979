"""`load`: a model's name to an engine that can answer. Ties folders, weights, tokenizer and drafters together; owns no logic of theirs."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.cache.quantized import check_kv_bits
from mlxspec.checkpoints.memory import bytes_of
from mlxspec.checkpoints.proposal_rows import Drafting, choose_rows
from mlxspec.checkpoints.pull import check_fits
from mlxspec.config import DRAFTER_NAME, DRAFTER_NAMES, EngineConfig, SpecConfig, shown
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel, check_tokens, check_vocabularies
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.gemma_assistant import GemmaAssistant
from mlxspec.drafters.guarded import guarded
from mlxspec.drafters.mtp import Mtp
from mlxspec.drafters.ngram_cache import NgramCache
from mlxspec.drafters.ngram_map import NgramMapK, NgramMapK4v
from mlxspec.drafters.ngram_mod import NgramMod
from mlxspec.drafters.ngram_simple import NgramSimple
from mlxspec.drafters.ngram_table import NgramTable
from mlxspec.engine.engine import Engine
from mlxspec.engine.memory import check_weights
from mlxspec.engine.ranks.peers import Peers, digest_of, files_of
from mlxspec.errors import ConfigError, ModelError
from mlxspec.kernels import launch, races
from mlxspec.loading import hub
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.assemble import (
    HOW_TO_GET_A_HEAD,
    Assembled,
    assemble_assistant_lazily,
    assemble_dflash_lazily,
    assemble_eagle3_lazily,
    assemble_head_lazily,
    assemble_lazily,
    check_finite,
    evaluate,
    not_read,
    widest_share,
)
from mlxspec.models.dflash import DFlash
from mlxspec.models.dflash_config import unknown_dflash_keys
from mlxspec.models.eagle3 import Eagle3Head, unknown_eagle3_keys
from mlxspec.models.folder import DRAFTS_AS, ModelFolder
from mlxspec.models.gemma4_assistant import unknown_assistant_keys
from mlxspec.models.head_rows import HeadRows
from mlxspec.models.ranks import ALONE
from mlxspec.models.vision.base import Vision
from mlxspec.platform import device
from mlxspec.policy import clock
from mlxspec.policy.calibrate import allowance, kept_costs, shared_costs
from mlxspec.policy.cost import CostModel
from mlxspec.policy.cost_file import CostFile

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load(
    model: str | os.PathLike[str] = hub.DEMO,
    *,
    revision: str | None = None,
    draft: str | Sequence[str] = "auto",
    draft_model: str | os.PathLike[str] | None = None,
    drafters: Sequence[Drafter] = (),
    spec: SpecConfig | None = None,
    config: EngineConfig | None = None,
    max_context: int | None = None,
    dtype: str | None = None,
    adapter: str | None = None,
    images: bool = True,
    peers: Peers | None = None,
) -> Engine:
    """Load a model and its drafters.

    model: `demo`, `demo-gemma`, `demo-vision`, a folder, or a Hugging Face id; a path object is a folder. revision: a branch, tag or
    commit of an id. draft: "off", "auto" (everything this model has: n-gram lookup, then an MTP head, else the draft model), or names in
    the order in which they are asked. draft_model: folder or id of a small model of the same vocabulary, of an MTP head of its own, of a
    Gemma 4 assistant (these two are the drafter `mtp`), of an EAGLE-3 drafter (`eagle3`), or of a block drafter (`dflash`); "auto" takes
    it, not the model's own head, and a list that leaves it out is refused; the demo brings its own. drafters: objects of your own
    (docs/adding-a-drafter.md); "auto" asks them first, a list in `draft` names them where it wants them. spec: limits of the drafts (its
    `drafters` are replaced by `draft` unless that is "auto" and spec names some). max_context: tokens of a row at most, as in
    EngineConfig. dtype: "float32", "float16", "bfloat16" or None, which keeps the stored one on a GPU and takes float32 elsewhere.
    adapter: a folder of LoRA layers as mlx-lm's training writes it, folded into the model's weights. images: load the vision tower of a
    model that has one. peers: the ranks among which the model is divided (engine/ranks/); all of them load it together.

    Raises MlxspecError subclasses with one sentence; nothing stays half-loaded. Whatever the files' headers, the tokenizer, the template
    and the options tell is checked before any weight is read.
    """
    spec, config = spec or SpecConfig(), config or EngineConfig()
    model = hub.named(model)
    draft_model = None if draft_model is None else hub.named(draft_model)
    if max_context is not None:
        if config.max_context not in (None, max_context):
            raise ConfigError(
                f"max_context is {max_context}, and config says {config.max_context}; give one."
            )
        config = replace(config, max_context=max_context)
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}.")
    own = _own(drafters)
    if peers is not None and own:
        raise ConfigError("Drafters of your own cannot draft for a model that is divided among ranks.")
    asked = _asked(draft, spec, own)
    is_named = draft_model is not None
    if draft_model is None and model in hub.DEMO_TARGETS:
        draft_model = hub.DEMO_DRAFT
    folder = ModelFolder(hub.resolve(model, revision=revision, judge=check_fits))
    beside = (
        None
        if draft_model is None or asked == ()
        else ModelFolder(hub.resolve(draft_model, judge=check_fits))
    )
    started = time.perf_counter()  # whatever had to be downloaded is here
    if peers is not None:
        _compare(peers, folder, beside, spec)
    with device.private_kernels():
        races.prepare()
        if peers is not None:
            launch.adopt(peers.share(launch.speedups())[0])
        target = assemble_lazily(
            folder.config(),
            folder.read,
            _DTYPES.get(dtype or ""),
            adapter=adapter,
            draft_bits=spec.draft_bits,
            images=folder.path if images and peers is None else None,
            ranks=ALONE if peers is None else peers.ranks,
        )
        check_kv_bits(target.model.make_cache(0).layers, config.kv_bits, "This model", "kv_bits")
        tokenizer = _tokenizer(folder.path, target)
        names = _names(asked, target, beside, tuple(own), is_named=is_named)
        modules: list[nn.Module] = [target.model, *_towers(target)]
        notices = list(target.notices)
        making = _Making(
            spec=spec,
            target=target,
            tokenizer=tokenizer,
            beside=beside,
            dtype=_DTYPES.get(dtype or ""),
            modules=modules,
            notices=notices,
        )
        made = [own[name] if name in own else making.drafter(name) for name in names if name != "forced"]
        check_weights(bytes_of(*modules) + sum(d.weight_bytes for d in own.values()), config.memory_budget)
        evaluate(modules)
        for module in modules:
            if isinstance(module, Eagle3Head | DFlash):
                check_finite(module, f"The {module.title}")
    if peers is not None:
        peers.compare("form of the weights", {"arrays": _forms(modules)})
    engine = Engine(
        target.model,
        tokenizer,
        drafters=made,
        spec=replace(spec, drafters=names, policy=spec.policy or "auto"),
        config=config,
        name=model,
        notices=[
            *notices,
            *_missing_head(asked, names, target),
            *_head_passed_over(asked, names, target),
            *_ends_out_of_reach(tokenizer, target),
            *_kept_plain(spec, made),
        ],
        vision=target.vision,
        no_images=target.no_images
        if peers is None
        else "A model that is divided among ranks reads no images.",
        peers=peers,
        widest=None if peers is None else widest_share(folder.config(), peers.ranks.size, target.model),
    )
    device.claim(engine.memory, engine.memory.budget, engine.memory.scratch)
    if names and engine.spec.policy == "auto":
        seconds = allowance(time.perf_counter() - started)
        if peers is None:
            costs = kept_costs(engine.model, engine.chain.drafters, config, model, seconds)
        else:
            costs = _costs_of_ranks(engine, peers, model, seconds)
        engine.follow(costs)
    return engine


def _compare(peers: Peers, folder: ModelFolder, beside: ModelFolder | None, spec: SpecConfig) -> None:
    """Raises RankError where ranks have other files."""
    folders = [folder.path, *([] if beside is None else [beside.path])]
    files = {name: digest for path in folders for name, digest in files_of(path).items()}
    tables = [Path(p) for p in (spec.ngram_dynamic, spec.ngram_static) if p is not None]
    peers.compare("file", files | {path.name: digest_of(path) for path in tables if path.is_file()})


def _forms(modules: Sequence[nn.Module]) -> str:
    """A digest of names and dtypes of all arrays: on a machine with little memory quantized ones stay packed."""
    found = [(name, str(array.dtype)) for name, array in tree_flatten([m.parameters() for m in modules])]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _costs_of_ranks(engine: Engine, peers: Peers, name: str, seconds: float) -> CostModel:
    """What rounds cost, sums over the ranks included."""
    drafters, config = engine.chain.drafters, engine.config
    file = CostFile.of(engine.model, drafters, config, name, peers.ranks.size) if peers.leads else None
    with clock.of(peers.read_clock):
        return shared_costs(
            engine.model, drafters, config, file, lambda value: peers.share(value)[0], seconds
        )


def _own(drafters: Sequence[Drafter]) -> dict[str, Drafter]:
    """Drafters that were given as objects, by name. Raises ConfigError for what is none, or has no name of its own."""
    found: dict[str, Drafter] = {}
    for drafter in drafters:
        if not isinstance(drafter, Drafter):
            raise ConfigError(
                f"drafters holds objects of classes that inherit from mlxspec.Drafter, not {shown(drafter)}."
            )
        name = getattr(drafter, "name", None)
        if not isinstance(name, str) or not DRAFTER_NAME.fullmatch(name) or name in ("off", "auto"):
            raise ConfigError(f"A drafter needs a `name` of letters, digits and dashes, not {shown(name)}.")
        if name in DRAFTER_NAMES or name in found:
            raise ConfigError(f"There is a drafter {name} already; give yours another name.")
        found[name] = guarded(drafter)
    return found


def _asked(draft: str | Sequence[str], spec: SpecConfig, own: Collection[str]) -> tuple[str, ...] | None:
    """Drafter names, () for off, None for auto. own: names of drafters that were given as objects; all of them must be used."""
    if draft == "auto" and not spec.drafters:
        return None
    if draft == "auto":
        draft = spec.drafters
    if draft == "off":
        draft = ()
    names = tuple(n.strip() for n in draft.split(",")) if isinstance(draft, str) else tuple(draft)
    if {"off", "auto"} & set(names):
        raise ConfigError("`off` and `auto` stand alone in a list of drafters.")
    names = SpecConfig(drafters=names).drafters
    for name in names:
        if name not in DRAFTER_NAMES and name not in own:
            there = ", ".join((*DRAFTER_NAMES, *own))
            raise ConfigError(f"There is no drafter {shown(name)}; there are: {there}.")
    unused = [name for name in own if name not in names]
    if unused:
        raise ConfigError(f"The drafter {unused[0]} was given, but is not among those that are to draft.")
    return names


def _names(
    asked: tuple[str, ...] | None,
    target: Assembled,
    beside: ModelFolder | None,
    own: tuple[str, ...],
    *,
    is_named: bool,
) -> tuple[str, ...]:
    """Who drafts. is_named: `beside` was named by the caller, so it is used or refused. Raises ConfigError and ModelError."""
    kind = None if beside is None else beside.kind()
    if asked is None:
        if kind is not None and (is_named or target.mtp is None):
            return (*own, "ngram-simple", DRAFTS_AS[kind])
        return (*own, "ngram-simple", *(("mtp",) if target.mtp is not None else ()))
    if "mtp" in asked and target.unsupported_head is not None and kind != "assistant":
        raise ModelError(
            f"There is no drafting with this model's MTP head: {target.unsupported_head}; leave `mtp` out."
        )
    if "mtp" in asked and target.mtp is None and beside is None:
        raise ModelError(f"This folder holds no MTP head: {HOW_TO_GET_A_HEAD}, or leave `mtp` out.")
    if "eagle3" in asked and kind != "eagle3":
        raise ConfigError(
            "Drafting with EAGLE-3 needs a drafter of that kind: name it with --draft-model (draft_model=...)."
        )
    if "dflash" in asked and kind != "dflash":
        raise ConfigError(
            "Drafting with a block drafter needs one: name it with --draft-model (draft_model=...)."
        )
    if "draft-model" in asked and beside is None:
        raise ConfigError(
            "Drafting with a draft model needs one: name it with --draft-model (draft_model=...)."
        )
    if kind is None or beside is None:
        return asked
    if "draft-model" in asked and kind != "model":
        raise ConfigError(
            f"{beside.path} is no model of its own; its drafts are asked for as `{DRAFTS_AS[kind]}`."
        )
    lends_head = "mtp" in asked and kind == "model" and target.mtp is None
    if is_named and DRAFTS_AS[kind] not in asked and not lends_head:
        raise ConfigError(
            f"The draft model {beside.path} would not be used: add {DRAFTS_AS[kind]} to the drafters, or leave --draft-model "
            "(draft_model=...) out."
        )
    return asked


def _missing_head(asked: tuple[str, ...] | None, names: tuple[str, ...], target: Assembled) -> list[str]:
    """What a person may not know who left the choice of drafters to us."""
    if asked is not None or "mtp" in names or not target.lacks_head:
        return []
    return [f"There is no drafting with this model's MTP head, which its folder lacks: {HOW_TO_GET_A_HEAD}."]


def _head_passed_over(asked: tuple[str, ...] | None, names: tuple[str, ...], target: Assembled) -> list[str]:
    """What a person may not know who named a draft model for a model with a head."""
    drafting = next((name for name in ("draft-model", "eagle3", "dflash") if name in names), None)
    if asked is not None or drafting is None or target.mtp is None:
        return []
    return [
        f"The draft model that was named drafts, this model's MTP head does not: --draft mtp,{drafting} uses both."
    ]


def _kept_plain(spec: SpecConfig, drafters: Sequence[Drafter]) -> list[str]:
    """What a person may not know who asked for drafters' keys and values in few bits where there are none to be had."""
    bits = spec.draft_kv_bits
    if bits == SpecConfig.draft_kv_bits or any(getattr(d, "kv_bits", None) == bits for d in drafters):
        return []
    return [
        f"--draft-kv-bits {bits} (draft_kv_bits) is not used: no drafter here keeps keys and values of its own."
    ]


def _tokenizer(folder: Path, target: Assembled) -> Tokenizer:
    """Raises ModelError where ordinary text would be cut into ids for which the model has no row. Added tokens may lie beyond the rows, as
    Gemma 3's `<image_soft_token>` does in its text models: they are refused where they would be used."""
    tokenizer, rows = Tokenizer.from_folder(folder), target.model.vocab_size
    if tokenizer.num_ordinary > rows:
        raise ModelError(
            f"The tokenizer in {folder} has {tokenizer.num_ordinary} tokens for text, the model only {rows} rows."
        )
    return tokenizer


def _ends_out_of_reach(tokenizer: Tokenizer, target: Assembled) -> list[str]:
    """What a person must know whose model can never end a text by itself, though its files say how."""
    rows = target.model.vocab_size
    if not tokenizer.eos_ids or any(0 <= i < rows for i in tokenizer.eos_ids):
        return []
    named = ", ".join(map(str, sorted(tokenizer.eos_ids)))
    return [f"No answer ends by itself: the model has {rows} rows, and its files end a text with {named}."]


@dataclass(frozen=True, kw_only=True)
class _Making:
    """What drafters are made of, and what making them adds. beside: the folder that was named as draft model. dtype: of weights that are
    floats, None as in `load`. modules: whatever must be evaluated before it runs, the target first. notices: sentences on what was found
    and on what is not used."""

    spec: SpecConfig
    target: Assembled
    tokenizer: Tokenizer
    beside: ModelFolder | None
    dtype: mx.Dtype | None
    modules: list[nn.Module]
    notices: list[str]

    def drafter(self, name: str) -> Drafter:
        """Without its weights. Raises ConfigError and ModelError."""
        if name.startswith("ngram-"):
            return make_ngram_drafter(name, self.spec, self.target.model.vocab_size)
        if name == "mtp":
            return self._mtp()
        makers = {"eagle3": self._eagle3, "dflash": self._dflash, "draft-model": self._draft_model}
        if name in makers and self.beside is not None:
            return makers[name](self.beside)
        raise ConfigError(f"The drafter {name} cannot be made.")

    def _draft_model(self, beside: ModelFolder) -> Drafter:
        vocab_size = self.target.model.vocab_size
        small = assemble_lazily(
            beside.config(),
            beside.read,
            self.dtype,
            beside=bytes_of(*self.modules),
            images=None if self.target.vision is None else beside.path,
        )
        self.notices.extend(f"Of the draft model: {notice}" for notice in small.notices)
        vision = _draft_vision(small, self.target, self.notices)
        self.modules.extend(_towers(small) if vision is not None else [])
        check_vocabularies(self.tokenizer, _tokenizer(beside.path, small), vocab_size, small.model.vocab_size)
        self.modules.append(small.model)
        return DraftModel(
            small.model,
            vocab_size,
            self._head_rows("draft-model", small.model),
            vision,
            kv_bits=self.spec.draft_kv_bits,
        )

    def _eagle3(self, beside: ModelFolder) -> Drafter:
        config, model = beside.config(), self.target.model
        head = assemble_eagle3_lazily(config, beside.read, model, self.dtype)
        self._check_own_tokenizer(beside)
        self._say_unread(unknown_eagle3_keys(config), "the EAGLE-3 drafter's config.json")
        if self.spec.draft_vocab:
            self.notices.append(
                f"--draft-vocab is not used: the EAGLE-3 drafter proposes over {head.num_proposed} tokens of its own."
            )
        self.modules.append(head)
        return Eagle3(head, model.max_context, kv_bits=self.spec.draft_kv_bits)

    def _dflash(self, beside: ModelFolder) -> Drafter:
        config, model = beside.config(), self.target.model
        block = assemble_dflash_lazily(
            config, beside.read, model, self.dtype, draft_bits=self.spec.draft_bits
        )
        self._check_own_tokenizer(beside)
        self.notices.append(
            f"{beside.path.name} is a {block.title}: it drafts up to {block.config.num_drafts} tokens at once."
        )
        self._say_unread(unknown_dflash_keys(config), "the block drafter's config.json")
        self._say_quantized(block.title, block.bits_at_load)
        self.modules.append(block)
        rows = self._head_rows("dflash", block)
        return DFlashDrafter(block, model.max_context, rows, kv_bits=self.spec.draft_kv_bits)

    def _mtp(self) -> Drafter:
        """A head that was named comes before the model's own; a whole model that was named lends its head only where there is no own."""
        model, beside = self.target.model, self.beside
        kind = None if beside is None else beside.kind()
        if beside is not None and kind == "assistant":
            config = beside.config()
            assistant = assemble_assistant_lazily(config, beside.read, model, self.dtype)
            self._say_unread(unknown_assistant_keys(config), "the assistant's config.json")
            self.modules.append(assistant)
            return GemmaAssistant(assistant, model.max_context, self._head_rows("mtp", assistant))
        head = self.target.mtp
        if beside is not None and (kind == "head" or head is None):
            head = assemble_head_lazily(beside.read, self.target, self.dtype, draft_bits=self.spec.draft_bits)
        if head is None:
            raise ModelError(f"This folder holds no MTP head: {HOW_TO_GET_A_HEAD}.")
        self._say_quantized("MTP head", head.bits_at_load)
        self.modules.append(head)
        rows = self._head_rows("mtp", head)
        return Mtp(head, model.max_context, rows, kv_bits=self.spec.draft_kv_bits)

    def _check_own_tokenizer(self, beside: ModelFolder) -> None:
        """A drafter that shares the target's tokens may come with their tokenizer. Raises VocabularyError where that is another one."""
        if (beside.path / "tokenizer.json").is_file():
            rows = self.target.model.vocab_size
            check_tokens(self.tokenizer, Tokenizer.from_folder(beside.path), rows, rows)

    def _say_unread(self, keys: Sequence[str], where: str) -> None:
        if keys:
            self.notices.append(not_read(keys, where))

    def _say_quantized(self, what: str, bits: int | None) -> None:
        if bits is not None:
            self.notices.append(
                f"The {what}, stored as floats, is kept in {bits} bits beside this quantized model; --draft-bits 16 leaves it."
            )

    def _head_rows(self, name: str, drafting: Drafting) -> HeadRows | None:
        """The rows of a language-model head that a drafter proposes from, None for all of them; without their weights."""
        spec = self.spec
        rows, said = choose_rows(
            name, drafting, self.target.model, self.tokenizer, spec.draft_vocab, spec.draft_bits
        )
        self.notices.extend(said)
        self.modules.extend([] if rows is None else [rows])
        return rows


def _towers(made: Assembled) -> list[nn.Module]:
    """The module that reads images, where there is one."""
    tower = None if made.vision is None else made.vision.tower
    return [tower] if isinstance(tower, nn.Module) else []


def _draft_vision(small: Assembled, target: Assembled, notices: list[str]) -> Vision | None:
    """What a draft model has for images. They are prepared once, so its settings must be the target's."""
    if target.vision is None:
        return None
    if small.vision is None:
        notices.append("The draft model reads no images, so it does not draft for prompts that hold some.")
        return None
    if small.vision.preprocessor != target.vision.preprocessor or small.vision.prompt != target.vision.prompt:
        notices.append(
            "The draft model prepares images otherwise than the model, so it does not draft for prompts that hold some."
        )
        return None
    return small.vision


def make_ngram_drafter(name: str, spec: SpecConfig, vocab_size: int) -> Drafter:
    """An n-gram drafter needs no model. Raises ConfigError for an unknown name or a file of counts that cannot be used."""
    if name == "ngram-simple":
        return NgramSimple(spec.ngram_n, spec.ngram_m)
    if name == "ngram-map-k":
        return NgramMapK(spec.ngram_n, spec.ngram_m, spec.ngram_min_hits)
    if name == "ngram-map-k4v":
        return NgramMapK4v(spec.ngram_n, spec.ngram_m, spec.ngram_min_hits)
    if name == "ngram-mod":
        return NgramMod(spec.ngram_mod_n, spec.ngram_m)
    if name == "ngram-cache":
        files = (spec.ngram_dynamic, spec.ngram_static)
        dynamic, static = (NgramTable.load(path, vocab_size) if path else None for path in files)
        return NgramCache(spec.ngram_m, dynamic, static)
    raise ConfigError(f"The drafter {name} cannot be made.")
