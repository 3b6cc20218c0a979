"""Compiles translated kernels with the system's C++ compiler and keeps them in a folder by the hash of all that went in. Knows no Metal."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = ("runtime.cpp", "runtime.h", "memory.h", "metal_stdlib", "metal_simdgroup_matrix")
cache = Path(tempfile.gettempdir()) / f"metal-emulator-{os.getuid()}"  # conftest puts it into pytest's cache

# The kernel: contraction as asked for, every memory access and every undefined operation reported to the runtime.
_KERNEL_FLAGS = (
    "-std=gnu++14 -O1 -g1 -fPIC -fno-exceptions -fno-strict-aliasing -fsingle-precision-constant -fno-math-errno "
    "-Wall -Wno-unused -Wno-attributes -Wno-unknown-pragmas -Wno-ignored-attributes -Wno-maybe-uninitialized -Wno-uninitialized -Werror "
    "-fsanitize=thread -fsanitize=bounds,alignment,shift,integer-divide-by-zero,signed-integer-overflow -fno-sanitize-recover=all"
).split()


class EmulationError(RuntimeError):
    """A kernel that Metal would not take, or that did something wrong."""


def missing_compiler() -> str | None:
    """Why kernels cannot be emulated here, or None."""
    if platform.system() != "Linux":
        return "the emulator runs on Linux only"
    return None if shutil.which("g++") else "there is no g++ to compile the emulated kernels"


@functools.cache
def _runtime_key() -> str:
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    parts = [(HERE / name).read_text() for name in RUNTIME]
    return _hash(version, platform.machine(), *parts)


@functools.cache
def _fused_flags() -> tuple[str, ...]:
    """fma as one instruction where the machine has it (elsewhere it is a function of the C library, equally exact)."""
    info = Path("/proc/cpuinfo")
    return ("-mfma",) if platform.machine() == "x86_64" and " fma " in info.read_text() else ()


@functools.lru_cache(maxsize=512)
def build(unit: str, *, contract: bool, flush: bool = False) -> ctypes.CDLL:
    """Compile a translation unit and load its library. GCC contracts in a pass that -O1 leaves out: -fexpensive-optimizations has it."""
    contraction = ("-ffp-contract=fast", "-fexpensive-optimizations") if contract else ("-ffp-contract=off",)
    flags = (*_KERNEL_FLAGS, *_fused_flags(), *contraction, f"-DEMU_FLUSH={int(flush)}")
    path = cache / f"{_hash(_runtime_key(), unit, *flags)}.so"
    if not path.exists():
        runtime = _compile_runtime()
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            source = Path(folder) / "kernel.cpp"
            source.write_text(unit)
            made = Path(folder) / "kernel.so"
            # Linked apart, without the flags: the runtime has the callbacks, not the compiler's own libraries. Nor is C++'s there:
            # looking through it would take two thirds of the linker's time, for hundreds of kernels.
            _run(["g++", *flags, f"-I{HERE}", "-c", str(source), "-o", f"{source}.o"])
            libraries = ["-nostdlib", "-lm", "-lc", "-lgcc"]
            _run(["g++", "-shared", f"{source}.o", str(runtime), *libraries, "-o", str(made)])
            os.replace(made, path)
    return ctypes.CDLL(str(path))


def _compile_runtime() -> Path:
    path = cache / f"{_runtime_key()}.o"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "runtime.o"
            flags = [
                "-std=c++17",
                "-O2",
                "-fPIC",
                "-fno-exceptions",
                "-fvisibility=hidden",
                "-U_FORTIFY_SOURCE",
            ]
            _run(["g++", *flags, "-c", str(HERE / "runtime.cpp"), "-o", str(made)])
            os.replace(made, path)
    return path


def symbol_offset(path: str) -> int:
    """Where emu_run lies in the file, to turn addresses of the process into addresses of the library."""
    try:
        listed = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return next((int(line.split()[0], 16) for line in listed.splitlines() if line.endswith(" T emu_run")), 0)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"the compiler does not take the kernel:\n{done.stderr}")


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
