"""Keeps the results of `mlxspec try`, by machine and model: how fast a model answers on this machine with drafting and without.

The files are plain JSON that can be shared, because they contain no text of a user. A file that is damaged or of another form is treated as
missing. Reads and writes files; measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from mlxspec.loading.short_names import repository
from mlxspec.platform import kept_json

_FOLDER = "tried"


def keep(model: str, data: Mapping[str, Any]) -> Path:
    """Write the measured speeds of a model to a file, and return its path. model: the name that it is loaded by. data: plain JSON
    objects, of the form that `sentence` reads."""
    path = _file(model)
    kept_json.write(path, dict(data))
    return path


def measured(model: str) -> str:
    """Return the measured speeds of a model as text, such as `measured here on 3 Dec.: chat 78 -> 84 tok/s (1.05x to 1.12x); same text`;
    "" where nothing was measured."""
    return _said(kept_json.read(_file(model)))


def all_measured() -> Iterator[str]:
    """Yield for every model that was measured its name and the text that `measured` returns for it."""
    for path in kept_json.kept_files(_FOLDER):
        data = kept_json.read(path)
        if said := _said(data):
            yield f"{data['model']} {said}"


def sentence(data: Mapping[str, Any]) -> str:
    """Return measured speeds as one text: for each kind of text both speeds and the range of their ratios. data: its "kinds" is a list
    with one mapping for each kind."""
    kinds = data["kinds"]
    same = all(kind["same_text"] for kind in kinds)
    return f"{', '.join(map(_of_kind, kinds))}{'; same text' if same else ''}"


def _of_kind(kind: Mapping[str, Any]) -> str:
    """Return the speeds for one kind of text, such as `chat 78 -> 84 tok/s (1.05x to 1.12x)`, without the second speed where no ratio
    can be given."""
    off, auto, ratio = kind["off"], kind["auto"], kind["ratio"]
    if ratio["refusal"]:
        return f"{kind['kind']} {off:.0f} tok/s ({ratio['refusal']})"
    span = f"{ratio['least']:.2f}x to {ratio['most']:.2f}x"
    if not ratio["is_settled"]:
        return f"{kind['kind']} {off:.0f} tok/s, with drafting not settled ({span})"
    return f"{kind['kind']} {off:.0f} -> {auto:.0f} tok/s ({span})"


def _said(data: Any) -> str:
    try:
        day = date.fromisoformat(data["day"])
        return f"measured here on {day.day} {day:%b}.: {sentence(data)}"
    except (TypeError, KeyError, ValueError, AttributeError):
        return ""


def _file(model: str) -> Path:
    """Return the path of a model's file. A short name and the repository that it names have the same file."""
    return kept_json.machines_file(_FOLDER, repository(model))
