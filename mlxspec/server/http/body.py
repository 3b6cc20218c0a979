"""Reads the body of a request within limits of size, depth and time, and makes its form of it, with placeholders in place of images."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import Request

from mlxspec.server.errors import ApiError
from mlxspec.server.forms.base import Fields, names_of, review
from mlxspec.server.http.fairness import LARGE
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.http.security import too_large
from mlxspec.server.images import take_images
from mlxspec.server.usable import leave_out

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SAID = (
    "messages",
    "input",
    "prompt",
    "images",
    "max_pixels",
)  # members that can hold what the user has said
_QUICK = 4 << 10  # characters of what is compiled within some tens of milliseconds
_COMPILED = (  # fields that are, and those that begin with guided_
    "bad_words", "regex", "lark", "json_schema", "response_format", "tools", "grammar", "structured_outputs",
    "output_config", "text", "format", "options",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A body that has passed its checks. form: the body in the form of its route. notices: sentences on what was left out, and on fields
    without effect. is_slow: preparing the request may take long, because the body is large, has images, or has a grammar that may be
    large. images: a reference that keeps the body's images in memory."""

    form: Fields
    notices: tuple[str, ...] = ()
    is_slow: bool = False
    images: object = None


class Unchecked:
    """A body that has been received and not checked. is_large: too large to be checked in the event loop."""

    def __init__(self, raw: bytes, limits: ServerLimits, form: type[Fields]) -> None:
        self._raw, self._limits, self._form = raw, limits, form
        self.is_large = len(raw) > LARGE

    def check(self) -> Checked:
        """Return the checked body, and release its bytes. Raises ApiError, BadField."""
        raw, self._raw = self._raw, b""
        return checked(raw, self._limits, self._form)


async def read(request: Request, limits: ServerLimits, take: Callable[[int], None]) -> bytes:
    """Return the bytes of a request's body. take: called with the size of each piece in bytes. Raises ApiError with status 413 for a
    body that is too large and 408 for one that arrives too slowly, and ClientDisconnect."""
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read(request, limits.max_body, take)
    except TimeoutError as error:
        raise ApiError("The request's body did not come in time.", status=408, code="timeout") from error


def checked(raw: bytes, limits: ServerLimits, form: type[Fields]) -> Checked:
    """Return the checked body that is written in these bytes as JSON. Call it outside of the event loop for large bodies, which take
    long. Raises ApiError, BadField."""
    body = parse(raw, limits, is_list=form.is_list)
    said = {name: body.pop(name) for name in _SAID if name in body}
    notices = leave_out(said, form.parts, form.result_parts)
    has_images = take_images(said, notices)
    body |= said
    made, ignored = review(form, body)
    other = names_of(form).other
    own = ((other.get(name, name), value) for name, value in body.items())
    compiled = (value for name, value in own if name in _COMPILED or name.startswith("guided_"))
    return Checked(
        form=made,
        notices=(*notices, *ignored),
        is_slow=len(raw) > LARGE or has_images or any(len(str(value)) > _QUICK for value in compiled),
        images=said if has_images else None,
    )


def parse(raw: bytes, limits: ServerLimits, *, is_list: bool = False) -> dict[str, Any]:
    """Return the JSON object that is written in these bytes. With is_list the body is a JSON list, which is returned as the member
    `body` of an object. Raises ApiError with status 400."""
    try:
        encoding = json.detect_encoding(raw)
        text = raw.decode(encoding)
        check_shape(raw if encoding.startswith("utf-8") else text.encode(), limits)
        value = json.loads(text, parse_constant=_no_number)
        # what cannot be written as UTF-8 (half a surrogate pair) no tokenizer can read
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ApiError("The body is nested too deeply.", code="too_deep") from error
    except ValueError as error:  # also what is no UTF-8
        what = _what(error) if raw.strip() else "it is empty"
        raise ApiError(f"The body is no valid JSON: {what}.", code="invalid_json") from error
    if is_list:
        value = {"body": value} if isinstance(value, list) else None
    if not isinstance(value, dict):
        raise ApiError(f"The body must be a JSON {'list' if is_list else 'object'}.", code="invalid_json")
    return value


async def _read(request: Request, most: int, take: Callable[[int], None]) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        take(len(piece))
        if size > most:
            raise too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


def check_shape(raw: bytes, limits: ServerLimits) -> None:
    """Raise ApiError for JSON with too many levels or values. raw: in UTF-8. Bytes that are no valid JSON may pass."""
    openings = raw.count(b"[") + raw.count(b"{")
    if openings <= limits.max_depth and openings + raw.count(b",") <= limits.max_values:
        return
    # escapes are taken out first, so that every quote left opens or closes a string
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # a value has at most two strings, itself and its name
    num_values, brackets = plain.count(b'"') // 4, b""
    if num_values <= limits.max_values:
        outside = b"".join(plain.split(b'"')[::2])
        brackets = outside.translate(None, _NO_BRACKETS)
        num_values = outside.count(b",") + brackets.count(b"[") + brackets.count(b"{")
    if num_values > limits.max_values:
        raise ApiError(f"The body has more than {limits.max_values} values.", code="too_many_values")
    level = 0
    for char in brackets:
        level += 1 if char in b"[{" else -1
        if level > limits.max_depth:
            raise ApiError(f"The body is nested more than {limits.max_depth} levels deep.", code="too_deep")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _what(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeError):
        return "it is not UTF-8"
    return str(error)[:200].rstrip(".")
