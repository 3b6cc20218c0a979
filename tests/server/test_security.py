"""Who is let in, what is taken, and that nothing a client sends gets more than an error in OpenAI's envelope."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from planting import catches

from mlxspec.errors import ConfigError
from mlxspec.server.chat_api import ChatCompletionRequest
from mlxspec.server.completions_api import CompletionRequest, DetokenizeRequest, TokenizeRequest
from mlxspec.server.errors import ApiError
from mlxspec.server.http.run import web_config
from mlxspec.server.http.security import Guard, check_content, host_name, is_own
from mlxspec.server.settings import ServerConfig
from tests.server.published_fields import honoured
from tests.server.serving import LONG, Served

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
KEY = "secret-kéy"


def envelope(data: bytes) -> dict[str, Any]:
    error = json.loads(data)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    return error


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("app.localhost:8080", 200),
        ("host.docker.internal", 403),
        ("localhost.internal", 403),
        ("127.0.0.1.nip.io", 403),
        ("evil.com", 403),
        ("localhost.evil.com", 403),
        ("localhost:80@evil.com", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_hosts(demo: Served, host: str, status: int) -> None:
    found, _, data = demo.ask("GET", "/v1/models", headers={"Host": host})
    assert found == status
    if status != 200:
        error = envelope(data)
        assert error["code"] == "host"
        assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("https://127.0.0.1", 200),
        ("http://[::1]:5", 200),
        ("https://evil.com", 403),
        ("http://localhost.evil.com", 403),
        ("http://tauri.localhost", 200),
        ("tauri://localhost", 200),
        ("app://obsidian.md", 200),
        ("vscode-webview://1a2b", 200),
        ("chrome-extension://abc", 403),
        ("http://app", 403),
        ("null", 403),
        ("file://", 403),
        ("http://[", 403),
    ],
)
def test_origins(demo: Served, origin: str, status: int) -> None:
    for method, body in (("GET", None), ("POST", BODY)):
        path = "/v1/models" if method == "GET" else "/v1/chat/completions"
        found, headers, data = demo.ask(method, path, body, headers={"Origin": origin})
        assert found == status
        assert headers.get("access-control-allow-origin") == (origin if status == 200 else None)
        if status != 200:
            assert envelope(data)["code"] == "origin"
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    found, headers, _ = demo.ask("OPTIONS", "/v1/chat/completions", headers=preflight)
    assert found == status
    assert ("access-control-allow-headers" in headers) == (status == 200)


@catches(
    "an origin that begins with the server's address is its own",
    "mlxspec.server.http.security:is_own",
    lambda right: lambda origin, host: host is not None and origin.partition("://")[2].startswith(host),
    case="evil.com-F",
)
@pytest.mark.parametrize(
    ("origin", "is_it"),
    [
        ("http://box:8080", True),
        ("https://box:8080", True),
        ("http://box:8080.evil.com", False),
        ("http://box:80801", False),
        ("http://box", False),
        ("http://evil.com/box:8080", False),
        ("ftp://box:8080", False),
        ("box:8080", False),
        ("null", False),
    ],
)
def test_a_page_is_the_servers_own_only_under_its_whole_address(origin: str, is_it: bool) -> None:
    assert is_own(origin, "box:8080") == is_it
    assert not is_own(origin, None)


OPENAI_HEADERS = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count"


def test_a_preflight_is_answered_with_the_headers_it_asks_for(demo: Served) -> None:
    """The libraries of OpenAI and others send many; a browser refuses to send what the answer does not name."""
    asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    for wanted, allowed in (
        (OPENAI_HEADERS, OPENAI_HEADERS),
        ("x-anything", "x-anything"),
        ("a b", "authorization, content-type, x-api-key"),
        ("x\x80y", "authorization, content-type, x-api-key"),
    ):
        more = {**asked, "Access-Control-Request-Headers": wanted}
        status, headers, _ = demo.ask("OPTIONS", "/v1/chat/completions", headers=more)
        assert (status, headers["access-control-allow-headers"]) == (200, allowed)
        assert "Access-Control-Request-Headers" in headers["vary"]


def test_extensions_are_allowed_by_name_or_by_scheme() -> None:
    for origins in (("chrome-extension://abc",), ("chrome-extension://*",), ("https://example.com",)):
        ServerConfig(allowed_origins=origins)
    for origin in ("https://*", "http://*", "chrome-extension", "https://example.com/path"):
        with pytest.raises(ConfigError, match="origin"):
            ServerConfig(allowed_origins=(origin,))
    guard = Guard(_nothing, ServerConfig(allowed_origins=("moz-extension://*", "https://a.example")))
    assert guard.allows("moz-extension://1-2")
    assert guard.allows("https://a.example")
    for origin in ("chrome-extension://1", "https://b.example", "moz-extension", "https://a.example.evil"):
        assert not guard.allows(origin)


async def _nothing(*_: Any) -> None: ...


def answered(guard: Guard, path: str, headers: dict[str, str], method: str = "GET") -> int:
    """The status of a request that goes through a guard; 200 where it lets it through."""
    found: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": raw,
        "client": ("127.0.0.1", 1),
        "state": {},
    }
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    return found[0] if found else 200


@pytest.mark.parametrize(
    ("length", "status"),
    [("0", 200), ("100", 200), ("101", 413), ("9" * 20, 413), ("-1", 413), ("1e2", 413), ("", 413)],
)
def test_a_body_may_be_announced_up_to_the_limit(length: str, status: int) -> None:
    headers = {"content-type": "application/json", "content-length": length}
    try:
        check_content(headers, 100, "/v1/completions")
        found = 200
    except ApiError as error:
        found = error.status
    assert found == status


@catches(
    "the beginning of a key is enough",
    "mlxspec.server.http.security:hmac",
    lambda right: SimpleNamespace(compare_digest=lambda given, key: key.startswith(given)),
    case="wrong",
)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 401, id="wrong-none"),
        pytest.param({"Authorization": "Bearer "}, 401, id="wrong-empty"),
        pytest.param({"Authorization": "Bearer sec"}, 401, id="wrong-beginning"),
        pytest.param({"X-API-Key": "sec"}, 401, id="wrong-header"),
        ({"Authorization": "Bearer secrets"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "bearer secret "}, 200),
        ({"X-API-Key": "secret"}, 200),
    ],
)
def test_the_whole_key_and_no_other_lets_in(headers: dict[str, str], status: int) -> None:
    guard = Guard(_nothing, ServerConfig(api_key="secret"))
    for path in ("/v1/models", "/metrics", "/v1/chat/completions", "/health/x", "//health"):
        assert answered(guard, path, {"Host": "localhost", **headers}) == status, path
    for path in ("/", "/health", "/v1/health", "/page/page.js"):
        assert answered(guard, path, {"Host": "localhost", **headers}) == 200, path


def test_every_answer_has_an_id(demo: Served) -> None:
    """The client's own where it sends one that fits into a log line."""
    fresh = {demo.ask("GET", path)[1]["x-request-id"] for path in ("/health", "/v1/models", "/nothing") * 2}
    assert len(fresh) == 6
    for given, same in (("my-id.1", True), ("x" * 200, False), ("a b", False)):
        _, headers, _ = demo.ask("GET", "/v1/models", headers={"X-Request-Id": given})
        assert (headers["x-request-id"] == given) == same


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_form_of_a_web_page_is_no_request(demo: Served, kind: str) -> None:
    raw = json.dumps(BODY).encode()
    status, _, data = demo.ask("POST", "/v1/chat/completions", raw=raw, headers={"Content-Type": kind})
    assert status == 415
    assert envelope(data)["code"] == "content_type"


def test_bodies_too_large_too_deep_or_no_json(demo: Served) -> None:
    for raw, status in (
        (b"x" * (33 << 20), 413),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        (b'{"messages": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", 400),
        (b"[" * 100_000, 400),
        (b"[]", 400),
        (b"", 400),
        (b"{", 400),
        (b'"x"', 400),
        (b'{"temperature": NaN, "messages": []}', 400),
        (b'{"max_tokens": 1e999, "messages": [{"role": "user", "content": "x"}]}', 400),
        (b'{"seed": 1' + b"0" * 5000 + b', "messages": [{"role": "user", "content": "x"}]}', 400),
        (b"\xff\xfe", 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    ):
        found, _, data = demo.ask("POST", "/v1/chat/completions", raw=raw)
        assert found == status, (raw[:60], data)
        envelope(data)
    assert demo.chat(max_tokens=1)  # and it goes on


def test_a_body_that_grows_past_its_limit(demo: Served) -> None:
    """Chunked, so that no length is announced."""
    with socket.create_connection(("127.0.0.1", demo.port), timeout=LONG) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        more = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall((head + more).encode())
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        try:
            for _ in range(34):
                connection.sendall(piece)
        except OSError:
            pass  # it has stopped reading
        answer = connection.recv(1 << 16)
    assert b"413" in answer.split(b"\r\n")[0]


WRONG: list[Any] = ["x" * 70_000, -1, 10**40, 1.5, [[]], {"a": 1}]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        pytest.param("/v1/completions", marks=pytest.mark.slow),
        "/tokenize",
        "/detokenize",
    ],
)
def test_wrong_types_in_every_field(demo: Served, path: str) -> None:
    """No field, whatever is in it, gives more than a sentence: 4xx, or an answer where the value happens to be valid."""
    form = {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
    }[path]
    good: dict[str, Any] = {
        "/v1/chat/completions": BODY,
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/tokenize": {"content": "x"},
        "/detokenize": {"tokens": [5]},
    }[path]
    for field in honoured(form):
        for value in WRONG:
            if field == "model" or (field == "timeout" and value == 1.5):
                continue
            status, _, data = demo.ask("POST", path, {**good, field: value})
            assert status in (200, 400), (field, value, data)
            if status == 400:
                envelope(data)


def test_messages_that_are_none(demo: Served) -> None:
    for messages in (
        [],
        [1],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "critic", "content": "x"}],
        [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}],
            }
        ],
        [{"role": "user", "content": [{"type": "text"}]}],
    ):
        status, _, data = demo.ask("POST", "/v1/chat/completions", {**BODY, "messages": messages})
        assert status == 400, (messages, data)
        error = envelope(data)
        assert error["code"] == "invalid_image" or error["param"].startswith("messages"), data


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "C:\\x",
        "http://127.0.0.1:1/x",
        "a/b",
        "\r\nX: y",
        "\u202e",
        "demo\x00",
    ],
)
def test_names_of_models_choose_no_file(demo: Served, name: str) -> None:
    assert demo.chat(model=name, max_tokens=1)["model"] == "demo"


def test_routes_and_methods_that_are_not_there(demo: Served) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1//models", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
    ):
        found, _, data = demo.ask(method, path)
        assert found == status, path
        envelope(data)


def test_log_lines_are_one_line_each(demo: Served) -> None:
    until = time.monotonic() + LONG
    while not any("forged" in line for line in demo.lines) and time.monotonic() < until:
        # lines are left out while there are too many, and other tests ask the same server
        assert demo.ask("GET", "/%0a%1b[31mforged%0d%0aline")[0] == 404
        time.sleep(0.1)
    demo.wait_for(r"forged")
    assert not [line for line in demo.lines if "\x1b" in line or line.startswith("line")]
    assert not [line for line in demo.lines if "Traceback" in line]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two models, a key and a hostile chat template."""
    hostile = tmp_path_factory.mktemp("models") / "hostile"
    _copy_demo(hostile, "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}")
    with Served(
        "--model",
        "demo",
        "--model",
        f"bad={hostile}",
        "--draft",
        "off",
        env={"MLXSPEC_API_KEY": KEY},
        headers={"X-API-Key": KEY.encode().decode("latin-1")},
    ) as served:
        yield served


def _copy_demo(folder: Path, template: str) -> None:
    from mlxspec.demo import TARGET

    folder.mkdir()
    for path in TARGET.iterdir():
        if path.name != "chat_template.jinja":
            shutil.copy(path, folder / path.name)
    (folder / "chat_template.jinja").write_text(template)


def test_keys(keyed: Served) -> None:
    right = KEY.encode().decode("latin-1")
    wrong = ("", "secret", right + "x", "Bearer", "\xff\xfe")
    for key in wrong:
        for header in ({"X-API-Key": key}, {"X-API-Key": "", "Authorization": f"Bearer {key}"}):
            status, headers, data = keyed.ask("GET", "/v1/models", headers=header)
            assert status == 401
            assert headers["www-authenticate"] == "Bearer"
            assert envelope(data)["code"] == "invalid_api_key"
            assert envelope(data)["type"] == "authentication_error"
    for path in ("/metrics", "/limits", "/openapi.json"):
        assert keyed.ask("GET", path, headers={"X-API-Key": "no"})[0] == 401
    for path in ("/health", "/", "/page/main.js"):
        assert keyed.ask("GET", path, headers={"X-API-Key": "no"})[0] == 200
    for header in ({}, {"X-API-Key": "", "Authorization": f"Bearer {right}"}):
        assert keyed.ask("GET", "/v1/models", headers=header)[0] == 200
    assert not [line for line in keyed.lines if KEY in line]


def test_a_table_of_models_and_a_hostile_template(keyed: Served) -> None:
    status, answer = keyed.post("/v1/chat/completions", {**BODY, "model": "gpt-4o"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = keyed.post("/v1/chat/completions", {**BODY, "model": "bad"})
    assert status == 400
    assert "template" in answer["error"]["message"]
    loads = keyed.metrics()["mlxspec_model_loads_total"]
    assert loads == 2  # it was swapped in
    text = keyed.post("/v1/completions", {"model": "bad", "prompt": "def main():", "max_tokens": 4})[1]
    assert text["model"] == "bad"
    assert keyed.chat(model="demo", max_tokens=2)["model"] == "demo"
    assert keyed.metrics()["mlxspec_model_loads_total"] == 3


def test_other_addresses_need_a_key() -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.com"):
        with pytest.raises(ConfigError, match="key"):
            ServerConfig(host=host)
        assert ServerConfig(host=host, api_key="12345678")
    for host in ("127.0.0.1", "localhost", "::1", "127.3.4.5"):
        assert ServerConfig(host=host).is_local
    with pytest.raises(ConfigError, match="key"):
        ServerConfig(allowed_origins=("*",))
    with pytest.raises(ConfigError, match="origin"):
        ServerConfig(allowed_origins=("example.com",))


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("a:1", "a"),
        ("A", "a"),
        ("[::1]", "::1"),
        ("[::1]:9", "::1"),
        ("a:b", None),
        ("", None),
        (":80", None),
        ("[::1]x", None),
    ],
)
def test_names_in_host_headers(host: str, name: str | None) -> None:
    assert host_name(host) == name


@catches(
    "uvicorn chooses by what is installed, and believes X-Forwarded-For",
    "mlxspec.server.http.run:web_config",
    lambda right: lambda app: uvicorn.Config(app, log_config=None),
)
def test_nothing_is_left_to_the_packages_that_are_installed() -> None:
    """A WebSocket library beside us, as many packages bring one, opens no door, and no header of a client's names another client."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the guard lets HTTP through only")

    config = web_config(app)
    config.load()
    assert config.ws_protocol_class is None
    assert config.proxy_headers is False
    assert (config.loop, config.interface, config.lifespan) == ("asyncio", "asgi3", "off")
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    guard = Guard(app, ServerConfig())
    asyncio.run(guard({"type": "websocket", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
    asyncio.run(guard({"type": "lifespan"}, None, send))
    assert len(sent) == 1
