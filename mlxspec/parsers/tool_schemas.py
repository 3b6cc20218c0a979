"""The schemas of a request's tools, each read at its first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.errors import GrammarError
from mlxspec.parsers.schema import Schema, Unheld

_ANYTHING = {"type": "object"}


class ToolSchemas:
    """The schemas of a request's tools by the tools' names; each is read at its first use. tools: the tools in OpenAI's form."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tools = tools
        self._given = {
            str(t["function"].get("name")): t["function"]
            for t in tools
            if isinstance(t.get("function"), Mapping)
        }
        self._read: dict[str, Schema] = {}

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._given)

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def of(self, name: str) -> Schema:
        """Return the schema of the parameters of the tool `name`. Raises GrammarError, with the tool's name, for parameters that are no
        schema."""
        if name not in self._read:
            given = self._given[name].get("parameters")
            try:
                self._read[name] = Schema(given if given else _ANYTHING)
            except GrammarError as error:
                raise GrammarError(f"The parameters of the tool {name} cannot be used: {error}") from error
        return self._read[name]

    def left_out(self, name: str) -> list[Unheld]:
        """Return the keywords of the tool's parameters that a grammar cannot enforce."""
        return self.of(name).left_out

    def is_strict(self, name: str) -> bool:
        return self._given[name].get("strict") is True

    def kinds(self, function: str, parameter: str) -> frozenset[str] | None:
        """Return the JSON types that a parameter of the tool `function` may have; None for a parameter that is not declared, or whose
        schema cannot be read."""
        try:
            schema = self.of(function)
            part = schema.member(parameter)
            is_declared = not isinstance(part, bool) or self.declares(function, parameter)
            return schema.kinds(part) if is_declared else None
        except (GrammarError, KeyError):
            return None

    def declares(self, function: str, parameter: str) -> bool:
        """Return whether the tool `function` declares a parameter of this name."""
        try:
            shapes = self.of(function).shapes()
        except (GrammarError, KeyError):
            return False
        return any(parameter in shape.rules.get("properties", {}) for shape in shapes)
