"""The table of the kinds of drafters: each row is complete, and what reads the table knows each."""

from __future__ import annotations

import pytest

from mlxspec.config import ALWAYS_THERE, DRAFTER_NAMES
from mlxspec.drafter_kinds import DRAFTS_AS, KINDS, TITLES, DrafterKind
from mlxspec.engine.load_drafters import DrafterBuilder
from mlxspec.models.drafter_folders import FOLDERS


def test_names_and_kinds_of_folders_are_there_once() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) == len(DRAFTER_NAMES)
    folders = [folder for kind in KINDS for folder, _ in kind.folders]
    assert sorted(folders) == sorted(("head", "model", *FOLDERS)) == sorted(DRAFTS_AS) == sorted(TITLES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_can_be_made(kind: DrafterKind) -> None:
    by_name = kind.name == "mtp" or kind.name.startswith("ngram-") or kind.name in ALWAYS_THERE
    assert by_name != (kind.name in DrafterBuilder._CLASSES or kind.name == "draft-model")
    assert not (kind.by_request and kind.default)
