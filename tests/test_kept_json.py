"""Small files that are kept: written as a whole, and as good as none where they cannot be read."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from planting import catches

from mlxspec.platform import folders, kept_json


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


def one_name_beside(path: Path, data: bytes) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    beside.replace(path)


@catches(
    "all writers share the unfinished file",
    "mlxspec.platform.folders:write_whole",
    lambda right: one_name_beside,
)
def test_two_writers_at_once_leave_whole_files(tmp_path: Path) -> None:
    path, both = tmp_path / "kept.json", threading.Barrier(2, timeout=10)

    failed: list[BaseException] = []

    def write(number: int) -> None:
        try:
            both.wait()
            for _ in range(40):
                folders.write_whole(path, json.dumps([number] * 20_000 * number).encode())
                assert set(json.loads(path.read_bytes())) <= {1, 2}
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_goes_an_hour_later(tmp_path: Path) -> None:
    path, left, fresh = (tmp_path / name for name in ("a[1].json", ".a[1].json.x1.new", ".a[1].json.x2.new"))
    other = tmp_path / ".b.json.x1.new"
    for file in (left, fresh, other):
        file.write_text("half")
    os.utime(left, (1, 1))
    os.utime(other, (1, 1))
    kept_json.write(path, 1)
    assert set(tmp_path.iterdir()) == {path, fresh, other}


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.json"
    kept_json.write(path, {"old": 1})

    def fail(name: str, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
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


@catches(
    "files that are being written count",
    "mlxspec.platform.kept_json:kept_files",
    lambda _: lambda folder: sorted(folders.private_folder(folder)[0].glob("*.json")),
)
def test_kept_files_are_those_that_have_been_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    path = kept_json.kept_file("costs", "something")
    kept_json.write(path, {})
    path.with_name(f".{path.name}").write_text("{")
    assert kept_json.kept_files("costs") == [path]
