"""Small files that are kept: written as a whole, and as good as none where they cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planting import catches

from mlxspec.platform import kept_json


@catches(
    "a kept file is written in place",
    "mlxspec.platform.kept_json:write",
    lambda right: lambda path, data: path.write_text(json.dumps(data)),
)
def test_who_reads_while_a_file_is_written_reads_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    kept_json.write(path, {"old": 1})
    with path.open() as reading:
        kept_json.write(path, {"new": [2] * 1000})
        assert json.load(reading) == {"old": 1}
    assert kept_json.read(path) == {"new": [2] * 1000}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.json"
    kept_json.write(path, {"old": 1})

    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    kept_json.write(path, {"new": 2})
    assert kept_json.read(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


@catches(
    "a kept file of any size is read",
    "mlxspec.platform.kept_json:LARGEST",
    lambda right: 1 << 40,
    case="1-None",
)
@pytest.mark.parametrize(("more", "wanted"), [(0, 7), (1, None)])
def test_a_file_that_is_too_large_is_as_good_as_none(more: int, wanted: int | None, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text("7".rjust((1 << 20) + more))
    assert kept_json.read(path) == wanted
