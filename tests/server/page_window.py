"""The page at / in a browser, for several files of tests: a server with slow and hostile answers, and what a person does and sees."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.server import chromium

HOSTILE = (
    "# <script>window.isOwned = 1</script>\n\n<img src=x onerror='window.isOwned = 1'> <style>body{display:none}</style>\n\n"
    "[click](javascript:window.isOwned=1) ![pixel](https://tracker.example/pixel.png) [ok](https://good.example/a)\n\n"
    "| a | b |\n|---|---|\n| 1 | " + "wide " * 40 + "|\n\n- one\n  - two\n\n**bold** *it* `code`\n\n"
    + "```html\n<script>window.isOwned = 1</script>\n"
    + "long line " * 30 + "\n```\n\n" + "unbroken" * 30
)  # fmt: skip
# In the server's process: some questions are answered slowly, some with the text above, some differently without drafting.
PLANT = f"""
import asyncio
from dataclasses import replace
from mlxspec.parsers.pieces import Content
from mlxspec.server import job_run

HOSTILE = {HOSTILE!r}
original = job_run.JobRun.updates

async def updates(self, **given):
    asked = self._job.rendered.rpartition("<|im_start|>user")[2]
    is_first = True
    async for update in original(self, **given):
        if isinstance(update, job_run.Delta):
            if "slowly" in asked:
                await asyncio.sleep(0.25)
            if "hostile" in asked:
                for at in range(0, len(HOSTILE) if is_first else 0, 7):
                    text = HOSTILE[at : at + 7]
                    yield replace(update, pieces=[Content(text)], drafted=[3])
                    await asyncio.sleep(0.002)
                is_first = False
                continue
            if "differently" in asked and not self._job.spec.drafters and is_first and update.pieces:
                update, is_first = replace(update, pieces=[Content("Other: "), *update.pieces], drafted=[]), False
        yield update

job_run.JobRun.updates = updates
"""
SLOW = "slowly: what does os.path.join do?"
IDLE = "document.querySelector('#stop').hidden"
_STORE = """
  const request = indexedDB.open("mlxspec");
  const db = await new Promise((done) => { request.onsuccess = () => done(request.result); });
  const all = (name, range) => new Promise((done) => {
    const found = db.transaction(name).objectStore(name).getAll(range);
    found.onsuccess = () => done(found.result);
  });
"""
_KEPT = f"""async () => {{ {_STORE}
  const id = sessionStorage.getItem("mlxspec.open") ?? "";
  const range = IDBKeyRange.bound([id, 0], [id, Infinity]);
  const [turns, images] = [await all("turns", range), await all("images", range)];
  turns.filter((turn) => turn.role === "user").forEach((turn) => {{ if (images.length) turn.images = images.shift(); }});
  db.close();
  return turns;
}}"""
_HEADS = f"""async () => {{ {_STORE}
  const heads = await all("conversations");
  db.close();
  return heads.sort((one, other) => one.time - other.time);
}}"""


def home_of(port: int) -> str:
    return f"http://127.0.0.1:{port}/"


def ask(browser: chromium.Browser, text: str, *, wait: bool = True) -> None:
    browser.js("document.querySelector('#question').focus()")
    browser.type(text)
    browser.until(
        "document.querySelector('#question').value"
    )  # in a tab that comes to the front, a key may be faster
    browser.press("Enter")
    browser.until("document.querySelector('#question').value === ''")
    if wait:
        browser.until(IDLE)


def last(browser: chromium.Browser, selector: str = ".answer") -> str:
    return str(
        browser.js(f"[...document.querySelectorAll('.turn.assistant {selector}')].at(-1)?.innerText ?? ''")
    )


def kept(browser: chromium.Browser) -> list[dict[str, Any]]:
    """The turns of the tab's conversation, once all is written."""
    before, found = None, browser.js(f"({_KEPT})()")
    while found != before:
        time.sleep(0.1)
        before, found = found, browser.js(f"({_KEPT})()")
    return list(found)


def all_kept(browser: chromium.Browser) -> list[dict[str, Any]]:
    """What the list is made of, the oldest first."""
    kept(browser)
    return list(browser.js(f"({_HEADS})()"))


def keep(browser: chromium.Browser, id: str, head: dict[str, Any], turns: list[dict[str, Any]]) -> None:
    """Put a conversation into the browser's storage, as a page has left it there."""
    browser.js(f"""(async (id, head, turns) => {{ {_STORE}
      const transaction = db.transaction(["conversations", "turns"], "readwrite");
      transaction.objectStore("conversations").put({{ id, title: "", time: 1, size: 1, version: 1, ...head }});
      turns.forEach((turn, number) => transaction.objectStore("turns").put(turn, [id, number]));
      await new Promise((done) => {{ transaction.oncomplete = done; }});
      db.close();
    }})({json.dumps(id)}, {json.dumps(head)}, {json.dumps(turns)})""")


def sent(browser: chromium.Browser) -> list[dict[str, Any]]:
    return [json.loads(body) for body in browser.posted]
