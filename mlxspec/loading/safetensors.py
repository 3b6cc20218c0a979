"""Checks a safetensors file's header before anything reads its tensors, because a downloaded file is not trusted.

Format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlxspec.errors import ModelError

_MAX_HEADER = 100 << 20  # the format's own limit
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4,
}  # fmt: skip

STORED = {  # as MLX reads what a header names
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "F8_E4M3": mx.uint8, "F8_E5M2": mx.uint8, "F8_E8M0": mx.uint8,
    "U16": mx.uint16, "I16": mx.int16, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "I32": mx.int32,
    "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64, "F64": mx.float32, "F4": mx.uint8,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """A tensor in the header of a safetensors file. dtype: as safetensors spells it. begin, end: its bytes, counted from the end of the
    header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a safetensors file, by name. Raises ModelError where the header is damaged, or a tensor
    lies outside the file or overlaps another."""
    return {name: (e.dtype, e.shape) for name, e in read_entries(path)[0].items()}


def read_entries(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """Return the tensors of a safetensors file by name, and the offset of its data. Raises ModelError as `check_header` does."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe waits for ever
            raise ModelError(f"{path.name} is no file.")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = header_length(file.read(8), size, path.name)
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read as safetensors: {_reason(error)}.") from error
    return entries(text, size - 8 - length, path.name), 8 + length


def header_length(first: bytes, size: int, file: str) -> int:
    """Return the length in bytes of a safetensors header. first: the first eight bytes of the file; size: of the file in bytes; file:
    its name, for errors. Raises ModelError where the length is impossible."""
    length = int.from_bytes(first, "little")
    if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise ModelError(f"{file} is no safetensors file, or it is cut short.")
    return length


def entries(header: bytes, room: int, file: str) -> dict[str, TensorEntry]:
    """Return the tensors that a safetensors header lists, by name. header: its JSON; room: bytes of the file after the header; file: its
    name, for errors. Raises ModelError where the header is damaged, or a tensor lies outside the file or overlaps another."""
    try:
        data = json.loads(header, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {_reason(error)}.") from error
    if not isinstance(data, dict):
        raise ModelError(f"{file} has a header that is no object.")
    data.pop("__metadata__", None)
    spans, found = [], {}
    for name, given in data.items():
        entry = _entry(file, name, given)
        if entry.end > room:
            raise ModelError(f"{file} is cut short: tensor {name[:80]!r} ends behind the end of the file.")
        if math.prod(entry.shape) * _BITS[entry.dtype] != (entry.end - entry.begin) * 8:
            raise ModelError(f"{file}: the bytes of tensor {name[:80]!r} do not match its shape.")
        spans.append((entry.begin, entry.end, name))
        found[name] = entry
    spans.sort()
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise ModelError(f"{file}: tensors {name[:80]!r} and {other[:80]!r} overlap.")
    return found


def header_of(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the first bytes (length and header) of a safetensors file that holds these tensors one after another, in this order.
    metadata: texts for the header's `__metadata__`, None for none."""
    at = 0
    data: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, entry in tensors.items():
        end = at + entry.end - entry.begin
        data[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(data, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers may map the data, which wants to be aligned
    return len(text).to_bytes(8, "little") + text


def _entry(file: str, name: str, entry: Any) -> TensorEntry:
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
        raise ModelError(f"{file}: the header entry of tensor {name[:80]!r} makes no sense.")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object as a dict. Raises ValueError where a name occurs twice: another reader might take the other
    value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return (error.strerror or "unreadable").lower()
    return "its header is no JSON in which every name stands once"
