"""The demo family in the layouts that other engines load, and the environments those engines run in. Knows files; runs no model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from peers.talk import PeerError

LONGEST = 4096  # positions; the demo's own limit is shorter than the longest prefill that is timed


def export(source: Path, folder: Path, *, model_type: str | None = None) -> Path:
    """A copy of a checkpoint with room for long prompts, under `model_type` where an engine has its own name for it."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(source, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = LONGEST
    if model_type is not None:
        config["model_type"] = model_type
    path.write_text(json.dumps(config, indent=1))
    return folder


def environment(folder: Path, packages: list[str]) -> Path:
    """The Python of an environment with these packages; made once. Raises PeerError."""
    python = folder / "bin" / "python"
    stamp = folder / "packages.txt"
    if stamp.is_file() and stamp.read_text().split() == packages:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()
        raise PeerError(
            f"{' '.join(packages)} could not be installed: {said[-1] if said else error}"
        ) from error
    stamp.write_text("\n".join(packages))
    return python


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
