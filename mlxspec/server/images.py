"""Takes images out of requests of all APIs, and puts them into the messages for the chat template.

Before a body is checked, `take_images` replaces each image by a placeholder text. So the readers of the APIs join and move the
placeholder like any other text, and need no code for images. `placed` finds it in the messages that they make, and puts an image part in
its place, as chat templates read it.

Invariants: a placeholder cannot be guessed, and only a text that this process has made is a placeholder. Placeholders are kept in a weak
table: the image is freed with the last string that contains its placeholder.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from mlxspec.errors import ImageError
from mlxspec.images.source import ImageLimits, ImageSource, from_base64, from_url
from mlxspec.server.errors import BadField
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.job import TemplateMessage
from mlxspec.server.usable import IMAGES, newest_turn

_BEGIN, _END = "\ue000image-", "\ue001"
_MARK = re.compile(_BEGIN + "[0-9a-f]{24}" + _END)
_LEFT_OUT = "[image left out: it cannot be read here]"
_LOW_DETAIL = 512 * 512  # pixels: what OpenAI's detail "low" makes of an image


class ImageText(str):
    """A text that is a placeholder for an image. where: the image's place in the request. data: a data URL, or base64 where is_url is
    False. max_pixels: the largest size that the request allows; None for the server's limit. is_needed: the image is in the user's
    newest turn, so that it is an error if it cannot be used."""

    where: str
    data: str
    is_url: bool
    max_pixels: int | None
    is_needed: bool

    @classmethod
    def of(cls, where: str, data: str, *, is_url: bool, max_pixels: int | None, is_needed: bool) -> ImageText:
        made = cls(f"{_BEGIN}{secrets.token_hex(12)}{_END}")
        made.where, made.data, made.is_url, made.max_pixels = where, data, is_url, max_pixels
        made.is_needed = is_needed
        _made[str(made)] = made
        return made

    def source(self, limits: ServerLimits) -> ImageSource:
        """Return the image's bytes with the largest size after resizing. Raises ImageError with the image's place in the request."""
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


def take_images(body: dict[str, Any], notices: list[str]) -> bool:
    """Replace the images of a body by placeholder texts, before the body is checked. Returns whether there were any. notices: receives a
    sentence for each image that is left out. Raises BadField for an image of the user's newest turn that is in no known form."""
    most, found = _max_pixels(body.pop("max_pixels", None), "max_pixels"), False
    for name in ("messages", "input"):
        turns = body[name] if isinstance(body.get(name), list) else ()
        newest = newest_turn(turns)
        for i, message in enumerate(turns):
            if isinstance(message, dict):
                found |= _take_parts(message, f"{name}[{i}]", most, notices, is_needed=i == newest)
                found |= _take_list(message, "content", f"{name}[{i}].images", most, is_needed=i == newest)
    if isinstance(body.get("prompt"), str):
        found |= _take_list(body, "prompt", "images", most, is_needed=True)
    return found


def _take_parts(
    holder: dict[str, Any], path: str, most: int | None, notices: list[str], *, is_needed: bool
) -> bool:
    """Replace the image parts of a message, an item, or a tool's result inside a message by placeholder texts. Returns whether there
    were any. most: the largest size in pixels; None for the server's limit. is_needed: an image in no known form raises BadField;
    otherwise it is left out, and `notices` receives a sentence."""
    found = False
    for name in ("content", "output"):
        parts = holder.get(name)
        if not isinstance(parts, list):
            continue
        for j, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            place = f"{path}.{name}[{j}]"
            if kind in IMAGES:
                try:
                    text: str = _image(part, place, most, is_needed=is_needed)
                    found = True
                except BadField as error:
                    if is_needed:
                        raise
                    text = _LEFT_OUT
                    notices.append(_told(place, error))
                parts[j] = {"type": "text", "text": text}
            elif kind == "tool_result":
                found |= _take_parts(part, place, most, notices, is_needed=False)
    return found


def _take_list(holder: dict[str, Any], text: str, where: str, most: int | None, *, is_needed: bool) -> bool:
    """Replace the member `images` of a message in Ollama's form, a list of base64, by placeholders before its text. Returns whether
    there were any. text: the name of the member that has the text."""
    images = holder.get("images")
    if not images:
        return False
    if not isinstance(images, list) or not all(isinstance(i, str) for i in images):
        raise BadField(where, f"{where} must be a list of images in base64.")
    content = holder.get(text)
    if content is not None and not isinstance(content, str):
        return False  # the check of the body says what is wrong
    made = [
        ImageText.of(
            f"{where}[{i}]", data, is_url=data[:5].lower() == "data:", max_pixels=most, is_needed=is_needed
        )
        for i, data in enumerate(images)
    ]
    del holder["images"]
    if not content and len(made) == 1:
        holder[text] = made[0]
    else:
        holder[text] = _Joined.of(made, content or "")
    return True


class _Joined(str):
    """A text that contains placeholders of images, and keeps the images in memory."""

    images: Sequence[ImageText]

    @classmethod
    def of(cls, images: Sequence[ImageText], text: str) -> _Joined:
        made = cls("".join(images) + text)
        made.images = tuple(images)
        return made


def _image(part: Mapping[str, Any], place: str, most: int | None, *, is_needed: bool) -> ImageText:
    """Return the placeholder for a part of a message that is an image. Raises BadField for a form that is not known."""
    given = part.get("image_url", part.get("image", part.get("source")))
    fields = {**part, **given} if isinstance(given, Mapping) else {**part, "url": given}
    most = _max_pixels(fields.get("max_pixels"), f"{place}.max_pixels") or most
    if fields.get("detail") == "low":
        most = min(most or _LOW_DETAIL, _LOW_DETAIL)
    is_url = fields.get("type") != "base64"
    data = fields.get("url" if is_url else "data")
    if data is None and (fields.get("type") == "file" or fields.get("file_id") is not None):
        raise BadField(place, f"{place}: files are not stored here; send the image itself.")
    if not isinstance(data, str):
        raise BadField(place, f"{place} holds no image: give it as a data: URL.")
    return ImageText.of(place, data, is_url=is_url, max_pixels=most, is_needed=is_needed)


def _max_pixels(given: Any, where: str) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise BadField(where, f"{where} must be a whole number of at least 1.")
    return given


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Messages with their images. messages: in the form that chat templates read, with the part {"type": "image"} in the place of each
    image. sources: the images in order. notices: sentences on images that were left out."""

    messages: Sequence[TemplateMessage]
    sources: Sequence[ImageSource] = ()
    notices: tuple[str, ...] = ()


def placed(
    messages: Sequence[TemplateMessage],
    limits: ServerLimits,
    *,
    why: str = "",
    bad: Mapping[str, str] | None = None,
) -> Placed:
    """Return the messages with image parts in place of the placeholders, and the images. why: the reason why the model reads no images;
    empty where it does. bad: reasons why images cannot be decoded, by their places. Outside of the user's newest turn, an image that
    cannot be used is left out, and so are the oldest of too many. Raises ImageError for others."""
    if not holds_images(messages):
        return Placed(messages=messages)
    contents = [m["content"] for m in messages if isinstance(m.get("content"), str)]
    found = [i for c in contents for m in _MARK.finditer(c) if (i := _made.get(m.group())) is not None]
    sources: dict[str, ImageSource] = {}
    notices: list[str] = []
    for image in found:
        try:
            told = why or (bad or {}).get(image.where)
            if told:
                raise ImageError(told)
            sources[image.where] = image.source(limits)
        except ImageError as error:
            if image.is_needed:
                raise
            notices.append(_told(image.where, error))
    for image in [i for i in found if i.where in sources and not i.is_needed]:
        if len(sources) > limits.max_images:
            del sources[image.where]
            notices.append(_told(image.where, f"a request may hold {limits.max_images} images at most"))
    if len(sources) > limits.max_images:
        raise ImageError(f"A request may hold {limits.max_images} images at most, not {len(sources)}.")
    out: list[TemplateMessage] = []
    for message in messages:
        content = message.get("content")
        parts = _parts(content, sources) if isinstance(content, str) and _BEGIN in content else content
        out.append(message if parts is content else {**message, "content": parts})
    return Placed(messages=out, sources=tuple(sources.values()), notices=tuple(notices))


def _told(where: str, why: object) -> str:
    said = str(why).removeprefix(f"{where}: ").removeprefix(f"{where} ").rstrip(".")
    return f"{where}: the image was left out: {said[:1].lower()}{said[1:]}"


def pieces(content: str) -> Iterator[str]:
    """Yield the texts of a message's content and the images between them, in order. An image is yielded as its ImageText."""
    at = 0
    for match in _MARK.finditer(content):
        image = _made.get(match.group())
        if image is not None:
            yield from filter(None, (content[at : match.start()], image))
            at = match.end()
    if at < len(content):
        yield content[at:]


def _parts(content: str, sources: Mapping[str, ImageSource]) -> str | list[dict[str, Any]]:
    """Return a text with placeholders as a list of text and image parts; as a text where none of its images is among the sources."""
    parts: list[dict[str, Any]] = []
    text = ""
    for piece in pieces(content):
        if not isinstance(piece, ImageText):
            text += piece
        elif piece.where not in sources:
            text += _LEFT_OUT
        else:
            parts += [{"type": "text", "text": text}] if text else []
            parts.append({"type": "image"})
            text = ""
    if not parts:
        return text
    return [*parts, {"type": "text", "text": text}] if text else parts


def lines(texts: Iterable[str]) -> str:
    """Return the texts joined, each on a line of its own. No line break is put between a text and an image's placeholder."""
    found = ""
    for i, text in enumerate(texts):
        beside = found.endswith(_END) or text.startswith(_BEGIN)
        found += text if beside or not i else "\n" + text
    return found


def holds_images(value: Any) -> bool:
    """Return whether any text in a JSON value contains a placeholder that `take_images` has made."""
    if isinstance(value, str):
        return _BEGIN in value and any(match.group() in _made for match in _MARK.finditer(value))
    if isinstance(value, Mapping):
        return any(map(holds_images, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_images, value))
