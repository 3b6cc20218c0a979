"""Files that macOS writes beside every file on drives of other systems, `._NAME`: no reader of a folder takes them for its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from planting import catches

from mlxspec import demo
from mlxspec.cli import saved
from mlxspec.errors import TokenizerError
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.platform import kept_json

APPLE_DOUBLE = bytes.fromhex("00051607000200004d6163204f5320582020202020202020") + bytes(range(128, 256))


def hide(folder: Path) -> None:
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.with_name(f"._{path.name}").write_bytes(APPLE_DOUBLE)


@catches(
    "hidden templates are read",
    "mlxspec.loading.tokenizer:is_hidden",
    lambda right: lambda path: False,
    errors=(TokenizerError,),
)
def test_a_tokenizer_with_more_templates(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo.TARGET, folder)
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ messages[0].content }}")
    hide(folder)
    assert Tokenizer.from_folder(folder).template is not None


def test_what_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    file = kept_json.kept_file("races", "x")
    kept_json.write(file, {})
    chat = saved.new_file()
    assert chat is not None
    chat.write_text("{}")
    hide(tmp_path)
    assert kept_json.kept_files("races") == [file]
    assert saved.kept_files() == [chat]
