"""Translates a round's requests and proposals for sampling (sampling/round.py), which knows neither."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.drafters.base import Unread
from mlxspec.drafters.chain import Proposal
from mlxspec.engine.request import Request
from mlxspec.sampling.round import Ahead, RoundRow, Sampled, sample


def sample_round(
    requests: Sequence[Request],
    proposals: Sequence[Proposal],
    tokens: mx.array,
    logits: mx.array,
    *,
    ahead: int | Unread = 0,
) -> Sampled:
    """The target's choices for logits (N, V) behind tokens (N,): each row's last token and its draft.

    ahead: how many tokens of each row are on their way but not in its history yet, or the round that they come from.
    """
    rows = [_row(request, proposal) for request, proposal in zip(requests, proposals, strict=True)]
    coming = Ahead(ahead.num_committed, ahead.width) if isinstance(ahead, Unread) else ahead
    return sample(rows, tokens, logits, ahead=coming)


def _row(request: Request, proposal: Proposal) -> RoundRow:
    draft = proposal.draft
    return RoundRow(
        sampler=request.sampler,
        length=len(request.history),
        history=lambda: request.shown,
        draft=draft.tokens,
        num_drafted=draft.length,
    )
