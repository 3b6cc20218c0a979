"""A headless Chromium that a program uses as a person would: keys, mouse, what is on the page, and what the browser complains about.

Speaks the DevTools protocol through a pipe, so that it needs no package and opens no port. Knows nothing of the page.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 120.0  # how long a slow machine may take for anything
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb", "--lang=en-US", "--remote-debugging-pipe",
)  # fmt: skip
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " "), "ArrowDown": (40, "")}
_SHIFT = 8
_MIDDLE = """(selector) => {
  const found = document.querySelector(selector);
  if (!found) return null;
  found.scrollIntoView({ block: "center" });
  const box = found.getBoundingClientRect();
  const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  return { x, y, isThere: found.contains(document.elementFromPoint(x, y)) };
}"""


def find() -> str | None:
    """The program, None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser ended, did not answer in time, or an expression raised an error in the page."""


class Browser:
    """One page. complaints: errors of the console and of the network, uncaught exceptions, violations of the page's policy.
    requested: every address that was asked for. posted: the bodies that were sent."""

    def __init__(self, program: str, *, width: int = 1000, height: int = 800) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.posted: list[str] = []
        self._num, self._session, self._rest = 0, "", b""
        self._pid = 0
        try:
            self._start(program)
            target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
            self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def _start(self, program: str) -> None:
        """The browser reads commands from file descriptor 3 and writes answers to 4."""
        theirs_in, self._in = (_high(fd) for fd in os.pipe())
        self._out, theirs_out = (_high(fd) for fd in os.pipe())
        null = os.open(os.devnull, os.O_RDWR)
        actions = [
            *((os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)),
            (os.POSIX_SPAWN_DUP2, theirs_in, 3),
            (os.POSIX_SPAWN_DUP2, theirs_out, 4),
        ]
        command = [program, *_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._pid = os.posix_spawn(program, command, os.environ, file_actions=actions, setpgroup=0)
        for fd in (theirs_in, theirs_out, null):
            os.close(fd)

    # ---- the protocol

    def _call(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self._num += 1
        message: dict[str, Any] = {"id": self._num, "method": method, "params": dict(params or {})}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            found = self._read(until)
            if found.get("id") == self._num:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']['message']}")
                return dict(found["result"])
            self._take(found)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._out], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise BrowserError("The browser does not answer.")
            data = os.read(self._out, 1 << 16)
            if not data:
                raise BrowserError("The browser has ended.")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _take(self, event: Mapping[str, Any]) -> None:
        """Remember what an event says."""
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                found = params["exceptionDetails"]
                self.complaints.append(str(found.get("exception", {}).get("description") or found["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                said = (str(a.get("value", a.get("description", ""))) for a in params["args"])
                self.complaints.append(" ".join(said))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.complaints.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
                if "postData" in params["request"]:
                    self.posted.append(params["request"]["postData"])

    # ---- the page

    def open(self, address: str) -> None:
        self._call("Page.navigate", {"url": address})
        self.until("document.readyState === 'complete'")

    def reload(self) -> None:
        self.js("window.isOld = true")
        self._call("Page.reload")
        self.until("!window.isOld && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise what it is resolved to."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self._call("Runtime.evaluate", asked)
        if "exceptionDetails" in found:
            raise BrowserError(
                f"{expression}: {found['exceptionDetails'].get('exception', {}).get('description')}"
            )
        return found["result"].get("value")

    def until(self, expression: str, *, seconds: float = SECONDS) -> None:
        """Return once the expression is true. Raises BrowserError when that takes too long."""
        end = time.monotonic() + seconds
        while not self._holds(expression):
            if time.monotonic() > end:
                shown = self.js("document.body.innerText")
                raise BrowserError(f"This never became true: {expression}\n{shown}")
            time.sleep(0.03)

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.js(f"Boolean({expression})"))
        except BrowserError as error:
            if "context" in str(error) or "navigated" in str(error):
                return False  # the page is being left for another
            raise

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self._call("Input.insertText", {"text": text})

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = _KEYS[key]
        event = {
            "key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code, "modifiers": _SHIFT if shift else 0,
        }  # fmt: skip
        down = {"type": "keyDown" if text else "rawKeyDown", **({"text": text} if text else {})}
        self._call("Input.dispatchKeyEvent", {**event, **down})
        self._call("Input.dispatchKeyEvent", {**event, "type": "keyUp"})

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element. Raises BrowserError where something else lies there."""
        place = self.js(f"({_MIDDLE})({json.dumps(selector)})")
        if place is None or not place["isThere"]:
            raise BrowserError(f"There is nothing to click at {selector}.")
        mouse = {"x": place["x"], "y": place["y"], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", {"type": kind, **mouse})

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self._call("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """light or dark"""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", {"features": features})

    def cut_off(self, is_offline: bool) -> None:
        """Take the network away, or give it back."""
        nothing = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self._call("Network.emulateNetworkConditions", {"offline": is_offline, **nothing})

    def screenshot(self, path: Path) -> None:
        found = self._call("Page.captureScreenshot", {"format": "png"})
        path.write_bytes(base64.b64decode(found["data"]))

    def accessibility_tree(self) -> list[dict[str, Any]]:
        """Nodes as assistive technology sees them: {role, name, ...}, without those that it ignores."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            {"role": n["role"]["value"], "name": n.get("name", {}).get("value", "")}
            for n in nodes
            if not n.get("ignored") and "role" in n
        ]

    def close(self) -> None:
        if self._pid:
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._in)
            os.close(self._out)
            self._pid = 0
        self._folder.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _high(fd: int) -> int:
    """The same file under a number that is not 3 or 4."""
    found = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return found
