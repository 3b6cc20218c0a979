"""Keeps what `mlxspec try` has measured, by machine and model: how fast a model answers here with drafting and without.

It is plain JSON that can be given away, without a text of anybody's. A file that is damaged or of another form is as good as none. Reads
and writes files; measures nothing.
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
    """Keep what was measured of a model, which is named as it is loaded; returns the file."""
    path = _file(model)
    kept_json.write(path, dict(data))
    return path


def measured(model: str) -> str:
    """Return `measured here on 3 Dec.: chat 78 -> 84 tok/s (1.05x to 1.12x); same text`; "" where nothing is kept of a model."""
    return _said(kept_json.read(_file(model)))


def all_measured() -> Iterator[str]:
    """Yield the same for every model that something is kept of, its name first."""
    for path in kept_json.kept_files(_FOLDER):
        data = kept_json.read(path)
        if said := _said(data):
            yield f"{data['model']} {said}"


def sentence(data: Mapping[str, Any]) -> str:
    """Return what was measured as one sentence: of each kind of text both speeds and the range of their ratios."""
    kinds = data["kinds"]
    same = all(kind["same_text"] for kind in kinds)
    return f"{', '.join(map(_of_kind, kinds))}{'; same text' if same else ''}"


def _of_kind(kind: Mapping[str, Any]) -> str:
    """`chat 78 -> 84 tok/s (1.05x to 1.12x)`, without a second speed where there is no ratio of them."""
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
    """Return the file of a model. A short name and its repository mean the same one."""
    return kept_json.machines_file(_FOLDER, repository(model))
