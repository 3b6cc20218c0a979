"""What lies in a model folder and is no file is refused before it is opened: opening a pipe waits for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planting import catches

from mlxspec.errors import ModelError
from mlxspec.loading.safetensors import check_header
from mlxspec.models.folder import ModelFolder


def raised(work: Callable[[], Any]) -> BaseException | None:
    """What it raises; it must end."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert found, "it waits for ever"
    return found[0]


@catches(
    "nobody looks at what a folder holds",
    "mlxspec.loading.folder:check_links",
    lambda right: lambda folder: None,
    case="config.json",
)
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "mtp/x.safetensors",
    ],
)
def test_a_pipe_in_a_model_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    error = raised(lambda: ModelFolder(tmp_path).read())
    assert isinstance(error, ModelError)
    assert str(error) == f"{Path(name).name} in {tmp_path} is neither a file nor a folder."


@catches("a pipe counts as a file", "pathlib:Path.is_file", lambda right: lambda self: True)
def test_a_pipe_in_place_of_tensors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapters.safetensors")
    error = raised(lambda: check_header(tmp_path / "adapters.safetensors"))
    assert isinstance(error, ModelError)
    assert str(error) == "adapters.safetensors is no file."
