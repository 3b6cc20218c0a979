"""The short-copy curriculum: repeat a few tokens, or repeat them with one name replaced.

Knows nothing of real code but a pool of names. Without this phase a small hybrid does not learn to copy within millions of
tokens; with it, it does within minutes. Prompts of these are never trained on (the content is random).
"""

from __future__ import annotations

import random

from .chat import ask, fenced
from .edits import FORMS, request

_SEPARATORS = [
    " ", " ", ", ", "\n", "\n    ", "\n        ", " = ", ".", "(", "[", ") ", "):\n    ", ": ", " + ", "_",
]  # fmt: skip
_REPEAT = ["repeat: ", "copy: ", "say again: ", "Repeat this: ", "repeat after me: ", "echo "]


def _words(pool: list[str], count: int, rnd: random.Random) -> list[str]:
    return [rnd.choice(pool) if rnd.random() < 0.85 else str(rnd.randrange(1000)) for _ in range(count)]


def _joined(words: list[str], separators: list[str]) -> str:
    return "".join(w + s for w, s in zip(words, separators, strict=True)).strip()


def short_copy(pool: list[str], snippets: list[str], rnd: random.Random, *, max_words: int = 14) -> str:
    """Repeat random names (with plain or code-like separators) or a short piece of real text."""
    if rnd.random() < 0.4:
        text = rnd.choice(snippets)
        start = rnd.randrange(max(1, len(text) - 40))
        piece = text[start : start + rnd.randrange(8, 6 * max_words)].strip() or "pass"
    else:
        words = _words(pool, rnd.randrange(2, max_words), rnd)
        plain = rnd.random() < 0.4
        piece = _joined(words, [" " if plain else rnd.choice(_SEPARATORS) for _ in words])
    if rnd.random() < 0.4:
        return ask(rnd.choice(_REPEAT) + "\n" + fenced(piece), fenced(piece))
    return ask(rnd.choice(_REPEAT) + piece, piece)


def short_rename(pool: list[str], rnd: random.Random, *, max_words: int = 16) -> str:
    """A few random names in a code-like row; one of them occurs one to four times and is renamed."""
    words = _words(pool, rnd.randrange(3, max_words), rnd)
    old, new = rnd.choice(pool), rnd.choice(pool)
    if rnd.random() < 0.4:
        new = new.strip("_") + "_" + rnd.choice(pool).strip("_")
    for i in rnd.sample(range(len(words)), min(len(words), rnd.randrange(1, 5))):
        words[i] = old
    separators = [rnd.choice(_SEPARATORS[:-1]) for _ in words]
    before = _joined(words, separators)
    after = _joined([new if w == old else w for w in words], separators)
    if rnd.random() < 0.7:
        return ask(request("rename", old, new, before, rnd), fenced(after))
    return ask(f"{rnd.choice(FORMS['rename']).format(a=old, b=new)}: {before}", after)
