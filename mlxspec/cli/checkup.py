"""The checks of `mlxspec doctor`: each finding has a name, what was found, and what to do if anything is wrong.

Asks the machine, the packages, the kernels, the caches and one small model; prints nothing and reaches no network.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from mlxspec import __version__
from mlxspec.cli.stats_line import counted, size
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.errors import MlxspecError
from mlxspec.platform import device, folders, macos, nvidia

Status = Literal["ok", "note", "wrong"]
PACKAGES = ("mlx", "mlx-lm", "numpy", "tokenizers", "huggingface-hub", "llguidance", "jinja2")
_LOW_DISK = 10 * 1000**3  # bytes: a 4-bit model of 8B takes half of it
_LOW_MEMORY = 4 * 1000**3
_OLDEST_MACOS = 14
_RESTARTS = (
    "15.",
    "26.0",
    "26.1",
    "26.2",
    "26.3",
    "26.4",
    "26.5",
)  # of which panics of IOGPUFamily were reported
_PROBE_TOKENS = 48
_PROBE_PROMPT = "def read_lines(path):\n    with open(path) as f:\n"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding of `mlxspec doctor`. found: what was found. status: "ok"; "note" where something works, but could be better; "wrong"
    where something does not work as it should. advice: what to do, "" where nothing."""

    name: str
    found: str
    status: Status = "ok"
    advice: str = ""


def examine(model: str) -> Iterator[Finding]:
    """Yield the findings on this machine, then those on the model `model`. An examination that raises an exception yields a finding with
    status "wrong"."""
    for name, look in _LOOKS:
        yield from _guarded(name, look)
    yield from _guarded("model", lambda: _model(model))


def _guarded(name: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except MlxspecError as error:
        yield Finding(name=name, found=str(error), status="wrong", advice="See the sentence above.")
    except Exception as error:  # a checkup that stops at the first surprise helps nobody
        said = f"{type(error).__name__}: {error}".rstrip(".: ")
        yield Finding(
            name=name,
            found=f"could not be examined ({said})",
            status="wrong",
            advice="Run it again with --debug.",
        )


# ---- the machine


def _platform() -> Iterator[Finding]:
    system = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else _linux()
    found = f"{system}, {platform.machine()}, {os.cpu_count()} cores"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        advice = "Use an arm64 Python: MLX needs Apple Silicon, and this one runs under Rosetta or on an Intel Mac."
        yield Finding(name="system", found=found, status="wrong", advice=advice)
    elif sys.platform == "darwin" and int(platform.mac_ver()[0].split(".")[0]) < _OLDEST_MACOS:
        advice = f"Update to macOS {_OLDEST_MACOS} or newer; MLX is not built for older ones."
        yield Finding(name="system", found=found, status="wrong", advice=advice)
    else:
        yield Finding(name="system", found=found)


def _linux() -> str:
    name = platform.system()
    with contextlib.suppress(OSError):
        name = platform.freedesktop_os_release().get("PRETTY_NAME", name)
    library, number = platform.libc_ver()
    return f"{name}, {library} {number}" if library else name


def _versions() -> Iterator[Finding]:
    yield Finding(name="mlxspec", found=f"{__version__}, Python {platform.python_version()}")
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        advice = "Install mlxspec again; pip brings what it needs."
        yield Finding(name="packages", found=f"missing: {', '.join(missing)}", status="wrong", advice=advice)
    else:
        yield Finding(name="packages", found=", ".join(found))


def _backend() -> Iterator[Finding]:
    report = device.report()
    if sys.platform == "darwin" and report.backend != "metal":
        advice = "Install MLX for arm64 macOS again; without Metal everything runs on the CPU."
        yield Finding(name="device", found=report.backend, status="wrong", advice=advice)
    elif report.backend == "cpu" and nvidia.has_gpu():
        unused = f"{report.device} (cpu), beside an NVIDIA GPU that MLX does not use"
        yield Finding(name="device", found=unused, status="note", advice=nvidia.advice())
    else:
        yield Finding(name="device", found=f"{report.device} ({report.backend})")
    if report.tf32:
        advice = (
            "Unset MLX_ENABLE_TF32: on an M5, float32 models then draft and verify with different numbers."
        )
        yield Finding(name="TF32", found="float32 products may be rounded", status="note", advice=advice)
    else:
        yield Finding(name="TF32", found="off: float32 products keep float32")
    if report.backend == "cpu" and report.blas_kind != "none":
        slow = report.blas_kind == "wheel"
        yield Finding(
            name="BLAS",
            found=f"{report.blas} ({report.blas_kind})",
            status="note" if slow else "ok",
            advice="Install a real one (apt install libopenblas0): this one is 30 to 100 times slower."
            if slow
            else "",
        )
    if report.backend == "metal":
        relaxed = os.environ.get("AGX_RELAX_CDM_CTXSTORE_TIMEOUT") == "1"
        yield Finding(
            name="GPU watchdog",
            found="relaxed by AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
            if relaxed
            else "macOS ends a process of which one command buffer takes about five seconds (ImpactingInteractivity); MLX hands work over "
            "in buffers of 40 to 50 kernels, each far below that",
        )
    if device.emulates_bfloat16():
        yield Finding(
            name="bfloat16",
            found=f"emulated by this GPU (generation {device.gpu_generation()}): what is stored so is computed in float16 where it fits; "
            "`mlxspec inspect MODEL` says whether it does",
        )
    yield Finding(
        name="compiling",
        found=("on: " if report.compile_enabled else "off: ") + report.compile_reason,
    )
    for notice in report.notices:
        yield Finding(name="notice", found=notice, status="note")


def _memory() -> Iterator[Finding]:
    from mlxspec.platform.memory import machine_memory

    usable = machine_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    small = usable < _LOW_MEMORY
    yield Finding(
        name="memory",
        found=f"{size(total)}, of which models may use {size(usable)}",
        status="note" if small else "ok",
        advice="`mlxspec inspect MODEL` says what a model takes." if small else "",
    )
    if sys.platform == "darwin":
        limit = macos.told("sysctl", "-n", "iogpu.wired_limit_mb")
        said = "the system's own" if limit in ("", "0") else f"{limit} MB"
        advice = f"`sudo sysctl iogpu.wired_limit_mb=N` raises it until the next start; leave the system {size(total / 6)} at least."
        yield Finding(name="wired limit", found=said, advice=advice)
        pressure = macos.memory_pressure()
        yield Finding(
            name="memory pressure",
            found=f"{pressure}; swap {macos.told('sysctl', '-n', 'vm.swapusage') or 'unknown'}",
            status="ok" if pressure == "normal" else "note",
            advice=""
            if pressure == "normal"
            else "Close other programs: stores of earlier texts are emptied until it is normal.",
        )


def _power() -> Iterator[Finding]:
    if sys.platform != "darwin":
        return
    low = macos.is_low_power()
    yield Finding(
        name="power",
        found="low power mode: others measured 1.4 to 3.8 times the time an answer takes otherwise"
        if low
        else "full speed",
        status="note" if low else "ok",
        advice="System Settings > Battery switches the low power mode off." if low else "",
    )
    version = platform.mac_ver()[0]
    if version.startswith(_RESTARTS):
        yield Finding(
            name="GPU driver",
            found=f"Apple's driver has restarted Macs with macOS {version} under long GPU work of other engines (mlx #3186, #3346)",
            status="note",
            advice="Install the newest macOS. docs/kernels.md says how mlxspec keeps away from what is known to cause it.",
        )


# ---- kernels


def _kernels() -> Iterator[Finding]:
    from mlxspec import kernels as _all  # noqa: F401
    from mlxspec.kernels import attention, conv_qkv, gdn_prefill, gdn_round, launch, products  # noqa: F401

    for heads in attention.COMMON:
        attention.has_kernel(heads)  # what is wrong is in the reports
    for report in launch.reports():
        has_source = not report.is_ours or launch.BODY in launch.source_of(report.name)
        name = f"kernel {report.name}"
        if not has_source:
            advice = "Install mlxspec again: the file is damaged."
            yield Finding(name=name, found="its Metal source cannot be used", status="wrong", advice=advice)
        elif report.failed:
            advice = (
                "It is switched off and plain MLX does its work; please report this sentence and the device."
            )
            yield Finding(name=name, found=report.reason, status="wrong", advice=advice)
        elif device.backend() != "cpu" or report.in_use:
            yield Finding(name=name, found=report.reason)
        else:
            yield Finding(name=name, found=f"source is there, not run: {report.reason}")


# ---- caches


def _caches() -> Iterator[Finding]:
    folder, problem = folders.private_folder("costs")
    root = folder.parent
    if problem is not None:
        advice = "Make it a folder of your own that can be written to, or name another in MLXSPEC_CACHE."
        yield Finding(name="cache folder", found=problem, status="wrong", advice=advice)
    else:
        yield Finding(name="cache folder", found=f"{root}, {size(_bytes_in(root))}")
    yield from _earlier_texts()
    from mlxspec.checkpoints.cache import listing
    from mlxspec.loading import repositories

    listed = listing()
    broken = [e for e in listed.entries if not e.is_complete or e.problem]
    told = f"{listed.folder}, {len(listed.entries)} that mlxspec runs, {size(sum(e.size for e in listed.entries))}"
    yield Finding(
        name="models",
        found=told if not broken else f"{told}; incomplete or unusable: {broken[0].name}",
        status="note" if broken else "ok",
        advice=f"`mlxspec pull {broken[0].name}` goes on with it, `mlxspec rm {broken[0].name}` removes it."
        if broken
        else "",
    )
    places = dict.fromkeys((_existing(root), _existing(repositories.cache_folder())))
    free = min(shutil.disk_usage(place).free for place in places)
    low = free < _LOW_DISK
    yield Finding(
        name="free disk",
        found=size(free),
        status="note" if low else "ok",
        advice="Most models need more; `mlxspec models` shows what can go." if low else "",
    )


def _earlier_texts() -> Iterator[Finding]:
    """Yield findings on the prefix cache on disk and on the texts that the drafter `suffix` has kept, each in its default folder."""
    from mlxspec.engine.prefix.disk import default_folder
    from mlxspec.engine.text_files import texts_folder

    for name, path in {"prefix cache": default_folder(), "earlier texts": texts_folder()}.items():
        if os.path.exists(path):  # not so in a folder of another user, where Path.exists raises
            num = len(list(path.glob("[!.]*.safetensors")))
            found = f"{path}, {counted(num, 'file')}, {size(_bytes_in(path))}; removing the folder clears it"
            yield Finding(name=name, found=found)
        elif name == "prefix cache":
            yield Finding(name=name, found=f"nothing on disk ({path} is not there)")


def _existing(path: Path) -> Path:
    while not os.path.exists(path):
        path = path.parent
    return path


def _bytes_in(root: Path) -> int:
    return sum(p.stat().st_size for p in root.rglob("*") if p.is_file() and not p.is_symlink())


# ---- a model


def _model(name: str) -> Iterator[Finding]:
    """Yield findings on a model: whether verifying several tokens gives the same results as plain steps, and whether one text is the
    same with drafting and without. Raises MlxspecError where the model cannot be loaded."""
    from mlxspec.engine.load import load
    from mlxspec.loading import hub

    hub.resolve(name, download=False)
    engine = load(name, spec=SpecConfig(policy="fixed"))  # whether or not drafting pays here
    report = engine.probe()
    flips = [v.width for v in report.widths if not v.same_argmax]
    yield Finding(
        name="exactness",
        found=f"{engine.name}: {report.sentence()}",
        status="note" if flips else "ok",
        advice="Where the text must be plain decoding's to the last token, use --exact." if flips else "",
    )
    params = SamplingParams(max_tokens=_PROBE_TOKENS, ignore_eos=True)
    plain = engine.generate(_PROBE_PROMPT, params, spec=SpecConfig())
    drafted = engine.generate(_PROBE_PROMPT, params)
    names = ", ".join(engine.spec.drafters) or "nothing"
    if plain.tokens == drafted.tokens:
        found = f"{len(plain.tokens)} tokens, the same with drafting ({names}) and without"
        yield Finding(name="same text", found=found)
    else:
        place = next(i for i, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=True)) if a != b)
        yield Finding(
            name="same text",
            found=f"with drafting ({names}) the text differs from token {place} on",
            status="note" if flips else "wrong",
            advice="Use --exact, or --draft off; and please report it with this output.",
        )
    for notice in drafted.stats.notices:
        yield Finding(name="drafting", found=notice, status="wrong", advice="Please report this sentence.")


_LOOKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("system", _platform),
    ("packages", _versions),
    ("device", _backend),
    ("memory", _memory),
    ("power", _power),
    ("kernels", _kernels),
    ("caches", _caches),
)
