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
    # a mouse, which machines without a screen do not have
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
)  # fmt: skip
_KEYS = {
    "Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " "), "ArrowDown": (40, ""), "ArrowUp": (38, ""),
    "End": (35, ""), "Backspace": (8, ""), "k": (75, ""), "o": (79, ""), "F2": (113, ""), "/": (191, ""), ",": (188, ""),
}  # fmt: skip
_NO_STORAGE = {"profile": {"default_content_setting_values": {"cookies": 2}}}
_CONTROL, _SHIFT = 2, 8
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
    """One tab, or several of which one is used.

    complaints: errors of the console and of the network, uncaught exceptions, violations of the page's policy.
    requested: every address that was asked for. posted: the bodies that were sent.
    dialogs: kinds of the browser's questions, which were answered with yes."""

    def __init__(
        self, program: str, *, width: int = 1000, height: int = 800, is_storage_off: bool = False
    ) -> None:
        """is_storage_off: pages may keep nothing, as with cookies blocked."""
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.posted: list[str] = []
        self.dialogs: list[str] = []
        self._num, self._session, self._rest = 0, "", b""
        self._pid = 0
        if is_storage_off:
            preferences = Path(self._folder.name) / "Default" / "Preferences"
            preferences.parent.mkdir()
            preferences.write_text(json.dumps(_NO_STORAGE))
        try:
            self._start(program)
            self.new_tab()
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

    def _call(
        self, method: str, params: Mapping[str, Any] | None = None, *, is_of_tab: bool = True
    ) -> dict[str, Any]:
        num = self._send(method, params, is_of_tab=is_of_tab)
        until = time.monotonic() + SECONDS
        while True:
            found = self._read(until)
            if found.get("id") == num:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']['message']}")
                return dict(found["result"])
            self._take(found)

    def _send(self, method: str, params: Mapping[str, Any] | None = None, *, is_of_tab: bool = True) -> int:
        self._num += 1
        message: dict[str, Any] = {"id": self._num, "method": method, "params": dict(params or {})}
        if is_of_tab:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        return self._num

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
            case "Page.javascriptDialogOpening":
                self.dialogs.append(params["type"])
                self._send("Page.handleJavaScriptDialog", {"accept": True})
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
                if "postData" in params["request"]:
                    self.posted.append(params["request"]["postData"])

    # ---- tabs and what is kept

    def new_tab(self) -> str:
        """Open a tab and use it from now on. Returns what `use` takes."""
        target = self._call("Target.createTarget", {"url": "about:blank"}, is_of_tab=False)["targetId"]
        attach = {"targetId": target, "flatten": True}
        self._session = str(self._call("Target.attachToTarget", attach, is_of_tab=False)["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setFocusEmulationEnabled", {"enabled": True}
        )  # tabs in the background get keys too
        return self._session

    @property
    def tab(self) -> str:
        return self._session

    def use(self, tab: str) -> None:
        self._session = tab
        self._call("Page.bringToFront")

    def close_tab(self, tab: str) -> None:
        """Another one than that which is used."""
        used, self._session = self._session, tab
        self._call("Page.close")
        self._session = used

    def forget(self, address: str) -> None:
        """Leave the page and everything that pages of the address have kept."""
        self.open(address)
        self.js("sessionStorage.clear()")
        self.open("about:blank")
        self._call("Storage.clearDataForOrigin", {"origin": address.rstrip("/"), "storageTypes": "all"})

    def bound_storage(self, address: str, size: int | None) -> None:
        """Pages of the address may keep so many bytes; None takes the bound away."""
        more = {} if size is None else {"quotaSize": size}
        self._call("Storage.overrideQuotaForOrigin", {"origin": address.rstrip("/"), **more})

    def download_to(self, folder: Path) -> None:
        self._call(
            "Browser.setDownloadBehavior",
            {"behavior": "allow", "downloadPath": str(folder)},
            is_of_tab=False,
        )

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
                raise BrowserError(f"This never became true: {expression}\n{shown}\n{self.complaints}")
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

    def press(self, key: str, *, shift: bool = False, control: bool = False) -> None:
        code, text = _KEYS[key]
        event = {
            "key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code,
            "modifiers": _SHIFT * shift + _CONTROL * control,
        }  # fmt: skip
        down = {"type": "keyDown" if text else "rawKeyDown", **({"text": text} if text else {})}
        self._call("Input.dispatchKeyEvent", {**event, **down})
        self._call("Input.dispatchKeyEvent", {**event, "type": "keyUp"})

    def _middle(self, selector: str) -> dict[str, float]:
        place = self.js(f"({_MIDDLE})({json.dumps(selector)})")
        if place is None or not place["isThere"]:
            raise BrowserError(f"There is nothing to reach at {selector}.")
        return {"x": place["x"], "y": place["y"]}

    def hover(self, selector: str) -> None:
        self._call("Input.dispatchMouseEvent", {"type": "mouseMoved", **self._middle(selector)})

    def drop(self, selector: str, *paths: Path) -> None:
        """Drag files there and let them go."""
        files = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        place = self._middle(selector)
        for kind in ("dragEnter", "dragOver", "drop"):
            self._call("Input.dispatchDragEvent", {"type": kind, **place, "data": files})

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element. Raises BrowserError where something else lies there."""
        mouse = {**self._middle(selector), "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", {"type": kind, **mouse})

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self._call("Emulation.setDeviceMetricsOverride", metrics)

    def touch(self) -> None:
        """A finger instead of the mouse, for good: Chromium gives back no mouse that a machine does not have."""
        self._call("Emulation.setTouchEmulationEnabled", {"enabled": True})

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
