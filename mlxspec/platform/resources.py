"""Data files of the package: finds Metal kernel sources and the demo family in a checkout and in an installed wheel.

Knows where the files lie, not what is in them.
"""

from __future__ import annotations

import re
from pathlib import Path

from mlxspec.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


def metal_folder() -> Path:
    """Return the folder with the `.metal` files: `mlxspec/metal` in a wheel, `metal` next to the package in a checkout."""
    packaged = _PACKAGE / "metal"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "metal"


def demo_folder(member: str) -> Path:
    """Return the folder of a member of the demo family: "target", "draft", "gemma", "eagle3", "dflash" or "vision". Whether it holds a
    model shows when it is loaded."""
    return _PACKAGE / "demo" / member


def metal_source(name: str) -> str:
    """Return the text of `NAME.metal` with the `.h` files that it includes. Raises ConfigError where there is no such kernel."""
    path = metal_folder() / f"{name}.metal"
    if not re.fullmatch(r"[a-z0-9_]+", name) or not path.is_file():
        raise ConfigError(f"There is no Metal kernel {name!r} in {metal_folder()}.")
    return with_includes(path.read_text(encoding="utf-8"), metal_folder())


def with_includes(text: str, folder: Path) -> str:
    """Replace each line `#include "FILE.h"` by that file: MLX compiles one text and knows no folder."""
    return re.sub(
        r'^#include "(\w+\.h)"$',
        lambda line: (folder / line[1]).read_text(encoding="utf-8"),
        text,
        flags=re.M,
    )
