"""Which bytes of which files a selection of tensors is fetched from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from planting import catches, rewritten

from mlxspec.loading import ranges
from mlxspec.loading.ranges import FileRange, Repository, Selection, select
from mlxspec.loading.safetensors import TensorEntry

WHERE = Repository("a/b", "0" * 40, {"one": 1000, "two": 1000}, ())


def entry(begin: int, end: int) -> TensorEntry:
    return TensorEntry("U8", (end - begin,), begin, end)


def test_neighbours_of_a_file_are_one_range_and_those_of_two_files_are_two() -> None:
    """The second file's data begin where the first one's pieces end."""
    held = {
        "one": (100, {"c": entry(20, 50), "a": entry(0, 10), "b": entry(10, 20), "left out": entry(50, 60)}),
        "two": (
            150,
            {"d": entry(0, 5), "left out too": entry(5, 9), "e": entry(9, 12), "empty": entry(12, 12)},
        ),
    }
    found = select(WHERE, held, lambda _, name: not name.startswith("left out"))
    assert found.pieces == (
        FileRange("one", 100, 150),
        FileRange("two", 150, 155),
        FileRange("two", 159, 162),
    )
    assert list(found.tensors) == ["a", "b", "c", "d", "e", "empty"]
    assert found.data_bytes == 58
    assert found.size == len(found.header) + 58


@catches(
    "a later commit's tensors are taken for those that are here",
    "mlxspec.loading.ranges:Selection.key",
    lambda _: property(
        lambda self: hashlib.sha256(self.header + repr((self.repo, self.pieces)).encode()).hexdigest()
    ),
)
def test_the_key_of_a_selection_is_that_of_its_content_alone() -> None:
    one = Selection("a/b", "0" * 40, {"a": entry(0, 4)}, b"header", (FileRange("one", 8, 12),))
    others = (
        one._replace(repo="a/c"),
        one._replace(commit="1" * 40),
        one._replace(header=b"another"),
        one._replace(pieces=(FileRange("two", 8, 12),)),
        one._replace(pieces=(FileRange("one", 8, 13),)),
    )
    assert one.key == one._replace(tensors={}).key
    assert len({one.key, *(other.key for other in others)}) == 6


@catches(
    "whatever lies there is taken for what was fetched",
    "mlxspec.loading.ranges:fetch",
    rewritten("if path.is_file() and path.stat().st_size == wanted.size:", "if path.is_file():"),
)
@catches(
    "what is there is fetched again",
    "mlxspec.loading.ranges:fetch",
    rewritten("if path.is_file() and path.stat().st_size == wanted.size:", "if False:"),
)
def test_only_a_whole_file_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Selection("a/b", "0" * 40, {"a": entry(0, 4)}, b"header", (FileRange("one", 8, 12),))
    whole, path, asked = b"headerdata", tmp_path / "head.safetensors", list[FileRange]()

    def reader(repo: str, commit: str) -> Callable[[FileRange], bytes]:
        return lambda piece: asked.append(piece) or b"data"  # type: ignore[func-returns-value]

    monkeypatch.setattr(ranges, "_reader", reader)
    for num_bytes in (None, 0, 5, 9, 10, 11):
        asked.clear()
        if num_bytes is not None:
            path.write_bytes((whole + b"more")[:num_bytes])
        assert ranges.fetch(wanted, path).read_bytes() == whole, num_bytes
        assert asked == ([] if num_bytes == 10 else list(wanted.pieces)), num_bytes
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
