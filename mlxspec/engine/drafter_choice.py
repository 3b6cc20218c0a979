"""Decides which drafters draft: what the caller asked for, what the model's folder and the draft model's folder hold, and what the user
should be told of it. Builds nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mlxspec.config import DRAFTER_NAME, DRAFTER_NAMES, OTHER_NAMES, SpecConfig, shown
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.checked import check_description
from mlxspec.errors import ConfigError, ModelError
from mlxspec.models.assemble import HOW_TO_GET_A_HEAD, Assembled
from mlxspec.models.folder import DRAFTS_AS, ModelFolder


def own_drafters(drafters: Sequence[Drafter]) -> dict[str, Drafter]:
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
        if name in (*DRAFTER_NAMES, *OTHER_NAMES, *found):
            raise ConfigError(f"There is a drafter {name} already; give yours another name.")
        check_description(drafter)
        found[name] = drafter
    return found


def asked_drafters(
    draft: str | Sequence[str], spec: SpecConfig, own: Collection[str]
) -> tuple[str, ...] | None:
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


def drafters_that_draft(
    asked: tuple[str, ...] | None,
    target: Assembled,
    beside: ModelFolder | None,
    own: tuple[str, ...],
    *,
    is_named: bool,
) -> tuple[str, ...]:
    """Who drafts. is_named: `beside` was named by the caller, so it is used, in place of the model's own head, or refused. One that is
    paired with the model drafts together with the head where both can. Raises ConfigError and ModelError."""
    kind = None if beside is None else beside.kind()
    if asked is None:
        head = () if target.mtp is None or (is_named and kind is not None) else ("mtp",)
        beside_head = (
            () if kind is None or (head and DRAFTS_AS[kind] in ("mtp", "draft-model")) else (DRAFTS_AS[kind],)
        )
        return (*own, "suffix", "ngram-simple", *head, *beside_head)
    if "mtp" in asked and target.unsupported_head is not None and beside is None:
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


def missing_head_notice(
    asked: tuple[str, ...] | None, names: tuple[str, ...], target: Assembled
) -> list[str]:
    """What a person may not know who left the choice of drafters to us."""
    if asked is not None or "mtp" in names or not target.lacks_head:
        return []
    return [f"There is no drafting with this model's MTP head, which its folder lacks: {HOW_TO_GET_A_HEAD}."]


def unused_head_notice(asked: tuple[str, ...] | None, names: tuple[str, ...], target: Assembled) -> list[str]:
    """What a person may not know who named a draft model for a model with a head."""
    drafting = next((name for name in ("draft-model", "eagle3", "dflash") if name in names), None)
    if asked is not None or drafting is None or target.mtp is None or "mtp" in names:
        return []
    return [
        f"The draft model that was named drafts, this model's MTP head does not: --draft mtp,{drafting} uses both."
    ]


def unused_kv_bits_notice(spec: SpecConfig, drafters: Sequence[Drafter]) -> list[str]:
    """What a person may not know who asked for drafters' keys and values in few bits where there are none to be had."""
    bits = spec.draft_kv_bits
    if bits == SpecConfig.draft_kv_bits or any(getattr(d, "kv_bits", None) == bits for d in drafters):
        return []
    return [
        f"--draft-kv-bits {bits} (draft_kv_bits) is not used: no drafter here keeps keys and values of its own."
    ]
