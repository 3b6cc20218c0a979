"""200 prompts of eight kinds for a model that continues text: 25 of each, the same ones on every run with one Python version.

Code, edits, copies and long documents are cut from the standard library; JSON, tables, lists and openings are written here. Knows texts and
a function that cuts them into tokens; knows no model.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from demo_data.corpus import Function, SourceFile, functions, parse, read_library

PER_KIND = 25
KINDS = ("code", "json", "tables", "prose", "lists", "copying", "edits", "long")
# Tokens of the long documents: five texts in five lengths each, from one window of 512 to sixteen.
AGAIN = 100  # tokens with which a document begins again
LENGTHS = ((600, 1000, 1500, 2000, 2600),) * 4 + ((3300, 4200, 5400, 6800, 8000),)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """name: its kind and number; tokens: ids, the beginning of the text included."""

    kind: str
    name: str
    tokens: tuple[int, ...]


def prompts(encode: Encode, *, per_kind: int = PER_KIND) -> list[Prompt]:
    """The first `per_kind` of each kind. encode: a text to ids, with what the tokenizer puts before a text."""
    files = [f for f in read_library() if not f.is_test]
    found = [f for f in functions(files, min_chars=300, max_chars=900) if f.doc]
    random.Random(7).shuffle(found)
    texts: dict[str, Iterator[str]] = {
        "code": (f.source[: len(f.source) * 2 // 3] for f in found[:PER_KIND]),
        "json": (_json(random.Random(100 + i)) for i in range(PER_KIND)),
        "tables": (_table(i, random.Random(200 + i)) for i in range(PER_KIND)),
        "prose": _prose(files),
        "lists": (_list(title, items) for title, items in LISTS),
        "copying": (_copy(f) for f in found[PER_KIND : 2 * PER_KIND]),
        "edits": _edits(found[2 * PER_KIND :]),
    }
    out = []
    for kind in KINDS[:-1]:
        for number, text in zip(range(per_kind), texts[kind], strict=False):
            out.append(Prompt(kind=kind, name=f"{kind}-{number:02}", tokens=tuple(encode(text))))
    for number, tokens in zip(range(per_kind), _long(files, encode), strict=False):
        out.append(Prompt(kind="long", name=f"long-{number:02}", tokens=tuple(tokens)))
    return out


# --- data and tables, written here

_NAMES = "Ada Boris Clara Dmitri Elena Farid Greta Hassan Ines Jonas Kaito Lena Mateo Nadia Omar".split()
_CITIES = "Lisbon Oslo Kyoto Quito Nairobi Perth Boston Lyon Cusco Tallinn Hanoi Porto".split()
_THINGS = "lamp chair desk shelf clock carpet mirror stool cabinet sofa bench frame".split()


def _record(rnd: random.Random, number: int) -> dict[str, object]:
    return {
        "id": number,
        "name": rnd.choice(_NAMES),
        "city": rnd.choice(_CITIES),
        "orders": [
            {"item": rnd.choice(_THINGS), "count": rnd.randint(1, 9)} for _ in range(rnd.randint(1, 3))
        ],
        "active": rnd.random() < 0.5,
    }


def _json(rnd: random.Random) -> str:
    """A list of records that ends inside one of them."""
    records = [_record(rnd, 100 + i) for i in range(rnd.randint(2, 5))]
    text = json.dumps(records, indent=rnd.choice([None, 2, 4]))
    return text[: len(text) * 3 // 4]


def _table(number: int, rnd: random.Random) -> str:
    """Five kinds of tables with a few rows filled in."""
    rows = range(1, rnd.randint(4, 8))
    shape = number % 5
    if shape == 0:
        factor = rnd.randint(3, 19)
        return "\n".join(f"{i} x {factor} = {i * factor}" for i in rows) + "\n"
    if shape == 1:
        head = "| name | city | item | count |\n|---|---|---|---|\n"
        lines = [
            f"| {rnd.choice(_NAMES)} | {rnd.choice(_CITIES)} | {rnd.choice(_THINGS)} | {rnd.randint(1, 50)} |"
            for _ in rows
        ]
        return head + "\n".join(lines) + "\n"
    if shape == 2:
        lines = [
            f"2024-03-{i:02},{rnd.choice(_CITIES)},{rnd.randint(-5, 30)},{rnd.randint(40, 99)}" for i in rows
        ]
        return "date,city,temperature,humidity\n" + "\n".join(lines) + "\n"
    if shape == 3:
        numbers = [i + number // 5 for i in rows]  # no two of these begin alike
        return "n\tn squared\tn cubed\n" + "\n".join(f"{n}\t{n**2}\t{n**3}" for n in numbers) + "\n"
    lines = [f"<tr><td>{rnd.choice(_THINGS)}</td><td>{rnd.randint(5, 400)}.00</td></tr>" for _ in rows]
    return "<table>\n<tr><th>item</th><th>price</th></tr>\n" + "\n".join(lines) + "\n"


# --- prose and lists

OPENINGS = (
    "Once upon a time, in a small village by the sea, there lived",
    "The lighthouse keeper had not spoken to anyone for eleven days when",
    "In this essay I will argue that public libraries",
    "The history of the bicycle begins in",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "When water freezes, its molecules",
    "My grandmother kept three secrets. The first was",
    "The capital of France is",
    "The main causes of the First World War were",
    "To bake a good loaf of bread you need",
    "Scientists have long wondered why birds",
    "It was raining when the train arrived, and",
    "A healthy diet consists of",
    "The most important lesson I learned from my father was",
    "Volcanoes are formed when",
)

LISTS = (
    ("Countries of Europe:", "France Germany Spain"),
    ("The planets of the solar system:", "Mercury Venus Earth"),
    ("The months of the year:", "January February March"),
    ("The days of the week:", "Monday Tuesday Wednesday"),
    ("Shopping list:", "milk|eggs|bread|butter"),
    ("Steps to change a tyre:", "Stop the car on firm ground.|Loosen the wheel nuts."),
    ("Chemical elements in order:", "Hydrogen Helium Lithium"),
    ("Programming languages:", "Python Java Rust"),
    ("The letters of the Greek alphabet:", "alpha beta gamma"),
    ("Presidents of the United States:", "George Washington|John Adams|Thomas Jefferson"),
    ("Rivers and where they end:", "Nile: the Mediterranean|Rhine: the North Sea"),
    ("Rules of the house:", "Take off your shoes.|Close the door quietly."),
    ("Musical instruments:", "violin piano flute"),
    ("Reasons to learn a language:", "You can talk to more people.|You understand films."),
    ("The numbers in French:", "un deux trois"),
    ("Colours of the rainbow:", "red orange yellow"),
    ("Units and their symbols:", "metre: m|second: s|kilogram: kg"),
    ("Animals and their young:", "dog: puppy|cat: kitten|cow: calf"),
    ("HTTP status codes:", "200 OK|201 Created|301 Moved Permanently"),
    ("Commands of git:", "git init|git clone|git add"),
    ("Agenda of the meeting:", "Welcome and introductions|Minutes of the last meeting"),
    ("Opposites:", "hot - cold|big - small|fast - slow"),
    ("Capitals of the world:", "Paris, France|Tokyo, Japan|Cairo, Egypt"),
    ("Things to pack:", "passport toothbrush charger"),
    ("Powers of two:", "2 4 8 16"),
)


def _list(title: str, items: str) -> str:
    cut = items.split("|") if "|" in items else items.split()
    return "\n".join([title, *(f"{i}. {item}" for i, item in enumerate(cut, 1)), f"{len(cut) + 1}."])


def _prose(files: Sequence[SourceFile]) -> Iterator[str]:
    """Openings written here, then first paragraphs of modules' docstrings that are sentences."""
    yield from OPENINGS
    for file in files:
        tree = parse(file.text)
        doc = ast.get_docstring(tree) if tree is not None else None
        for paragraph in (doc or "").split("\n\n"):
            words = paragraph.split()
            plain = all(c.isalpha() or c in " ,.'-\n()" for c in paragraph)
            if plain and len(words) >= 40 and paragraph[:1].isupper():
                yield " ".join(words[: len(words) * 2 // 3])
                break


# --- copies, edits, documents


def _copy(f: Function) -> str:
    """A text, and the first line of its copy."""
    first = f.source.split("\n")[0]
    return f"Original:\n\n{f.source}\n\nAn exact copy of the original:\n\n{first}\n"


def _edits(found: Sequence[Function]) -> Iterator[str]:
    """A function, and the first line of it with one argument renamed."""
    for f in found:
        args = next(n for n in ast.walk(ast.parse(f.source)) if isinstance(n, ast.arguments))
        names = [a.arg for a in args.args if a.arg not in ("self", "cls") and len(a.arg) > 2]
        if names and f.source.count(names[0]) >= 3:
            line = f.source.split("\n")[0].replace(names[0], f"new_{names[0]}")
            yield f"{f.source}\n\n# The same function with {names[0]} renamed to new_{names[0]}:\n\n{line}\n"


def _long(files: Sequence[SourceFile], encode: Encode) -> Iterator[list[int]]:
    """Documents cut to LENGTHS tokens. Every second one ends with the document's own first lines, as if it began again."""
    by_path = {f.path: f.text for f in files}
    sources = ("argparse.py", "textwrap.py", "statistics.py", "heapq.py", "inspect.py")
    for path, lengths in zip(sources, LENGTHS, strict=True):
        tokens = encode(by_path[path])
        for number, length in enumerate(lengths):
            again = tokens[1:AGAIN] if number % 2 else []
            yield [*tokens[: length - len(again)], *again]
