"""The kinds of drafters that lie in a folder of their own, in the order in which a folder is compared with them. Builds nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mlxspec.drafter_kinds import TITLES
from mlxspec.models import dflash, eagle3, gemma4_assistant
from mlxspec.models.drafter_module import DrafterFolder

FOLDERS = {folder.kind: folder for folder in (eagle3.FOLDER, dflash.FOLDER, gemma4_assistant.FOLDER)}
ALONE = frozenset(
    kind for kind, folder in FOLDERS.items() if folder.alone is not None
)  # built without their target


def folder_kind(names: Collection[str], config: Mapping[str, Any]) -> str | None:
    """Return the kind of drafter that a folder holds, by the names of its tensors or its config.json; None where it holds none of the kinds
    in FOLDERS."""
    return next((kind for kind, folder in FOLDERS.items() if folder.is_one(names, config)), None)


def title_of(kind: str, names: Collection[str]) -> str:
    """Return the title of a folder of this kind with its article, such as "an EAGLE-3 drafter". names: names of its tensors."""
    folder: DrafterFolder | None = FOLDERS.get(kind)
    return TITLES[kind] if folder is None or folder.title is None else folder.title(names)
