"""One file of the prefix store on disk: a label and named tensors, in the safetensors format, with a checksum over both.

Knows bytes, dtypes by name and shapes; knows no models, no folders and no MLX.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlxspec.errors import StorageError
from mlxspec.loading.safetensors import TensorEntry, entries, header_length, header_of

FORMAT, VERSION = "mlxspec prefix store", "1"
HEADER_AT_MOST = 4 << 20  # bytes
_KEY = re.compile(r"[0-9a-f]{64}")
_UNKNOWN = "0" * 64  # in the place of the checksum while it is computed
_NUMBER = re.compile(r"[0-9]{1,9}")

Bytes: TypeAlias = bytes | NDArray[np.uint8]
Kind = Literal["block", "end"]
KINDS: tuple[Kind, ...] = ("block", "end")


class Stored(NamedTuple):
    """A tensor on the host. dtype: as safetensors calls it. data (n,) uint8."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a piece says of itself. key: its name, 64 hexadecimal digits; parent: of the block before it, or the root of its part.
    model, part: for people. length: tokens of the text up to its end; num_tokens: how many of these it holds keys and values of (or
    hiddens). is_cuttable: its part has nothing but these, so that any whole blocks of it can be continued from."""

    key: str
    parent: str
    kind: Kind
    model: str
    part: str
    length: int
    num_tokens: int
    is_cuttable: bool

    def __post_init__(self) -> None:
        if not (_KEY.fullmatch(self.key) and _KEY.fullmatch(self.parent)):
            raise StorageError("A piece's name is 64 hexadecimal digits.")
        if self.kind not in KINDS or not 0 <= self.num_tokens <= self.length:
            raise StorageError("A piece's label makes no sense.")

    def data(self) -> dict[str, str]:
        """As safetensors metadata, without the checksum."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "key": self.key,
            "parent": self.parent,
            "kind": self.kind,
            "model": self.model,
            "part": self.part,
            "length": str(self.length),
            "num_tokens": str(self.num_tokens),
            "is_cuttable": str(int(self.is_cuttable)),
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Label:
        """Raises StorageError for what is no label of this version."""
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise StorageError("The file is of another format.")
        numbers = [data.get("length"), data.get("num_tokens")]
        texts = [data.get(name) for name in ("key", "parent", "model", "part")]
        if not all(isinstance(n, str) and _NUMBER.fullmatch(n) for n in numbers) or not all(
            isinstance(t, str) for t in texts
        ):
            raise StorageError("A piece's label makes no sense.")
        return cls(
            key=data["key"],
            parent=data["parent"],
            kind=data.get("kind"),  # type: ignore[arg-type]  # checked above
            model=data["model"],
            part=data["part"],
            length=int(data["length"]),
            num_tokens=int(data["num_tokens"]),
            is_cuttable=data.get("is_cuttable") == "1",
        )


def encoded(label: Label, tensors: Mapping[str, Stored]) -> list[Bytes]:
    """The file's bytes, in parts to be written one behind the other."""
    shapes = {
        name: TensorEntry(stored.dtype, stored.shape, 0, len(stored.data)) for name, stored in tensors.items()
    }
    head = header_of(shapes, {"checksum": _UNKNOWN, **label.data()})
    data: list[Bytes] = [stored.data for stored in tensors.values()]
    checksum = _digest(head, data)
    return [head.replace(_UNKNOWN.encode(), checksum.encode(), 1), *data]


def size_of(label: Label, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> int:
    """Bytes of the file of tensors of these dtypes, shapes and bytes."""
    shapes = {name: TensorEntry(dtype, shape, 0, size) for name, (dtype, shape, size) in tensors.items()}
    head = header_of(shapes, {"checksum": _UNKNOWN, **label.data()})
    return len(head) + sum(size for *_, size in tensors.values())


def read_label(first: bytes, size: int, name: str) -> Label:
    """Of a file of `size` bytes, by its header. first: the length field and the header, as `header_bytes` counts them. Raises MlxspecError
    where the file is no whole piece called `name`; what its data are worth the checksum says."""
    return _label(first, size, name)[0]


def header_bytes(first: bytes, size: int, name: str) -> int:
    """Bytes of length field and header of a file of `size` bytes, by its first eight. Raises MlxspecError."""
    length = header_length(first, size, name)
    if length > HEADER_AT_MOST:
        raise StorageError(f"{name} has a header that is too long for a piece.")
    return 8 + length


def decoded(data: NDArray[np.uint8], name: str) -> tuple[Label, dict[str, Stored]]:
    """A whole file. Tensors are views of `data`. Raises MlxspecError where anything in it is not as it was written."""
    size = len(data)
    head = data[: header_bytes(data[:8].tobytes(), size, name)].tobytes()
    label, found, checksum = _label(head, size, name)
    body = data[len(head) :]
    unsigned = head.replace(checksum.encode(), _UNKNOWN.encode(), 1)
    if _digest(unsigned, [body]) != checksum:
        raise StorageError(f"{name} has changed since it was written.")
    return label, {
        key: Stored(entry.dtype, entry.shape, body[entry.begin : entry.end]) for key, entry in found.items()
    }


def _label(first: bytes, size: int, name: str) -> tuple[Label, dict[str, TensorEntry], str]:
    """Label, tensors, checksum."""
    length = header_bytes(first[:8], size, name)
    if len(first) != length:
        raise StorageError(f"{name} is cut short.")
    found = entries(first[8:], size - length, name)
    if max((entry.end for entry in found.values()), default=0) != size - length:
        raise StorageError(f"{name} is longer than its tensors.")
    if sum(entry.end - entry.begin for entry in found.values()) != size - length:
        raise StorageError(f"{name} has bytes that belong to no tensor.")
    metadata = json.loads(first[8:]).get("__metadata__")
    if not isinstance(metadata, dict):
        raise StorageError(f"{name} has no label.")
    label, checksum = Label.of(metadata), metadata.get("checksum")
    if label.key != name.split(".", 1)[0]:
        raise StorageError(f"{name} is called otherwise than its label says.")
    if not isinstance(checksum, str) or not _KEY.fullmatch(checksum):
        raise StorageError(f"{name} has no checksum.")
    return label, found, checksum


def _digest(head: bytes, data: Sequence[Bytes]) -> str:
    found = hashlib.sha256(head)
    for part in data:
        found.update(part)
    return found.hexdigest()
