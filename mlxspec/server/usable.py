"""Leaves out or refuses the parts of a conversation that the server cannot use: one rule for all APIs, applied before a body is checked.

    in an earlier turn, an answer, or the result of a tool    a part is left out with a notice; a text in its place names its type
    in the user's newest turn                                 a sound, a video or a file is an error in one sentence; a part of a type that
                                                              is not known is left out, as long as the turn has another part

So no part of a history makes all later requests fail. A turn that holds results of tools is not the user's. The table `parts` of a form
holds the types of parts that it reads. images.py applies the same rule to images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from mlxspec.server.errors import BadField

MEDIA = {
    "input_audio": "Sounds",
    "audio": "Sounds",
    "audio_url": "Sounds",
    "video": "Videos",
    "video_url": "Videos",
    "input_video": "Videos",
    "file": "Files",
    "input_file": "Files",
    "document": "Documents",
    "container_upload": "Files",
}
IMAGES = ("image", "image_url", "input_image")
_PLACES = ("messages", "input")
_RESULTS = ("tool_result", "mcp_tool_result")


def types_of(union: Any) -> frozenset[str]:
    """Return the values that the field `type` may have in the forms of a union."""
    if get_origin(union) is not None or not hasattr(union, "model_fields"):
        return frozenset().union(*map(types_of, (a for a in get_args(union) if not isinstance(a, str))))
    field = union.model_fields.get("type")
    said = get_args(field.annotation) if field else ()
    return frozenset(a for a in (*said, *(b for a in said for b in get_args(a))) if isinstance(a, str))


def newest_turn(turns: Sequence[Any]) -> int | None:
    """Return the index of the user's newest turn: the last message, if it is the user's and contains no result of a tool; else None."""
    last = turns[-1] if turns else None
    if not isinstance(last, dict) or last.get("role") != "user":
        return None
    content = last.get("content")
    kinds = [p.get("type") for p in content if isinstance(p, dict)] if isinstance(content, list) else []
    return None if any(kind in _RESULTS for kind in kinds) else len(turns) - 1


def leave_out(body: dict[str, Any], parts: frozenset[str], in_results: frozenset[str]) -> list[str]:
    """Remove the parts of a conversation that cannot be used from a body, before the body is checked, and return notices on them. parts:
    types that the body's form reads in messages; in_results: those that it reads in results of tools within a message. Raises
    BadField for such a part of the user's newest turn."""
    kinds: list[str] = []
    for name in _PLACES:
        turns = body.get(name) if parts and isinstance(body.get(name), list) else ()
        newest = newest_turn(turns or ())
        for i, turn in enumerate(turns or ()):
            if not isinstance(turn, dict):
                continue
            path, is_answer = f"{name}[{i}]", turn.get("role") == "assistant"
            for j, part in enumerate(turn["content"] if isinstance(turn.get("content"), list) else ()):
                if isinstance(part, dict) and part.get("type") == "tool_result":
                    _sift(part, "content", f"{path}.content[{j}]", in_results, kinds)
            for member in ("content", "output"):
                _sift(turn, member, path, parts, kinds, is_newest=i == newest, is_answer=is_answer)
    return left_out(kinds, "part")


def _sift(
    holder: dict[str, Any],
    member: str,
    path: str,
    parts: frozenset[str],
    kinds: list[str],
    *,
    is_newest: bool = False,
    is_answer: bool = False,
) -> None:
    """Replace or remove the unusable parts in the list `member` of a message, an item, or a tool's result. kinds: receives the types of
    these parts. is_newest: the user's newest turn, in which such a part raises BadField. is_answer: a message of the assistant."""
    given = holder.get(member)
    if not isinstance(given, list):
        return
    kept: list[Any] = []
    for j, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        place = f"{path}.{member}[{j}]"
        if not isinstance(kind, str) or kind in IMAGES or (kind in parts and not _is_file(part)):
            kept.append(part)
            continue
        if is_newest and kind in MEDIA:
            raise BadField(
                f"{place}.type", f"{MEDIA[kind]} are not supported yet: {place} must be text or an image."
            )
        if is_newest and len(given) == 1:
            raise BadField(
                f"{place}.type",
                f"{place} is of the type {kind[:60]}, which cannot be used here; send it as text.",
            )
        kinds.append(kind[:60])
        if kind in MEDIA or not is_answer:
            kept.append({"type": "text", "text": instead_of(kind)})
    holder[member] = kept


def _is_file(part: Mapping[str, Any]) -> bool:
    """Return whether a part is a document that is a file; a document of text is none."""
    source = part.get("source")
    return part["type"] == "document" and not (
        isinstance(source, dict) and source.get("type") in ("text", "content")
    )


def instead_of(kind: str) -> str:
    """Return the text that the model reads in place of a part that was left out. kind: the part's type."""
    what = MEDIA.get(kind, f"Parts of the type {kind[:60]}").removesuffix("s").lower()
    return f"[{what} left out: it cannot be read here]"


def left_out(kinds: Sequence[str], what: str) -> list[str]:
    """Return notices on the parts of a conversation that were left out, one for each type. kinds: their types; what: the API's word for
    a part."""
    return [
        f"{num} {what}{'s' if num > 1 else ''} of the type {kind} {'were' if num > 1 else 'was'} left out: this server cannot use them"
        for kind, num in Counter(kinds).items()
    ]
