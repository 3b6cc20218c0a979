"""The body of a request as a JSON object: so much, so deep and so slow as allowed. Knows no field."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from mlxspec.server.errors import ApiError
from mlxspec.server.security import too_large
from mlxspec.server.settings import ServerConfig


async def read_object(request: Request, config: ServerConfig) -> dict[str, Any]:
    """Raises ApiError: 400 for what is no JSON object, 413 for too much, 408 for too slow. ClientDisconnect as it is."""
    try:
        async with asyncio.timeout(config.body_seconds):
            raw = await _read(request, config.max_body)
    except TimeoutError as error:
        raise ApiError("The request's body did not come in time.", status=408, code="timeout") from error
    if depth(raw, config.max_depth) > config.max_depth:
        raise ApiError(f"The body is nested more than {config.max_depth} levels deep.", code="too_deep")
    try:
        value = json.loads(raw, parse_constant=_no_number)
        # what cannot be written as UTF-8 (half a surrogate pair) no tokenizer can read
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ApiError("The body is nested too deeply.", code="too_deep") from error
    except ValueError as error:  # also what is no UTF-8
        raise ApiError(f"The body is no valid JSON: {_what(error)}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError("The body must be a JSON object.", code="invalid_json")
    return value


async def _read(request: Request, most: int) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


def depth(raw: bytes, limit: int) -> int:
    """How deep lists and objects are nested in JSON text; counting ends above the limit. Brackets in strings do not count."""
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return 0
    deepest = level = 0
    for outside in _outside_strings(raw):
        for char in outside:
            if char in b"[{":
                level += 1
                if level > deepest:
                    deepest = level
                    if deepest > limit:
                        return deepest
            elif char in b"]}":
                level -= 1
    return deepest


def _outside_strings(raw: bytes) -> list[bytes]:
    """What stands between strings. Escapes are taken out first, so that every quote left opens or closes one."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return plain.split(b'"')[::2]


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _what(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeError):
        return "it is not UTF-8"
    return str(error)[:200].rstrip(".")


__all__ = ["ClientDisconnect", "depth", "read_object"]
