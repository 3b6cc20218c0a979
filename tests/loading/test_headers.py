"""Headers of safetensors files that are written here, and lists of added tokens: what readers of others rely on, and limits by one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from planting import catches

from mlxspec.errors import ModelError, TokenizerError
from mlxspec.loading import added_tokens
from mlxspec.loading.safetensors import TensorEntry, check_header, header_of


def of_four(right: Any) -> Any:
    """Pads a header to a multiple of four bytes."""

    def header(tensors: Any, metadata: Any = None) -> bytes:
        text = right(tensors, metadata)[8:].rstrip(b" ")
        text += b" " * (-len(text) % 4)
        return len(text).to_bytes(8, "little") + text

    return header


@catches("headers are not aligned", "mlxspec.loading.safetensors:header_of", of_four)
def test_a_header_ends_at_a_multiple_of_eight_and_is_read_back(tmp_path: Path) -> None:
    """Readers map the data, which wants to be aligned; a name may have any length."""
    for length in range(1, 17):
        shapes = {"a" * length: (3, 4), "b": (5,), "c": ()}
        tensors = {n: TensorEntry("F32", s, 0, 4 * math.prod(s)) for n, s in shapes.items()}
        header = header_of(tensors, {"made": "here"} if length % 2 else None)
        assert len(header) % 8 == 0
        path = tmp_path / f"{length}.safetensors"
        path.write_bytes(header + bytes(4 * sum(map(math.prod, shapes.values()))))
        assert check_header(path) == {name: ("F32", shape) for name, shape in shapes.items()}
        assert {name: x.shape for name, x in mx.load(str(path)).items()} == shapes


@pytest.mark.parametrize("size", range(12))
def test_a_file_without_a_whole_header_is_refused(size: int, tmp_path: Path) -> None:
    whole = header_of({"a": TensorEntry("F32", (1,), 0, 4)}) + bytes(4)
    path = tmp_path / "cut.safetensors"
    path.write_bytes(whole[:size])
    with pytest.raises(ModelError, match=r"cut\.safetensors"):
        check_header(path)
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert check_header(path) == {}


@catches(
    "the longest token is refused",
    "mlxspec.loading.added_tokens:_LONGEST",
    lambda right: right - 1,
    errors=(TokenizerError,),
)
def test_an_added_token_may_have_4096_characters() -> None:
    for length in (1, 4096):
        (token,) = added_tokens.declared({"eos_token": "x" * length}, {}, {})
        assert token["content"] == "x" * length
    with pytest.raises(TokenizerError, match="too long"):
        added_tokens.declared({"eos_token": "x" * 4097}, {}, {})
