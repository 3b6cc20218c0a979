"""Makes names and messages out of untrusted files safe to print in an error message."""

from __future__ import annotations


def shown(what: object) -> str:
    """On one line, printable, of bounded length."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(str(what).split())).rstrip(".")
    return text if len(text) <= 120 else f"{text[:117]}..."
