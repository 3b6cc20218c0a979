"""Values out of a config.json, judged as they are read. Knows bounds; knows no architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxspec.errors import ModelError

WIDEST = 1 << 24  # outputs of one projection
_MOST = {
    "num_hidden_layers": 1024,
    "num_kv_shared_layers": 1024,
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 16,
    "num_experts": 1 << 14,
}


def short(value: Any) -> str:
    """What a config says, cut to what fits into a sentence."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`, empty where there is none. Raises ModelError when it is something else."""
    found = values.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ModelError(f"{key} in config.json is not an object.")
    return found


class Values:
    """Bounded numbers, flags and choices of a JSON object. Every method raises ModelError naming the key; null is the same as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.raw = values

    def size(self, key: str, default: int | None = None) -> int:
        """An integer from 1 (0 where the default is 0) to what is plausible."""
        value = self._get(key, default)
        low = 0 if default == 0 else 1
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not low <= value <= _MOST.get(key, 1 << 24)
        ):
            raise ModelError(f"config.json: {key} is {short(value)}, which is no usable size.")
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            raise ModelError(f"config.json: {key} is {short(value)}, which is no usable number.")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} is {short(value)}, which is neither true nor false.")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """The value must be one of `allowed`, or absent: what it would change is not implemented."""
        value = self.raw.get(key)
        if value is not None and not any(
            value is a or (value == a and type(value) is type(a)) for a in allowed
        ):
            raise ModelError(f"config.json: {key} {short(value)} is not supported.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value
