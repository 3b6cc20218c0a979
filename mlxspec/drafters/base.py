"""The interface between engine and drafters. A drafter hears every known token of every row, and proposes continuations for the rows it
is asked about.

Invariants a drafter may rely on: `begin` comes first and `forget` last for a row; between them `hear` gets every token of the row's
history once, in order (prompt included), also those somebody else drafted. A row only grows. Invariants the engine relies on: `draft`
changes nothing that `hear` would have to undo (drafts live on a fork); work happens in `draft`, `hear` only queues (so that plain rounds
pay nothing). A drafter that mlxspec did not write is checked (checked.py): its lengths and token ids, and an exception that it raises
ends its drafting for the rows concerned, never a request. It cannot write to a history. Other lists, arrays and samplers that it is
given are the engine's own, which it must not change.

A subclass must bear a `name` and give `draft`. One that keeps something for each row gives `hear` and `forget` too. All else has
defaults.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.snapshot import Snapshot
from mlxspec.errors import ConfigError
from mlxspec.models.image_rows import SeenImages
from mlxspec.option import shown
from mlxspec.platform.host import numbers
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler


class DrafterFailed(Exception):
    """A drafter raised, gave what is not what it was asked for, or cannot draft for a row. Its text names the reason."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The inputs from the target, in addition to tokens, that a drafter needs. Raises ConfigError where they contradict each other.

    layers: 0-based ids of layers of the target. The drafter receives the residual stream after each of them, concatenated in this order
    (after the final hidden, if it needs that as well), wherever a method speaks of hiddens: H is then `width` times the target's hidden
    size. Invariants: the rows are those of the forward that sampled the token, that of a prompt, of a plain round or of a verify; a row of
    a rejected draft is never given; a request that uses no such drafter does not compute them.
    """

    hidden: bool = False  # the final hidden each token was sampled from
    newest: bool = False  # of those, the newest token's alone
    cache: bool = False  # its keys and values; lent to mlxspec's own drafters only
    layers: tuple[int, ...] = ()  # the residual streams behind these layers, of the token before each token

    def __post_init__(self) -> None:
        ids = self.layers
        whole = isinstance(ids, tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not whole or len(set(ids)) != len(ids) or min(ids, default=0) < 0:
            raise ConfigError(
                f"layers must be different layer ids of at least 0 in a tuple, not {shown(ids)}."
            )
        if ids and self.newest:
            raise ConfigError(
                "A drafter that needs layers needs them of every token, not of the newest alone."
            )

    @property
    def wants_hidden(self) -> bool:
        """Whether `hear` gives it an array with the tokens."""
        return self.hidden or bool(self.layers)

    @property
    def every_hidden(self) -> bool:
        """Whether a text of which it has not seen all hiddens is of no use to it."""
        return self.wants_hidden and not self.newest

    @property
    def width(self) -> int:
        """Number of vectors of the target's hidden size that the drafter receives with a token."""
        return self.hidden + len(self.layers)


class Ask(NamedTuple):
    """A row to draft for. history: all its known tokens, the last of them not yet seen by the target. limit: at most so
    many, >= 1. sampler: the row's, not to be changed. stops: where it is given, a drafter that makes its draft token by token asks it after
    every few tokens whether the draft ends there, with the confidences of all tokens so far."""

    row: int
    history: Sequence[int]
    limit: int
    sampler: RowSampler
    stops: Callable[[Sequence[float]], bool] | None = None


class Draft(NamedTuple):
    """A proposal for one row: `length` tokens.

    Either host tokens (a list) or device ones: tokens (length,) integer and confidences (length,) of any float dtype, lazy; drafters that
    run a model give float32 (sampler.confidence). Confidence is the probability of the drafter's most likely token at that place (a list
    where the tokens are one); None where the drafter has no distribution.
    ended: why the drafter has closed the row and will draft no more for it. backing: of a lookup, how many tokens before the ones it looked
    up it would have said right from the same place; None where it does not know. The engine says the rest. drafter: whose it is; width: how
    many of its tokens are verified.
    """

    length: int
    tokens: list[int] | mx.array
    confidences: mx.array | list[float] | None = None
    ended: str | None = None
    backing: int | None = None
    drafter: str = ""
    width: int = 0

    @classmethod
    def of(cls, tokens: Sequence[int], confidences: Sequence[float] | None = None) -> Draft:
        """A draft of host tokens, possibly none."""
        return cls(len(tokens), list(tokens), None if confidences is None else list(confidences))

    @property
    def is_read(self) -> bool:
        """Whether its tokens are on the host."""
        return isinstance(self.tokens, list)

    @property
    def lazy(self) -> tuple[mx.array, ...]:
        """The arrays of it that are read with the round that verifies it: tokens and confidences that a policy learns from. They are the
        arrays that were handed to the device with that round: a new one would be computed after the next round, and waited for."""
        held = (x for x in (self.tokens, self.confidences) if isinstance(x, mx.array))
        return tuple(held) if isinstance(self.confidences, mx.array) else ()

    def read(self) -> Draft:
        """The same on the host. It has been evaluated."""
        if isinstance(self.tokens, list):
            return self
        sure = self.confidences
        return self._replace(
            tokens=numbers(self.tokens).tolist(),
            confidences=numbers(sure).tolist() if isinstance(sure, mx.array) else sure,
        )

    def cut(self, length: int) -> Draft:
        """Its first `length` tokens; their confidences have been used."""
        if not length:
            return NO_DRAFT
        if length == self.length:
            return self._replace(confidences=None)
        return Draft(length, self.tokens[:length])


NO_DRAFT = Draft(0, [])


class Unread(NamedTuple):
    """A verified round that the host has not read: tokens (B, W) int32, what the target chose for each of B rows at its W
    places; num_committed (B,) int32 in 1..W: how many of them the row's history goes on with, its accepted drafts and the round's own
    token; hidden (B * W, H): what each was sampled from. All lazy."""

    tokens: mx.array
    num_committed: mx.array
    hidden: mx.array

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def newest(self) -> mx.array:
        """(B,) int32: each row's last token."""
        return mx.take_along_axis(self.tokens, self.num_committed[:, None] - 1, axis=1)[:, 0]

    def select(self, rows: Sequence[int]) -> Unread:
        """These rows, in this order."""
        if list(rows) == list(range(self.tokens.shape[0])):
            return self
        index = mx.array(list(rows), mx.int32)
        hidden = self.hidden.reshape(*self.tokens.shape, -1)[index].reshape(-1, self.hidden.shape[1])
        return Unread(self.tokens[index], self.num_committed[index], hidden)


Heard = tuple[Sequence[int], mx.array | None]  # tokens and hiddens, as `Drafter.hear` has them


class Drafter(ABC):
    """See the module's invariants. Rows are named by numbers that are never used twice.

    max_draft: the longest draft it is asked for; None: as a request's SpecConfig has it for n-gram lookup, or for models that draft.
    """

    name: str
    needs = Needs()
    max_draft: int | None = None

    def begin(self, row: int) -> None:  # noqa: B027
        """Begin a new row."""

    def see(self, row: int, seen: SeenImages) -> None:  # noqa: B027
        """Receive the images of a row's prompt; called after `begin`, before any token, where it holds some. Image tokens are negative
        numbers in all tokens that the drafter hears of this row and in its history; never propose one. seen: gives the rows that the target
        takes at them. Raises DrafterFailed where the row cannot be drafted for."""

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:  # noqa: B027
        """Receive known tokens, the next of the row's history. hidden (len(tokens), H): the hidden that each was sampled from (the target's
        final hidden one place before it, zeros before the first), given if `needs.wants_hidden`."""

    @abstractmethod
    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        """One draft an ask, possibly empty. `sampler` holds the asks' rows in order."""

    def may_draft(self, row: int) -> bool:
        """Whether `draft` could give anything for the row as it stands, if that is cheaper to find out than to draft."""
        return True

    def draft_behind(self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread) -> list[Draft] | None:
        """`draft` while only the device knows the last tokens of these rows, in the asks' order: histories end before them, and limits
        allow for all of them. None where the host must have read them first; most drafters do. It is as though it had not been called:
        next the row's tokens are observed, whether the drafts were used or dropped."""
        return None

    def prime(self, row: int) -> None:  # noqa: B027  (few need it)
        """Run what has been queued, if anything. Called when the prompt and the first token have been heard and the answer begins; its time
        counts as reading the prompt, not as decoding."""

    def attach(self, cache: ModelCache, order: Sequence[int]) -> None:  # noqa: B027  (few need it)
        """Receive the target's cache, to be read in the drafts of this round only. order: numbers of its rows. Called if `needs.cache`."""

    def snapshot(self, row: int, length: int, start: int) -> Snapshot | None:
        """Return, for the prefix cache, what `resume` needs in addition to tokens to go on after the row's first `length` tokens, all of
        which have been heard; keys and values of tokens from `start` on only. None: tokens are enough, or there is nothing of use."""
        return None

    def resume(self, row: int, tokens: Sequence[int], state: Snapshot | None) -> None:
        """Start a row behind `tokens` that the prefix cache supplied, so `hear` is not called for them. Called after `begin`.

        state: the snapshot that `snapshot` returned for the first `state.length` of these tokens, or None. Where `needs.every_hidden` is
        true, it covers all of them. Raises ValueError where the drafter cannot draft behind these tokens. By default `hear` is called with
        the tokens and no hiddens.
        """
        if self.needs.every_hidden:
            raise ValueError("it keeps no state from which it could go on behind this beginning")
        self.hear(row, tokens, None)

    @property
    def modules(self) -> Sequence[nn.Module] | None:
        """The modules that compute the states which `snapshot` returns: drafters of one class whose modules have the same weights may
        continue from each other's states, so these are written to disk. None: they are kept in memory only."""
        return None

    def forget(self, row: int) -> None:  # noqa: B027
        """Forget a row. Rows that are not known are ignored."""

    @property
    def nbytes(self) -> int:
        """Bytes of state held for rows."""
        return 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of a model of its own."""
        return 0

    def row_bytes(self, length: int) -> int:
        """Bytes of state of a row of so many tokens, at most; what n-gram tables take is beside the point."""
        return 0
