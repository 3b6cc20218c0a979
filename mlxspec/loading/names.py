"""Names and messages out of somebody's files, fit for a sentence of ours. Knows strings."""

from __future__ import annotations


def shown(what: object) -> str:
    """On one line, printable, of bounded length."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(str(what).split())).rstrip(".")
    return text if len(text) <= 120 else f"{text[:117]}..."
