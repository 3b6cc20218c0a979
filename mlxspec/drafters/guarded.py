"""Drafters that mlxspec did not write: they see copies and read-only views, and whatever they raise becomes one kind of error.

So a drafter of one's own cannot change a text or end a request, whatever it does with what it is given. What it drafts is checked where
all drafts are (checked.py). Costs a few objects a call, whatever the length of the text. Knows the interface; knows no rows and no rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, overload

import mlx.core as mx

from mlxspec.cache.attention import copied
from mlxspec.cache.model_cache import ModelCache, Snapshot
from mlxspec.config import MAX_DRAFT, shown
from mlxspec.drafters.base import Ask, Draft, Drafter, DrafterFailed, Heard, Needs, Unread
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.errors import ConfigError
from mlxspec.models.image_rows import SeenImages
from mlxspec.sampling.sampler import BatchSampler

T = TypeVar("T")
_EXITS = (KeyboardInterrupt, SystemExit)  # what ends the process is not a drafter's failure
_MOST_WORDS = 300  # characters of a drafter's error that a notice shows


class History(Sequence[int]):
    """A row's token ids, read-only: the engine's own list behind it grows as the text does. Slices are lists, and copies."""

    __slots__ = ("_tokens",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        return list(self._tokens[place]) if isinstance(place, slice) else self._tokens[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._tokens

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (History, list, tuple)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __add__(self, other: Sequence[int]) -> list[int]:
        """A new list: the tokens and others behind them."""
        return [*self._tokens, *other]

    def __repr__(self) -> str:
        return f"History({list(self._tokens)!r})"


def guarded(drafter: Drafter) -> Drafter:
    """The drafter itself where it is one of mlxspec's, or runs a model by mlxspec's own loop; else in its guard. Raises ConfigError."""
    is_known = isinstance(drafter, (Guarded, ModelDrafter))
    return drafter if is_known or type(drafter).__module__.startswith("mlxspec.") else Guarded(drafter)


def reason(error: BaseException) -> str:
    """An error in one line, even one whose text cannot be had."""
    try:
        said = " ".join(str(error).split())
    except Exception:
        said = ""
    said = said if len(said) <= _MOST_WORDS else said[:_MOST_WORDS] + "..."
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


class Guarded(Drafter):
    """Another drafter, behind its guard. Methods raise DrafterFailed, but for the sizes, which are 0 where they cannot be told.

    name, needs and max_draft are read once.
    """

    def __init__(self, drafter: Drafter) -> None:
        """Raises ConfigError where the drafter does not describe itself as it must."""
        self._drafter = drafter
        try:
            self.name, self.needs, self.max_draft = drafter.name, drafter.needs, drafter.max_draft
        except Exception as error:
            raise ConfigError(
                f"A drafter's name, needs and max_draft cannot be read: {reason(error)}."
            ) from error
        if not isinstance(self.needs, Needs):
            raise ConfigError(f"The drafter {self.name}'s `needs` must be a Needs, not {shown(self.needs)}.")
        if self.needs.cache:
            raise ConfigError(
                f"The drafter {self.name} needs the target's cache, which is not lent to drafters of one's own."
            )
        most = self.max_draft
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ConfigError(
                f"The drafter {self.name}'s `max_draft` must be None or a whole number of at least 1, not {shown(most)}."
            )
        self.max_draft = None if most is None else min(most, MAX_DRAFT)

    def begin(self, row: int) -> None:
        self._call(lambda: self._drafter.begin(row))

    def see(self, row: int, seen: SeenImages) -> None:
        self._call(lambda: self._drafter.see(row, seen))

    def observe(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        self._call(lambda: self._drafter.observe(row, list(tokens), _copy(hidden)))

    def observe_rounds(self, row: int, rounds: Sequence[Heard]) -> None:
        copies = [(list(tokens), _copy(hidden)) for tokens, hidden in rounds]
        self._call(lambda: self._drafter.observe_rounds(row, copies))

    def propose(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        views = _views(asks)
        own = BatchSampler([a.sampler for a in views], sampler.vocab_size)
        return self._call(lambda: self._drafter.propose(views, own))

    def may_draft(self, row: int) -> bool:
        return self._call(lambda: bool(self._drafter.may_draft(row)))

    def propose_behind(
        self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread
    ) -> list[Draft] | None:
        views = _views(asks)
        own = BatchSampler([a.sampler for a in views], sampler.vocab_size)
        copies = Unread(*map(copied, unread))
        return self._call(lambda: self._drafter.propose_behind(views, own, copies))

    def settle(self) -> None:
        self._call(self._drafter.settle)

    def take_back(self) -> None:
        self._call(self._drafter.take_back)

    def prime(self, row: int) -> None:
        self._call(lambda: self._drafter.prime(row))

    def attach(self, cache: ModelCache, order: Sequence[int]) -> None:
        """It does not see the target's cache."""

    def snapshot(self, row: int, length: int, start: int) -> Snapshot | None:
        def work() -> Snapshot | None:
            found = self._drafter.snapshot(row, length, start)
            return None if found is None else _checked_snapshot(found, length, start)

        return self._call(work)

    def resume(
        self, row: int, tokens: Sequence[int], state: Snapshot | None, hidden: mx.array | None
    ) -> None:
        copies = None if state is None else _copied(state)
        self._call(lambda: self._drafter.resume(row, list(tokens), copies, _copy(hidden)))

    def close(self, row: int) -> None:
        self._call(lambda: self._drafter.close(row))

    @property
    def nbytes(self) -> int:
        return _size(lambda: self._drafter.nbytes)

    @property
    def weight_bytes(self) -> int:
        return _size(lambda: self._drafter.weight_bytes)

    def row_bytes(self, length: int) -> int:
        return _size(lambda: self._drafter.row_bytes(length))

    def _call(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except _EXITS:
            raise
        except BaseException as error:
            raise DrafterFailed(reason(error)) from error


def _views(asks: Sequence[Ask]) -> list[Ask]:
    return [a._replace(history=History(a.history), sampler=a.sampler.sealed()) for a in asks]


def _copy(x: mx.array | None) -> mx.array | None:
    """A copy in memory of its own: numpy's view of an array may be written to. Nothing is copied before the drafter looks at it."""
    return None if x is None else copied(x)


def _size(read: Callable[[], Any]) -> int:
    try:
        return max(0, int(read()))
    except Exception:
        return 0


def _copied(state: Snapshot) -> Snapshot:
    """A snapshot whose lists and arrays are its own; its numbers are not copied."""
    segments = [[tuple(x.astype(x.dtype) for x in kv) for kv in segment] for segment in state.segments]
    point = [tuple(x.astype(x.dtype) for x in arrays) for arrays in state.point]
    return Snapshot(state.length, segments, point, state.start)


def _checked_snapshot(found: object, length: int, start: int) -> Snapshot:
    """What a drafter gave for the prefix store, evaluated, if that can cut it and give it back."""
    if not isinstance(found, Snapshot) or (found.length, found.start) != (length, start):
        _refuse(f"its snapshot is not one of tokens {start} to {length}")
    if not isinstance(found.segments, list) or len(found.segments) != 1:
        _refuse("its snapshot does not have one stretch of keys and values")
    copies = _copied(found)
    for kv in copies.segments[0]:
        if any(x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != length - start for x in kv):
            _refuse(f"its snapshot's keys and values are not (1, heads, {length - start}, size)")
    mx.eval(copies.arrays)
    return copies


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)
