"""Asks macOS for its memory pressure and power mode, and keeps it awake. On other systems there is no pressure and nothing to do."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from typing import Any, Literal

Pressure = Literal["normal", "warn", "critical"]

_LEVELS: dict[int, Pressure] = {2: "warn", 4: "critical"}  # of kern.memorystatus_vm_pressure_level
_UTF8 = 0x08000100  # kCFStringEncodingUTF8
_ON = 255  # kIOPMAssertionLevelOn
_FRAMEWORKS = "/System/Library/Frameworks/{0}.framework/{0}"


def memory_pressure() -> Pressure:
    """Return how short of memory the system reports to be. Takes a microsecond; outside macOS the result is always "normal"."""
    return _LEVELS.get(_number("kern.memorystatus_vm_pressure_level"), "normal")


def _number(name: str) -> int:
    """Return a number of the kernel's, 0 where there is none."""
    if sys.platform != "darwin":
        return 0
    found, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = _library("libSystem.B.dylib").sysctlbyname(
        name.encode(), ctypes.byref(found), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return 0 if failed else found.value


@functools.cache
def _library(path: str) -> Any:
    return ctypes.CDLL(path)


class Awake:
    """Keeps a Mac from going to sleep by itself while something is computed. A closed lid still puts it to sleep."""

    def __init__(self) -> None:
        self._assertion: int | None = None

    def hold(self, wanted: bool) -> None:
        """Take the assertion against sleep if `wanted`, otherwise release it; a no-op where that is already so, and outside macOS."""
        if wanted and self._assertion is None:
            self._assertion = _prevent_sleep()
        elif not wanted and self._assertion is not None:
            _allow_sleep(self._assertion)
            self._assertion = None


def _prevent_sleep() -> int | None:
    """Return the number of an assertion against idle sleep, None where the system has none to give."""
    if sys.platform != "darwin":
        return None
    core, kit = (_library(_FRAMEWORKS.format(name)) for name in ("CoreFoundation", "IOKit"))
    core.CFStringCreateWithCString.restype = ctypes.c_void_p
    kind, reason = (
        ctypes.c_void_p(core.CFStringCreateWithCString(None, text, ctypes.c_uint32(_UTF8)))
        for text in (b"PreventUserIdleSystemSleep", b"mlxspec is answering")
    )
    number = ctypes.c_uint32(0)
    failed = kit.IOPMAssertionCreateWithName(kind, ctypes.c_uint32(_ON), reason, ctypes.byref(number))
    for text in (kind, reason):
        core.CFRelease(text)
    return None if failed else number.value


def _allow_sleep(assertion: int) -> None:
    _library(_FRAMEWORKS.format("IOKit")).IOPMAssertionRelease(ctypes.c_uint32(assertion))


def told(*command: str) -> str:
    """Return the output of a program of the system, "" where it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def is_low_power() -> bool:
    """Return whether the low power mode is on, in which a GPU takes 1.4 to 3.8 times as long (measured by others on an M4 Max)."""
    lines = (line.split() for line in told("pmset", "-g").splitlines())
    return any(line[:2] == ["lowpowermode", "1"] or line[:2] == ["powermode", "1"] for line in lines)
