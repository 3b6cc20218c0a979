"""Tables and pairs on a terminal of any width, and in a pipe: no cell is lost, and no line is longer than the terminal."""

from __future__ import annotations

import sys

import pytest

from mlxspec.cli import terminal
from mlxspec.cli.table import print_pairs, print_table

ROWS = [
    ("Qwen/Qwen3-30B-A3B, Qwen/Qwen3-30B-A3B-Instruct-2507", "18.1 GB", "4 bits, 8 bits, bfloat16", "[bold]"),
    ("short", "1 GB", "no", "none"),
]


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(("model", "4 bits", "fits here", "head"), ROWS, right=(1,))
    print_pairs([("memory", "16.5 GB for 1 x 8192 tokens; this machine gives 22 GB: fits"), ("", "")])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_they_fit_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    whole = printed(capsys)
    assert len(whole) == 5
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is sys.stdout)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = printed(capsys)
    assert max(map(len, shown)) <= columns
    assert sorted("".join(shown).replace(" ", "")) == sorted("".join(whole).replace(" ", ""))
