"""Finds models that LM Studio has fetched: folders owner/name below its own. Reads names alone, and changes nothing there."""

from __future__ import annotations

from pathlib import Path

PLACES = ("~/.lmstudio/models", "~/.cache/lm-studio/models")


def models() -> dict[str, Path]:
    """Return LM Studio's model folders that hold a config.json, by owner/name. Where both of its places hold one, the newer place
    counts. Folders of GGUF files have no config.json."""
    found: dict[str, Path] = {}
    for place in PLACES:
        try:
            configs = sorted(Path(place).expanduser().glob("*/*/config.json"))
        except (OSError, RuntimeError):  # it may not be read, or the user has no home
            continue
        for folder in (config.parent for config in configs):
            found.setdefault(f"{folder.parent.name}/{folder.name}", folder)
    return found
