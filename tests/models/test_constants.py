"""Nothing that a loaded model keeps is still to be computed: a forward that is compiled takes such an array's graph along and computes it
anew at every call, which no result shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_gemma

import mlxspec
from mlxspec.config import SpecConfig
from mlxspec.engine.engine import Engine


def kept(value: Any, name: str) -> Iterator[tuple[str, mx.array]]:
    """Arrays in a module's attributes, parameters or not, and in those of the objects that it keeps."""
    if isinstance(value, mx.array):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from kept(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from kept(part, f"{name}[{i}]")
    is_ours = hasattr(value, "__dict__") and type(value).__module__.startswith("mlxspec.models")
    if isinstance(value, nn.Module) or is_ours:
        yield from kept(vars(value), name)


def is_computed(array: mx.array, folder: Path) -> bool:
    file = folder / "graph.dot"
    mx.export_to_dot(str(file), array)
    return not re.search("shape=rectangle", file.read_text())


def models(engine: Engine) -> dict[str, Any]:
    drafters = engine.drafts.drafters.items()
    return {"target": engine.model} | {name: vars(drafter) for name, drafter in drafters}


@pytest.mark.parametrize("name", ["demo", "demo-gemma", "gemma4-e"])
def test_everything_kept_is_computed(name: str, tmp_path: Path) -> None:
    if name not in ("demo", "demo-gemma"):
        from test_load_pairs import add_tokenizer

        c = tiny_gemma.CONFIGS[name]
        model = str(add_tokenizer(tiny_gemma.write_text(tmp_path / name, c), c["vocab_size"]))
    else:
        model = name
    drafts = ("mtp", "draft-model") if name == "demo" else "auto" if name == "demo-gemma" else "off"
    engine = mlxspec.load(model, draft=drafts, spec=SpecConfig(policy="fixed"))
    found = [pair for part, model in models(engine).items() for pair in kept(model, part)]
    assert len(found) > 20
    assert [name for name, array in found if not is_computed(array, tmp_path)] == []
