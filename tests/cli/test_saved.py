"""Saved conversations: what is written comes back, what is damaged is refused in one sentence, and no other file is lost."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.cli.saved import Saved, load, save
from mlxspec.errors import ConfigError

TALK = Saved(
    model="demo",
    system="be",
    messages=[
        {"role": "user", "content": "a\n\x1b"},
        {"role": "assistant", "content": "é", "reasoning_content": "so"},
    ],
)


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save(path, TALK)
    assert load(path) == TALK
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    save(path, Saved(model="demo", system=None, messages=[]))  # our own may be written over
    assert not load(path).messages
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]


def test_other_files_are_kept(tmp_path: Path) -> None:
    for name, text in (("notes.txt", "mine"), ("other.json", "{}"), ("list.json", "[]"), ("binary", "\x00")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="is no saved conversation"):
            save(tmp_path / name, TALK)
        assert (tmp_path / name).read_text() == text
    with pytest.raises(ConfigError, match="cannot be written"):
        save(tmp_path / "nowhere" / "talk.json", TALK)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "absent.json")


GOOD = {
    "format": "mlxspec-conversation",
    "version": 1,
    "model": "demo",
    "system": None,
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
}
MESSAGES = GOOD["messages"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"model": 1},
        {"system": 1},
        {"system": "\ud800"},
        {"messages": None},
        {"messages": MESSAGES[:1]},  # type: ignore[index]
        {"messages": MESSAGES[::-1]},  # type: ignore[index]
        {"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a", "tool": "x"}, {"role": "assistant", "content": "b"}]},
        {"messages": ["a", "b"]},
    ],
)
def test_damage_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(GOOD))
    load(path)
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("saved") / "talk.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        load(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError):
        load(path)
