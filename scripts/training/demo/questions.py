"""Questions about well-known functions, and their answers from signature and docstring.

Knows question forms (training and held-out) and which objects are well known; not the corpus or the edits. An answer is
the signature in backticks and the docstring's first sentence: nothing is written by hand.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
import warnings
from dataclasses import dataclass

from .chat import WORDINGS
from .corpus import first_sentence

_WORDS = WORDINGS["questions"]
MODULES: list[str] = _WORDS["modules"]
TYPES = (str, list, dict, set, bytes, tuple, int, float)

# {n} is the name as asked. Cores are combined with a prefix, a suffix and a way of writing the name.
CORES: list[str] = _WORDS["cores"]
PREFIXES: list[str] = _WORDS["prefixes"]
SUFFIXES: list[str] = _WORDS["suffixes"]
HELD_OUT_FORMS: list[str] = _WORDS["held_out"]
_HOMES = (
    "posix",
    "posixpath",
    "genericpath",
    "builtins",
    "io",
    "collections",
)  # whose functions other modules show


@dataclass(frozen=True, kw_only=True)
class Known:
    """A well-known function: its full name, the shorter names it also goes by, and its answer."""

    name: str
    aliases: tuple[str, ...]
    answer: str
    sentence: str


def _signature(obj: object) -> str:
    try:
        text = str(inspect.signature(obj))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return "(...)"
    text = re.sub(r"\(self(, )?", "(", text).replace("/, ", "").replace(", /", "").replace("(/)", "()")
    text = re.sub(r" -> .*$", "", text)
    return text if len(text) <= 70 and " at 0x" not in text and "<" not in text else "(...)"


def answer(name: str, signature: str, sentence: str) -> str:
    """The form of every answer about a function."""
    return f"`{name}{signature}`\n\n{sentence}"


def known_functions() -> list[Known]:
    """About 1,200 functions of the standard library with a signature and a one-sentence description, sorted by name."""
    found: dict[str, tuple[str, str]] = {}

    def add(name: str, obj: object) -> None:
        with warnings.catch_warnings():  # some attributes are deprecated, and say so when read
            warnings.simplefilter("ignore")
            doc = inspect.getdoc(obj)
        sentence = first_sentence(doc) if doc else ""
        if len(sentence) >= 12 and sentence.isascii() and "\n" not in sentence:
            found.setdefault(name, (_signature(obj), sentence))

    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for key, obj in sorted(vars(module).items()):
            home = (getattr(obj, "__module__", None) or module_name).split(".")[0].lstrip("_")
            if key.startswith("_") or not callable(obj):
                continue
            if isinstance(obj, type) and issubclass(obj, BaseException):
                continue
            if home in (module_name.split(".")[0], *_HOMES):
                add(key if module_name == "builtins" else f"{module_name}.{key}", obj)
    for kind in TYPES:
        for key in sorted(vars(kind)):
            if not key.startswith("_"):
                add(f"{kind.__name__}.{key}", getattr(kind, key))
    tails: dict[str, int] = {}
    for name in found:
        tails[name.split(".")[-1]] = tails.get(name.split(".")[-1], 0) + 1
    known = []
    for name, (signature, sentence) in sorted(found.items()):
        tail = name.split(".")[-1]
        aliases = (tail,) if "." in name and tails[tail] == 1 and len(tail) > 3 else ()
        said = answer(name, signature, sentence)
        known.append(Known(name=name, aliases=aliases, answer=said, sentence=sentence))
    return known


def write_name(name: str, rnd: random.Random) -> str:
    """The name as somebody may type it."""
    return rnd.choice(["{}", "{}", "{}", "{}", "`{}`", "{}()", "`{}()`"]).format(name)


def training_question(item: Known, rnd: random.Random) -> str:
    """A random question form about `item`; about a fifth use the bare name where it is unambiguous."""
    name = rnd.choice(item.aliases) if item.aliases and rnd.random() < 0.2 else item.name
    core = rnd.choice(CORES).format(n=write_name(name, rnd))
    text = rnd.choice(PREFIXES) + core + rnd.choice(SUFFIXES)
    style = rnd.random()
    if style < 0.3:
        text = text[0].upper() + text[1:] if not text.startswith(name) else text
    elif style < 0.33:
        text = text.upper()
    return text
