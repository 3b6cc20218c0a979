"""Where the real models and the real vocabulary lie in the user's cache folder, and whether they are whole.

Knows folders; downloads nothing and reads no weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlxspec.platform.folders import make_private, wanted_cache_folder

MODEL, VOCABULARY = "gemma-3-270m", "qwen3.6-vocabulary"
SMOLLM, CODER = "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"
GGUF = "gemma-3-270m-q4_k_m.gguf"  # inside the model's folder; what llama.cpp reads
SMOLLM_GGUF = "smollm2-135m-instruct-q4_1.gguf"
CODER_GGUF = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
HOW = {
    MODEL: "scripts/real_model",
    VOCABULARY: "scripts/real_model --vocabulary qwen",
    SMOLLM: "scripts/real_model --model smollm2",
    CODER: "scripts/real_model --model qwen2.5-coder",
}
_SOURCES = "SOURCES.json"  # written last: a folder with it is whole


class PartError(Exception):
    """What cannot be had, in one sentence."""


def place(name: str) -> Path:
    """Return the folder of a model or of the vocabulary, whether it is there or not."""
    return wanted_cache_folder() / "real" / name


def sources(name: str) -> dict[str, Any] | None:
    """What a whole folder was made from; None where it is missing or damaged."""
    try:
        found = json.loads((place(name) / _SOURCES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def missing(name: str) -> str | None:
    """Why the folder cannot be used, as a test's reason to skip; None where it is whole."""
    return None if sources(name) else f"{name} is not in the cache folder: {HOW[name]} puts it there"


def assemble(name: str, made_from: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
    """The folder, filled by `fill` if it is not there or was made from something else.

    It is filled beside its place and moved there when whole, so an interruption leaves nothing that could be taken for it. Raises
    PartError, and OSError where the cache folder cannot be written to.
    """
    final = place(name)
    if sources(name) == dict(made_from):
        return final
    make_private(final.parent.parent)
    make_private(final.parent)
    partial = final.with_name(f"{name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        fill(partial)
        (partial / _SOURCES).write_text(json.dumps(made_from, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
