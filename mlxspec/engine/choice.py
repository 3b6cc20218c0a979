"""What the target chooses at every verified position of a round: samples, or by rejection the drafts themselves.

Ties requests and their proposals to samplers, constraints and log-probabilities; builds lazy arrays only. Knows no cache and no events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxspec.drafters.base import Draft
from mlxspec.drafters.chain import Proposal
from mlxspec.engine.request import Request
from mlxspec.kernels.flat import FlatRows
from mlxspec.sampling.bits import Bits
from mlxspec.sampling.logprobs import Logprobs, logprobs
from mlxspec.sampling.noise import Stream, gumbel, uniform
from mlxspec.sampling.rejection import reject
from mlxspec.sampling.sampler import BatchSampler
from mlxspec.speculation.verify import ForRejection


@dataclass(frozen=True, kw_only=True)
class Choice:
    """sampled (N,) int32: equal to the draft behind it where that stands. logprobs: of the sampled tokens, where a row asks for them."""

    sampled: mx.array
    logprobs: Logprobs | None

    @property
    def arrays(self) -> list[mx.array]:
        return [self.sampled, *(self.logprobs.arrays if self.logprobs else [])]


def choose(
    requests: Sequence[Request],
    proposals: Sequence[Proposal],
    rows: FlatRows,
    tokens: mx.array,
    logits: mx.array,
    *,
    ahead: int = 0,
) -> Choice:
    """Choices for logits (N, V) behind tokens (N,): each row's last token and its draft.

    ahead: how many tokens of each row are on their way but not in its history yet. Raises ValueError where a constraint must know
    those. A draft on the device is waited for where a constraint must know it.
    """
    vocab = logits.shape[1]
    sampler = BatchSampler([r.sampler for r in requests], vocab)
    owners = [r for r, width in enumerate(rows.widths) for _ in range(width)]
    lengths = [len(r.history) + ahead for r in requests]
    positions = [n + i for n, width in zip(lengths, rows.widths, strict=True) for i in range(width)]
    drafts = _drafts_before(rows, tokens, vocab) if sampler.needs_drafts and rows.max_width > 1 else None
    masks = _masks(requests, proposals, rows, ahead)
    rejecting = [
        i for i, p in enumerate(proposals) if isinstance(p.submission, ForRejection) and p.draft.length
    ]
    if rejecting:
        scores = sampler.scores(logits, owners, drafts, masks)
        sampled = sampler.choose(scores, owners, positions)
        for row in rejecting:
            sampled = _rejected(
                requests[row], proposals[row].draft, rows.starts[row], tokens, scores, sampled
            )
    else:
        sampled = sampler.sample(logits, owners, positions, drafts, masks)
    tops = [r.params.top_logprobs for r in requests if r.params.wants_logprobs]
    return Choice(sampled=sampled, logprobs=logprobs(logits, sampled, max(tops)) if tops else None)


def _rejected(
    request: Request, draft: Draft, start: int, tokens: mx.array, scores: mx.array, sampled: mx.array
) -> mx.array:
    """`sampled` with one row's drafted positions decided by rejection; behind them stays the bonus token."""
    end = start + draft.length
    seeds = [request.sampler.seed] * draft.length
    positions = range(len(request.history), len(request.history) + draft.length)
    decided = reject(
        scores[start:end],
        draft.scores,
        tokens[start + 1 : end + 1],
        uniform(seeds, positions, Stream.ACCEPT),
        gumbel(seeds, positions, scores.shape[1]),
    )
    return mx.concatenate([sampled[:start], decided, sampled[end:]])


def _masks(
    requests: Sequence[Request], proposals: Sequence[Proposal], rows: FlatRows, ahead: int
) -> list[Bits | None] | None:
    """What may come at each position, None where anything may everywhere."""
    found: list[Bits | None] = []
    for request, proposal, width in zip(requests, proposals, rows.widths, strict=True):
        constraints, draft = request.sampler.constraints, proposal.draft
        if constraints is None or not constraints.reaches(width + ahead):
            found += [None] * width
            continue
        if ahead:
            raise ValueError("constraints must know the tokens before them")
        known = draft.tokens if isinstance(draft.tokens, list) else np.asarray(draft.tokens).tolist()
        found += constraints.masks(known)
    return found if any(m is not None for m in found) else None


def _drafts_before(rows: FlatRows, tokens: mx.array, vocab_size: int) -> mx.array:
    """(N, V) float32: how often each token is among the drafts read up to each position of its row."""
    before = np.zeros((rows.num_tokens, rows.num_tokens), np.float32)
    for start, end in zip(rows.starts, rows.starts[1:], strict=False):
        for i in range(start + 1, end):
            before[i, start + 1 : i + 1] = 1.0
    one_hot = (tokens[:, None] == mx.arange(vocab_size)[None]).astype(mx.float32)
    return mx.array(before) @ one_hot
