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
    """A published drafter: one entry of drafters.toml. kind: one of KINDS. targets: the models that it was made for. parameters: their
    number in billions, None where the source does not state it. license, note: "" where the source has none. source: address of the
    page; read: the date on which it was read, YYYY-MM-DD. Raises ConfigError for wrong values."""

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
    """Return all drafters of drafters.toml, in the order of the file. Raises ConfigError where an entry is wrong or a repository is
    listed twice."""
    lines = tomllib.loads(DATA.read_text(encoding="utf-8"))["drafter"]
    found = tuple(
        PublishedDrafter(**line | {"targets": tuple(line["targets"]), "read": str(line["read"])})
        for line in lines
    )
    if len({p.repo for p in found}) < len(found):
        raise ConfigError(f"{DATA.name} names a repository twice.")
    return found


def drafters_for(names: Iterable[str]) -> list[PublishedDrafter]:
    """Return the catalogue's drafters that were made for any of these models, the best first. names: repositories, compared without
    regard to case."""
    wanted = {name.lower() for name in names}
    return [p for p in catalogue() if wanted & {target.lower() for target in p.targets}]
