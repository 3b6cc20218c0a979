"""Keeps the results of races between our kernels and MLX's own operations on this device, in one small file.

Before a variant of a kernel runs it is marked as begun in that file. A mark that a later process finds means that the process ended while
the variant ran, by a hang or a crash of the GPU: the variant is not run again.

A ratio counts only for the device, the system, the MLX and the kernel's text it was measured with: each device, system and MLX has a file
of its own, and what does not fit is as good as none. `tune` runs races and `launch` decides by them.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.kernels import launch
from mlxspec.platform import device, kept_json


def prepare() -> tuple[launch.KernelReport, ...]:
    """Load the recorded speedups of kernels over MLX's own operations, decide which of the kernels that won a race or that a loaded
    model needs are used, and return a report on every kernel. Called when a model is loaded. Without a GPU no speedups are loaded."""
    if device.backend() != "cpu":
        restore()
        launch.call_before_races(mark)
    return launch.needed()


def path() -> Path:
    """Return the path of the file of race results for this device, memory size, system version and MLX version."""
    info = mx.device_info()
    name = str(info.get("device_name", "")) or platform.machine()
    described = [
        f"{name} {info.get('architecture', '')}".strip(),
        str(info.get("memory_size", "")),
        platform.mac_ver()[0] or platform.release(),
        mx.__version__,
    ]
    return kept_json.kept_file("races", described)


def restore() -> None:
    """Load the ratios on record into `launch`. Those of a kernel whose text has changed are left out."""
    for name, kernel in _known().items():
        for width, ratio in _ratios_of(kernel).items():
            launch.set_speedup(name, width, ratio)
        if isinstance(begun := kernel.get("begun"), str):
            launch.refuse(name, begun, "an earlier process ended while it ran")


def save() -> Path:
    """Write the ratios that `launch` holds, together with those on record that it does not hold, and return the file's path."""
    return _write(None)


def mark(name: str, width: str) -> None:
    """Record in the file of race results that a variant of kernel `name` is about to run. width: the variant's name. A mark that a later
    process finds means that the process ended while the variant ran; the variant is then not run again. The next `mark` or `save`
    removes the mark."""
    _write((name, width))


def _write(begun: tuple[str, str] | None) -> Path:
    ratios = _on_record()
    for name, by_width in launch.speedups().items():
        ratios[name] = {**ratios.get(name, {}), **by_width}
    data: dict[str, Any] = {
        name: {"text": _digest(name), "speedups": ratios[name]} for name in sorted(ratios)
    }
    if begun is not None:
        name, width = begun
        data.setdefault(name, {"text": _digest(name), "speedups": {}})["begun"] = width
    file = path()
    kept_json.write(file, data)
    return file


def _on_record() -> dict[str, dict[str, float]]:
    """Return the ratios on record, by kernel and what was raced."""
    return {name: ratios for name, kernel in _known().items() if (ratios := _ratios_of(kernel))}


def _known() -> dict[str, Mapping[str, Any]]:
    """Return the entries on record of kernels whose text is the same."""
    found = kept_json.read(path())
    entries = {name: found.get(name) for name in launch.raced()} if isinstance(found, Mapping) else {}
    return {
        name: kernel
        for name, kernel in entries.items()
        if isinstance(kernel, Mapping) and kernel.get("text") == _digest(name)
    }


def _ratios_of(kernel: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of an entry on record, empty where it is damaged."""
    by_width = kernel.get("speedups")
    if not isinstance(by_width, Mapping) or not all(map(_is_ratio, by_width.values())):
        return {}
    return {str(width): float(ratio) for width, ratio in by_width.items()}


def _digest(name: str) -> str:
    return hashlib.sha256(launch.source_of(name).encode()).hexdigest()[:16]


def _is_ratio(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value < 1000
