"""Markdown that is shown while it is written: nothing is lost or said twice, and where the text is cut changes nothing."""

from __future__ import annotations

import re

import pytest
from cli_window import OURS, Window
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from mlxspec.cli import markdown, terminal
from mlxspec.cli.markdown import MarkdownStream

TEXT = """\
# A title

Some **bold words** and *others*, `code with blanks`, a [link](https://example.org/x), 2 * 3 * 4, snake_case_name and List<int>, long enough
to wrap twice.

- one **with** marks
- two
  goes on
  - below
1. first
2. second

> a quote that
> goes on

| name | what it does |
|---|---|
| `join` | joins **two** |
| split | other way |

```python
def f(x):
    return "hello"  # comment
```
***
~~gone~~ but \\(x\\) stays, &#27;[31m too
"""


def stream(width: int = 60, height: int = 12, colours: str | None = None) -> tuple[Window, MarkdownStream]:
    window = Window(width, height)
    console = Console(
        file=window,
        width=width,
        height=height,
        force_terminal=True,
        color_system=colours,  # type: ignore[arg-type]
        _environ={},
    )
    return window, MarkdownStream(console)


def shown(pieces: list[str], width: int = 60, height: int = 12) -> str:
    """What a person sees at the end."""
    window, made = stream(width, height)
    for piece in pieces:
        made.push(piece)
    made.end()
    return window.text


@pytest.fixture(autouse=True)
def _every_push_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "_REST", 0)


def test_how_it_looks() -> None:
    assert (
        shown([TEXT])
        == """\
A title

Some bold words and others, code with blanks, a link
(https://example.org/x), 2 * 3 * 4, snake_case_name and
List<int>, long enough to wrap twice.

 • one with marks
 • two goes on
    • below

 1 first
 2 second

▌ a quote that goes on

 name   what it does
 ───────────────────
 join   joins two
 split  other way

```python
def f(x):
    return "hello"  # comment
```

────────────────────────────────────────

gone but \\(x\\) stays, \ufffd[31m too
"""
    )


@pytest.mark.parametrize("size", [1, 2, 5, 17])
def test_pieces_do_not_matter(size: int) -> None:
    pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    assert shown(pieces) == shown([TEXT])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("one\n#two goes on\n", "one #two goes on\n"),  # no heading, so no block of its own
        ("- one\n1two\n", " • one 1two\n"),
        ("[a]: http://b 'c'\n", "[a]: http://b 'c'\n"),  # what CommonMark would not show
        ("![d](http://e)", "!d (http://e)\n"),
        ("<b>f</b>\n\n<div>\ng\n</div>\n", "<b>f</b>\n\n<div> g </div>\n"),
        ("h\n===\n", "h ===\n"),
    ],
)
def test_nothing_is_hidden_and_no_block_is_closed_too_early(text: str, wanted: str) -> None:
    assert shown([text]) == shown(list(text)) == wanted
    for i in range(1, len(text)):  # a piece that ends within a line
        assert shown([text[:i], text[i:]]) == wanted


@pytest.mark.parametrize("height", [3, 5, pytest.param(200, marks=pytest.mark.slow)])
def test_a_block_taller_than_the_window_is_whole_at_the_end(height: int) -> None:
    text = "```\n" + "".join(f"line {i}\n" for i in range(30)) + "```\n\n" + "word " * 200
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    assert shown(pieces, height=height) == shown([text], height=200)


MARKS = st.sampled_from(
    [
        *"** * _ ` ``` ~~ [ ]( ) | \\ <b> &amp; word x é".split(),
        "# ",
        "- ",
        "1. ",
        "> ",
        "\n",
        "\n\n",
        " ",
        "---\n",
    ]
)


def letters(text: str) -> list[str]:
    """Everything a reader would miss, in order."""
    return re.findall(r"[a-zé]", text.replace("&amp;", ""))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(MARKS, max_size=30), st.integers(1, 7))
@example(["- ", "```", "<b>"], 1)
@example(["\\", "\n", "word"], 1)
@example(["**", "**", " ", "<b>"], 1)
@example([*"** ** ` ** ` ** ** ** <b>".split(), "# "], 1)
def test_no_letter_is_lost_or_said_twice(parts: list[str], size: int) -> None:
    text = "".join(parts)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert letters(shown(pieces)) == letters(text)


@pytest.mark.parametrize("widths", [(60, 30), (30, 60), (60, 25, 50)])
def test_a_window_that_changes_loses_nothing(widths: tuple[int, ...]) -> None:
    """A narrower window may leave a copy of lines that were being drawn; every word is there, whole, in order, at the end."""
    window, made = stream(60, 40)
    words = [f"word{i:02} " for i in range(24)]
    for i, word in enumerate(words):
        made._console.width = widths[i * len(widths) // len(words)]
        made.push(word)
    made.end()
    found = window.text.split()
    assert found[-24:] == "".join(words).split()


def test_the_model_moves_no_cursor() -> None:
    """Beside characters a terminal gets styles, and the moves within the growing block that are ours."""
    hidden = "a \x1b]0;title\x07 \x1b[2J \x9b1m [x](http://a\x1b]8;;http://evil\x07b) `\x1b[A` ~~\x08~~\n"
    hidden += "```\n\x1b[1A\x1b[2K\n```\n| \x1b[A |\n|---|\n"
    text = terminal.clean(hidden)
    window, made = stream(colours="standard")
    for i in range(0, len(text), 3):
        made.push(text[i : i + 3])
    made.end()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", re.sub(OURS, "", window.getvalue()))
    assert "http://a" in window.text  # an address is shown, not hidden behind a text
    assert "\x1b[?25h" in window.getvalue()  # the cursor is there again


def test_words_come_before_their_line_ends() -> None:
    window, made = stream()
    made.push("Some wor")
    assert window.text == "Some wor\n"
    made.push("ds and **bo")
    assert window.text == "Some words and **bo\n"
    made.push("ld** ones")
    assert window.text == "Some words and bold ones\n"
    made.push("\n\n| a |\n|---|\n| b")
    assert [line.strip() for line in window.text.splitlines() if line.strip(" ─")] == [
        "Some words and bold ones",
        "a",
        "b",
    ]
    made.end()


def test_what_is_final_is_drawn_once() -> None:
    window, made = stream(height=50)
    made.push("first\n\nsecond\n\n")
    drawn = window.getvalue().count("first")
    for _ in range(20):
        made.push("more ")
    assert window.getvalue().count("first") == drawn
    made.end()
