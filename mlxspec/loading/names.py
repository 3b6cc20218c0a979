"""Makes names and messages of users and of untrusted files safe to print in an error message."""

from __future__ import annotations

NAME_LENGTH = 400  # characters shown of a path or a repository, whose end tells them apart


def printable(what: object, most: int = 120) -> str:
    """Return the text of an object on one line, with `?` for unprintable characters, cut to `most` characters."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(str(what).split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."
