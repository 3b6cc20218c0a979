"""macOS's GPU watchdog: it ends GPU work that holds up the display for some seconds, and with it the process (mlx #3267).

Long prompts and large restored states on a busy Mac can cause it. Holds the name of its error, what a user can do, and an evaluation of
large arrays that keeps away from it.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from mlxspec.platform import device

NAME = "ImpactingInteractivity"  # part of the system's error
ADVICE = (
    "macOS ended GPU work that held up the display. A smaller --prefill-chunk or a shorter prompt helps, and so does "
    "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 before mlxspec starts."
)
_BYTES_AT_ONCE = 256 << 20


def explained(said: str) -> str:
    """Return an error's sentence, with what to do where the GPU's watchdog caused it."""
    return f"{said} {ADVICE}" if NAME in said else said


def evaluate_in_parts(arrays: Iterable[mx.array]) -> None:
    """Evaluate arrays a quarter of a gigabyte at a time on a Mac's GPU; elsewhere nothing: they are evaluated when they are needed."""
    if device.backend() != "metal":
        return
    part: list[mx.array] = []
    for array in arrays:
        part.append(array)
        if sum(x.nbytes for x in part) >= _BYTES_AT_ONCE:
            mx.eval(part)
            part = []
    mx.eval(part)
