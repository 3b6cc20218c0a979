"""How far a checkpoint's folder travels: the files of mlxspec that are given it while an engine is loaded."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mlxspec
import mlxspec.engine.load  # imported before the walk, so that only calls count
from mlxspec.platform.resources import demo_folder

ROOT = Path(mlxspec.__file__).parent
LARGE = 25  # attributes of an object that is more than a parcel, such as the engine


@contextmanager
def walked(value: str) -> Iterator[list[str]]:
    """While it is open, files of mlxspec are noted, one stay after another, in which a function is called with this path, or with an
    object that holds it."""
    stays: list[str] = []

    def holds(given: Any) -> bool:
        inside = getattr(given, "__dict__", {})
        held = inside.values() if isinstance(inside, dict) and len(inside) < LARGE else ()
        return any(isinstance(x, str | os.PathLike) and str(x) == value for x in (given, *held))

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(ROOT) or code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        own = str(file.relative_to(ROOT))
        if any(holds(frame.f_locals.get(name)) for name in names) and stays[-1:] != [own]:
            stays.append(own)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield stays
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_a_checkpoint_s_folder_passes_ten_files_with_four_returns() -> None:
    folder = str(demo_folder("target"))
    with walked(folder) as stays:
        mlxspec.load(folder).close()
    assert "loading/weights.py" in stays
    assert len(set(stays)) <= 10, stays
    assert len(stays) - len(set(stays)) <= 4, stays
