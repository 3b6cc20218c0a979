"""How the recurrence of a Gated DeltaNet layer goes back to what was accepted: three ways behind one contract, `Rollback`.

    Tape        keeps the state before the last forward and what that forward did to it; the next replays what stands (the default)
    Snapshots   keeps the last states themselves; the next forward starts from the one that stands
    Checkpoint  keeps the state before and the forward's inputs; the next runs what stands again (the plain twin of the others)

A way is chosen when a cache is made and never changes, so compiled forwards may depend on it. Knows arrays and the kernels; does not
know which tokens are accepted (the model cache says `kept`), nor the convolution in front, which goes back by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec import device
from mlxspec.errors import ConfigError
from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_ops import Tape as TapeArrays
from mlxspec.kernels.gdn_ops import pick, picked
from mlxspec.kernels.gdn_prefill import gdn_prefill
from mlxspec.kernels.gdn_round import Kept, RowLayout, gdn_facts, gdn_flush, gdn_round, gdn_snapshots

STEPS_AT_MOST = 16  # facts wider than this go through the chunked form
# bytes of the states that a row passed in one layer: of more its tape is kept instead
_PASSED_AT_MOST = 8 << 20


class RecurrentState(NamedTuple):
    """What a layer's forward takes and gives.

    window (B, K - 1, C): convolution inputs before the last forward's; state (B, Hv, Dv, Dk) float32. After a forward that may be taken
    back, `inputs` (M, C or more columns, of which the first C count) are its convolution inputs, and state and held are what its way of
    rollback keeps. inputs None: nothing is deferred, window and state stand right before the next token.
    """

    state: mx.array
    window: mx.array
    inputs: mx.array | None = None
    held: tuple[mx.array, ...] = ()


@dataclass(frozen=True)
class Stood:
    """What stands of the last forward, the same for all layers: its rows; of each row's tokens the first kept (B,) int32, so that the
    last dropped (B,) int32 do not. known: rows and kept as the host has them; None where only the device does."""

    rows: RowLayout
    kept: mx.array
    dropped: mx.array
    known: tuple[FlatRows, Sequence[int]] | None = None

    @classmethod
    def of(cls, rows: FlatRows, kept: Sequence[int]) -> Stood:
        counts = np.asarray(kept, np.int32)
        dropped = np.asarray(rows.widths, np.int32) - counts
        return cls(RowLayout.of(rows), mx.array(counts), mx.array(dropped), (rows, kept))

    @classmethod
    def of_unread(cls, rows: FlatRows, kept: mx.array) -> Stood:
        """The same where only the device knows how many stand, kept (B,) int32."""
        widths = mx.array(np.asarray(rows.widths, np.int32))
        return cls(RowLayout.of(rows), kept, widths - kept)


class Verified(NamedTuple):
    """y (N, Hv, Dv) float32, and what a RecurrentState is to keep until it is known which tokens stand."""

    y: mx.array
    state: mx.array
    held: tuple[mx.array, ...]


class Rollback(ABC):
    """One way back. In every method `stood` is None exactly when `past` has nothing deferred; a row may have no tokens.

    max_rollback: how many of a forward's tokens may be rejected in one row, None for all of them.
    """

    max_rollback: int | None = None

    @abstractmethod
    def verify(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout, widths: FlatRows
    ) -> Verified:
        """Run tokens of which any prefix of each row may stand (of `widths` only the widest counts)."""

    @abstractmethod
    def flush(self, past: RecurrentState, stood: Stood | None) -> mx.array:
        """The state (B, Hv, Dv, Dk) after what stands."""

    @abstractmethod
    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        """Facts, token by token."""

    def facts(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout, widths: FlatRows
    ) -> tuple[mx.array, mx.array]:
        """Run tokens that will all stand: y (N, Hv, Dv) and the state (B, Hv, Dv, Dk) after them."""
        if widths.max_width <= STEPS_AT_MOST:
            return self._steps(inputs, past, stood, here)
        return gdn_prefill(inputs, self.flush(past, stood), widths)


@dataclass(frozen=True)
class Tape(Rollback):
    """state: before the last forward; held: its tape (k, delta, log_g).

    keeps_passed: hold the states behind each token instead, where they are small. The twin makes them on its way anyway, so that nothing is
    to be replayed; a GPU's kernel would have to write them.
    """

    keeps_passed: bool = False

    def verify(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout, widths: FlatRows
    ) -> Verified:
        begun, kept = self._start(past, stood)
        y, state, tape, passed = gdn_round(inputs, begun, here, kept)
        fit = widths.max_width <= self.most_passed(state.nbytes // state.shape[0])
        return Verified(y, state, tuple(passed if passed and fit else tape))

    def most_passed(self, state_bytes: int) -> int:
        """How many states of a row, of so many bytes each in a layer, are held; of a forward of more tokens it is the tape."""
        return _PASSED_AT_MOST // state_bytes if self.keeps_passed else 0

    def flush(self, past: RecurrentState, stood: Stood | None) -> mx.array:
        if stood is None:
            return past.state
        if not _are_states(past.held):
            return gdn_flush(past.state, self._kept(past, stood))
        if stood.known is None:
            return pick(past.state, past.held, stood.kept, stood.rows.groups)
        rows, kept = stood.known
        return picked(past.state, past.held, kept, rows.grouped)

    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        begun, kept = self._start(past, stood)
        return gdn_facts(inputs, begun, here, kept)

    def _start(self, past: RecurrentState, stood: Stood | None) -> tuple[mx.array, Kept | None]:
        """The state that a forward begins with, and what is to be replayed onto it."""
        if stood is None or _are_states(past.held):
            return self.flush(past, stood), None
        return past.state, self._kept(past, stood)

    def _kept(self, past: RecurrentState, stood: Stood) -> Kept:
        return Kept(TapeArrays(*past.held), stood.rows, stood.kept)


def _are_states(held: Sequence[mx.array]) -> bool:
    """Or a tape, which begins with keys (M, Hk, Dk)."""
    return held[0].ndim > 3


@dataclass(frozen=True)
class Snapshots(Rollback):
    """state: the last states (B, P, Hv, Dv, Dk), slot s being the state s tokens before the row's end; nothing else is held.

    P is num_states, or less where the forward was so narrow that older ones would repeat its beginning.
    """

    num_states: int

    def __post_init__(self) -> None:
        if self.num_states < 2:
            raise ConfigError("Snapshots of fewer than 2 states cannot take anything back.")

    @property
    def max_rollback(self) -> int:  # type: ignore[override]
        return self.num_states - 1

    def verify(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout, widths: FlatRows
    ) -> Verified:
        num_states = min(self.num_states, widths.max_width + 1)
        y, states = gdn_snapshots(inputs, *self._start(past, stood), here, num_states)
        return Verified(y, states, ())

    def flush(self, past: RecurrentState, stood: Stood | None) -> mx.array:
        if stood is None:
            return past.state
        return mx.take_along_axis(past.state, stood.dropped[:, None, None, None, None], axis=1)[:, 0]

    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        y, states = gdn_snapshots(inputs, *self._start(past, stood), here, 1)
        return y, states[:, 0]

    def _start(self, past: RecurrentState, stood: Stood | None) -> tuple[mx.array, mx.array]:
        """States and the slot (B,) int32 of the one that stands."""
        if stood is not None:
            return past.state, stood.dropped
        return past.state[:, None], mx.array(np.zeros(past.state.shape[0], np.int32))


@dataclass(frozen=True)
class Checkpoint(Rollback):
    """state: before the last forward; held: what that forward was given (k, v, log_g, beta)."""

    def verify(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout, widths: FlatRows
    ) -> Verified:
        state = self.flush(past, stood)
        y, _ = gdn_facts(inputs, state, here)
        return Verified(y, state, tuple(inputs[1:]))

    def flush(self, past: RecurrentState, stood: Stood | None) -> mx.array:
        """A token that does not stand neither decays nor writes."""
        if stood is None:
            return past.state
        (k, v, log_g, beta), rows = past.held, stood.rows
        if rows.index is None:
            places = mx.arange(k.shape[0] // past.state.shape[0])
            stands = (places < stood.kept[:, None]).reshape(-1, 1)
        else:
            stands = (rows.index.places < stood.kept[rows.index.owners])[:, None]
        log_g, beta = mx.where(stands, log_g, 0.0), mx.where(stands, beta, 0.0)
        return gdn_facts(GdnInputs(k, k, v, log_g, beta), past.state, rows)[1]

    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        return gdn_facts(inputs, self.flush(past, stood), here)


TAPE = Tape()


def by_tape() -> Tape:
    """The default way on this device."""
    return Tape(keeps_passed=device.backend() == "cpu")


def rollback(name: str, num_states: int) -> Rollback:
    """By the name that options use; num_states matters to `snapshots`. Raises ConfigError."""
    if name == "tape":
        return by_tape()
    if name == "snapshots":
        return Snapshots(num_states)
    if name == "checkpoint":
        return Checkpoint()
    raise ConfigError(f"There is no rollback {name!r}.")
