"""Markdown that is shown while it is written: nothing is lost or taken back, and where the text is cut changes nothing."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from mlxspec.cli import markdown, terminal
from mlxspec.cli.blocks import Blocks
from mlxspec.cli.inline import LONGEST, settle
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


def shown(pieces: list[str], width: int = 60, *, colours: bool = False) -> str:
    """What a terminal gets."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=colours, color_system="standard" if colours else None
    )
    stream = MarkdownStream(console)
    for piece in pieces:
        stream.push(piece)
    stream.end()
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


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

name         what it does
──────────────────────────────────
join         joins two
split        other way

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


FENCED = """\
- ```python
  def f():
      return 1
  ```
- then
1. - ~~~
     x
     ~~~
after

> ```sh
> ls
> ```
"""


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_item_may_be_code_and_ends_where_it_does(size: int) -> None:
    pieces = [FENCED[i : i + size] for i in range(0, len(FENCED), size)]
    assert (
        shown(pieces)
        == """\
- ```python
  def f():
      return 1
  ```
 • then
1. - ~~~
     x
     ~~~
after

▌ ```sh
▌ ls
"""
    )


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


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(25, 100), min_size=1, max_size=6))
def test_a_window_that_changes_loses_nothing(widths: list[int]) -> None:
    file = io.StringIO()
    console = Console(file=file, width=60, color_system=None)
    stream = MarkdownStream(console)
    words = [f"word{i:02} " for i in range(24)]
    for i, word in enumerate(words):
        console.width = widths[i * len(widths) // len(words)]
        stream.push(word)
    stream.end()
    assert file.getvalue().split() == "".join(words).split()
    assert max(map(len, file.getvalue().split("\n"))) < max(widths)


def test_nothing_moves_the_cursor() -> None:
    """All that a terminal gets beside characters are colours and styles."""
    hidden = "a \x1b]0;title\x07 \x1b[2J \x9b1m [x](http://a\x1b]8;;http://evil\x07b) `\x1b[A` ~~\x08~~\n"
    hidden += "```\n\x1b[1A\x1b[2K\n```\n| \x1b[A |\n|---|\n"
    text = terminal.clean(hidden)
    out = shown([text[i : i + 3] for i in range(0, len(text), 3)], colours=True)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[\d;]*m", "", out))
    assert "http://a" in out  # an address is shown, not hidden behind a text


def test_words_come_before_their_line_ends() -> None:
    file = io.StringIO()
    stream = MarkdownStream(Console(file=file, width=60, color_system=None))
    for piece in ("Some wor", "ds and **bo", "ld** ones"):
        stream.push(piece)
    assert file.getvalue() == "Some words and bold "[:-1]
    stream.push(" `x")
    assert file.getvalue() == "Some words and bold ones"


def test_openers_do_not_wait_for_ever() -> None:
    source, place = settle("a *b " + "word " * 10)
    assert place == 2
    source, place = settle("a *b " + "word " * (LONGEST // 5 + 1))
    assert source.startswith("a \\*b word")
    assert place == len(source)


def test_code_comes_by_lines_and_words() -> None:
    lines = [line for piece in ("```py", "thon\nx = ", "1\n``", "`\nafter") for line in _pushed(piece)]
    assert [(line.kind, line.text, line.whole) for line in lines] == [
        ("code", "```python", True),
        ("code", "x = ", False),
        ("code", "x = 1", True),
        ("code", "```", True),
        ("prose", "after", False),
    ]


_blocks = Blocks()


def _pushed(piece: str):  # type: ignore[no-untyped-def]
    return list(_blocks.push(piece))
