"""Faults of the memory plan that more than one test finds."""

from __future__ import annotations

from typing import Any

from mlxspec.engine import memory


def without_own_row(_: Any) -> Any:
    """Return a stand-in of `EngineMemory.has_room` for a request that counts as if it took no part in the rounds that it joins."""
    return lambda self, request: (
        not self._reserved
        or self.weights
        + self.reserved
        + self.needed(request)
        + self.activations(memory.SMALLEST_CHUNK, max(self._longest, 11), rows=len(self._reserved))
        <= self.budget
    )
