"""Rollback of a Gated DeltaNet layer's recurrent state to the accepted tokens: four ways behind one interface, `Rollback`.

    TapeRollback    keeps the state before the last forward and what that forward did to it; the next replays the accepted tokens (default)
    TrailRollback   the same with fewer operations: rows of few tokens keep the states they passed (default without a GPU)
    Snapshots       keeps the last states themselves; the next forward starts from the one after the accepted tokens
    Checkpoint      keeps the state before and the forward's inputs; the next runs the accepted tokens again (the plain twin of the others)

A way is chosen when a cache is made and never changes, so compiled forwards may depend on it. The model cache says how many tokens are
committed (`num_committed`). The convolution in front of the recurrence rolls back by itself (recurrent.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.errors import ConfigError
from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.flat import FEW, FlatRows
from mlxspec.kernels.gdn_few import few_facts, few_round, go_back, go_back_known, trail_bytes
from mlxspec.kernels.gdn_ops import Tape as TapeArrays
from mlxspec.kernels.gdn_prefill import gdn_prefill
from mlxspec.kernels.gdn_round import Replay, RowLayout, gdn_advance, gdn_flush, gdn_round, gdn_snapshots
from mlxspec.platform import device

STEPS_AT_MOST = 16  # certain tokens wider than this go through the chunked form
_LEAST_ROOM = 4  # tokens


class RecurrentState(NamedTuple):
    """The recurrent state that a layer's forward takes and returns.

    window (B, K - 1, C): convolution inputs before the last forward's; state (B, Hv, Dv, Dk) float32. After a forward that may be taken
    back, `inputs` (M, C or more columns, of which the first C count) are its convolution inputs, and state and held are what its way of
    rollback keeps. inputs None: nothing is deferred; window and state are those right before the next token.
    """

    state: mx.array
    window: mx.array
    inputs: mx.array | None = None
    held: tuple[mx.array, ...] = ()


@dataclass(frozen=True)
class Committed:
    """How much of the last forward is committed, the same for all layers. rows: its rows; the first num_committed (B,) int32 tokens of each
    row are, the last num_rejected (B,) int32 are not. known: rows and num_committed on the host; None where only the device has them."""

    rows: RowLayout
    num_committed: mx.array
    num_rejected: mx.array
    known: tuple[FlatRows, Sequence[int]] | None = None

    @classmethod
    def of(cls, rows: FlatRows, num_committed: Sequence[int]) -> Committed:
        counts = np.asarray(num_committed, np.int32)
        num_rejected = np.asarray(rows.widths, np.int32) - counts
        return cls(RowLayout.of(rows), mx.array(counts), mx.array(num_rejected), (rows, num_committed))

    @classmethod
    def of_unread(cls, rows: FlatRows, num_committed: mx.array) -> Committed:
        """The same where only the device knows how many tokens are committed, num_committed (B,) int32."""
        widths = mx.array(np.asarray(rows.widths, np.int32))
        return cls(RowLayout.of(rows), num_committed, widths - num_committed)


class Verified(NamedTuple):
    """Result of a verify: y (N, Hv, Dv) float32, and what a RecurrentState keeps until the accepted tokens are known."""

    y: mx.array
    state: mx.array
    held: tuple[mx.array, ...]


class Rollback(ABC):
    """One way of rollback. In every method `committed` is None exactly when `past` has nothing deferred. A row may have no tokens.

    max_rollback: how many of a forward's tokens may be rejected in one row, None for all of them.
    """

    max_rollback: int | None = None

    def room(self, num_tokens: int) -> int:
        """Of how many tokens kernels make what is held of a forward of so many."""
        return num_tokens

    @abstractmethod
    def verify(
        self,
        inputs: GdnInputs,
        past: RecurrentState,
        committed: Committed | None,
        here: RowLayout,
        widths: FlatRows,
    ) -> Verified:
        """Run tokens of which any prefix of each row may be accepted (of `widths` only the widest counts)."""

    @abstractmethod
    def flush(self, past: RecurrentState, committed: Committed | None) -> mx.array:
        """The state (B, Hv, Dv, Dk) after the accepted tokens."""

    @abstractmethod
    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, committed: Committed | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        """Run certain tokens one by one."""

    def advance(
        self,
        inputs: GdnInputs,
        past: RecurrentState,
        committed: Committed | None,
        here: RowLayout,
        widths: FlatRows,
    ) -> tuple[mx.array, mx.array]:
        """Run certain tokens: y (N, Hv, Dv) and the state (B, Hv, Dv, Dk) after them."""
        if widths.max_width <= STEPS_AT_MOST:
            return self._steps(inputs, past, committed, here)
        return gdn_prefill(inputs, self.flush(past, committed), widths, here.starts)


@dataclass(frozen=True)
class TapeRollback(Rollback):
    """state: before the last forward; held: its tape (k, delta, log_g)."""

    def room(self, num_tokens: int) -> int:
        """A power of two: forwards then follow forwards of few shapes, and each pair of shapes is compiled. Memory is all that it takes."""
        return max(_LEAST_ROOM, 1 << (num_tokens - 1).bit_length())

    def verify(
        self,
        inputs: GdnInputs,
        past: RecurrentState,
        committed: Committed | None,
        here: RowLayout,
        widths: FlatRows,
    ) -> Verified:
        y, state, tape = gdn_round(inputs, past.state, here, _replay(past, committed))
        return Verified(y, state, tuple(tape))

    def flush(self, past: RecurrentState, committed: Committed | None) -> mx.array:
        replay = _replay(past, committed)
        return past.state if replay is None else gdn_flush(past.state, replay)

    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, committed: Committed | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        return gdn_advance(inputs, past.state, here, _replay(past, committed))

    def bytes_for(self, width: int, state: Sequence[int]) -> int:
        """Upper bound of the bytes held for a row of up to `width` tokens in a layer of state (Hv, Dv, Dk)."""
        num_heads, value_dim, key_dim = state
        return 4 * self.room(width) * num_heads * (value_dim + key_dim + 1)


def _replay(past: RecurrentState, committed: Committed | None) -> Replay | None:
    """The tape and counts to replay onto `past.state`."""
    return (
        None if committed is None else Replay(TapeArrays(*past.held), committed.rows, committed.num_committed)
    )


@dataclass(frozen=True)
class TrailRollback(Rollback):
    """The tape's part where the number of operations is what costs, without a GPU: see kernels/gdn_few.py.

    state: before the last forward; held: its trail.

    one_by_one: the widest rows whose tokens run one by one; those of wider ones all at once, with other last bits than plain decoding.
    """

    one_by_one: int = FEW

    def verify(
        self,
        inputs: GdnInputs,
        past: RecurrentState,
        committed: Committed | None,
        here: RowLayout,
        widths: FlatRows,
    ) -> Verified:
        state = self.flush(past, committed)
        y, held = few_round(inputs, state, here.index, self.one_by_one)
        return Verified(y, state, held)

    def flush(self, past: RecurrentState, committed: Committed | None) -> mx.array:
        if committed is None:
            return past.state
        if committed.known is not None:
            rows, num_committed = committed.known
            return go_back_known(past.state, past.held, num_committed, rows.grouped, self.one_by_one)
        width = 0 if past.inputs is None else past.inputs.shape[0] // past.state.shape[0]
        return go_back(
            past.state, past.held, committed.num_committed, committed.rows.groups, width, self.one_by_one
        )

    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, committed: Committed | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        return few_facts(inputs, self.flush(past, committed), here.index, self.one_by_one)

    def bytes_for(self, width: int, state: Sequence[int]) -> int:
        """As a tape's."""
        return trail_bytes(width, state, self.one_by_one)


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
        self,
        inputs: GdnInputs,
        past: RecurrentState,
        committed: Committed | None,
        here: RowLayout,
        widths: FlatRows,
    ) -> Verified:
        num_states = min(self.num_states, widths.max_width + 1)
        y, states = gdn_snapshots(inputs, *self._start(past, committed), here, num_states)
        return Verified(y, states, ())

    def flush(self, past: RecurrentState, committed: Committed | None) -> mx.array:
        if committed is None:
            return past.state
        return mx.take_along_axis(past.state, committed.num_rejected[:, None, None, None, None], axis=1)[:, 0]

    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, committed: Committed | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        y, states = gdn_snapshots(inputs, *self._start(past, committed), here, 1)
        return y, states[:, 0]

    def _start(self, past: RecurrentState, committed: Committed | None) -> tuple[mx.array, mx.array]:
        """States, and the slot (B,) int32 of the one after the accepted tokens."""
        if committed is not None:
            return past.state, committed.num_rejected
        return past.state[:, None], mx.array(np.zeros(past.state.shape[0], np.int32))


@dataclass(frozen=True)
class Checkpoint(Rollback):
    """state: before the last forward; held: what that forward was given (k, v, log_g, beta)."""

    def verify(
        self,
        inputs: GdnInputs,
        past: RecurrentState,
        committed: Committed | None,
        here: RowLayout,
        widths: FlatRows,
    ) -> Verified:
        state = self.flush(past, committed)
        y, _ = gdn_advance(inputs, state, here)
        return Verified(y, state, tuple(inputs[1:]))

    def flush(self, past: RecurrentState, committed: Committed | None) -> mx.array:
        """Runs the inputs again, with decay and writes of rejected tokens off."""
        if committed is None:
            return past.state
        (k, v, log_g, beta), rows = past.held, committed.rows
        if rows.index is None:
            places = mx.arange(k.shape[0] // past.state.shape[0])
            is_committed = (places < committed.num_committed[:, None]).reshape(-1, 1)
        else:
            is_committed = (rows.index.places < committed.num_committed[rows.index.owners])[:, None]
        log_g, beta = mx.where(is_committed, log_g, 0.0), mx.where(is_committed, beta, 0.0)
        return gdn_advance(GdnInputs(k, k, v, log_g, beta), past.state, rows)[1]

    def _steps(
        self, inputs: GdnInputs, past: RecurrentState, committed: Committed | None, here: RowLayout
    ) -> tuple[mx.array, mx.array]:
        return gdn_advance(inputs, self.flush(past, committed), here)


TAPE = TapeRollback()


def by_tape(*, exact: bool = False) -> TapeRollback | TrailRollback:
    """The default way on this device. exact: with the bits of plain decoding at every width.

    Callers ask for `exact` where the model computes in 16 bits. A trail of more than FEW tokens differs from steps in the last float32
    bits. Those rarely change a float32 model's choice. A 16-bit model rounds the recurrence's output: where a last bit crosses the middle
    between two 16-bit numbers, the output differs by 2^-8 (bfloat16) or 2^-11 (float16) of its size, and logits differ as much.
    """
    return TAPE if exact or device.has_gpu() else TrailRollback()


def rollback(name: str, num_states: int, *, exact: bool = False) -> Rollback:
    """By the name that options use; num_states matters to `snapshots`, exact to `tape`, as in `by_tape`. Raises ConfigError."""
    if name == "tape":
        return by_tape(exact=exact)
    if name == "snapshots":
        return Snapshots(num_states)
    if name == "checkpoint":
        return Checkpoint()
    raise ConfigError(f"There is no rollback {name!r}.")
