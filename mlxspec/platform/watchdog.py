"""macOS's GPU watchdog: it ends GPU work that holds up the display for some seconds, and with it the process (mlx #3267).

Long prompts and large restored states on a busy Mac can cause it. It counts the seconds of one command buffer, not of a forward. Holds the
name of its error, what a user can do, an evaluation of large arrays that keeps away from it, and the watch over the pieces of a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from mlxspec.platform import device

NAME = "ImpactingInteractivity"  # part of the system's error
ADVICE = (
    "macOS ended GPU work that held up the display. A smaller --prefill-chunk or a shorter prompt helps, and so does "
    "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 before mlxspec starts."
)
_BYTES_AT_ONCE = 256 << 20
_HANDED_SECONDS = (
    0.25  # that one hand-over may take by what earlier ones took; the watchdog waits for about five
)
_LONGEST_PART = 1.0  # seconds of what cannot be handed over in parts, above which pieces become shorter
_SHORTEST = 1024  # tokens; below it no Mac attends by MLX's fused kernel
_QUICK_PIECES = 3  # after so many in sequence pieces become longer again


def explained(said: str) -> str:
    """Return an error's message, with advice added where the GPU's watchdog caused the error."""
    return f"{said} {ADVICE}" if NAME in said else said


def evaluate_in_parts(arrays: Iterable[mx.array]) -> None:
    """Evaluate arrays a quarter of a gigabyte at a time on a Mac's GPU; do nothing elsewhere, where they are evaluated when they are
    needed."""
    if device.backend() != "metal":
        return
    part: list[mx.array] = []
    for array in arrays:
        part.append(array)
        if sum(x.nbytes for x in part) >= _BYTES_AT_ONCE:
            mx.eval(part)
            part = []
    mx.eval(part)


class PromptWatch:
    """A watch that keeps the command buffers of a prompt's pieces short on a Mac's GPU. Each engine has one.

    A forward is built in parts, of which a layer has one or two. As many parts are handed over together as take _HANDED_SECONDS by what
    parts took in this piece and in the one before it. The host waits for a hand-over before it makes the next but one, so that it sees what
    each takes. The piece is the same graph either way. A stall makes hand-overs shorter for at most two pieces. Pieces become shorter only
    where one part alone takes more than _LONGEST_PART, and grow back. may_shorten: whether they may become shorter at all.
    """

    def __init__(self) -> None:
        self.may_shorten = True
        self._halvings = self._num_quick = 0
        self._before: float | None = None  # seconds of a part and a token: the slowest of the piece before
        self._slowest: float | None = None  # likewise, of this piece
        self._longest_part = 0.0  # seconds, in this piece
        self._num_tokens = self._num_parts = 0
        self._handed: tuple[tuple[mx.array, ...], int] | None = None  # on its way, with its number of parts
        self._last = 0.0  # when the hand-over before that ended

    def limited(self, chunk: int) -> int:
        """Return the tokens of a piece where memory allows `chunk`."""
        return max(min(chunk, _SHORTEST), chunk >> self._halvings)

    @contextmanager
    def reading(self, num_tokens: int) -> Iterator[None]:
        """Watch one piece of a prompt, which is built and handed over inside this context. The device has nothing else to do."""
        if device.backend() != "metal":
            with device.idle():
                yield
            return
        self._num_tokens, self._num_parts, self._handed = num_tokens, 0, None
        self._before, self._slowest, self._longest_part = self._slowest, None, 0.0
        self._last = time.perf_counter()
        try:
            with device.idle(self):
                yield
            self._wait()
        finally:
            self._handed = None
        self._judge()

    def is_due(self) -> bool:
        """Return whether what has been built so far is handed over now. Called once for each part."""
        self._num_parts += 1
        known = [rate for rate in (self._before, self._slowest) if rate is not None]
        return not known or (self._num_parts + 1) * max(known) * self._num_tokens > _HANDED_SECONDS

    def handed(self, arrays: tuple[mx.array, ...]) -> None:
        """Note a hand-over, and wait for the one before it."""
        self._wait()
        self._handed, self._num_parts = (arrays, self._num_parts), 0

    def _wait(self) -> None:
        if self._handed is None:
            return
        arrays, num = self._handed
        mx.eval(*arrays)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._slowest = max(self._slowest or 0.0, seconds / num / self._num_tokens)
        if num == 1:
            self._longest_part = max(self._longest_part, seconds)

    def _judge(self) -> None:
        if self._longest_part > _LONGEST_PART:
            self._num_quick = 0
            if self.may_shorten and self._num_tokens > _SHORTEST:
                self._halvings += 1
            return
        self._num_quick += 1
        if self._num_quick >= _QUICK_PIECES:
            self._halvings, self._num_quick = max(0, self._halvings - 1), 0
