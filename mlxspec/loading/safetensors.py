"""Checks a safetensors file's header before anything reads its tensors, because a downloaded file is not trusted.

Format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, then the data.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mlxspec.errors import ModelError

_MAX_HEADER = 100 << 20  # the format's own limit
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4,
}  # fmt: skip


def check_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (dtype, shape). Raises ModelError unless every tensor lies whole, alone and inside the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ModelError(f"{path.name} is no safetensors file, or it is cut short.")
            header = json.loads(file.read(length), object_pairs_hook=_object)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} cannot be read as safetensors: {_reason(error)}.") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path.name} has a header that is no object.")
    header.pop("__metadata__", None)
    spans, found = [], {}
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry)
        if end > size - 8 - length:
            raise ModelError(
                f"{path.name} is cut short: tensor {name[:80]!r} ends behind the end of the file."
            )
        if math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
            raise ModelError(f"{path.name}: the bytes of tensor {name[:80]!r} do not match its shape.")
        spans.append((begin, end, name))
        found[name] = (dtype, shape)
    spans.sort()
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise ModelError(f"{path.name}: tensors {name[:80]!r} and {other[:80]!r} overlap.")
    return found


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        good = (
            dtype in _BITS
            and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)
            and begin <= end
            and len(shape) <= 8
            and all(n < 1 << 31 for n in shape)
        )
    except (TypeError, KeyError, ValueError):
        good = False
    if not good:
        raise ModelError(f"{path.name}: the header entry of tensor {name[:80]!r} makes no sense.")
    return dtype, tuple(shape), begin, end


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that stands twice may mean one thing to us and another to whoever reads the tensors."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return (error.strerror or "unreadable").lower()
    return "its header is no JSON in which every name stands once"
