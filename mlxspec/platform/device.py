"""The machine: which backend and BLAS MLX computes with, how many threads, where its CPU kernels go.

Import it before `mlx.core`: importing loads a real BLAS on Linux and has MLX keep float32 products in float32. It imports no MLX itself;
what only MLX can answer is asked when needed. Knows no models, no shapes, and no options but the variables MLXSPEC_BLAS and MLXSPEC_CACHE.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import os
import re
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol
from weakref import WeakKeyDictionary

from mlxspec.platform import blas as _blas
from mlxspec.platform import compile_folder as _compile_folder

if TYPE_CHECKING:
    import mlx.core as mx

Backend = Literal["cpu", "metal", "cuda"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
HAND_OVER_AT = 100  # launches: two to three of MLX's command buffers
_EMULATING = 13, 14  # bfloat16: generations of GPUs
_MATRIX_UNITS = 17  # generation of the first GPU that has them
# bytes: three times the logits of 17 positions of 248k words in 16 bits; and as much again as a prompt's chunk of a small model takes
_SAMPLING_ON_CPU, _SAMPLING_ON_GPU = 24 << 20, 256 << 20
_LARGEST_KEPT, _KEPT = 32 << 20, 256 << 20  # bytes; 32 MiB is the most that glibc takes
# evaluations: once about a hundred of its tasks are lost MLX waits for ever, and each evaluation that fails on a CPU loses one or two
FAILED_AT_MOST = 20
_NOT_YET = "g++ has not compiled MLX's kernels for this CPU yet"
# MLX reads this once, at its first operation; its default is 1. On an M5, float32 products of two rows and more then have a mantissa of 10
# bits (mlx #3534, #4411): verifying would not compute what plain decoding computes. 16-bit products use the same units either way.
_TF32 = "MLX_ENABLE_TF32"
_mlx_came_first = "mlx.core" in sys.modules and os.environ.get(_TF32) != "0"
os.environ.setdefault(_TF32, "0")
_chosen = _blas.choose()
_kernels = _compile_folder.KernelFolder()
_threads = _chosen.max_threads
_claims: MutableMapping[object, tuple[int, int]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """The device that this process computes with, for statistics. `notices` are whole sentences about what could be better. `threads` is
    the BLAS's number now; `kernel_folder` is None where MLX compiles nothing for the CPU. `tf32`: whether float32 products may be rounded
    to TF32 on GPUs that can (M5 and later), None where MLX was imported before mlxspec, which may have been too late to say."""

    backend: Backend
    device: str
    blas: str
    blas_kind: str
    blas_path: str | None
    threads: int
    kernel_folder: str | None
    compile_enabled: bool
    compile_reason: str
    tf32: bool | None
    notices: tuple[str, ...]


def clear_streams() -> None:
    """Destroy MLX's streams of the calling thread, which must not compute any more. MLX may abort a process that ends with a stream
    (mlx #4327), so each thread that computes calls this last. The main thread does so at exit."""
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.clear_streams()


atexit.register(clear_streams)


def tf32() -> bool | None:
    """Return whether MLX may round float32 products to TF32 on GPUs that can; None where MLX was imported before mlxspec, so that the
    setting may have come too late."""
    if os.environ.get(_TF32, "1") != "0":
        return True
    return None if _mlx_came_first else False


def report() -> DeviceReport:
    """Return what this process computes with at the moment. Imports MLX."""
    enabled, reason = _compile_state()
    folder = _kernels.path
    return DeviceReport(
        backend=backend(),
        device=_device_name(),
        blas=_chosen.name,
        blas_kind=_chosen.kind,
        blas_path=_chosen.path,
        threads=_threads,
        kernel_folder=str(folder) if folder is not None else None,
        compile_enabled=enabled,
        compile_reason=reason,
        tf32=tf32(),
        notices=(*_chosen.notices, *_kernel_notices(reason), *_tf32_notices()),
    )


def _tf32_notices() -> list[str]:
    if tf32() is False or backend() != "metal":
        return []
    if tf32():
        return [
            f"{_TF32} is set, so an M5 rounds float32 products: drafted text may differ from plain text. Unset it."
        ]
    return [
        f"MLX was imported before mlxspec, so {_TF32}=0 may have no effect. On an M5, import mlxspec first or set the variable yourself."
    ]


def _kernel_notices(reason: str) -> list[str]:
    if reason == _NOT_YET:
        return [
            f"MLX runs each operation by itself, as {reason}; `mlxspec demo --all` has them compiled once, in a minute or two."
        ]
    return [_kernels.notice] if _kernels.notice else []


def decode_threads() -> None:
    """Use one BLAS thread from here on. With few rows, waking and waiting for a second thread costs more than it saves. It has no effect on
    GPU computations or with a BLAS other than OpenBLAS."""
    _set_threads(1)


def prefill_threads() -> None:
    """Use all cores from here on. Does nothing on GPUs."""
    _set_threads(_chosen.max_threads)


class _Failed:
    """The count of failed evaluations. num: evaluations that have failed in this process."""

    num = 0


def note_failure(error: BaseException | None) -> None:
    """Count `error`, and each of its causes, once, where it is a failed evaluation of MLX on a CPU. Tasks that were queued behind a failed
    one never run, but MLX keeps waiting for them. `worn_out` tells when there have been too many of them."""
    while error is not None:
        is_evaluation = type(error) is RuntimeError and "::eval_cpu]" in str(error)
        if is_evaluation and backend() == "cpu" and not vars(error).setdefault("is_noted", False):
            vars(error)["is_noted"] = True
            _Failed.num += 1
        error = error.__cause__


def worn_out() -> str | None:
    """Return a sentence where the number of failed evaluations has become so large that the next ones might never end, otherwise None."""
    if _Failed.num < FAILED_AT_MOST:
        return None
    return (
        f"MLX has failed to compute {FAILED_AT_MOST} times in this process, and after some more it would wait for ever on a CPU: end the "
        "process, and look at what the requests said that failed."
    )


class HandOverWatch(Protocol):
    """A rule that decides when a forward is handed over in smaller parts than HAND_OVER_AT launches."""

    def is_due(self) -> bool:
        """Return whether what has been built is handed over now. Called once for each call of `start`."""
        ...

    def handed(self, arrays: tuple[mx.array, ...]) -> None:
        """Note the arrays of a part of a forward that the device has just been given to evaluate. Called by `start` after each such part
        on a GPU. May wait for an earlier part."""
        ...


class _Ahead:
    """The state of handing forwards over to the device in parts. is_idle: a GPU has nothing to do but what the host is building; holds:
    nothing is handed over for now. num_launches: kernels built since the last hand-over. watch: decides when more is handed over;
    None: only the number of launches does."""

    is_idle = False
    holds = False
    num_launches = 0
    watch: HandOverWatch | None = None


def start(*arrays: mx.array, num_launches: int = 0) -> None:
    """Let the device begin on what has been built of a forward while the host builds the rest.

    num_launches: about so many kernels were built since the last call. A CPU begins at every call: MLX keeps about a hundred operations
    there on their way, so that a thread that is handed a forward as a whole is idle while the next is built. A GPU begins only within
    `idle`, because else it works on the round before: on the first kernels at once, then on every HAND_OVER_AT, and whenever `idle`'s
    watch says so. No-op within `hold`.
    """
    if _Ahead.holds:
        return
    watch = None
    if backend() != "cpu":
        _Ahead.num_launches += num_launches
        if not _Ahead.is_idle:
            return
        watch = _Ahead.watch
        is_due = watch is not None and watch.is_due()
        if _Ahead.num_launches < HAND_OVER_AT and not is_due:
            return
        _Ahead.num_launches = 0
    import mlx.core as mx

    mx.async_eval(*arrays)
    if watch is not None:
        watch.handed(arrays)


def launch(*arrays: mx.array) -> None:
    """Hand these arrays over to the device, because nothing more is built of them. No-op within `hold`."""
    if not _Ahead.holds:
        import mlx.core as mx

        mx.async_eval(*arrays)


def finish(*arrays: mx.array) -> None:
    """Wait until these arrays are computed, so that the memory of their inputs is free. No-op within `hold`."""
    if not _Ahead.holds and arrays:
        import mlx.core as mx

        mx.eval(*arrays)


def sampling_bytes() -> int:
    """Return the bytes that sampling may take at a time in addition to its logits. A GPU may take more: it would wait for the host
    between two blocks, and each block is launched anew."""
    return _SAMPLING_ON_GPU if has_gpu() else _SAMPLING_ON_CPU


@contextmanager
def idle(watch: HandOverWatch | None = None) -> Iterator[None]:
    """Hand over at once what is launched in the `with` block: it is waited for, and the device has nothing else to do. watch: see
    `HandOverWatch`."""
    before = _Ahead.is_idle, _Ahead.watch
    _Ahead.is_idle, _Ahead.watch, _Ahead.num_launches = True, watch, HAND_OVER_AT - 1
    try:
        yield
    finally:
        _Ahead.is_idle, _Ahead.watch = before


@contextmanager
def hold() -> Iterator[None]:
    """Keep the device from beginning yet on what is launched in the `with` block."""
    before, _Ahead.holds = _Ahead.holds, True
    try:
        yield
    finally:
        _Ahead.holds = before


def keep_heap() -> None:
    """Have glibc keep freed memory of activations instead of giving it back to the system and faulting it in again in the next step; up to
    _KEPT bytes, for this process. No-op on GPUs and with other C libraries.
    """
    if backend() != "cpu" or not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # musl has no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def give_back_heap() -> None:
    """Give the system what `keep_heap` has kept of freed memory, between two answers. No-op on GPUs and with other C libraries."""
    if backend() != "cpu" or not sys.platform.startswith("linux"):
        return
    import mlx.core as mx

    mx.clear_cache()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def claim(owner: object, nbytes: int, scratch: int) -> None:
    """Reserve nbytes of MLX's memory for `owner` until they are released or the owner is deleted; `scratch` of them are used again and
    again.

    On a Mac MLX keeps claimed memory resident, never more than the system recommends (above that the Mac comes to a halt), and keeps at
    most `scratch` of what was freed. By default it would keep nearly all that the system recommends, and growing keys and values leave
    buffers that are never used again (mlx #3350). Does nothing elsewhere.
    """
    _claims[owner] = nbytes, scratch
    _share_out()


def adjust(owner: object, scratch: int) -> None:
    """Change how many bytes `owner` uses again and again. What it has claimed stays. Does nothing where it has claimed nothing."""
    nbytes, before = _claims.get(owner, (0, scratch))
    if before != scratch:
        _claims[owner] = nbytes, scratch
        _limit_scratch()


def release(owner: object) -> None:
    """Release what `owner` has claimed."""
    if _claims.pop(owner, None) is not None:
        _share_out()


def _recommended() -> int | None:
    """Return the bytes that a Mac's GPU may use; None elsewhere."""
    if backend() != "metal":
        return None
    import mlx.core as mx

    found = mx.device_info().get("max_recommended_working_set_size")
    return found if isinstance(found, int) else None


def _share_out() -> None:
    recommended = _recommended()
    if recommended is None:
        return
    import mlx.core as mx

    most = min(sum(nbytes for nbytes, _ in _claims.values()), recommended)
    with suppress(RuntimeError, ValueError):  # before macOS 15
        mx.synchronize()  # changed while a command runs, the limit may unwire memory that it reads
        mx.set_wired_limit(most)
    _limit_scratch()


def _limit_scratch() -> None:
    recommended = _recommended()
    if recommended is None:
        return
    import mlx.core as mx

    scratch = min(sum(scratch for _, scratch in _claims.values()), recommended)
    mx.set_cache_limit(scratch if _claims else recommended)


def give_back() -> None:
    """Give memory that nothing refers to any more back to the system, once what the device runs has ended: Apple's driver has restarted
    Macs whose memory was freed while commands ran."""
    import mlx.core as mx

    gc.collect()
    mx.synchronize()
    mx.clear_cache()


def _set_threads(num_threads: int) -> None:
    global _threads
    if num_threads != _threads:
        _chosen.set_threads(num_threads)
        _threads = num_threads


def private_kernels() -> AbstractContextManager[None]:
    """Return a context in which kernels that MLX compiles for the CPU go to a private folder; a no-op on GPUs, whose kernels MLX keeps
    in memory.

    Reentrant and cheap enough for every step. The first use also finds out whether compiling works at all.
    """
    if has_gpu() or not _compiles_for_cpu() or not _compile_state()[0]:
        return nullcontext()
    return _kernels.entered()


@functools.cache
def backend() -> Backend:
    """Return the kind of MLX's default device: "metal", "cuda" or "cpu". Imports MLX."""
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def has_gpu() -> bool:
    """Return whether MLX computes on a GPU. Imports MLX."""
    return backend() != "cpu"


def has_fused_attention() -> bool:
    """Return whether MLX's scaled-dot-product attention is one kernel here. On a CPU it is several operations, which we can also launch
    ourselves."""
    return has_gpu()


@functools.cache
def gpu_generation() -> int | None:
    """Return the generation of an Apple GPU: 13 is M1, 14 M2, 15 M3, 16 M4, 17 M5; None where there is none, or where it is not stated
    (by a virtual one)."""
    if backend() != "metal":
        return None
    import mlx.core as mx

    named = re.search(r"(\d\d)[a-z]$", str(mx.device_info().get("architecture", "")))
    return int(named[1]) if named else None


def emulates_bfloat16() -> bool:
    """Return whether the GPU, of an M1 or M2, has no arithmetic in bfloat16, so that float16 is faster."""
    return gpu_generation() in _EMULATING


@functools.cache
def has_matrix_units() -> bool:
    """Return whether MLX multiplies with a GPU's matrix units ("neural accelerators"): on an M5 with macOS 26.2."""
    import platform

    import mlx.core as mx

    found = gpu_generation()
    least = _MATRIX_UNITS + str(mx.device_info().get("architecture", "")).endswith("p")  # a phone's GPU
    system = tuple(int(n) for n in platform.mac_ver()[0].split(".")[:2] if n.isdigit())
    return found is not None and found >= least and system >= (26, 2)


def compile_enabled() -> bool:
    """Return whether `mx.compile` fuses operations here. Where it does not, compiled functions still work, operation by operation."""
    return _compile_state()[0]


def compile_kernels() -> bool:
    """Let g++ compile what is not compiled yet, as commands that measure do. Call it before a model is loaded. Returns whether nothing has
    been compiled before, so that answers wait for it.

    Otherwise a CPU on which no such process has run to its end computes step by step: the first token of a short answer would wait
    half a minute for g++. No-op on GPUs and where MLX_DISABLE_COMPILE is set.
    """
    is_first = _compile_state()[1] == _NOT_YET
    _kernels.ask()
    if "MLX_DISABLE_COMPILE" not in os.environ and "mlx.core" in sys.modules:
        sys.modules["mlx.core"].enable_compile()
    _compile_state.cache_clear()
    return is_first


@functools.cache
def _compiles_for_cpu() -> bool:
    return _compile_folder.compiler() is not None


@functools.cache
def _compile_state() -> tuple[bool, str]:
    """Return whether mx.compile fuses, and why. On a CPU a trial kernel is compiled, because a g++ that exists may still be unable to.
    Switches mx.compile off for the process where the trial fails, or where MLX's kernels have not been compiled on this machine
    before."""
    if "MLX_DISABLE_COMPILE" in os.environ:
        return False, "MLX_DISABLE_COMPILE is set"
    if backend() != "cpu":
        return True, "kernels are compiled by the GPU's own toolchain"
    if not _compiles_for_cpu():
        return False, "there is no g++, with which MLX compiles kernels for the CPU"
    import mlx.core as mx

    if not _kernels.is_stocked(mx.__version__):
        mx.disable_compile()
        return False, _NOT_YET
    trial = mx.compile(lambda x: mx.exp(x) * x + 1.0)
    try:
        with _kernels.entered():
            mx.eval(trial(mx.zeros(3)))
    except (RuntimeError, OSError) as error:
        mx.disable_compile()
        return (
            False,
            f"compiling was switched off, as MLX could not compile a kernel with g++: {_first_line(error)}",
        )
    return True, "MLX compiles kernels with g++"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _device_name() -> str:
    import platform

    import mlx.core as mx

    return str(mx.device_info().get("device_name", "")) or platform.machine()
