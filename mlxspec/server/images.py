"""Takes images out of requests of all APIs, and puts them into the messages for the chat template.

Before a body is checked, `take_images` puts a text in the place of each image. So the APIs' adapters join and move it like any other text,
and know nothing of images. `placed` finds it in the messages that come out and puts an image part there, as chat templates read it.

Invariants: the text cannot be guessed, and only a text that this process has made stands for an image. Placeholders are kept in a weak
table: the image is freed with the last string that contains its placeholder.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from mlxspec.errors import ImageError
from mlxspec.images.decode import ImageLimits
from mlxspec.images.source import ImageSource, from_base64, from_url
from mlxspec.server.errors import BadField
from mlxspec.server.http.limits import ServerLimits

_MEDIA = {
    "input_audio": "Sounds",
    "audio_url": "Sounds",
    "video_url": "Videos",
    "input_video": "Videos",
    "file": "Files",
    "input_file": "Files",
    "document": "Documents",
    "container_upload": "Files",
}
_IMAGES = ("image", "image_url", "input_image")
_BEGIN, _END = "\ue000image-", "\ue001"
_MARK = re.compile(_BEGIN + "[0-9a-f]{24}" + _END)
_LOW_DETAIL = 512 * 512  # pixels: what OpenAI's detail "low" makes of an image


class ImageText(str):
    """The text that stands for an image. where: of the request; data: a data URL, or base64 alone where is_url is False."""

    where: str
    data: str
    is_url: bool
    max_pixels: int | None

    @classmethod
    def of(cls, where: str, data: str, *, is_url: bool, max_pixels: int | None) -> ImageText:
        made = cls(f"{_BEGIN}{secrets.token_hex(12)}{_END}")
        made.where, made.data, made.is_url, made.max_pixels = where, data, is_url, max_pixels
        _made[str(made)] = made
        return made

    def source(self, limits: ServerLimits) -> ImageSource:
        """Raises ImageError that says where the image stands."""
        bounds = decode_limits(limits)
        try:
            data = from_url(self.data, bounds) if self.is_url else from_base64(self.data, bounds)
        except ImageError as error:
            raise ImageError(f"{self.where}: {error}") from error
        most = limits.max_image_pixels
        return ImageSource(given=data, max_pixels=min(most, self.max_pixels or most), where=self.where)


_made: WeakValueDictionary[str, ImageText] = WeakValueDictionary()


def decode_limits(limits: ServerLimits) -> ImageLimits:
    return ImageLimits(max_bytes=limits.max_body)


def take_images(body: dict[str, Any]) -> bool:
    """Replace the images of a body, which has not been checked yet, by texts. Returns whether there were any. Raises BadField for a part
    that is neither text nor an image, and for an image that is none of the forms that are known."""
    most, found = _max_pixels(body.pop("max_pixels", None), "max_pixels"), False
    for name in ("messages", "input"):
        for i, message in enumerate(body[name] if isinstance(body.get(name), list) else ()):
            if isinstance(message, dict):
                found |= _take_parts(message, f"{name}[{i}]", most)
                found |= _take_list(message, "content", f"{name}[{i}].images", most)
    if isinstance(body.get("prompt"), str):
        found |= _take_list(body, "prompt", "images", most)
    return found


def _take_parts(holder: dict[str, Any], path: str, most: int | None) -> bool:
    """Take the images of a message or an item, or of a tool's result inside a message."""
    found = False
    for name in ("content", "output"):
        parts = holder.get(name)
        if not isinstance(parts, list):
            continue
        for j, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            place = f"{path}.{name}[{j}]"
            if not isinstance(kind, str):
                continue
            source = part.get("source")
            if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
                continue
            if kind in _MEDIA:
                raise BadField(
                    f"{place}.type",
                    f"{_MEDIA[kind]} are not supported yet: {place} must be text or an image.",
                )
            if kind in _IMAGES:
                text = _image(part, place, most)
                parts[j] = {"type": "input_text" if kind == "input_image" else "text", "text": text}
                found = True
            elif kind == "tool_result":
                found |= _take_parts(part, place, most)
    return found


def _take_list(holder: dict[str, Any], text: str, where: str, most: int | None) -> bool:
    """Take images in Ollama's form: a list of base64 beside a text, which the images come before."""
    images = holder.get("images")
    if not images:
        return False
    if not isinstance(images, list) or not all(isinstance(i, str) for i in images):
        raise BadField(where, f"{where} must be a list of images in base64.")
    content = holder.get(text)
    if content is not None and not isinstance(content, str):
        return False  # the check of the body says what is wrong
    made = [
        ImageText.of(f"{where}[{i}]", data, is_url=data[:5].lower() == "data:", max_pixels=most)
        for i, data in enumerate(images)
    ]
    del holder["images"]
    if not content and len(made) == 1:
        holder[text] = made[0]
    else:
        holder[text] = _Joined.of(made, content or "")
    return True


class _Joined(str):
    """A text that holds texts of images, and keeps them."""

    images: Sequence[ImageText]

    @classmethod
    def of(cls, images: Sequence[ImageText], text: str) -> _Joined:
        made = cls("".join(images) + text)
        made.images = tuple(images)
        return made


def _image(part: Mapping[str, Any], place: str, most: int | None) -> ImageText:
    given = part.get("image_url", part.get("image", part.get("source")))
    holder: Mapping[str, Any] = given if isinstance(given, Mapping) else part
    most = _max_pixels(holder.get("max_pixels", part.get("max_pixels")), f"{place}.max_pixels") or most
    if holder.get("detail", part.get("detail")) == "low":
        most = min(most or _LOW_DETAIL, _LOW_DETAIL)
    if isinstance(given, Mapping):
        kind = given.get("type")
        if kind == "file" or given.get("file_id") is not None:
            raise BadField(place, f"{place}: files are not stored here; send the image itself.")
        data = given.get("data") if kind == "base64" else given.get("url")
        is_url = kind != "base64"
    else:
        data, is_url = given, True
    if data is None and part.get("file_id") is not None:
        raise BadField(place, f"{place}: files are not stored here; send the image itself.")
    if not isinstance(data, str):
        raise BadField(place, f"{place} holds no image: give it as a data: URL.")
    return ImageText.of(place, data, is_url=is_url, max_pixels=most)


def _max_pixels(given: Any, where: str) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise BadField(where, f"{where} must be a whole number of at least 1.")
    return given


def placed(
    messages: Sequence[Mapping[str, Any]], limits: ServerLimits
) -> tuple[Sequence[Mapping[str, Any]], list[ImageSource]]:
    """Messages as chat templates read them, with {"type": "image"} in the place of each image, and the images in order. Raises
    ImageError."""
    if not holds_images(messages):
        return messages, []
    found: list[ImageSource] = []
    out: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        parts = _parts(content, limits, found) if isinstance(content, str) and _BEGIN in content else None
        out.append(message if parts is None else {**message, "content": parts})
    if len(found) > limits.max_images:
        raise ImageError(f"A request may hold {limits.max_images} images at most, not {len(found)}.")
    return out, found


def _parts(content: str, limits: ServerLimits, found: list[ImageSource]) -> list[dict[str, Any]] | None:
    """None where no image is in it."""
    parts: list[dict[str, Any]] = []
    num, at = len(found), 0
    for match in _MARK.finditer(content):
        image = _made.get(match.group())
        if image is None:
            continue
        if match.start() > at:
            parts.append({"type": "text", "text": content[at : match.start()]})
        parts.append({"type": "image"})
        found.append(image.source(limits))
        at = match.end()
    if len(found) == num:
        return None
    if at < len(content):
        parts.append({"type": "text", "text": content[at:]})
    return parts


def lines(texts: Iterable[str]) -> str:
    """Texts a line each; nothing stands between a text and an image."""
    found = ""
    for i, text in enumerate(texts):
        beside = found.endswith(_END) or text.startswith(_BEGIN)
        found += text if beside or not i else "\n" + text
    return found


def holds_images(value: Any) -> bool:
    """Whether a JSON value holds an image that `take_images` has found. Looks at all its texts."""
    if isinstance(value, str):
        return _BEGIN in value and any(match.group() in _made for match in _MARK.finditer(value))
    if isinstance(value, Mapping):
        return any(map(holds_images, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_images, value))
