"""The page at /: its files and how they are sent, what its scripts may do, its colours, and those of its parts that need no browser."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import mlxspec.server
from mlxspec.server import page
from mlxspec.server.http.security import Guard, is_open, is_own
from mlxspec.server.settings import ServerConfig
from tests.server.serving import Served

ROOT = Path(__file__).resolve().parents[2]
WEB = Path(mlxspec.server.__file__).parent / "web"
FILES = sorted(WEB.iterdir())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
INDEX = (WEB / "index.html").read_text(encoding="utf-8")
# ways to make markup or code of text; the policy refuses most of them, where a browser knows it
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc"
    r"|\beval\(|\bFunction\("
)
ADDRESS = re.compile(r"""(?:https?:|["'`(=])//[a-z0-9][a-z0-9.-]*\.[a-z]{2,}""", re.IGNORECASE)


# ---- files


def test_every_file_is_served(demo: Served) -> None:
    assert set(page.files()) == {path.name for path in FILES}
    for path, address in [(WEB / "index.html", "/"), *((path, f"/page/{path.name}") for path in FILES)]:
        status, headers, data = demo.ask("GET", address)
        assert (status, data) == (200, path.read_bytes())
        kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
        assert headers["content-type"] == f"{kinds[path.suffix]}; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"] == page.POLICY
        assert headers["cache-control"] == "no-cache"
        tag = headers["etag"]
        for given in (tag, f'"x", W/{tag}'):
            status, again, data = demo.ask("GET", address, headers={"If-None-Match": given})
            assert (status, data, again["etag"]) == (304, b"", tag)
        assert demo.ask("GET", address, headers={"If-None-Match": '"x"'})[0] == 200


def test_its_address_is_printed(demo: Served) -> None:
    demo.wait_for(rf"A page to chat on: http://127\.0\.0\.1:{demo.port}/$")


def test_nothing_else_is_served(demo: Served) -> None:
    for address in (
        "/page/",
        "/page/app.py",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/..%2fapp.py",
        "/page",
        "/page/web/main.js",
    ):
        assert demo.ask("GET", address)[0] == 404, address
    assert demo.ask("POST", "/", {})[0] == 405


def test_the_policy_allows_nothing_inline_and_nothing_foreign() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in page.POLICY.split(";"))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert rules["default-src"] == "'none'"
    assert rules.pop("img-src") == "'self' data:"  # the user's own images; a model's text makes no image
    assert set(rules.values()) == {"'none'", "'self'"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_another_host(path: Path) -> None:
    found = set(ADDRESS.findall(path.read_text(encoding="utf-8"))) - {"http://www.w3.org"}
    if path.name == "marked.js":  # its licence and the text of an error
        found -= {"https://github.com"}
    assert not found
    has_names = path.suffix == ".svg" or path.name in (
        "mathematics.js",
        "temml.js",
    )  # of the kinds of elements
    assert has_names or "www.w3.org" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_no_markup_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not MARKUP.findall(text)
    for name in re.findall(r'from "([^"]+)"|import\("', text):
        assert name.startswith("./")
        assert (WEB / name).is_file()


def test_the_document_has_nothing_inline_and_only_files_that_are_there() -> None:
    assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:", INDEX)
    assert re.findall(r"<script[^>]*>([^<]*)", INDEX) == [""]
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', INDEX)
    assert sorted(named) == ["page/chat.css", "page/icon.svg", "page/main.js"]
    for name in named:
        assert (WEB / name.removeprefix("page/")).is_file()


def test_ids_and_labels() -> None:
    """Every id that a script asks for is there once; every field has a label and every button a text."""
    ids = re.findall(r'\sid="([^"]+)"', INDEX)
    assert len(ids) == len(set(ids))
    asked = {
        name
        for path in SCRIPTS
        for name in re.findall(r'byId\("([^"]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert asked <= set(ids)
    assert len(asked) > 25
    labelled = set(re.findall(r'<label for="([^"]+)"', INDEX))
    for tag in re.findall(r"<(?:input|textarea|select)[^>]*>", INDEX):
        name = re.search(r'id="([^"]+)"', tag)
        assert name is not None
        assert name[1] in labelled or "aria-label=" in tag, tag
    described = re.findall(r'aria-(?:describedby|labelledby)="([^"]+)"', INDEX)
    assert set(described) <= set(ids)
    assert labelled <= set(ids)
    assert '<html lang="en">' in INDEX


def test_the_wheel_has_them() -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("needs hatchling")
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(ROOT))
    held = {file.distribution_path for file in builder.recurse_included_files()}
    assert {f"mlxspec/server/web/{path.name}" for path in FILES} <= held


# ---- who may have it


def test_the_page_needs_no_key_and_says_nothing_that_does() -> None:
    assert is_open("/")
    assert is_open("/page/main.js")
    for path in ("/v1/models", "/metrics", "/pages", "/v1", "/page", "/openapi.json", "/x/page/y"):
        assert not is_open(path)


def test_a_page_of_this_server_may_call_it() -> None:
    """Under whatever name the server is reached: the browser sends that name in Host and in Origin."""
    assert is_own("http://mac.local:8080", "mac.local:8080")
    assert is_own("https://mac.local", "mac.local")
    for origin, host in (
        ("http://mac.local:8080", "mac.local"), ("http://evil.example", "mac.local"), ("null", "null"), ("http://", ""),
        ("http://a", None), ("ftp://a", "a"), ("http://a/", "a"),
    ):  # fmt: skip
        assert not is_own(origin, host) or not host, (origin, host)


def test_another_page_may_still_not_call() -> None:
    guard = Guard(lambda *_: None, ServerConfig(allowed_hosts=("mac.local",)))  # type: ignore[arg-type, return-value]
    assert not guard.allows("http://mac.local:8080")  # as a foreign page; is_own is what lets it in


def test_origins_over_http(demo: Served) -> None:
    own = f"127.0.0.1:{demo.port}"
    assert demo.ask("GET", "/v1/models", headers={"Host": own, "Origin": f"http://{own}"})[0] == 200
    for host, origin in ((own, "http://evil.example"), ("evil.example", "http://evil.example")):
        assert demo.ask("GET", "/v1/models", headers={"Host": host, "Origin": origin})[0] == 403


# ---- colours


def luminance(colour: str) -> float:
    """Of #rrggbb, as WCAG 2 defines it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def schemes() -> dict[str, dict[str, str]]:
    style = (WEB / "chat.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{([^}]*)\}", style)
    found = {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for name, block in (("light", light), ("dark", dark))
    }
    assert set(found["light"]) == set(found["dark"])
    assert not re.findall(r"#[0-9a-f]{3,8}", style.replace(light, "").replace(dark, ""))
    return found


TEXT_ON = {
    "text": ("page", "raised", "drafted", "line"), "muted": ("page", "raised"), "link": ("page", "drafted", "raised"),
    "on-button": ("button",), "error": ("page",), "word": ("raised", "drafted"), "string": ("raised", "drafted"),
    "number": ("raised", "drafted"),
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    assert round(contrast("#000000", "#ffffff"), 2) == 21
    colours = schemes()[scheme]
    low = {
        (text, ground): round(contrast(colours[text], colours[ground]), 2)
        for text, grounds in TEXT_ON.items()
        for ground in grounds
        if contrast(colours[text], colours[ground]) < 4.5
    }
    assert not low
    for edge in ("border", "focus", "error"):
        for ground in ("page", "raised"):
            assert contrast(colours[edge], colours[ground]) >= 3, (edge, ground)


# ---- the parts that need no browser


def check_scripts(folder: Path, num_texts: int) -> dict[str, Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    shutil.copytree(WEB, folder / "web")
    shutil.copy(Path(__file__).with_name("page_checks.mjs"), folder)
    (folder / "package.json").write_text('{"type": "module"}')
    ran = subprocess.run(
        [node, "page_checks.mjs", str(num_texts)], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


@pytest.mark.node
def test_scripts(tmp_path: Path) -> None:
    """Markdown, the stream, what is kept, the sentences; and the page says what the terminal says about other clients."""
    said = check_scripts(tmp_path, 300)
    for name, make in (("curl", page.curl), ("sdk", page.sdk)):
        assert said[name] == [make("B", has_key=False), make("B", has_key=True)]


@pytest.mark.slow
@pytest.mark.node
def test_markdown_at_length(tmp_path: Path) -> None:
    check_scripts(tmp_path, 20_000)
