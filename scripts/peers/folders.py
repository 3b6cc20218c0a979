"""The demo family in the layouts that other engines load, and the environments those engines run in. Knows files; runs no model.

llama.cpp takes key and value heads of Gated DeltaNet layers to be of one size, which they are in every published model and not in the demo
family (32 and 64). So for this comparison keys are widened with zeros, for every engine alike: zeros change no product and no norm. What
changes is the queries' scale, Dk^-1/2, which the norm behind them divides out again up to its epsilon.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers.talk import PeerError

LONGEST = 4096  # positions; the demo's own limit is shorter than the longest prefill that is timed


def export(source: Path, folder: Path, *, model_type: str | None = None) -> Path:
    """A copy of a checkpoint with room for long prompts, under `model_type` where an engine has its own name for it."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(source, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    _widen_keys(folder / "model.safetensors", config)
    config["max_position_embeddings"] = LONGEST
    if model_type is not None:
        config["model_type"] = model_type
    path.write_text(json.dumps(config, indent=1))
    return folder


def _widen_keys(path: Path, config: dict[str, Any]) -> None:
    """Pad each key head to the size of a value head, in the projections and the convolution; config and file are changed."""
    import mlx.core as mx

    heads, old = config["linear_num_key_heads"], config["linear_key_head_dim"]
    new = config["linear_key_head_dim"] = config["linear_value_head_dim"]
    weights = mx.load(str(path))
    for name, array in weights.items():
        if name.endswith(("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")):
            keys, values = mx.split(array, [2 * heads * old])
            keys = keys.reshape(2 * heads, old, *array.shape[1:])
            room = [(0, 0), (0, new - old)] + [(0, 0)] * (array.ndim - 1)
            weights[name] = mx.concatenate([mx.pad(keys, room).reshape(-1, *array.shape[1:]), values])
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, metadata={"format": "pt"})


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
