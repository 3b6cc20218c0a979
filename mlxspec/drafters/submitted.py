"""Cuts a draft to the part that is verified, by the row's limits (p_min, n_min) and by the tokens that its constraints forbid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxspec.drafters.base import Draft
from mlxspec.drafters.row import DraftRow
from mlxspec.platform.host import numbers
from mlxspec.sampling.acceptance import num_verified
from mlxspec.sampling.row import RowSampler


def submitted(drafts: Sequence[Draft], states: Sequence[DraftRow]) -> list[Draft]:
    """Return each draft cut to the tokens that are verified. Waits for the device only where p_min, n_min or a constraint must see the
    tokens or confidences."""
    pairs = list(zip(drafts, states, strict=True))
    doubted = [d.length > 0 and d.confidences is not None and s.has_limits for d, s in pairs]
    read = [s.sampler.needs_tokens(d.length + 1) for d, s in pairs]
    mx.eval(
        [d.confidences for (d, _), yes in zip(pairs, doubted, strict=True) if yes],
        [d.tokens for (d, _), yes in zip(pairs, read, strict=True) if yes],
    )
    return [
        _submit(_on_host(draft) if reads else draft, state, doubts)
        for (draft, state), doubts, reads in zip(pairs, doubted, read, strict=True)
    ]


def submitted_on_host(drafts: Sequence[Draft], states: Sequence[DraftRow]) -> list[Draft]:
    """Return each draft cut to the tokens that are verified, with tokens and confidences as lists. Waits for the device where they are
    still there."""
    lazy = [(d.tokens, d.confidences) for d in drafts if not isinstance(d.tokens, list)]
    if lazy:
        mx.eval(lazy)
    out = []
    for draft, state in zip(drafts, states, strict=True):
        if draft.length:
            sure = _confidences(draft)
            whole = _on_host(draft)._replace(confidences=sure)
            cut = _submit(whole, state, sure is not None and state.has_limits)
            out.append(cut._replace(confidences=sure and sure[: cut.length]))
        else:
            out.append(draft)
    return out


def _submit(draft: Draft, state: DraftRow, doubted: bool) -> Draft:
    if not draft.length:
        return draft
    length = num_verified(
        draft.length,
        _confidences(draft) if doubted else None,
        p_min=state.spec.p_min,
        n_min=state.spec.n_min,
        valid=_validity(draft, state.sampler),
    )
    return draft if length == draft.length else draft.cut(length)


def _validity(draft: Draft, sampler: RowSampler) -> Callable[[int], int] | None:
    """Return a function from a number of first tokens of the draft to how many of them could be accepted; None where the row forbids no
    token."""
    constraints, tokens = sampler.constraints, draft.tokens
    if constraints is None or not isinstance(tokens, list):
        return None
    return lambda length: constraints.validate(tokens[:length])


def _on_host(draft: Draft) -> Draft:
    """Return the draft with its evaluated tokens as a list."""
    return draft if isinstance(draft.tokens, list) else draft._replace(tokens=numbers(draft.tokens).tolist())


def _confidences(draft: Draft) -> list[float] | None:
    """Return the draft's evaluated confidences as a list, None where it has none."""
    sure = draft.confidences
    return numbers(sure).tolist() if isinstance(sure, mx.array) else sure
