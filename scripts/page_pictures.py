"""Pictures of the page to chat on, made from a real run in a headless Chromium: docs/pictures/page-*.png.

    .venv/bin/python scripts/page_pictures.py [--to FOLDER]

Serves the demo model, asks two questions, and takes the page light, dark and as a phone shows it. Needs Chromium. Speeds in the pictures
are those of the machine that made them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from chromium import Browser, find

ROOT = Path(__file__).resolve().parents[1]
IDLE = "document.querySelector('#stop').hidden"
WIDTH, HEIGHT = 760, 860


def ask(browser: Browser, number: int) -> None:
    """Press example number `number` of the empty page, or send its text where a conversation has begun."""
    browser.js(
        f"document.querySelector('#question').value = document.querySelectorAll('#examples button')[{number}].textContent"
    )
    browser.js("document.querySelector('#composer').requestSubmit()")
    browser.until(f"!{IDLE} || document.querySelector('.turn.assistant .tools')")
    browser.until(IDLE)


def take(address: str, program: str, folder: Path) -> None:
    with Browser(program, width=WIDTH, height=HEIGHT) as browser:
        browser.open(address)
        browser.until("document.querySelector('#model-facts').textContent")
        ask(browser, 0)
        ask(browser, 2)
        for name, scheme, width in (
            ("light", "light", WIDTH),
            ("dark", "dark", WIDTH),
            ("phone", "light", 360),
        ):
            browser.prefer(scheme)
            browser.resize(width, 640 if name == "phone" else HEIGHT, is_phone=name == "phone")
            browser.js("document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight")
            browser.screenshot(folder / f"page-{name}.png")
        if browser.complaints:
            sys.exit("\n".join(browser.complaints))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures")
    folder = parser.parse_args().to
    program = find()
    if program is None:
        sys.exit("There is no Chromium here.")
    command = [sys.executable, "-m", "mlxspec", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            for line in server.stderr or ():
                found = re.search(r"(http://[^ ]*)/v1", line)
                if found:
                    take(found[1] + "/", program, folder)
                    return
            sys.exit("The server has ended.")
        finally:
            server.kill()


if __name__ == "__main__":
    main()
