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
    """A failure of a drafter: it raised, returned something other than what was requested, or cannot draft for a row. The message names the
    reason."""


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
        """Return whether the drafter's `hear` receives an array of hidden states with the tokens."""
        return self.hidden or bool(self.layers)

    @property
    def every_hidden(self) -> bool:
        """Return whether the drafter can draft for a row only if it has received the hidden states of all of the row's tokens."""
        return self.wants_hidden and not self.newest

    @property
    def width(self) -> int:
        """Return the number of vectors of the target's hidden size that the drafter receives with each token."""
        return self.hidden + len(self.layers)


class Ask(NamedTuple):
    """A request for a draft of one row. history: all known tokens of the row; the target has not yet run the last one. limit: the most
    tokens to draft, >= 1. sampler: the row's sampler, not to be changed. stops: if given, a drafter that drafts token by token calls it
    every few tokens with the confidences of all tokens so far; True ends the draft."""

    row: int
    history: Sequence[int]
    limit: int
    sampler: RowSampler
    stops: Callable[[Sequence[float]], bool] | None = None


class Draft(NamedTuple):
    """A draft for one row: `length` tokens.

    Tokens are either on the host (a list) or lazy on the device: tokens (length,) integer and confidences (length,) of any float dtype;
    drafters that run a model give float32 (sampler.confidence). Confidence is the probability of the drafter's most likely token at that
    place (a list where the tokens are a list); None where the drafter has no distribution. ended: why the drafter has closed the row and
    will not draft for it again, None while it goes on. backing: of a draft copied from a text, how many tokens before the copied ones
    equal the answer's last tokens, less the n tokens of an n-gram by which the place was found; None where that is not known. drafter:
    name of the drafter; width: number of the draft's tokens that are verified; both are set by the engine.
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
        """Return a draft of tokens on the host, which may be empty."""
        return cls(len(tokens), list(tokens), None if confidences is None else list(confidences))

    @property
    def is_read(self) -> bool:
        """Return whether the draft's tokens are on the host."""
        return isinstance(self.tokens, list)

    @property
    def lazy(self) -> tuple[mx.array, ...]:
        """Return the draft's device arrays that are read together with the round that verifies it: tokens and the confidences that a policy
        learns from. These are the very arrays that were launched with that round; new arrays would be computed only after the next
        round."""
        held = (x for x in (self.tokens, self.confidences) if isinstance(x, mx.array))
        return tuple(held) if isinstance(self.confidences, mx.array) else ()

    def read(self) -> Draft:
        """Return the draft with its tokens and confidences on the host. Its arrays have been evaluated."""
        if isinstance(self.tokens, list):
            return self
        sure = self.confidences
        return self._replace(
            tokens=numbers(self.tokens).tolist(),
            confidences=numbers(sure).tolist() if isinstance(sure, mx.array) else sure,
        )

    def cut(self, length: int) -> Draft:
        """Return the first `length` tokens of the draft, without confidences."""
        if not length:
            return NO_DRAFT
        if length == self.length:
            return self._replace(confidences=None)
        return Draft(length, self.tokens[:length])


NO_DRAFT = Draft(0, [])


class Unread(NamedTuple):
    """A verified round whose result is still on the device. tokens (B, W) int32: the tokens that the target chose for each of B rows at its
    W places; num_committed (B,) int32 in 1..W: how many of them each row commits, its accepted drafted tokens and the round's own token;
    hidden (B * W, H): the hidden state that each token was sampled from. All are lazy."""

    tokens: mx.array
    num_committed: mx.array
    hidden: mx.array

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def newest(self) -> mx.array:
        """Return the last committed token of each row, (B,) int32."""
        return mx.take_along_axis(self.tokens, self.num_committed[:, None] - 1, axis=1)[:, 0]

    def select(self, rows: Sequence[int]) -> Unread:
        """Return the round of these rows alone, in this order."""
        if list(rows) == list(range(self.tokens.shape[0])):
            return self
        index = mx.array(list(rows), mx.int32)
        hidden = self.hidden.reshape(*self.tokens.shape, -1)[index].reshape(-1, self.hidden.shape[1])
        return Unread(self.tokens[index], self.num_committed[index], hidden)


Heard = tuple[Sequence[int], mx.array | None]  # tokens and hiddens, as `Drafter.hear` has them


class Drafter(ABC):
    """A source of drafts for rows; the module states its invariants. Each row has a number that is never used twice.

    max_draft: the longest draft that is requested of the drafter; None: the length that a request's SpecConfig sets for n-gram drafters, or
    for models that draft.
    """

    name: str
    needs = Needs()
    max_draft: int | None = None

    def begin(self, row: int) -> None:  # noqa: B027
        """Begin a new row."""

    def see(self, row: int, seen: SeenImages) -> None:  # noqa: B027
        """Receive the images of a row's prompt. Called after `begin` and before any token, for rows with images. Image tokens are negative
        numbers in all tokens and histories of the row; never propose one. seen: gives the input rows that the target uses for them.
        Raises DrafterFailed where the drafter cannot draft for the row."""

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:  # noqa: B027
        """Receive the next known tokens of the row's history. hidden (len(tokens), H): the hidden state that each token was sampled from
        (the target's final hidden state one place before it, zeros before the first token), given if `needs.wants_hidden`."""

    @abstractmethod
    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        """Return one draft for each of `asks`, possibly empty. `sampler` holds the samplers of their rows in the same order."""

    def may_draft(self, row: int) -> bool:
        """Return False if it is cheap to find out that `draft` would return nothing for the row, otherwise True."""
        return True

    def draft_behind(self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread) -> list[Draft] | None:
        """Draft while the last tokens of these rows are still on the device; return one draft for each of `asks`, or None where the host
        must read the tokens first, as for most drafters. Histories end before the unread tokens, limits allow for all of them, and
        `unread` has the rows in the order of `asks`. The call leaves no trace: next, the tokens are given to `hear`, whether the drafts
        were used or dropped."""
        return None

    def prime(self, row: int) -> None:  # noqa: B027  (few need it)
        """Run the tokens that the drafter has queued. Called when `hear` has received the prompt and the first token of the answer; the
        time counts as reading the prompt, not as decoding."""

    def attach(self, cache: ModelCache, order: Sequence[int]) -> None:  # noqa: B027  (few need it)
        """Receive the target's cache, which the drafter may read in the drafts of this round only. order: row numbers in the order of the
        cache's rows. Called if `needs.cache`."""

    def snapshot(self, row: int, length: int, start: int) -> Snapshot | None:
        """Return, for the prefix cache, what `resume` needs in addition to tokens to continue after the row's first `length` tokens, all of
        which `hear` has received; keys and values of tokens from `start` on only. None: tokens are enough, or there is nothing of use."""
        return None

    def resume(self, row: int, tokens: Sequence[int], state: Snapshot | None) -> None:
        """Start a row after `tokens` that the prefix cache supplied, so that `hear` is not called for them. Called after `begin`.

        state: the snapshot that `snapshot` returned for the first `state.length` of these tokens, or None. Where `needs.every_hidden` is
        true, it covers all of them. Raises ValueError where the drafter cannot draft after these tokens. The default calls `hear` with the
        tokens and without hidden states.
        """
        if self.needs.every_hidden:
            raise ValueError("it keeps no state from which it could go on behind this beginning")
        self.hear(row, tokens, None)

    @property
    def modules(self) -> Sequence[nn.Module] | None:
        """Return the modules that compute the states which `snapshot` returns. Drafters of one class whose modules have the same weights
        may continue from each other's states, so these are written to disk. None: states are kept in memory only."""
        return None

    def forget(self, row: int) -> None:  # noqa: B027
        """Release the state of a row. Unknown rows are ignored."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of state that the drafter holds for all rows."""
        return 0

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights of the drafter's own model, 0 where it has none."""
        return 0

    def row_bytes(self, length: int) -> int:
        """Return the most bytes of state that a row of `length` tokens takes. N-gram tables are not counted."""
        return 0
