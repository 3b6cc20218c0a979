"""Reads `drafters.toml`, the list of drafters that were published for known models. Uses no network; pairing.py checks whether one fits."""

from __future__ import annotations

import datetime
import functools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlxspec.errors import ConfigError
from mlxspec.loading.repositories import check_repo

DATA = Path(__file__).with_name("drafters.toml")
KINDS = ("head", "assistant", "EAGLE-3", "DFlash", "DFlash2", "DSpark")


@dataclass(frozen=True, kw_only=True)
class PublishedDrafter:
    """One repository that holds a drafter. targets: the models that it was made for; parameters: in billions, None where the source does
    not say; license, note: "" where it does not say; read: when the source was read, YYYY-MM-DD. Raises ConfigError for a line that is
    wrong."""

    repo: str
    kind: str
    targets: tuple[str, ...]
    parameters: float | None = None
    license: str = ""
    note: str = ""
    read: str
    source: str

    def __post_init__(self) -> None:
        for name in (self.repo, *self.targets):
            check_repo(name)
        if self.kind not in KINDS:
            raise ConfigError(f"{self.repo}: kind must be one of {', '.join(KINDS)}, not {self.kind!r}.")
        if not self.targets or self.repo in self.targets:
            raise ConfigError(f"{self.repo}: targets must name the models that it drafts for.")
        if self.parameters is not None and not 0 < self.parameters < 1000:
            raise ConfigError(f"{self.repo}: parameters are given in billions.")
        if not self.source.startswith("https://"):
            raise ConfigError(f"{self.repo}: source must be the address of a page.")
        datetime.date.fromisoformat(self.read)


@functools.cache
def catalogue() -> tuple[PublishedDrafter, ...]:
    """All of them, in the order of the file."""
    lines = tomllib.loads(DATA.read_text(encoding="utf-8"))["drafter"]
    found = tuple(
        PublishedDrafter(**line | {"targets": tuple(line["targets"]), "read": str(line["read"])})
        for line in lines
    )
    if len({p.repo for p in found}) < len(found):
        raise ConfigError(f"{DATA.name} names a repository twice.")
    return found


def drafters_for(names: Iterable[str]) -> list[PublishedDrafter]:
    """Return the drafters made for any of these models, the best first. Case does not matter: conversions spell `base_model` in several
    ways."""
    wanted = {name.lower() for name in names}
    return [p for p in catalogue() if wanted & {target.lower() for target in p.targets}]
