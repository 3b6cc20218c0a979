"""The prompts of `mlxspec demo`: from what drafters are best at to what they help least with.

Knows texts and sampling; knows no model. All code in them was written for this page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mlxspec import demo


@dataclass(frozen=True, kw_only=True)
class DemoPrompt:
    """One prompt. `is_chat`: asked in the model's chat format where it has one; otherwise the text is continued as it stands. image: a file
    that the text asks about; says: what stands in it."""

    name: str
    what: str
    text: str
    is_chat: bool = True
    temperature: float = 0.0
    seed: int = 0
    image: Path | None = None
    says: str = ""


_PAIRS = '''\
def parse_pairs(text, separator=","):
    """Split text into pairs of a name and a value."""
    pairs = {}
    for part in text.split(separator):
        name, value = part.split("=", 1)
        pairs[name.strip()] = value.strip()
    return pairs'''

_COUNT = """\
def count_words(lines):
    counts = {}
    for line in lines:
        for word in line.split():
            counts[word] = counts.get(word, 0) + 1
    return counts"""

_READ = '''\
def read_settings(path):
    """Read the settings file at path and return its values."""
    with open(path) as file:
        text = file.read()
    return parse_pairs(text, "\\n")'''

_NAMES = '''\
def load_names(path):
    """Return the names in the file at path."""
    names = []
    with open(path) as file:
        for line in file:
            names.append(line.strip())
    return names'''

_OPEN = """\
class Reader:
    def __init__(self, file):
        self.file = file

    def """


def _fenced(request: str, code: str) -> str:
    return f"{request}:\n```python\n{code}\n```"


PROMPTS = (
    DemoPrompt(
        name="docstring",
        what="remove a docstring (most of the answer stands in the prompt)",
        text=_fenced("remove the docstring", _PAIRS),
    ),
    DemoPrompt(name="rename", what="rename a variable", text=_fenced("rename counts to totals", _COUNT)),
    DemoPrompt(name="explain", what="explain a function", text=_fenced("what does this function do", _READ)),
    DemoPrompt(name="question", what="answer a question", text="what does os.path.join do?"),
    DemoPrompt(
        name="longer", what="rename in a longer function", text=_fenced("rename names to lines", _NAMES)
    ),
    DemoPrompt(
        name="dice",
        what="code drawn at temperature 1: chance decides, n-grams never repeat, drafts help least",
        text=_OPEN,
        is_chat=False,
        temperature=1.0,
        seed=7,
    ),
)


def picture_prompts() -> tuple[DemoPrompt, ...]:
    """Questions about the pictures that come with the demo family."""
    listed = json.loads((demo.PICTURES / "pictures.json").read_text(encoding="utf-8"))
    return tuple(
        DemoPrompt(
            name=Path(entry["file"]).stem,
            what=entry["question"],
            text=entry["question"],
            image=demo.PICTURES / entry["file"],
            says=entry["text"],
        )
        for entry in listed
    )
