"""The pictures of the documentation that show the program, made from real runs of the built-in model: docs/pictures.

    .venv/bin/python scripts/make_pictures.py [--to FOLDER] [--check]

chat.svg: `mlxspec chat` runs in a pseudo-terminal with keys typed into it; what stands on the screen at the end is the picture, colours
included. two-columns.svg: one prompt with drafting off and on (two_columns.py). page-*.png: the page in Chromium, where there is one; the
others are made without it. --check makes nothing and says which pictures name other drafters, or have another header, than the program
has now. Needs the development packages (pyte emulates the terminal).
"""

from __future__ import annotations

import argparse
import html
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte
import two_columns
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import mlxspec  # noqa: E402
from mlxspec.cli import header  # noqa: E402
from mlxspec.cli.conversation import Conversation  # noqa: E402
from tests.cli.recorder import Recorder  # noqa: E402
from tests.server import chromium  # noqa: E402
from tests.server.page_window import ask, home_of  # noqa: E402
from tests.server.serving import QUESTION, Served  # noqa: E402

FRAME = """\
<svg class="terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre; font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 16px; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def ready(text: str) -> bool:
    return text.endswith("\n>")


EDIT = """\
remove the docstring:
```python
def read_all(paths):
    \"\"\"Read the files at paths and return their texts.\"\"\"
    texts = []
    for path in paths:
        with open(path) as file:
            texts.append(file.read())
    return texts
```"""


def _chat(terminal: Recorder) -> None:
    """A question, a pasted edit, a command."""
    terminal.wait_for(ready)
    for line in ("what does os.path.join do?", EDIT, "/stats"):
        seen = len(terminal.text())
        terminal.paste(line) if "\n" in line else terminal.type(line)
        terminal.settle(0.3)
        terminal.type("\r")
        terminal.wait_for(ready, after=seen)
    terminal.settle()


CHAT, COLUMNS, ROWS = ("chat", "--no-history"), 96, 44
PAGES = {
    "page-light": ("light", 1280, 800),
    "page-dark": ("dark", 1280, 800),
    "page-phone": ("light", 390, 844),
}


def record(
    arguments: Sequence[str], act: Callable[[Recorder], object], columns: int, rows: int
) -> pyte.HistoryScreen:
    """The screen at the end of a run with the demo model, its kernels and files kept as they are on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM")}
        variables |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": folder}
        command = [sys.executable, "-m", "mlxspec", *arguments]
        with Recorder(command, environment=variables, columns=columns, rows=rows, seconds=900) as terminal:
            act(terminal)
            return terminal.screen


def draw_page(program: str, folder: Path) -> list[Path]:
    """The page with a question and an edit, as pictures of PAGES, and its models beside an empty cache of the hub."""
    made = []
    with (
        tempfile.TemporaryDirectory() as empty,
        Served(env={"HF_HOME": empty}) as served,
        chromium.Browser(program) as browser,
    ):
        browser.open(home_of(served.port))
        browser.until("document.querySelector('#model-facts').textContent")
        for text in (QUESTION, EDIT):
            ask(browser, text)
        for name, (scheme, width, height) in PAGES.items():
            browser.prefer(scheme)
            browser.resize(width, height)
            browser.js("document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight")
            made.append(folder / f"{name}.png")
            browser.screenshot(made[-1])
        browser.resize(1000, 800)
        browser.click("#open-models")
        browser.until("document.querySelector('#models-fitting li')")
        made.append(folder / "page-models.png")
        browser.screenshot(made[-1])
    return made


def svg(screen: pyte.Screen, title: str) -> str:
    """The screen as a picture: characters, colours and styles."""
    console = Console(
        record=True, width=screen.columns, file=io.StringIO(), color_system="truecolor", force_terminal=True
    )
    lines = [_line(screen, y) for y in range(screen.lines)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    return console.export_svg(title=title, theme=THEME, code_format=FRAME, unique_id="t")


THEME: TerminalTheme = DIMMED_MONOKAI
_NAMES = {"brown": "yellow", "default": None}


def _line(screen: pyte.Screen, y: int) -> Text:
    line = Text()
    for x in range(screen.columns):
        cell = screen.buffer[y][x]
        line.append(cell.data, _style(cell))
    line.rstrip()
    return line


def _style(cell: pyte.screens.Char) -> Style:
    return Style(
        color=_colour(cell.fg), bgcolor=_colour(cell.bg), bold=cell.bold, italic=cell.italics,
        underline=cell.underscore, strike=cell.strikethrough, reverse=cell.reverse,
    )  # fmt: skip


def _colour(name: str) -> str | None:
    """pyte's name of a colour as rich says it."""
    if name in _NAMES:
        return _NAMES[name]
    if len(name) == 6 and all(c in "0123456789abcdefABCDEF" for c in name):
        return f"#{name}"
    return name.replace("bright", "bright_").replace("bright_brown", "bright_yellow")


def words(picture: str) -> str:
    """The text of a picture without its spaces: a terminal's line may be one element or many."""
    return "".join(html.unescape(re.sub(r"<[^>]*>", "", picture)).split())


def check(folder: Path, engine: mlxspec.Engine) -> list[str]:
    """What pictures of a folder say that the program does not say now, in sentences. engine: the built-in model as `load` gives it."""
    talk = Conversation(engine=engine, params=mlxspec.SamplingParams(), spec=engine.spec)
    wanted = {
        "chat.svg": [f"{name} {text}" for name, text in header.rows(talk).items()],
        "two-columns.svg": [two_columns.title(engine)],
    }
    return [
        f"{name} does not say {line!r}: scripts/make_pictures.py makes it anew."
        for name, lines in wanted.items()
        for found in [words((folder / name).read_text(encoding="utf-8"))]
        for line in lines
        if "".join(line.split()) not in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures", help="folder")
    parser.add_argument("--check", action="store_true", help="only say which pictures are of another program")
    options = parser.parse_args()
    with mlxspec.load(
        "demo", config=mlxspec.EngineConfig(past_texts=0)
    ) as engine:  # none of an answer's own drafts
        if options.check:
            complaints = check(options.to, engine)
            print(*complaints, sep="\n")
            return bool(complaints)
        options.to.mkdir(parents=True, exist_ok=True)
        made = {"two-columns.svg": two_columns.svg(engine)}
    made["chat.svg"] = svg(record(CHAT, _chat, COLUMNS, ROWS), f"mlxspec {' '.join(CHAT)}")
    for name, picture in made.items():
        (options.to / name).write_text(picture, encoding="utf-8")
        print(options.to / name)
    program = chromium.find()
    print(
        *(
            draw_page(program, options.to)
            if program
            else ["There is no Chromium here: page-*.png are as they were."]
        ),
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
