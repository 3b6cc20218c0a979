"""Models of the machine on a server: listed, fetched from a hub on this machine, served beside the others; who may, and what is refused."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from mlxspec.platform.resources import demo_folder
from mlxspec.server.errors import ApiError
from mlxspec.server.library import Pull, check_is_own
from mlxspec.server.settings import ServerConfig
from tests.checkpoints.hub_server import HubServer
from tests.server import chromium
from tests.server.page_window import ask, home_of, last
from tests.server.serving import LONG, QUESTION, Served

WEIGHTS = "model.safetensors"


class Place:
    """A server, the stand-in of the hub that it fetches from, and the home that both are used from."""

    def __init__(self, hub: HubServer, home: Path, *args: str) -> None:
        self.hub, self.home = hub, home
        environment = {
            "HOME": str(home),
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        }
        self.served = Served(
            *args, env=environment | {"HF_HUB_DOWNLOAD_TIMEOUT": "300", "MLXSPEC_CACHE": f"{home}-own"}
        )

    def library(self) -> dict[str, Any]:
        status, _, data = self.served.ask("GET", "/api/library")
        assert status == 200, data
        return dict(json.loads(data))

    def pull(self, model: str) -> list[dict[str, Any]]:
        """The lines of a whole download."""
        status, headers, data = self.served.ask("POST", "/api/pull", {"model": model})
        assert status == 200, data
        assert headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in data.splitlines()]

    @contextmanager
    def begun(self, model: str) -> Iterator[http.client.HTTPResponse]:
        """A download that stops in the middle of the weights. Its client goes away behind the block."""
        self.hub.stalled.clear()
        self.hub.released.clear()
        self.hub.stall_after[WEIGHTS] = 1 << 20
        connection = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=LONG)
        with closing(connection):
            body = json.dumps({"model": model})
            connection.request("POST", "/api/pull", body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                assert self.hub.stalled.wait(LONG)
                yield response

    def change(self, **change: str) -> tuple[int, dict[str, Any]]:
        return self.served.post("/api/library", change)

    def files(self) -> set[str]:
        """All but those of the hub's cache."""
        cache = self.home / "hf" / "hub"
        return {str(p) for p in self.home.rglob("*") if p.is_file() and cache not in p.parents}

    def children(self) -> set[int]:
        """The server's processes that fetch."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
                parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"mlxspec.checkpoints.fetching" in words and parent in (self.served.process.pid, 1):
                found.add(int(path.parent.name))
        return found


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    made = HubServer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(hub, tmp_path_factory.mktemp("home"))
    with place.served:
        yield place


@pytest.fixture
def place(running: Place, hub: HubServer) -> Iterator[Place]:
    """With an empty cache."""
    hub.repos, hub.gated = {"owner/demo": demo_folder("target"), "owner/other": demo_folder("draft")}, set()
    hub.released.set()
    yield running
    running.change(action="cancel")
    until(lambda: running.library()["fetching"] is None)
    shutil.rmtree(running.home / "hf" / "hub", ignore_errors=True)


def until(holds: Any) -> None:
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_model_is_fetched_and_served(place: Place) -> None:
    """Progress in bytes, one model more, nothing outside the hub's cache; the same text by either name."""
    before = place.files()
    assert place.library()["here"] == []
    *told, end = place.pull("https://huggingface.co/owner/demo")
    size = sum(
        p.stat().st_size
        for p in demo_folder("target").iterdir()
        if p.suffix in (".safetensors", ".json", ".jinja")
    )
    done = [line["completed"] for line in told if "total" in line]
    assert end == {"status": "success", "notices": []}
    assert done == sorted(done)
    assert {line["total"] for line in told if "total" in line} == {size}
    assert done[-1] == size
    assert place.files() == before
    (entry,) = place.library()["here"]
    assert {k: entry[k] for k in ("name", "fits", "problem", "served_as")} == {
        "name": "owner/demo", "fits": True, "problem": "", "served_as": None,
    }  # fmt: skip
    assert place.change(action="serve", model="owner/none")[0] == 404
    assert place.served.chat(model="owner/demo")["model"] == "demo"  # any name means the one that is there
    assert place.change(action="serve", model="owner/demo") == (200, {"success": True})
    assert place.library()["here"][0]["served_as"] == "owner/demo"
    answers = [place.served.chat(model=name, temperature=0) for name in ("demo", "owner/demo", "gpt-4o")]
    assert [a["model"] for a in answers] == ["demo", "owner/demo", "demo"]
    assert len({a["choices"][0]["message"]["content"] for a in answers}) == 1


def test_a_download_delays_no_answer_and_can_be_ended(place: Place) -> None:
    with place.begun("owner/other") as response:
        assert len(place.children()) == 1  # a process of its own
        assert place.served.chat(QUESTION)["choices"][0]["message"]["content"]
        fetching = place.library()["fetching"]
        assert fetching["model"] == "owner/other"
        assert 0 <= fetching["completed"] < fetching["total"]
        status, found = place.served.post("/api/pull", {"model": "owner/demo", "stream": False})
        assert (status, found) == (
            400,
            {"error": "owner/other is being fetched; one model is fetched at a time."},
        )
        assert place.change(action="cancel") == (200, {"success": True})
        lines = [json.loads(line) for line in response.read().splitlines()]
    assert lines[-1] == {
        "error": "owner/other was not fetched: its download was ended. Files that are whole are kept."
    }
    assert place.children() == set()
    assert "incomplete" in place.library()["here"][0]["problem"]
    place.hub.released.set()
    assert place.pull("owner/other")[-1]["status"] == "success"


def test_a_client_that_goes_away_ends_no_download(place: Place) -> None:
    with place.begun("owner/other"):
        (child,) = place.children()
    assert place.library()["fetching"]
    assert place.children() == {child}
    place.hub.released.set()
    assert place.pull("owner/other")[-1]["status"] == "success"  # joined


def test_the_end_of_the_server_ends_its_download(hub: HubServer, tmp_path: Path) -> None:
    hub.repos = {"owner/other": demo_folder("draft")}
    place = Place(hub, tmp_path)
    with place.served, place.begun("owner/other"):
        assert len(place.children()) == 1
        assert place.served.stop() == 0
        until(lambda: not place.children())
    hub.released.set()


def test_a_download_that_is_ended_at_once_fetches_nothing(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its process has begun."""
    hub.repos = {"owner/other": demo_folder("draft")}
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)

    async def ended_at_once() -> Pull:
        pull = Pull("owner/other")
        pull.cancel()
        async for _ in pull.updates():
            pass
        return pull

    asked = len(hub.requests)
    assert asyncio.run(ended_at_once()).error.endswith(
        "its download was ended. Files that are whole are kept."
    )
    assert len(hub.requests) == asked


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/pull", {}), ("/api/pull", {"model": None}), ("/api/library", {"action": "serve"})],
)
def test_a_request_that_names_no_model(place: Place, path: str, body: dict[str, Any]) -> None:
    assert place.served.post(path, body) == (400, {"error": "model is missing."})


NOT_A_REPOSITORY = (
    "../../up", "/etc", "~/x", "owner/..", "owner/../../x", "owner/a/../..", "a\\..\\b", "owner", "https://hf.co/../..", " ", "owner/a\nb",
)  # fmt: skip


@pytest.mark.parametrize("name", NOT_A_REPOSITORY)
def test_names_that_are_no_repository(place: Place, name: str) -> None:
    before, asked = place.files(), len(place.hub.requests)
    status, found = place.served.post("/api/pull", {"model": name})
    assert status == 400
    assert "\n" not in found["error"]
    assert place.files() == before
    assert len(place.hub.requests) == asked


def test_what_the_hub_does_not_give(place: Place) -> None:
    place.hub.gated = {"owner/other"}
    for name, words in {"owner/none": "no model owner/none", "owner/other": "gated"}.items():
        end = place.pull(name)[-1]
        assert set(end) == {"error"}
        assert words in end["error"]
        assert "\n" not in end["error"]
    status, found = place.served.post("/api/pull", {"model": "owner/none", "stream": False})
    assert (status, set(found)) == (500, {"error"})


OWN = {"host": "127.0.0.1:8080"}


@pytest.mark.parametrize(
    "headers", [{}, {"origin": "http://127.0.0.1:8080"}, {"content-type": "application/json"}]
)
def test_the_user_of_this_machine_may(headers: dict[str, str]) -> None:
    check_is_own(ServerConfig(), Headers({**OWN, **headers}))


@pytest.mark.parametrize(
    ("config", "headers"),
    [
        ({"api_key": "secret"}, {"authorization": "Bearer secret"}),  # every client has that key
        ({"host": "0.0.0.0", "api_key": "secret"}, {"authorization": "Bearer secret"}),
        ({"allowed_hosts": ("mac.local",)}, {}),
        ({}, {"origin": "http://localhost:3000"}),
        ({"allowed_origins": ("https://example.com",)}, {"origin": "https://example.com"}),
        ({}, {"origin": "null"}),
        ({}, {"x-forwarded-for": "203.0.113.9"}),
        ({}, {"via": "1.1 proxy"}),
    ],
)
def test_nobody_else_may(config: dict[str, Any], headers: dict[str, str]) -> None:
    with pytest.raises(ApiError, match="without a key that nobody else can reach") as found:
        check_is_own(ServerConfig(**config), Headers({**OWN, **headers}))
    assert found.value.status == 403


def test_every_route_of_it_asks_who_may(place: Place) -> None:
    for method, path, body in (
        ("GET", "/api/library", None),
        ("POST", "/api/library", {"action": "cancel"}),
        ("POST", "/api/library", {"action": "serve", "model": "owner/demo"}),
        ("POST", "/api/pull", {"model": "owner/demo"}),
    ):
        status, _, data = place.served.ask(method, path, body, headers={"X-Forwarded-For": "203.0.113.9"})
        assert (status, set(json.loads(data))) == (403, {"error"}), path
    assert place.library()["fetching"] is None


# ---- on the page

STATE = "document.querySelector('#models-state').textContent"
WRONG = "document.querySelector('#models-error').textContent"


def fetch(browser: chromium.Browser, name: str) -> None:
    browser.js("document.querySelector('#fetch-name').select()")
    browser.type(name)
    browser.press("Enter")


@pytest.mark.slow
def test_models_on_the_page(program: str, place: Place, tmp_path: Path) -> None:
    """Fetch, leave the page and come back, cancel, fetch again, use."""
    place.hub.repos["owner/page"] = demo_folder("target")
    with chromium.Browser(program, width=1280) as browser:
        browser.open(home_of(place.served.port))
        browser.until("document.querySelector('#model-facts').textContent")
        browser.click("#open-models")
        browser.until("document.querySelector('#models-fitting li')")
        here = "document.querySelector('#models-here').innerText"
        assert "demo in memory, chosen" in browser.js(here)
        fetch(browser, "../up")
        browser.until(f"{WRONG}.includes('no Hugging Face id')")
        place.hub.stalled.clear()
        place.hub.released.clear()
        place.hub.stall_after[WEIGHTS] = 1 << 20
        fetch(browser, "owner/other")
        bytes_of = "document.querySelector('#fetch-state').textContent"
        browser.until(f"/of [0-9.]+ MB$/.test({bytes_of})")
        assert browser.js(WRONG) == ""
        fetch(browser, "owner/page")
        browser.until(f"{WRONG} === 'owner/other is being fetched; one model is fetched at a time.'")
        assert place.hub.stalled.wait(LONG)
        browser.reload()
        browser.until("document.querySelector('#model-facts').textContent")
        ask(browser, QUESTION)  # answers come meanwhile
        assert last(browser)
        browser.click("#open-models")
        browser.until(f"/of [0-9.]+ MB$/.test({bytes_of})")
        assert browser.js("document.querySelector('#fetch-bar').position") < 1
        browser.click("#fetch-cancel")
        browser.until(f"{WRONG}.startsWith('owner/other was not fetched')")
        assert browser.js("document.querySelector('#fetching').hidden")
        place.hub.released.set()
        fetch(browser, "owner/page")
        browser.until(f"{STATE} === 'owner/page is here.'")
        browser.click("[aria-label='Use owner/page']")
        browser.until(
            "!document.querySelector('#models').open && document.querySelector('#model').value === 'owner/page'"
        )
        ask(browser, "what does sorted do?")
        assert (
            browser.js("[...document.querySelectorAll('.turn.assistant h2')].at(-1).textContent")
            == "owner/page"
        )
        browser.click("#open-models")
        browser.until("document.querySelector(\"[aria-label='Choose demo']\")")
        assert "owner/page 8.93 MB, in memory, chosen" in browser.js(here)
        browser.click("[aria-label='Choose demo']")
        browser.until("document.querySelector('#model').value === 'demo'")
        assert [c for c in browser.complaints if "400" not in c] == []


@pytest.mark.slow
def test_a_server_with_a_key_says_where_models_are_fetched(program: str) -> None:
    with Served("--api-key", "secret") as served, chromium.Browser(program, width=1280) as browser:
        browser.open(home_of(served.port))
        browser.until("document.querySelector('#key-dialog').open")
        browser.type("secret")
        browser.press("Enter")
        browser.until("document.querySelector('#model-facts').textContent")
        browser.click("#open-models")
        browser.until(f"{STATE}.includes('`mlxspec pull` at its terminal')")
        assert "demo in memory, chosen" in browser.js("document.querySelector('#models-here').innerText")
        assert browser.js("document.querySelector('#library').hidden")
