"""Decides which drafters draft, by the caller's options and by the contents of the folders of the model and of the draft model. Builds the
drafters without their weights, and collects the modules that must be evaluated before they run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlxspec.config import DRAFTER_NAME, DRAFTER_NAMES, OTHER_NAMES, SpecConfig
from mlxspec.drafter_kinds import BY_NAME, DRAFTS_AS, KINDS
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.checked import check_description
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel, check_tokens, check_vocabularies
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.gemma_assistant import GemmaAssistant
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading.added_tokens import has_vocabulary
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.assemble import HOW_TO_GET_A_HEAD, Assembled, assemble_folder, not_read
from mlxspec.models.assemble_drafter import (
    assemble_drafter,
    assemble_head_lazily,
)
from mlxspec.models.folder import ModelFolder
from mlxspec.models.head_rows import HeadRows
from mlxspec.models.proposal_rows import Drafting, choose_rows
from mlxspec.models.vision.base import Vision
from mlxspec.option import near, of_kind, shown, texts


def own_drafters(drafters: Sequence[Drafter]) -> dict[str, Drafter]:
    """Return the caller's Drafter objects by name. Raises ConfigError for an object that is no Drafter, and for a name that is missing,
    invalid or taken."""
    of_kind("drafters", drafters, list, tuple)
    found: dict[str, Drafter] = {}
    for drafter in drafters:
        if not isinstance(drafter, Drafter):
            raise ConfigError(
                f"drafters holds objects of classes that inherit from mlxspec.Drafter, not {shown(drafter)}."
            )
        name = getattr(drafter, "name", None)
        if not isinstance(name, str) or not DRAFTER_NAME.fullmatch(name) or name in ("off", "auto"):
            raise ConfigError(f"A drafter needs a `name` of letters, digits and dashes, not {shown(name)}.")
        if name in (*DRAFTER_NAMES, *OTHER_NAMES, *found):
            raise ConfigError(f"There is a drafter {name} already; give yours another name.")
        check_description(drafter)
        found[name] = drafter
    return found


def asked_drafters(
    draft: str | Sequence[str], spec: SpecConfig, own: Collection[str]
) -> tuple[str, ...] | None:
    """Return the names of the drafters that the caller has chosen; () for "off", None for "auto". own: names of the caller's own Drafter
    objects; all of them must be used. Raises ConfigError for an unknown name."""
    if draft == "auto" and not spec.drafters:
        return None
    if draft == "auto":
        draft = spec.drafters
    if draft == "off":
        draft = ()
    names = tuple(n.strip() for n in draft.split(",")) if isinstance(draft, str) else texts("draft", draft)
    if {"off", "auto"} & set(names):
        raise ConfigError("`off` and `auto` stand alone in a list of drafters.")
    names = SpecConfig(drafters=names).drafters
    for name in names:
        if name not in DRAFTER_NAMES and name not in own:
            there = (*DRAFTER_NAMES, *own, "auto", "off")
            tip = near(name, there) or f"there are: {', '.join(there)}."
            raise ConfigError(f"There is no drafter {shown(name)}; {tip}")
    unused = [name for name in own if name not in names]
    if unused:
        raise ConfigError(f"The drafter {unused[0]} was given, but is not among those that are to draft.")
    return names


def drafters_that_draft(
    asked: tuple[str, ...] | None,
    target: Assembled,
    beside: ModelFolder | None,
    own: tuple[str, ...],
    *,
    is_named: bool,
) -> tuple[str, ...]:
    """Return the names of the drafters that draft, in order. asked: names that the caller chose, None for "auto". beside: folder of the
    draft model. own: names of the caller's own drafters. is_named: the caller named `beside`; its drafter then replaces the model's
    own head, or is an error where `asked` leaves it out. A drafter that is only paired with the model drafts in addition to the head
    where both can. Raises ConfigError and ModelError."""
    folder = None if beside is None else BY_NAME[DRAFTS_AS[beside.kind()]]
    if asked is None:
        head = () if target.mtp is None or (is_named and folder is not None) else ("mtp",)
        lookups = (kind.name for kind in KINDS if kind.default and not kind.folders)
        drafts = folder is not None and folder.default and (folder.beside_head or not head)
        return (*own, *lookups, *head, *([folder.name] if drafts and folder is not None else []))
    if "mtp" in asked and target.unsupported_head is not None and beside is None:
        raise ModelError(
            f"There is no drafting with this model's MTP head: {target.unsupported_head}; leave `mtp` out."
        )
    if "mtp" in asked and target.mtp is None and beside is None:
        raise ModelError(f"This folder holds no MTP head: {HOW_TO_GET_A_HEAD}, or leave `mtp` out.")
    for kind in KINDS:
        if kind.name in asked and kind.folders and kind not in (folder, BY_NAME["mtp"]):
            if beside is not None and folder is not None and kind.name == "draft-model":
                raise ConfigError(
                    f"{beside.path} is no model of its own; its drafts are asked for as `{folder.name}`."
                )
            raise ConfigError(
                f"The drafter {kind.name} needs {kind.needs}: name it with --draft-model (draft_model=...)."
            )
    if beside is None or folder is None:
        return asked
    lends_head = "mtp" in asked and folder.name == "draft-model" and target.mtp is None
    if is_named and folder.name not in asked and not lends_head:
        raise ConfigError(
            f"The draft model {beside.path} would not be used: add {folder.name} to the drafters, or leave --draft-model "
            "(draft_model=...) out."
        )
    return asked


@dataclass(frozen=True, kw_only=True)
class DrafterBuilder:
    """A builder of drafters that also collects their modules and notices. beside: the folder of the draft model or head, None without
    one. dtype: of weights that are floats; None as in `load`. modules: the modules that must be evaluated before they run, the target
    first. notices: sentences on what was found and on what is not used."""

    spec: SpecConfig
    target: Assembled
    tokenizer: Tokenizer
    beside: ModelFolder | None
    dtype: mx.Dtype | None
    modules: list[nn.Module]
    notices: list[str]

    def drafter(self, name: str) -> Drafter:
        """Return the drafter of this name, without its weights, and add its modules and notices to the builder's. Raises ConfigError and
        ModelError where it cannot be made."""
        if name.startswith("ngram-"):
            return ngram_lookup(name, self.spec.ngram_n, self.spec.ngram_m, self.spec.ngram_min_hits)
        hides_layers = BY_NAME[name].reads_layers and not self.target.model.num_layers
        if self.target.made_by and (name == "mtp" or hides_layers):
            raise ModelError(
                f"The drafter {name} reads what this model, which runs by mlx-lm's code, does not show."
            )
        if name == "mtp":
            return self._mtp()
        if self.beside is None:
            raise ConfigError(f"The drafter {name} cannot be made.")
        return self._draft_model(self.beside) if name == "draft-model" else self._in_folder(name, self.beside)

    def _draft_model(self, beside: ModelFolder) -> Drafter:
        vocab_size = self.target.model.vocab_size
        small = assemble_folder(beside, self.dtype, images=self.target.vision is not None)
        self.notices.extend(f"Of the draft model: {notice}" for notice in small.notices)
        vision = _draft_vision(small, self.target, self.notices)
        self.modules.extend(towers_of(small) if vision is not None else [])
        own = Tokenizer.from_folder(beside.path)
        own.check_rows(small.model.vocab_size)
        check_vocabularies(self.tokenizer, own, vocab_size, small.model.vocab_size)
        self.modules.append(small.model)
        return DraftModel(
            small.model,
            vocab_size,
            self._head_rows("draft-model", small.model),
            vision,
            kv_bits=self.spec.draft_kv_bits,
        )

    def _in_folder(self, name: str, beside: ModelFolder) -> Drafter:
        """Return the drafter of this name, an EAGLE-3 or block drafter, whose weights are in the folder `beside`."""
        model, spec = self.target.model, self.spec
        made = assemble_drafter(
            beside.kind(), beside.config(), beside.read, model, self.dtype, draft_bits=spec.draft_bits
        )
        self._check_own_tokenizer(beside)
        self._say_unread(made.config.unread, f"the {made.title}'s config.json")
        self._say_quantized(made.title, made.bits_at_load)
        self.modules.append(made)
        if not BY_NAME[name].has_own_rows:
            rows = self._head_rows(name, made)
            drafter = self._CLASSES[name](made, model.max_context, rows, kv_bits=spec.draft_kv_bits)
        else:
            if spec.draft_vocab:
                self.notices.append(
                    f"--draft-vocab is not used: the {made.title} proposes over {made.num_proposed} tokens of its own."
                )
            drafter = self._CLASSES[name](made, model.max_context, kv_bits=spec.draft_kv_bits)
        if drafter.drafts_at_once and made.summary:
            self.notices.append(f"{beside.path.name} is a {made.title}: it {made.summary}.")
        return drafter

    def _mtp(self) -> Drafter:
        """Return the drafter of an MTP head. A folder of a head that the caller named is preferred to the model's own head; a whole
        model that the caller named lends its head only where the target has none. Raises ModelError where there is no head."""
        model, beside = self.target.model, self.beside
        kind = None if beside is None else beside.kind()
        if beside is not None and kind == "assistant":
            config = beside.config()
            assistant = assemble_drafter("assistant", config, beside.read, model, self.dtype)
            self._say_unread(assistant.config.text.unread, "the assistant's config.json")
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
        """Check that a tokenizer in the drafter's folder, if there is one, has the target's tokens. Raises VocabularyError where they
        differ."""
        if has_vocabulary(beside.path):
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
        """Return the rows of the language-model head that a drafter proposes from, without their weights; None: all rows. drafting: the
        drafter's model."""
        spec = self.spec
        rows, said = choose_rows(
            name, drafting, self.target.model, self.tokenizer, spec.draft_vocab, spec.draft_bits
        )
        self.notices.extend(said)
        self.modules.extend([] if rows is None else [rows])
        return rows

    # of the kinds of drafters whose weights are in a folder of their own
    _CLASSES: ClassVar[Mapping[str, Any]] = {"eagle3": Eagle3, "dflash": DFlashDrafter}


def towers_of(made: Assembled) -> list[nn.Module]:
    """Return the vision tower of a model in a list; an empty list where it has none."""
    tower = None if made.vision is None else made.vision.tower
    return [tower] if isinstance(tower, nn.Module) else []


def _draft_vision(small: Assembled, target: Assembled, notices: list[str]) -> Vision | None:
    """Return the vision parts of a draft model; None, with a sentence added to `notices`, where it cannot draft for prompts with images.
    Images are prepared only once, so the settings of both models must be equal."""
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
