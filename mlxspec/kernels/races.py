"""Keeps the results of races between our kernels and MLX's own operations on this device, in one small JSON file.

A ratio counts only for the device, the system, the MLX and the kernel's text it was measured with; a file that does not fit is ignored and
says so. `tune` runs races and `launch` decides by them.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.kernels import launch
from mlxspec.platform import device, folders

_FORMAT = 1
_MOST_BYTES = 1 << 20
_FOLDER = "races"


def prepare() -> tuple[launch.KernelReport, ...]:
    """What loading a model does: take the ratios on record, then decide every kernel that may run. Off Metal there is nothing to read."""
    if device.backend() == "metal":
        restore()
    return launch.needed()


def path() -> Path:
    """The file for this device; its folder is made if need be."""
    folder, _ = folders.private_folder(_FOLDER)
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(conditions()["device"])).strip("-").lower()
    return folder / f"{name or 'device'}.json"


def conditions() -> dict[str, str]:
    """What a ratio depends on besides the kernel: device, its memory, system and MLX."""
    info = mx.device_info()
    name = str(info.get("device_name", "")) or platform.machine()
    return {
        "device": f"{name} {info.get('architecture', '')}".strip(),
        "memory": str(info.get("memory_size", "")),
        "system": platform.mac_ver()[0] or platform.release(),
        "mlx": mx.__version__,
    }


def restore() -> str | None:
    """Give the ratios on record to `launch`; returns why there are none, or None. Ratios of a kernel that has changed are left out."""
    file = path()
    try:
        if file.stat().st_size > _MOST_BYTES:
            return f"{file.name} is too large to be a record of races."
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "No race was run on this device so far."
    except (OSError, ValueError, RecursionError):
        return f"The record of races {file.name} cannot be read."
    ratios = _checked(found)
    if isinstance(ratios, str):
        return ratios
    for name, by_width in ratios.items():
        for width, ratio in by_width.items():
            launch.set_speedup(name, width, ratio)
    return None


def save() -> Path:
    """Write the ratios that `launch` knows, beside those on record that it does not; returns the file. Raises OSError."""
    file = path()
    known = launch.speedups()
    try:
        before = _checked(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        before = {}
    if isinstance(before, str):
        before = {}
    ratios = {name: {**before.get(name, {}), **known.get(name, {})} for name in {*before, *known}}
    data = {
        "format": _FORMAT,
        **conditions(),
        "kernels": {name: {"text": _digest(name), "speedups": ratios[name]} for name in sorted(ratios)},
    }
    folders.write_whole(file, json.dumps(data, indent=1).encode() + b"\n")
    return file


def _digest(name: str) -> str:
    return hashlib.sha256(launch.source_of(name).encode()).hexdigest()[:16]


def _checked(found: Any) -> dict[str, dict[str, float]] | str:
    """Ratios by kernel and width, or the sentence that says why the record does not count."""
    if not isinstance(found, Mapping) or found.get("format") != _FORMAT:
        return "The record of races is of another format."
    for name, value in conditions().items():
        if found.get(name) != value:
            return f"The record of races is of another {name}: {str(found.get(name))[:60]!r}, not {value!r}."
    kernels = found.get("kernels")
    if not isinstance(kernels, Mapping):
        return "The record of races is damaged."
    ratios: dict[str, dict[str, float]] = {}
    for name in launch.raced():
        kernel = kernels.get(name, {})
        if not isinstance(kernel, Mapping) or kernel.get("text") != _digest(name):
            continue
        by_width = kernel.get("speedups")
        if not isinstance(by_width, Mapping) or not all(_is_ratio(r) for r in by_width.values()):
            return "The record of races is damaged."
        ratios[name] = {str(width): float(ratio) for width, ratio in by_width.items()}
    return ratios


def _is_ratio(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value < 1000
