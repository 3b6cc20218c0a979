"""Who may ask, and how much: Host, Origin, key and content type, checked before anything of a request is read.

Any web page can reach a server on this machine, so that "localhost" is no protection by itself: a foreign name in Host is DNS rebinding, a
foreign Origin is a page that should not call, a body that is not JSON is a form that such a page sent without asking. Pure ASGI middleware;
knows no route but those that are open. Errors have OpenAI's envelope.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from mlxspec.server import log
from mlxspec.server.errors import ApiError, to_api_error
from mlxspec.server.settings import ServerConfig, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = frozenset({"/health", "/v1/health"})
_METHODS = "GET, POST, OPTIONS"
_HEADERS = "authorization, content-type, x-api-key"


class Guard:
    """Wraps the application. Lets nothing through that `ServerConfig` does not allow."""

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._key = None if config.api_key is None else config.api_key.encode()
        self._hosts = {config.host.strip("[]").lower(), *(h.lower() for h in config.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        origin = headers.get("origin")
        is_welcome = origin is None or self._allows(origin)
        cors = _cors(origin) if origin is not None and is_welcome else {}

        async def with_cors(message: Message) -> None:
            if message["type"] == "http.response.start" and cors:
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in cors.items()),
                ]
            await send(message)

        try:
            self._check_host(headers.get("host"))
            if not is_welcome:
                raise ApiError(
                    "This page may not use this server; --allowed-origins would allow it.",
                    status=403,
                    code="origin",
                )
            if scope["method"] == "OPTIONS" and origin is not None:
                await _empty(with_cors, 204)
                return
            if scope["path"].rstrip("/") not in _OPEN:
                self._check_key(headers)
            if scope["method"] == "POST":
                _check_content(headers, self._config.max_body)
        except ApiError as error:
            log.request(scope, error.status, 0.0, str(error))
            await answer_error(error, with_cors)
            return
        await self._app(scope, receive, with_cors)

    def _allows(self, origin: str) -> bool:
        if "*" in self._config.allowed_origins or origin in self._config.allowed_origins:
            return True
        try:
            parts = urlsplit(origin)
            return parts.scheme in ("http", "https") and is_loopback(parts.hostname or "")
        except ValueError:
            return False

    def _check_host(self, host: str | None) -> None:
        """Only where the key does not protect anyway: on this machine alone."""
        if not self._config.is_local:
            return
        name = host_name(host or "")
        if name is None or not (is_loopback(name) or name in self._hosts):
            raise ApiError(
                "This server answers to localhost only, not to another name.", status=403, code="host"
            )

    def _check_key(self, headers: Mapping[str, str]) -> None:
        if self._key is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        if not hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key):
            raise ApiError(
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
            )


def host_name(host: str) -> str | None:
    """The name in a Host header, in lower case; None for one that is none."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        valid = bool(bracket) and (not port or (port[0] == ":" and port[1:].isdigit()))
    else:
        name, colon, port = host.partition(":")
        valid = not colon or port.isdigit()
    return name.lower() if valid and name else None


def _check_content(headers: Mapping[str, str], most: int) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            "A request's body must be JSON: send it as application/json.", status=415, code="content_type"
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("A request's body must not be compressed.", status=415, code="content_encoding")
    length = headers.get("content-length", "0")
    if not length.isdigit() or len(length) > 15 or int(length) > most:
        raise too_large(most)


def too_large(most: int) -> ApiError:
    return ApiError(f"A request's body may have {most >> 20} MiB at most.", status=413, code="body_too_large")


def _cors(origin: str) -> dict[str, str]:
    return {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": _HEADERS,
        "access-control-allow-private-network": "true",
        "vary": "Origin",
    }


async def _empty(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def answer_error(error: BaseException, send: Send) -> None:
    """The envelope, as ASGI."""
    found = to_api_error(error)
    body = json.dumps(found.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(k.lower().encode(), v.encode()) for k, v in found.headers.items()]
    if found.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": found.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
