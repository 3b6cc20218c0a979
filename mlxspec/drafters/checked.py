"""The one place where drafts are checked: types, lengths, shapes and token ids, each row's by itself.

mlxspec's own drafters draw ids from logits of the target's vocabulary, so of a draft that is on the device only shape and type are looked
at, which evaluates nothing. Any other drafter's draft is evaluated, so that a wrong id, or a computation that fails, is found before a
round is built on it: where it drafts on the device that costs a synchronisation. It comes out as host tokens and confidences of ours.
Knows drafts; knows no drafter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import numpy as np

from mlxspec.drafters.base import NO_DRAFT, Ask, Draft

_ROUNDING = 2.0**-7  # by so much a probability in 16 bits may be above 1
_MOST_WORDS = 300  # characters of a reason


class Checked(NamedTuple):
    """drafts: one an ask, empty where it was wrong. wrong: index of an ask -> why its draft cannot be used."""

    drafts: list[Draft]
    wrong: dict[int, str]


def checked(drafts: object, asks: Sequence[Ask], vocab_size: int, *, is_ours: bool) -> Checked:
    """What a drafter gave for `asks`. Raises ValueError where that is not one draft an ask, so that nobody knows whose is whose."""
    if not isinstance(drafts, (list, tuple)):
        raise ValueError(f"it gave {_kind(drafts)} where a list of {len(asks)} drafts was asked for")
    if len(drafts) != len(asks):
        raise ValueError(f"it gave {len(drafts)} drafts where {len(asks)} were asked for")
    found, wrong = [], {}
    for place, (draft, ask) in enumerate(zip(drafts, asks, strict=True)):
        try:
            if not isinstance(draft, Draft):
                _refuse(f"it gave {_kind(draft)} where a Draft was asked for")
            check = _ours if is_ours else _anybodys
            found.append(NO_DRAFT if draft is NO_DRAFT else check(draft, ask, vocab_size))
        except Exception as error:  # a draft may be of any type, and evaluating it may fail in any way
            said = " ".join(str(error).split())[:_MOST_WORDS]
            wrong[place] = said if isinstance(error, _Wrong) else f"{type(error).__name__}: {said}"
            found.append(NO_DRAFT)
    return Checked(found, wrong)


class _Wrong(Exception):
    """Its text is the reason."""


def _ours(draft: Draft, ask: Ask, vocab_size: int) -> Draft:
    """As it is."""
    _check_length(draft, ask)
    if isinstance(draft.tokens, list):
        _check_host(draft.tokens, draft.length, vocab_size)
    else:
        _check_device(draft.tokens, draft.length)
    return draft


def _anybodys(draft: Draft, ask: Ask, vocab_size: int) -> Draft:
    """The same draft with host tokens and confidences of our own, and arrays that have been evaluated."""
    _check_length(draft, ask)
    ended = draft.ended
    if ended is not None and (not isinstance(ended, str) or not ended.strip()):
        _refuse(f"its draft's `ended` must be None or a sentence, not {_kind(ended)}")
    if ended is not None:
        ended = " ".join(ended.split())[:_MOST_WORDS]
    length = int(draft.length)
    if not length:
        return NO_DRAFT if ended is None else NO_DRAFT._replace(ended=ended)
    given: Any = draft.tokens
    if isinstance(given, (mx.array, np.ndarray)):
        _check_device(given, length)
        given = given.tolist()
    elif not isinstance(given, (list, tuple)):
        _refuse(f"its draft's tokens must be a list or an array, not {_kind(given)}")
    given = list(given)
    _check_host(given, length, vocab_size)
    tokens = [int(t) for t in given]
    backing = draft.backing
    if backing is not None and (not _is_whole(backing) or backing < 0):
        _refuse("its draft's `backing` must be None or a whole number of at least 0")
    sure = _confidences(draft.confidences, length)
    return Draft(length, tokens, sure, ended, None if backing is None else int(backing))


def _check_length(draft: Draft, ask: Ask) -> None:
    if not _is_whole(draft.length) or not 0 <= draft.length <= ask.limit:
        said = draft.length if isinstance(draft.length, int) else _kind(draft.length)
        _refuse(f"a draft has at most {ask.limit} tokens here, and its length is given as {said}")


def _check_host(tokens: list[Any], length: int, vocab_size: int) -> None:
    if len(tokens) != length:
        _refuse(f"a draft of length {length} has {len(tokens)} tokens")
    for token in tokens:
        if not _is_whole(token) or not 0 <= token < vocab_size:
            said = int(token) if _is_whole(token) else _kind(token)
            _refuse(f"it drafted {said}, which is no token id of the target")


def _check_device(tokens: Any, length: int) -> None:
    """Of an array the shape and type, which are known before it has been evaluated."""
    if not isinstance(tokens, (mx.array, np.ndarray)):
        _refuse(f"its draft's tokens must be a list or an array, not {_kind(tokens)}")
    if tuple(tokens.shape) != (length,):
        _refuse(f"a draft of length {length} has tokens of shape {tuple(tokens.shape)}")
    is_whole = (
        mx.issubdtype(tokens.dtype, mx.integer) if isinstance(tokens, mx.array) else tokens.dtype.kind in "iu"
    )
    if not is_whole:
        _refuse(f"its draft's tokens are of type {tokens.dtype}, which is no integer type")


def _confidences(given: Any, length: int) -> list[float] | None:
    """One probability a token, None where there are none."""
    if given is None:
        return None
    if isinstance(given, (mx.array, np.ndarray)):
        if tuple(given.shape) != (length,):
            _refuse(f"a draft of length {length} has confidences of shape {tuple(given.shape)}")
        given = given.tolist()
    if not isinstance(given, (list, tuple)) or len(given) != length:
        _refuse(f"a draft of length {length} needs as many confidences, or None")
    if any(isinstance(p, bool) or not isinstance(p, (int, float, np.number)) for p in given):
        _refuse("its draft's confidences are no numbers")
    if not all(math.isfinite(p) and 0.0 <= p <= 1.0 + _ROUNDING for p in given):
        _refuse("its draft's confidences are no probabilities")
    return [min(1.0, float(p)) for p in given]


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _kind(value: object) -> str:
    """What a value is, without looking into it."""
    return "None" if value is None else f"a {type(value).__name__}"


def _refuse(why: str) -> NoReturn:
    raise _Wrong(why)
