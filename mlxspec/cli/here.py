"""Finds the models on this disk, and chooses one for a user who names none.

Knows the hub's cache, LM Studio's folders, and folders that models were loaded from; loads and prints nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from mlxspec.cli import options
from mlxspec.errors import MlxspecError


@dataclass(frozen=True, kw_only=True)
class Here:
    """A model on this disk that fits this machine's memory. memory: bytes that it takes. told: a phrase on the model and why it was
    chosen. num_here: number of models from which it was chosen."""

    name: str
    memory: int
    told: str
    num_here: int


def best() -> Here | None:
    """Return the model on this disk, of those that fit into memory, that was used last; if none was used, the largest; None where there
    is no such model."""
    from mlxspec.loading.progress import amount
    from mlxspec.loading.short_names import repository
    from mlxspec.platform.memory import machine_memory
    from mlxspec.policy.cost_file import models_used

    used = [repository(name) for name in models_used()]
    machine = machine_memory()
    sizes = {name: size for name, size in _sizes(used).items() if size <= machine}
    if not sizes:
        return None
    last = next((name for name in used if name in sizes), None)
    name = last or max(sizes, key=lambda n: sizes[n])
    why = f"; of {len(sizes)} models here, {'the last that was used' if last else 'the largest that fits'}"
    told = f"{name}, {amount(sizes[name])}{why if len(sizes) > 1 else ''}"
    return Here(name=name, memory=sizes[name], told=told, num_here=len(sizes))


def _sizes(used: list[str]) -> dict[str, int]:
    """Return the bytes of memory that each model on this disk takes, by name: those of the caches, and those of `used` that are folders."""
    from mlxspec.checkpoints.cache import listing
    from mlxspec.checkpoints.inspect import inspect
    from mlxspec.checkpoints.inspect_report import InspectReport
    from mlxspec.loading import hub

    found = {e.name: e.memory for e in listing().entries if e.is_complete and e.memory is not None}
    for name in used:
        with suppress(MlxspecError):
            if name not in options.DEMO_FAMILY and hub.is_local(name):
                report = inspect(name)
                found |= {name: report.memory.total} if isinstance(report, InspectReport) else {}
    return found


def to_pull(else_: str) -> str:
    """Return a sentence on the command that fetches a model for this machine, with its size. else_: the end of the sentence, on an
    alternative without a download."""
    from mlxspec.checkpoints.fitting import fitting
    from mlxspec.loading.progress import amount
    from mlxspec.platform.memory import machine_memory

    first = next(iter(fitting(machine_memory())), None)
    if first is None:
        return f"{else_}."
    return f"`mlxspec pull {first.name}` fetches one ({amount(first.size)}), {else_}."
