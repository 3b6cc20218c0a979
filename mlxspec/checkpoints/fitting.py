"""Chooses the models with short names that fit a machine, and what drafts for each. Uses no network."""

from __future__ import annotations

import re
from typing import NamedTuple

from mlxspec.checkpoints.catalogue import catalogue
from mlxspec.loading.short_names import short_names

_ROOM = 1.3  # memory over weights: a few thousand tokens of context and a drafter
# what mlx-community adds to the name of the model that it converted
_OF_CONVERSION = re.compile(r"^meta-(?=llama)|-(4bit|mxfp4-q8)$")

_OF_EXPERTS = re.compile(r"-A\d+B\b")


class Fitting(NamedTuple):
    """A model that fits a machine. name: its short name; repo: its repository; size: bytes of the weights; drafter: a phrase on what
    drafts for it once it is fetched."""

    name: str
    repo: str
    size: int
    drafter: str


def fitting(machine: int) -> list[Fitting]:
    """Return the models with short names whose weights and some context fit into `machine` bytes of memory. Models with an MTP head come
    first, of them mixtures of experts, of them the largest."""
    found = []
    for known in sorted(
        short_names(), key=lambda k: (k.head, bool(_OF_EXPERTS.search(k.repo)), k.gb), reverse=True
    ):
        if known.gb * 1e9 * _ROOM > machine:
            continue
        base = _OF_CONVERSION.sub("", known.repo.partition("/")[2].lower()).removesuffix("-it")
        beside = [
            d
            for d in catalogue()
            if any(t.partition("/")[2].removesuffix("-it").lower() == base for t in d.targets)
        ]
        drafter = (
            "its MTP head" if known.head else f"{beside[0].kind}, {beside[0].repo}" if beside else "lookups"
        )
        found.append(Fitting(known.name, known.repo, int(known.gb * 1e9), drafter))
    return found
