"""What of a hostile answer reaches a terminal: characters, colours and line ends, and nothing else. A pipe gets every byte."""

from __future__ import annotations

import re
import sys

import pytest
from cli_window import OURS, Window

from mlxspec.cli.view import MarkdownView, PlainView, View, best_view

HOSTILE = "a\x1b]0;title\x07b \x1b[2J\x9b31m [c](http://d\x1b]8;;http://evil\x07) \x00\x08\x7f\r\n```\n\x1b[1A\x1b[2K\n```\n"


def spoken(view: View, size: int) -> None:
    view.begin()
    for i in range(0, len(HOSTILE), size):
        view.think(HOSTILE[i : i + size])
    for i in range(0, len(HOSTILE), size):
        view.say(HOSTILE[i : i + size])
    view.end()
    view.unfold()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_gets_no_escapes_of_the_model(
    monkeypatch: pytest.MonkeyPatch, term: str, colours: bool, size: int
) -> None:
    out = Window(90, 40)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    view = best_view()
    assert type(view) is (PlainView if term == "dumb" else MarkdownView)
    spoken(view, size)
    sent = out.getvalue()
    assert bool(re.search(r"\x1b\[[\d;]*m", sent)) == (colours and term != "dumb")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", re.sub("" if term == "dumb" else OURS, "", sent))
    assert out.text.count("title") == 3  # thought, said, unfolded: nothing a reader could see is missing


def test_a_pipe_gets_what_the_model_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = best_view()
    assert type(view) is View
    spoken(view, 5)
    said, told = capsys.readouterr()
    assert said == HOSTILE + "\n"
    assert told.count("title") == 2
