"""Where a call may stand: what is invented and what is lost, counted on the same texts, and CommonMark's own answer beside ours."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from planting import catches
from said_of_calls import TOOLS, _whole

from mlxspec.parsers.formats import ChatFormat, ToolStyle
from mlxspec.parsers.pieces import CallStart, Content, Piece, merged
from mlxspec.parsers.place import Place

ROOT = Path(__file__).resolve().parents[2]
STYLES: tuple[ToolStyle, ...] = ("json", "xml", "gemma4", "function-gemma")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/**/README.md"))]
LOOSE = [
    "The command `ls' failed, I try again.\n",
    "In LaTeX ``quoted'' text.\n",
    "Don't forget the ` character.\n",
    "1. ```js\n   foo\n   ```\n",
    "- ```bash\n  ls\n  ```\n\nNow I run it.\n\n",
    "> ```\n> ls\n> ```\n\n",
    "Here it is:\n```python\nprint(1)\n",
    "```md\n```js\nx\n```\n```\nDone.\n\n",
    "* a\n  * b\n    ```\n    x\n    ```\n",
]


def pieces_of(style: ToolStyle, parts: list[str], special: tuple[str, ...] = ()) -> list[Piece]:
    parser = ChatFormat(tools=style).parser("", TOOLS, special=special)
    return merged([piece for part in parts for piece in parser.push(part)] + parser.finish())


def num_calls(style: ToolStyle, parts: list[str], special: tuple[str, ...] = ()) -> int:
    return sum(isinstance(p, CallStart) for p in pieces_of(style, parts, special))


def is_shown(text: str, at: int) -> bool:
    """Whether CommonMark has this place in a fenced block that is closed behind it."""
    line = text.count("\n", 0, at)
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "fence" and token.map is not None and token.map[0] < line < token.map[1]:
            last = text.split("\n")[token.map[1] - 1]
            return re.sub(r"^[\s>]*", "", last).rstrip().startswith(token.markup) and line < token.map[1] - 1
    return False


def line_ends(num: int) -> list[tuple[str, int]]:
    """Places behind line ends of this project's pages: (page, place), drawn so that code has its share."""
    rng, found = random.Random(5), list[tuple[str, int]]()
    texts = [
        page.read_text(encoding="utf-8") for page in PAGES if len(page.read_text(encoding="utf-8")) > 500
    ]
    for text in texts:
        ends = [m.end() for m in re.finditer("\n", text)]
        found += [(text, at) for at in rng.sample(ends, min(len(ends), 1 + num // len(texts)))]
    return found[:num]


def counted(num: int, style: ToolStyle) -> tuple[int, int, int]:
    """(places in closed blocks, calls invented there, calls lost elsewhere) of a call that is put in at each of these line ends."""
    call, shown, invented, lost = _whole(random.Random(1), style, "read"), 0, 0, 0
    for page, at in line_ends(num):
        text = f"{page[:at]}{call}\n{page[at:]}"
        is_call, inside = num_calls(style, [text]) == 1, is_shown(text, at)
        shown += inside
        invented += inside and is_call
        lost += not inside and not is_call
    return shown, invented, lost


@pytest.mark.parametrize("style", STYLES)
def test_a_call_behind_loose_markdown_is_one(style: ToolStyle) -> None:
    call = _whole(random.Random(1), style, "read")
    for before in LOOSE:
        for parts in ([before + call], list(before + call)):
            assert num_calls(style, parts) == 1, before


def test_a_call_in_a_block_that_is_closed_behind_it_is_text() -> None:
    call = _whole(random.Random(1), "xml", "read")
    for before, after in (("So:\n```\n", "\n```\nClear?"), ("~~~~xml\n", "\n~~~\n~~~~")):
        text = before + call + after
        for parts in ([text], list(text)):
            assert pieces_of("xml", parts) == [Content(text)]
            assert num_calls("xml", parts, ("<tool_call>",)) == 1


@catches(
    "an open block is closed by the end of the text",
    "mlxspec.parsers.place:Place.end_line",
    lambda right: lambda self: (right(self), setattr(self, "num_closed", self.num_closed + 1))[0],
)
def test_a_block_that_is_never_closed_holds_no_call_back() -> None:
    call = _whole(random.Random(1), "json", "read")
    assert num_calls("json", [f"```\nls\n{call}"]) == 1
    assert num_calls("json", list(f"```\nls\n{call}\n{call}\n")) == 2


@catches(
    "a paragraph's odd backtick reaches over a blank line",
    "mlxspec.parsers.place:Place._begin_line",
    lambda right: (
        lambda self: (
            setattr(self, "_span", self._span or getattr(self, "_odd", 0)),
            setattr(self, "_odd", self._span),
            right(self),
        )[2]
    ),
)
def test_a_code_span_ends_with_its_paragraph() -> None:
    for text, is_code in (
        ("an ` odd\none", True),
        ("an ` odd\n\none", False),
        ("an ` odd\n  \none ` two", True),
    ):
        place = Place()
        place.push(text)
        assert place.in_code == is_code, text


def test_the_place_is_the_same_however_the_text_is_cut() -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(
            rng.choice(["```", "~~~", "`", "``", "\n", " ", "> ", "- ", "1. ", "word", "  "])
            for _ in range(14)
        )
        whole, cut = Place(), Place()
        whole.push(text)
        for char in text:
            cut.push(char)
        assert vars(whole) == vars(cut), text


def test_of_300_line_ends_no_call_is_invented_or_lost() -> None:
    shown, invented, lost = counted(300, "xml")
    assert shown >= 5
    assert (invented, lost) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_of_900_line_ends_no_call_is_invented_or_lost(style: ToolStyle) -> None:
    shown, invented, lost = counted(900, style)
    assert shown >= 20
    assert (invented, lost) == (0, 0)
