"""Checks Host, Origin and key before a route is looked for, and the content type before a body is read.

Any web page can reach a server on this machine, so that "localhost" is no protection by itself. A foreign name in Host is DNS rebinding;
a foreign Origin is a page that should not call; Sec-Fetch-Site reveals an image or a script of such a page, which has no Origin; and a
body that is not JSON is a form that such a page sent without a preflight. This is pure ASGI middleware; of the routes it contains only
the paths that need no key. Errors have the form of the path's API.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from mlxspec.server.errors import AUTHENTICATION, ApiError, error_body, to_api_error
from mlxspec.server.http import log
from mlxspec.server.http.connections import note_key
from mlxspec.server.routes import PAGE_FOLDER
from mlxspec.server.settings import ServerConfig, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Without a slash at the end. "" is the page, which is the same for everybody.
_OPEN = frozenset({"/health", "/v1/health", ""})
_METHODS = "GET, POST, DELETE, OPTIONS"
_HEADERS = "authorization, content-type, x-api-key"  # where a preflight does not say which it wants
_EXPOSED = "x-request-id, retry-after"  # headers of answers that a page may read
_CURLS_OWN = "application/x-www-form-urlencoded"  # what curl -d says of any body
_PREFLIGHT_SECONDS = 600  # that a browser may remember an answer to a preflight
# schemes of programs on this machine; no page of the web can be an origin of such a scheme
_APPS = ("app", "tauri", "vscode-webview", "vscode-file")
_TOKENS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """An ASGI application around another one, which passes on only the requests that `ServerConfig` allows by Host, Origin and API key."""

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._key = None if config.api_key is None else config.api_key.encode()
        self._hosts = {config.host.strip("[]").lower(), *(h.lower() for h in config.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        host = headers.get("host")
        is_welcome = origin is None or is_own(origin, host) or self.allows(origin)
        more = {"x-request-id": request_id(headers.get("x-request-id"))}
        if origin is not None and is_welcome:
            more |= _cors(origin, headers.get("access-control-request-headers"))

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"]).update(more)
            await send(message)

        try:
            if (
                "content-length" in headers and "transfer-encoding" in headers
            ):  # a proxy may have read the other
                more["connection"] = "close"
                raise ApiError(
                    "A request has Content-Length or Transfer-Encoding, and not both.", code="two_lengths"
                )
            self._check_host(host)
            is_foreign = headers.get("sec-fetch-site") == "cross-site" and origin is None
            if is_foreign and not _is_page(scope["path"]):
                raise ApiError(
                    "A page of another site asked for this by itself, as an image or a link; open the address directly.",
                    status=403,
                    code="origin",
                )
            if not is_welcome:
                raise ApiError(
                    "This page may not use this server; --allowed-origins would allow it.",
                    status=403,
                    code="origin",
                )
            if scope["method"] == "OPTIONS" and origin is not None:
                await Response()(scope, receive, with_headers)
                return
            if not is_open(scope["path"]):
                self._check_key(headers)
                note_key(scope)
        except ApiError as error:
            log.request(scope, error.status, 0.0, str(error))
            await error_response(error, scope["path"])(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def allows(self, origin: str) -> bool:
        """Return whether a web page of this origin may use the server."""
        scheme, separator, _ = origin.partition("://")
        if not separator:
            return "*" in self._config.allowed_origins
        if {"*", origin, f"{scheme}://*"} & set(self._config.allowed_origins):
            return True
        if scheme in _APPS:
            return True
        try:
            name = urlsplit(origin).hostname or ""
        except ValueError:
            return False
        return scheme in ("http", "https") and _is_this_machine(name)

    def _check_host(self, host: str | None) -> None:
        """Raise ApiError for a Host header with a name that is not allowed. Checked only on a server that listens on this machine alone,
        since others need an API key."""
        if not self._config.is_local:
            return
        name = host_name(host or "")
        if name is None or not (_is_this_machine(name) or name in self._hosts):
            raise ApiError(
                "This server answers to localhost only, not to another name; --allowed-hosts NAME would allow one.",
                status=403,
                code="host",
            )

    def _check_key(self, headers: Mapping[str, str]) -> None:
        if self._key is None:
            return
        if not hmac.compare_digest(_given_key(headers), self._key):
            raise ApiError(
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                status=401,
                kind=AUTHENTICATION,
                code="invalid_api_key",
            )


def _given_key(headers: Mapping[str, str]) -> bytes:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")
    return given.strip().encode("latin-1", "replace")


def owner_of(headers: Mapping[str, str]) -> str:
    """Return a digest of the API key in a request's headers, empty without a key. Prompts of different keys are kept apart by it,
    whether or not the server requires a key."""
    key = _given_key(headers)
    return hashlib.sha256(key).hexdigest()[:32] if key else ""


def is_open(path: str) -> bool:
    """Return whether a path needs no API key: /health and the files of the page. A browser has no key when it opens the page, which then
    asks for the key."""
    return path.rstrip("/") in _OPEN or _is_page(path)


def _is_page(path: str) -> bool:
    """Return whether a path belongs to the server's page. A link on another site may lead there."""
    return path in ("", "/") or path.startswith(PAGE_FOLDER)


def _is_this_machine(name: str) -> bool:
    """Return whether a host name can only mean this machine, whatever name servers answer. Browsers resolve every name under .localhost
    to their own machine (RFC 6761). host.docker.internal does not count: where Docker has not defined it, name servers are queried
    for it."""
    return is_loopback(name) or name.endswith(".localhost")


def is_own(origin: str, host: str | None) -> bool:
    """Return whether `origin` is this server itself, under the name in the request's Host header. Whether this name is allowed is
    checked elsewhere."""
    scheme, separator, rest = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and rest == host


def host_name(host: str) -> str | None:
    """Return the name in a Host header, without the port and in lower case; None for an invalid header."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        valid = bool(bracket) and (not port or (port[0] == ":" and port[1:].isdigit()))
    else:
        name, colon, port = host.partition(":")
        valid = not colon or port.isdigit()
    return name.lower() if valid and name else None


def check_content(headers: Mapping[str, str], most: int, path: str) -> None:
    """Check the headers of a body. Raises ApiError with status 415 for a body that is not uncompressed JSON, 413 for one of more than
    `most` bytes. Below /api the content type may be missing, because programs for Ollama's API leave it out."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # programs for Ollama's API leave the type out, or let curl say that it is a form; no browser sends a POST of another page without an
    # Origin
    is_unnamed = kind in ("", _CURLS_OWN) and path.startswith("/api/") and "origin" not in headers
    if kind != "application/json" and not is_unnamed:
        raise ApiError(
            "A request's body must be JSON: send it with the header Content-Type: application/json.",
            status=415,
            code="content_type",
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("A request's body must not be compressed.", status=415, code="content_encoding")
    length = headers.get("content-length", "0")
    if not length.isdigit() or len(length) > 15 or int(length) > most:
        raise too_large(most)


def too_large(most: int) -> ApiError:
    return ApiError(f"A request's body may have {most >> 20} MiB at most.", status=413, code="body_too_large")


def request_id(given: str | None) -> str:
    """Return the id that the client gave its request, where it is valid, else a new id."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def _cors(origin: str, asked: str | None) -> dict[str, str]:
    """Return the CORS headers that allow a page of this origin to read the response. asked: the headers that a preflight announces; all
    are allowed, because client libraries send many, and this server trusts none of them."""
    return {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": asked if asked and _TOKENS.fullmatch(asked) else _HEADERS,
        "access-control-allow-private-network": "true",
        "access-control-expose-headers": _EXPOSED,
        "access-control-max-age": str(_PREFLIGHT_SECONDS),
        "vary": "Origin, Access-Control-Request-Headers",
    }


def error_response(error: BaseException, path: str) -> Response:
    """Return the response for an error, in the form of the API that `path` belongs to."""
    found = to_api_error(error)
    more = {"WWW-Authenticate": "Bearer"} if found.status == 401 else {}
    body = json.dumps(error_body(found, path))
    return Response(body, found.status, {**found.headers, **more}, "application/json")
