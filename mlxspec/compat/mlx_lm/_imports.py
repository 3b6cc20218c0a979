"""Imports of modules below one package that are another package's: each stands for the module of the same name there, with the names that
were given in the place of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """A module with all names of another module, some of them replaced by objects of mlxspec."""

    def __init__(self, name: str, theirs: ModuleType, ours: Mapping[str, Any]) -> None:
        super().__init__(name, theirs.__doc__)
        self._theirs = theirs
        self.__all__ = getattr(theirs, "__all__", [n for n in vars(theirs) if not n.startswith("_")])
        if hasattr(theirs, "__path__"):
            self.__path__: list[str] = []  # modules below it are found here too, and not loaded a second time
        vars(self).update({n: value for n, value in ours.items() if n in vars(theirs)})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def __dir__(self) -> list[str]:
        return dir(self._theirs)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str, theirs: str, ours: Mapping[str, Any]) -> None:
        self._package, self._theirs, self._ours = package, theirs, ours

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{self._package}."):
            return None
        found = find_spec(self._theirs + name.removeprefix(self._package))
        if found is None:
            return None
        return ModuleSpec(name, self, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        theirs = import_module(self._theirs + spec.name.removeprefix(self._package))
        return StandIn(spec.name, theirs, self._ours)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the original module has been run under its own name."""


def install(package: str, theirs: str, ours: Mapping[str, Any]) -> None:
    """Make the modules of the package `theirs` importable below `package`, unless `package` has a module of that name. ours: objects by
    name, which replace objects of the same names in these modules."""
    sys.meta_path.append(_Finder(package, theirs, ours))
