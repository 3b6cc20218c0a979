"""Checks of what drafters say of themselves and what they draft: lengths, shapes and token ids, each row's draft by itself.

Drafters that run a model by mlxspec's loop draw ids from logits of the target's vocabulary, so of a draft that is on the device only
shape and type are looked at, which evaluates nothing. Any other drafter's draft is evaluated, because an id out of range would end the
process: it comes out as host tokens. It reads a row's history and cannot write to it. Whatever a drafter raises ends it for the rows
concerned (drafts.py). A drafter shares this process, so nothing keeps it from changing arrays and samplers that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import mlx.core as mx
import numpy as np

from mlxspec.cache.snapshot import Snapshot
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter, DrafterFailed, Needs
from mlxspec.drafters.forced import Forced
from mlxspec.drafters.lookup import Lookup
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.errors import ConfigError
from mlxspec.option import shown

_ROUNDING = 2.0**-7  # by so much a probability in 16 bits may be above 1
_MOST_WORDS = 300  # characters of a drafter's error that a notice shows


class History(Sequence[int]):
    """A read-only view of a row's token ids, given to drafters that are not mlxspec's own. Reads like a list without a copy; slices are
    lists."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        return self._tokens[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)


def is_ours(drafter: Drafter) -> bool:
    """Return whether a drafter is one of mlxspec's own, whose token ids are valid by construction: it takes them from logits of the
    target's vocabulary, or from texts."""
    return isinstance(drafter, ModelDrafter | Lookup | Forced)


def check_description(drafter: Drafter) -> None:
    """Raise ConfigError where the attributes by which a caller's own drafter describes itself (such as `name`, `needs`, `max_draft`) are
    missing or invalid."""
    if is_ours(drafter):
        return
    name, needs, most = drafter.name, drafter.needs, drafter.max_draft
    if type(drafter).__hash__ is None:
        raise ConfigError(
            f"The drafter {name} must be hashable: leave out __eq__, in a dataclass by eq=False."
        )
    if not isinstance(needs, Needs):
        raise ConfigError(f"The drafter {name}'s `needs` must be a Needs, not {shown(needs)}.")
    if needs.cache:
        raise ConfigError(
            f"The drafter {name} needs the target's cache, which is not lent to drafters of one's own."
        )
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(
            f"The drafter {name}'s `max_draft` must be None or a whole number of at least 1, not {shown(most)}."
        )


def reason(error: BaseException) -> str:
    """Return an error as one line: the text of a DrafterFailed, otherwise the error's type and text."""
    said = " ".join(str(error).split())[:_MOST_WORDS]
    if isinstance(error, DrafterFailed):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def checked(
    drafts: object, asks: Sequence[Ask], vocab_size: int, *, is_ours: bool
) -> list[Draft | DrafterFailed]:
    """Return the drafts that a drafter gave for `asks`, with a DrafterFailed in place of each one that cannot be used. Raises DrafterFailed
    where there is not one draft for each request, so that they cannot be matched."""
    if not isinstance(drafts, (list, tuple)) or len(drafts) != len(asks):
        raise DrafterFailed(f"it gave {shown(drafts)} where a list of {len(asks)} drafts was asked for")
    found: list[Draft | DrafterFailed] = []
    for draft, ask in zip(drafts, asks, strict=True):
        try:
            found.append(draft if draft is NO_DRAFT else _checked(draft, ask, vocab_size, is_ours))
        except Exception as error:  # evaluating a draft may fail in any way
            found.append(DrafterFailed(reason(error)))
    return found


def _checked(draft: Draft, ask: Ask, vocab_size: int, is_ours: bool) -> Draft:
    if not isinstance(draft, Draft):
        raise DrafterFailed(f"it gave {shown(draft)} where a Draft was asked for")
    length, tokens = draft.length, draft.tokens
    if not _is_whole(length) or not 0 <= length <= ask.limit:
        raise DrafterFailed(
            f"a draft has at most {ask.limit} tokens here, and its length is given as {shown(length)}"
        )
    if isinstance(tokens, (mx.array, np.ndarray)):
        if tuple(tokens.shape) != (length,) or "int" not in str(tokens.dtype):
            raise DrafterFailed(
                f"a draft of length {length} has tokens of shape {tuple(tokens.shape)} and type {tokens.dtype}"
            )
        if is_ours:
            return draft
        tokens = tokens.tolist()
    if not isinstance(tokens, (list, tuple)) or len(tokens) != length:
        raise DrafterFailed(f"a draft of length {length} has the tokens {shown(tokens)}")
    strange = next((t for t in tokens if not _is_whole(t) or not 0 <= t < vocab_size), None)
    if strange is not None:
        raise DrafterFailed(f"it drafted {shown(strange)}, which is no token id of the target")
    if is_ours:
        return draft
    if draft.ended is not None and not isinstance(draft.ended, str):
        raise DrafterFailed(f"its draft's `ended` must be None or a sentence, not {shown(draft.ended)}")
    if draft.backing is not None and (not _is_whole(draft.backing) or draft.backing < 0):
        raise DrafterFailed("its draft's `backing` must be None or a whole number of at least 0")
    ended = draft.ended and " ".join(draft.ended.split())[:_MOST_WORDS]
    sure = _confidences(draft.confidences, length)
    return Draft(length, [int(t) for t in tokens], sure, ended, draft.backing)


def _confidences(given: Any, length: int) -> list[float] | None:
    """Return one probability for each token of a draft, None where the drafter gave none."""
    if given is None:
        return None
    sure = given.tolist() if isinstance(given, (mx.array, np.ndarray)) else given
    fits = isinstance(sure, (list, tuple)) and len(sure) == length
    if not fits or not all(isinstance(p, (float, int, np.number)) and 0 <= p <= 1 + _ROUNDING for p in sure):
        raise DrafterFailed(
            f"a draft of length {length} needs as many probabilities for confidences, or None"
        )
    return [min(1.0, float(p)) for p in sure]


def check_snapshot(found: Snapshot, length: int, start: int) -> None:
    """Evaluate the snapshot that a drafter returned for the prefix cache. Raises DrafterFailed where the prefix cache could not cut the
    snapshot and return a part of it."""
    if (
        not isinstance(found, Snapshot)
        or (found.length, found.start) != (length, start)
        or len(found.segments) != 1
    ):
        raise DrafterFailed(f"its snapshot is not one of tokens {start} to {length}")
    if any(x.ndim != 4 or x.shape[2] != length - start for kv in found.segments[0] for x in kv):
        raise DrafterFailed(f"its snapshot's keys and values are not (1, heads, {length - start}, size)")
    mx.eval(found.arrays)


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
