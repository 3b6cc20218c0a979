"""Launches Metal kernels, decides whether each is used on this device, and reports why.

A kernel is used on a GPU, by Metal or as CUDA, unless MLXSPEC_KERNELS=off, and only after its self-check (kernel against plain-mx twin
on random data) has passed in this process. A kernel that competes with an operation of MLX's own must also win a race on this device.
`races` keeps the results on disk.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import mlx.core as mx

from mlxspec.errors import ConfigError
from mlxspec.kernels import cuda
from mlxspec.platform import device
from mlxspec.platform.resources import metal_source

BODY = "//// body\n"  # in a .metal file: above it helper functions, below it the body of the kernel function
VARIABLE = "MLXSPEC_KERNELS"
FLOATS = (mx.float32, mx.float16, mx.bfloat16)  # compute dtypes that kernels take
RACE_MARGIN = 1.02  # ours must be this much faster than MLX's own operation

Factory = Callable[..., Any]
_substitute: Factory | None = None


def factory() -> Factory:
    """Return the function that builds kernels on this device, with the signature of `mx.fast.metal_kernel`."""
    if _substitute is not None:
        return _substitute
    return cuda.metal_kernel if device.backend() == "cuda" else mx.fast.metal_kernel


@contextmanager
def using(substitute: Factory) -> Iterator[None]:
    """Build kernels with `substitute` on any device, until the context ends."""
    global _substitute
    before, _substitute = _substitute, substitute
    try:
        yield
    finally:
        _substitute = before


class MetalKernel:
    """A kernel function of one .metal file. The file is read and the kernel is built at the first call."""

    def __init__(self, name: str, *, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.name, self._inputs, self._outputs = name, tuple(inputs), tuple(outputs)
        self._built: dict[Factory, Any] = {}

    def _build(self) -> Any:
        header, mark, body = metal_source(self.name).partition(BODY)
        if not mark:
            raise ConfigError(f"{self.name}.metal has no line {BODY.strip()!r}.")
        names = {"input_names": list(self._inputs), "output_names": list(self._outputs)}
        return factory()(name=f"mlxspec_{self.name}", source=body, header=header, **names)

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
        template: Mapping[str, Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        """Launch the kernel and return its outputs. outputs: (shape, dtype) in the order of the output names; grid: in threads."""
        by = factory()
        if by not in self._built:
            self._built[by] = self._build()
        built = self._built[by]
        return built(
            inputs=list(inputs),
            template=list(template.items()),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )


# ---- whether a kernel is used


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of a self-check: the largest error found, the largest error allowed, and other findings. matches_mlx: whether a row's
    result has the bits of MLX's own operation on that row alone; True for a kernel that replaces no operation of MLX's."""

    error: float
    limit: float
    note: str = ""
    matches_mlx: bool = True


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """A kernel's row in the statistics. failed: its self-check ran and switched it off. speedups: by what was raced, MLX's own time
    divided by the kernel's. is_ours: False for an operation of MLX's that was found wrong on this device. matches_mlx: as in `Check`;
    a kernel in use that does not match is launched only where it computes all products of 1 to 8 rows, that is, with `exact`.
    refusals: by what was raced, why this device could not run it."""

    name: str
    in_use: bool
    reason: str
    note: str = ""
    failed: bool = False
    is_ours: bool = True
    matches_mlx: bool = True
    speedups: Mapping[str, float] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)

    @property
    def notice(self) -> str | None:
        """Return a sentence for the user where the kernel is not used although it could run here, otherwise None."""
        if self.failed:
            return f"The kernel {self.name} is switched off: it {self.reason}."
        if self.refusals:
            width, why = next(iter(self.refusals.items()))
            return (
                f"This device cannot run {len(self.refusals)} of the kernel {self.name}'s variants, such as {width}: {why}. MLX's own "
                "operation is used there."
            )
        if self.in_use and not self.matches_mlx and _has_won(self.speedups):
            return (
                f"The kernel {self.name} is faster here, but is used with --exact only: its results differ in their last bits from MLX's "
                "own products of one row, so drafted text could differ from plain text."
            )
        return None


_checks: dict[str, Callable[..., Check]] = {}
_raced: set[str] = set()
_unless_lost: set[str] = set()
_of_models: set[str] = set()
_checked: set[tuple[Any, ...]] = set()  # kernels, with what models use them for
_texts: dict[str, str] = {}
_reports: dict[str, KernelReport] = {}
_speedups: dict[str, dict[str, float]] = {}
_refusals: dict[str, dict[str, str]] = {}
_before_race: Callable[[str, str], object] | None = None


def self_check(
    name: str,
    *,
    raced: bool = False,
    unless_lost: bool = False,
    of_models: bool = False,
    text: str | None = None,
) -> Callable[[Callable[..., Check]], Callable[..., Check]]:
    """Return a decorator for the function that compares kernel `name` with its twin. raced: the kernel is used only where it won a race,
    or with `unless_lost` wherever it has not lost one. of_models: the function takes what a model uses the kernel for, and has an
    example as default. text: name of the .metal file where it is another name: parts of one file can be checked and switched off
    separately; "" for operations of MLX's own, which have no file."""

    def register(function: Callable[..., Check]) -> Callable[..., Check]:
        _checks[name] = function
        _texts[name] = name if text is None else text
        if raced:
            _raced.add(name)
        if unless_lost:
            _unless_lost.add(name)
        if of_models:
            _of_models.add(name)
        return function

    return register


def in_use(name: str) -> bool:
    """Return whether kernel `name` is to be launched. The first call on a GPU runs its self-check."""
    if name not in _reports:
        _reports[name] = _decide(name)
    return _reports[name].in_use


def check_for(*used_for: Any) -> None:
    """Run the self-checks of the kernels that models need, with the shapes of one model, so that nothing is compiled for an example. A
    kernel that fails once is switched off."""
    for name in sorted(_of_models):
        is_new = (name, *used_for) not in _checked
        if is_new and (name not in _reports or _reports[name].in_use):
            _checked.add((name, *used_for))
            _reports[name] = _decide(name, *used_for)


def may_mix(name: str) -> bool:
    """Return whether kernel `name` may compute some widths of a model's rounds while MLX's own operation computes others: it is in use,
    and its self-check found the bits of MLX's own operation."""
    return in_use(name) and (name not in _reports or _reports[name].matches_mlx)


def reports() -> tuple[KernelReport, ...]:
    """Return one report for each kernel. Kernels that have not been checked yet are checked."""
    for name in sorted(_checks):
        in_use(name)
    return _all_reports()


def needed() -> tuple[KernelReport, ...]:
    """Return the reports of the kernels in use. Kernels that have won none of the races they have to win are not used and so not
    checked; the same holds for those that no loaded model needs. Loading a model decides this."""
    for name in sorted(_checks):
        if not _may_run() or (
            wins_anything(name) if name in _raced - _unless_lost else name not in _of_models
        ):
            in_use(name)
    return _all_reports()


def add_report(report: KernelReport) -> None:
    """Add the report of a kernel that this module does not decide on."""
    _reports[report.name] = report


def _all_reports() -> tuple[KernelReport, ...]:
    names = [*sorted(_checks), *sorted(set(_reports) - set(_checks))]
    found = (_reports.get(n, KernelReport(name=n, in_use=False, reason=_waiting(n))) for n in names)
    return tuple(
        replace(r, speedups=dict(_speedups.get(r.name, {})), refusals=dict(_refusals.get(r.name, {})))
        for r in found
    )


def _waiting(name: str) -> str:
    if name in _of_models:
        return "no model that was loaded needs it"
    return "has won no race on this device; MLX's own operation is used"


def forget() -> None:
    """Discard all decisions and races, so that everything is decided anew."""
    _reports.clear()
    _checked.clear()
    _speedups.clear()
    _refusals.clear()


def _may_run() -> bool:
    """Return whether kernels can run here: there is a GPU or a substitute for one, and kernels are not switched off."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in ("auto", "off"):
        raise ConfigError(f"{VARIABLE} must be auto or off, not {wanted!r}.")
    return wanted == "auto" and (_substitute is not None or device.backend() != "cpu")


def _decide(name: str, *used_for: Any) -> KernelReport:
    if not _may_run():
        off = os.environ.get(VARIABLE) == "off"
        without_gpu = "there is no GPU here; plain MLX operations do the same"
        return KernelReport(
            name=name, in_use=False, reason=f"switched off by {VARIABLE}=off" if off else without_gpu
        )
    try:
        check = _checks[name](*used_for)
    except Exception as error:
        # Whatever a GPU's compiler or MLX finds wrong with a kernel must cost only that kernel.
        return KernelReport(
            name=name, in_use=False, failed=True, reason=f"did not run on this device: {_first_line(error)}"
        )
    if not check.error <= check.limit:
        reason = f"differs from plain MLX operations on this device: error {check.error:.2e}, limit {check.limit:.0e}"
        return KernelReport(name=name, in_use=False, failed=True, reason=reason)
    return KernelReport(
        name=name,
        in_use=True,
        reason=f"agrees with plain MLX operations: error {check.error:.1e}",
        note=check.note,
        matches_mlx=check.matches_mlx,
    )


def largest_error(got: Sequence[mx.array], wanted: Sequence[mx.array]) -> float:
    """Return the largest difference over all pairs of arrays, each in units of the wanted array's largest value. Not-a-number counts as
    infinite."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        if a.shape != b.shape or not mx.isfinite(a).all().item():
            return float("inf")
        worst = max(worst, (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-3)).item())
    return worst


# ---- races against MLX's own operations

_REPEAT, _ROUNDS, _FEW_ROUNDS = 8, 15, 7
_BYTES_AT_ONCE = 256 << 20  # read in a millisecond or two, far longer than a GPU is waited for
ROUNDED = 0.05  # of the largest number: what 16-bit numbers on the way may make; a wrong kernel is off by many times as much
LOST = 1e-3  # the ratio of a kernel whose result is not what is wanted


def wins(name: str, width: str) -> bool:
    """Return whether kernel `name` was faster than MLX's own operation at `width`. Without a measurement: False, but True for a kernel
    that is used unless it has lost."""
    unmeasured = RACE_MARGIN if name in _unless_lost else 0.0
    return _speedups.get(name, {}).get(width, unmeasured) >= RACE_MARGIN


def speedup(name: str, width: str) -> float:
    """Return MLX's time divided by that of kernel `name` at `width`; 0 where that was not raced."""
    return _speedups.get(name, {}).get(width, 0.0)


def wins_anything(name: str) -> bool:
    """Return whether kernel `name` was faster than MLX's own operation at any width."""
    return _has_won(_speedups.get(name, {}))


def _has_won(ratios: Mapping[str, float]) -> bool:
    return any(ratio >= RACE_MARGIN for ratio in ratios.values())


def race(
    name: str,
    width: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    *,
    num_bytes: int = 0,
) -> float:
    """Time both functions on this device in turns, and store and return the ratio of medians (MLX's time divided by the kernel's). A
    race is lost without timing where this device cannot run our kernel; where the results differ, our kernel is switched off as well.

    Calls are evaluated together, so that the wait for the GPU does not hide their time: the more bytes one call reads, the fewer calls
    and rounds. num_bytes: of weights that a call reads.
    """
    ratio = attempt(name, width, lambda: _timed(name, width, ours, theirs, num_bytes))
    ratio = LOST if ratio is None else ratio
    set_speedup(name, width, ratio)
    return ratio


def _timed(
    name: str, width: str, ours: Callable[[], Any], theirs: Callable[[], Any], num_bytes: int
) -> float:
    repeat = max(1, min(_REPEAT, _BYTES_AT_ONCE // max(1, num_bytes)))
    num_rounds = _ROUNDS if repeat > 1 else _FEW_ROUNDS
    times: tuple[list[float], list[float]] = ([], [])
    results = [found if isinstance(found, (list, tuple)) else [found] for found in (ours(), theirs())]
    if not (error := largest_error(*results)) <= ROUNDED:
        reason = f"differs from MLX's own operation ({width}): error {error:.2e}, limit {ROUNDED}"
        add_report(KernelReport(name=name, in_use=False, failed=True, reason=reason))
        return LOST
    for _ in range(num_rounds):
        for function, found in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            mx.eval([function() for _ in range(repeat)])
            found.append(time.perf_counter() - start)
    return statistics.median(times[1]) / statistics.median(times[0])


Result = TypeVar("Result")


def attempt(name: str, width: str, run: Callable[[], Result]) -> Result | None:
    """Run a variant of kernel `name` and return its result, which `run` must have evaluated. Returns None where this device cannot run
    the variant, now or earlier: a refusal by the GPU's compiler, its limits or MLX costs that variant and nothing else."""
    if width in _refusals.get(name, {}):
        return None
    if _before_race is not None:
        _before_race(name, width)
    try:
        return run()
    except Exception as error:
        refuse(name, width, _first_line(error))
        return None


def refuse(name: str, width: str, why: str) -> None:
    """Store that this device cannot run a variant of kernel `name`. The variant has lost its race and is not run again."""
    _refusals.setdefault(name, {})[width] = why
    set_speedup(name, width, LOST)


def refusals() -> dict[str, dict[str, str]]:
    """Return, by kernel and by what was raced, why this device could not run it."""
    return {name: dict(by_width) for name, by_width in _refusals.items()}


def call_before_races(function: Callable[[str, str], object] | None) -> None:
    """Call `function` with a kernel's name and what is raced, each time before that variant runs. None: no function."""
    global _before_race
    _before_race = function


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def set_speedup(name: str, width: str, ratio: float) -> None:
    """Store a ratio that was measured earlier on the same device."""
    _speedups.setdefault(name, {})[width] = ratio


def adopt(ratios: Mapping[str, Mapping[str, float]]) -> None:
    """Replace this process's ratios by those of another process, so that both choose the same kernels."""
    _speedups.clear()
    for name, by_width in ratios.items():
        _speedups[name] = dict(by_width)


def speedups() -> dict[str, dict[str, float]]:
    """Return, by raced kernel and by what was raced, MLX's own time divided by the kernel's: what this process measured or has adopted."""
    return {name: dict(_speedups[name]) for name in sorted(_raced & set(_speedups))}


def source_of(name: str) -> str:
    """Return the Metal text of a checked kernel; a text without code where the kernel is made of MLX's own operations."""
    return metal_source(_texts[name]) if _texts[name] else BODY


def raced() -> tuple[str, ...]:
    """Return the names of the kernels that have to win races."""
    return tuple(sorted(_raced))
