"""Logs, for the operator, the kinds of the notices that clients receive. No text of a request or an answer is written."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mlxspec.server.http import log

_KINDS = (
    (re.compile(r"a call was cut at the limit"), "A call was cut at the limit of an answer, and left out."),
    (
        re.compile(r"reached its limit in thinking"),
        "An answer reached its limit in thinking, before its required call or format.",
    ),
    (re.compile(r"What looks like a call of"), "What looks like a call of a tool was taken for text."),
    (re.compile(r"calls (?:of .{1,200} )?may have any arguments"), "Calls of a tool are held to no grammar."),
    (re.compile(r"not enforced"), "A part of a schema or grammar is not enforced."),
    (re.compile(r"ignored|has no effect|does nothing"), "A field of a request does nothing."),
)


def note(notices: Iterable[str]) -> None:
    """Log, for each notice that a client receives, a fixed sentence on its kind, if the kind is known."""
    for notice in notices:
        kind = next((said for pattern, said in _KINDS if pattern.search(notice[:400])), None)
        if kind is not None:
            log.note(kind)
