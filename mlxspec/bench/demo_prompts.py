"""The prompts of `mlxspec demo`: from what drafters are best at to what they help least with, and the answers that are right.

Knows texts and sampling; knows no model. All code in them was written for this page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mlxspec import demo


@dataclass(frozen=True, kw_only=True)
class DemoPrompt:
    """One prompt. is_chat: rendered in the model's chat format where it has one; otherwise the text is continued unchanged. image: a
    file that the text asks about; says: what the image shows. wanted: the right answer, where there is one; the built-in model gives
    it."""

    name: str
    what: str
    text: str
    is_chat: bool = True
    temperature: float = 0.0
    seed: int = 0
    image: Path | None = None
    says: str = ""
    wanted: str = ""


_FIND = '''\
def find_files(folder, suffix):
    """Return the paths of all files below folder that end in suffix, sorted."""
    found = []
    for root, folders, names in os.walk(folder):
        for name in names:
            if name.endswith(suffix):
                found.append(os.path.join(root, name))
    return sorted(found)'''

UNIQUE = '''\
def unique(items):
    """Return the items without repeats, in order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result'''

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


def edit(request: str, code: str) -> str:
    """Return a prompt that requests a change of code."""
    return f"{request}:\n{_fenced(code)}"


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


PROMPTS = (
    DemoPrompt(
        name="docstring",
        what="remove a docstring (most of the answer stands in the prompt)",
        text=edit("remove the docstring", _FIND),
        wanted=_fenced("\n".join(_FIND.splitlines()[:1] + _FIND.splitlines()[2:])),
    ),
    DemoPrompt(
        name="rename",
        what="rename a variable",
        text=edit("rename names to lines", _NAMES),
        wanted=_fenced(
            _NAMES.replace("names =", "lines =").replace("names.", "lines.").replace("n names", "n lines")
        ),
    ),
    DemoPrompt(
        name="explain",
        what="explain a function",
        text=edit("what does this function do", _READ),
        wanted="`read_settings(path)`\n\nRead the settings file at path and return its values.",
    ),
    DemoPrompt(
        name="question",
        what="answer a question",
        text="what does os.path.join do?",
        wanted="`os.path.join(a, *p)`\n\nJoin two or more pathname components, inserting '/' as needed.",
    ),
    DemoPrompt(
        name="longer",
        what="rename in a function with a loop and a condition",
        text=edit("rename result to output", UNIQUE),
        wanted=_fenced(UNIQUE.replace("result", "output")),
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
    """Return questions about the pictures of the demo family."""
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
