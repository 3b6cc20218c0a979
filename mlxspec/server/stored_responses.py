"""Responses that were asked to be stored, in memory: within a number of bytes, each for a while. Nothing is written to disk."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.server.errors import ApiError


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """response: the object as its client got it. items: the conversation up to its end, as input items of the API. num_bytes: of both as
    JSON, what earlier responses share with it counted again. until: when it is dropped, on the store's clock."""

    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    num_bytes: int
    until: float


class StoredResponses:
    """By id. max_bytes: of all together; the one used longest ago goes first. seconds: how long one stays after it was made."""

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._seconds, self._clock = max_bytes, seconds, clock
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a response of so many bytes can be kept at all."""
        return num_bytes <= self._max_bytes

    def put(self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]], num_bytes: int) -> None:
        """Keep one that `has_room` for."""
        self._drop_old()
        while self._kept and self.num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))
        until = self._clock() + self._seconds
        self._kept[response["id"]] = StoredResponse(
            response=response, items=items, num_bytes=num_bytes, until=until
        )
        self.num_bytes += num_bytes

    def find(self, name: str) -> StoredResponse | None:
        self._drop_old()
        found = self._kept.get(name)
        if found is not None:
            self._kept.move_to_end(name)
        return found

    def get(self, name: str) -> StoredResponse:
        """Raises ApiError (404)."""
        found = self.find(name)
        if found is None:
            raise ApiError(
                f"There is no stored response {name[:100]!r}; responses are kept in memory, for a while only.",
                status=404,
                code="response_not_found",
            )
        return found

    def items(self) -> dict[str, Mapping[str, Any]]:
        """The items that stored responses gave their clients, by their ids, which the server has drawn."""
        self._drop_old()
        return {item["id"]: item for kept in self._kept.values() for item in kept.response["output"]}

    def delete(self, name: str) -> None:
        """Raises ApiError (404)."""
        self.get(name)
        self._drop(name)

    def _drop_old(self) -> None:
        now = self._clock()
        for name in [n for n, kept in self._kept.items() if kept.until <= now]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self.num_bytes -= self._kept.pop(name).num_bytes


def size_of(value: Any) -> int:
    """Bytes of a value as JSON."""
    return len(json.dumps(value, ensure_ascii=False).encode())
