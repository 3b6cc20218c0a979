"""Keeps the results of races between our kernels and MLX's own operations on this device, in one small file.

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
    """What loading a model does: take the ratios on record, then decide every kernel that may run. Without a GPU there are none."""
    if device.backend() != "cpu":
        restore()
    return launch.needed()


def path() -> Path:
    """The file for this device, its memory, the system and MLX."""
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
    """Give the ratios on record to `launch`. Those of a kernel that has changed are left out."""
    for name, by_width in _on_record().items():
        for width, ratio in by_width.items():
            launch.set_speedup(name, width, ratio)


def save() -> Path:
    """Write the ratios that `launch` knows, beside those on record that it does not; returns the file."""
    ratios = _on_record()
    for name, by_width in launch.speedups().items():
        ratios[name] = {**ratios.get(name, {}), **by_width}
    data = {name: {"text": _digest(name), "speedups": ratios[name]} for name in sorted(ratios)}
    file = path()
    kept_json.write(file, data)
    return file


def _on_record() -> dict[str, dict[str, float]]:
    """Ratios by kernel and what was raced; none of a kernel whose entry is damaged."""
    found, ratios = kept_json.read(path()), dict[str, dict[str, float]]()
    for name in launch.raced() if isinstance(found, Mapping) else ():
        kernel = found.get(name)
        if not isinstance(kernel, Mapping) or kernel.get("text") != _digest(name):
            continue
        by_width = kernel.get("speedups")
        if isinstance(by_width, Mapping) and all(map(_is_ratio, by_width.values())):
            ratios[name] = {str(width): float(ratio) for width, ratio in by_width.items()}
    return ratios


def _digest(name: str) -> str:
    return hashlib.sha256(launch.source_of(name).encode()).hexdigest()[:16]


def _is_ratio(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value < 1000
