"""How a model's hiddens become one vector for a text, by the files of sentence-transformers: `modules.json`, `1_Pooling/config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlxspec.errors import TokenizerError
from mlxspec.loading.names import printable
from mlxspec.loading.tokenizer import read_json

POOLING_FILE = "1_Pooling/config.json"
_MODES: dict[str, Literal["last", "mean", "first"]] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "first",
    "cls_token": "first",
}
NO_POOLING = "its folder has no modules.json, which embedding models have"


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """mode: a text's vector is the final hidden of its last or first token, or the mean over all. normalizes: it has length 1."""

    mode: Literal["last", "mean", "first"]
    normalizes: bool


def pooling_of(folder: Path) -> Pooling | str:
    """Of a model's folder; a text that says why there is none ends a sentence."""
    path = folder / "modules.json"
    if not path.is_file():
        return NO_POOLING
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        kinds = [str(module["type"]).rpartition(".")[2] for module in listed]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its modules.json is damaged"
    strange = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if strange:
        return f"its modules.json names {printable(strange[0])}, which is not supported"
    if "Pooling" not in kinds or not (folder / POOLING_FILE).is_file():
        return f"its {POOLING_FILE} is missing; the original repository has it"
    try:
        modes = _modes(read_json(folder / POOLING_FILE))
    except TokenizerError:
        return f"its {POOLING_FILE} is damaged"
    if len(modes) != 1 or modes[0] not in _MODES:
        return f"its {POOLING_FILE} asks for another pooling than one of last token, mean and first token"
    return Pooling(mode=_MODES[modes[0]], normalizes="Normalize" in kinds)


def _modes(settings: Mapping[str, Any]) -> list[str]:
    """In either form: one name, or a flag for each mode."""
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    flag = "pooling_mode_"
    return [
        name.removeprefix(flag) for name, value in settings.items() if name.startswith(flag) and value is True
    ]
