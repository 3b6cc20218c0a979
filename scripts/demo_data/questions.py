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

from .corpus import first_sentence

MODULES = """builtins math cmath itertools functools operator time os os.path shutil json re random string collections
datetime pathlib statistics glob fnmatch tempfile csv copy heapq bisect textwrap hashlib base64 subprocess threading
argparse logging urllib.parse html struct zipfile enum contextlib typing socket decimal fractions types inspect sys io
pprint secrets uuid calendar platform getpass queue pickle gzip zlib bz2 asyncio ast dis gc signal select shlex
keyword tokenize traceback warnings weakref abc numbers difflib unicodedata locale""".split()
TYPES = (str, list, dict, set, bytes, tuple, int, float)

# {n} is the name as asked. Cores are combined with a prefix, a suffix and a way of writing the name.
CORES = """what does {n} do|what is {n}|explain {n}|how do I use {n}|tell me about {n}|what is {n} for|describe {n}
can you explain what {n} does|how does {n} work|what is the purpose of {n}|give me a summary of {n}|help with {n}
what can you tell me about {n}|I want to know about {n}|docs for {n}|documentation of {n}|define {n}|{n}|{n} help
{n} usage|what's {n}|what's {n} for|whats {n}|explain {n} to me|show me {n}|show the signature of {n}
what arguments does {n} take|which arguments has {n}|could you describe {n}|would you explain {n}|I do not understand {n}
I don't get {n}|can you tell me what {n} is|do you know {n}|do you know what {n} does|when do I need {n}
what happens when I call {n}|what happens if I call {n}|why would I use {n}|when should I use {n}|use of {n}
meaning of {n}|what is the meaning of {n}|what does the function {n} do|what is the function {n}|explain the function {n}
tell me what {n} does|tell me how {n} works|the function {n}|info on {n}|information about {n}|please document {n}
write the documentation of {n}|summarize {n}|say what {n} does|I need help with {n}|help me with {n}|help me understand {n}
how to use {n}|how to call {n}|how do you use {n}|how can I use {n}|how do I call {n}|what is {n} good for
what does calling {n} do|teach me {n}|look up {n}|remind me what {n} does|I forgot what {n} does|python {n}
what does {n} mean|how would you describe {n}|in one sentence, what is {n}|short description of {n}|what did {n} do again
explain briefly {n}|what does it do: {n}|question about {n}|is there help for {n}|help({n})
this script uses {n}, explain it|there is a call of {n} here, why|my colleague wrote {n}, what does that mean
someone told me to use {n}, what for|I am reading about {n}, what is it|I have to use {n}, how does it work
the documentation mentions {n}, what is that|I found {n} in a file, can you explain it|in this line there is {n}, what happens
we use {n} at work and I wonder what it does|I keep seeing {n}, what is its purpose|what {n} does|the use of {n}
a program I read calls {n}, what is the effect|I was told that {n} helps, what is it for|explain what {n} is used for""".replace(
    "\n", "|"
).split("|")
HELD_OUT_FORMS = (
    "What exactly does {n} do?",
    "give me a one-line explanation of {n}",
    "Hey, what is the use of {n} in Python?",
    "I came across {n} in some code, what does it do?",
    "please explain to me what `{n}` is for",
)
PREFIXES = (
    [""] * 9
    + """please |hey, |hi, |hello, |in python, |in Python, |ok, |ok so |so |quick question: |and |now |well, |sorry, |question: |
one more: |um, |I saw some code. |I am new to Python. |for my homework: |tell me, |next: |also, """.replace(
        "\n", ""
    ).split("|")
)
SUFFIXES = (
    [""] * 6
    + ["?"] * 5
    + ".|!|??| please| please?|, please| in python| in Python?| in Python| thanks|, thanks| now| briefly| in short?".split(
        "|"
    )
)


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
            if home in (
                module_name.split(".")[0],
                "posix",
                "posixpath",
                "genericpath",
                "builtins",
                "io",
                "collections",
            ):
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
        known.append(
            Known(name=name, aliases=aliases, answer=answer(name, signature, sentence), sentence=sentence)
        )
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
