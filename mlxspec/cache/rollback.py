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
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec import device
from mlxspec.errors import ConfigError
from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.flat import FlatRows, RowGroups, up_to
from mlxspec.kernels.gdn_ops import Tape as TapeArrays
from mlxspec.kernels.gdn_prefill import gdn_prefill
from mlxspec.kernels.gdn_round import Kept, RowLayout, gdn_facts, gdn_flush, gdn_round, gdn_snapshots

STEPS_AT_MOST = 16  # facts wider than this go through the chunked form


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
    last dropped (B,) int32 do not; no entry of kept is above longest. groups: rows by how much of them stands, for who replays without
    a kernel; None for all as they were run."""

    rows: RowLayout
    kept: mx.array
    dropped: mx.array
    longest: int
    groups: RowGroups | None = None
    known: tuple[FlatRows, Sequence[int]] | None = None  # rows and kept as the host has them

    @classmethod
    def of(cls, rows: FlatRows, kept: Sequence[int]) -> Stood:
        """`longest` is a power of two, so that shapes repeat."""
        counts = np.asarray(kept, np.int32)
        return cls(
            RowLayout.of(rows),
            mx.array(counts),
            mx.array(np.asarray(rows.widths, np.int32) - counts),
            up_to(max(kept)),
            known=(rows, kept),
        )

    @classmethod
    def of_unread(cls, rows: FlatRows, kept: mx.array) -> Stood:
        """The same where only the device knows how many stand, kept (B,) int32."""
        widths = mx.array(np.asarray(rows.widths, np.int32))
        return cls(RowLayout.of(rows), kept, widths - kept, up_to(rows.max_width))

    def apart(self) -> Stood:
        """With `groups`, where the host knows and they help."""
        if self.known is None:
            return self
        rows, kept = self.known
        return replace(self, groups=rows.standing(kept))


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

    keeps_end: and the state behind it, which replaying the whole tape would give. The twin makes it on its way, a GPU's kernel would have
    to write it.
    """

    keeps_end: bool = False

    def verify(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout, widths: FlatRows
    ) -> Verified:
        y, state, tape, after = gdn_round(inputs, past.state, here, self._kept(past, stood))
        return Verified(y, state, (*tape, after) if self.keeps_end and after is not None else tuple(tape))

    def flush(self, past: RecurrentState, stood: Stood | None) -> mx.array:
        kept = self._kept(past, stood)
        return past.state if kept is None else gdn_flush(past.state, kept)

    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        return gdn_facts(inputs, past.state, here, self._kept(past, stood))

    def _kept(self, past: RecurrentState, stood: Stood | None) -> Kept | None:
        if stood is None:
            return None
        tape, (after, *_) = TapeArrays(*past.held[:3]), (*past.held[3:], None)
        return Kept(tape, stood.rows, stood.kept, stood.longest, stood.groups, after)


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
        """A token that does not stand neither decays nor writes; of rows of equal width what none keeps is left out."""
        if stood is None:
            return past.state
        num_rows, rows = past.state.shape[0], stood.rows
        if rows.index is not None:
            k, v, log_g, beta = past.held
            stands = (rows.index.places < stood.kept[rows.index.owners])[:, None]
        else:
            k, v, log_g, beta = (x.reshape(num_rows, -1, *x.shape[1:])[:, : stood.longest] for x in past.held)
            width = k.shape[1]
            stands = (mx.arange(width) < stood.kept[:, None])[..., None]
            rows = RowLayout(mx.array(np.arange(num_rows + 1, dtype=np.int32) * width), None)
        log_g, beta = mx.where(stands, log_g, 0.0), mx.where(stands, beta, 0.0)
        if rows.index is None:
            k, v, log_g, beta = (x.reshape(-1, *x.shape[2:]) for x in (k, v, log_g, beta))
        return gdn_facts(GdnInputs(k, k, v, log_g, beta), past.state, rows)[1]

    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, stood: Stood | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        return gdn_facts(inputs, self.flush(past, stood), here)


TAPE = Tape()


def rollback(name: str, num_states: int) -> Rollback:
    """By the name that options use; num_states matters to `snapshots`. Raises ConfigError."""
    if name == "tape":
        return Tape(keeps_end=device.backend() == "cpu")
    if name == "snapshots":
        return Snapshots(num_states)
    if name == "checkpoint":
        return Checkpoint()
    raise ConfigError(f"There is no rollback {name!r}.")
