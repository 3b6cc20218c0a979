"""What the target chooses at every verified position of a round: samples, or by rejection the drafts themselves.

Ties requests and their proposals to samplers, constraints and log-probabilities; builds lazy arrays only. Knows no cache and no events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxspec.drafters.base import Draft, Unread
from mlxspec.drafters.chain import Proposal
from mlxspec.engine.request import Request
from mlxspec.kernels.flat import FlatRows
from mlxspec.platform.host import numbers
from mlxspec.sampling.acceptance import ForRejection
from mlxspec.sampling.bits import Bits
from mlxspec.sampling.logprobs import Logprobs, logprobs
from mlxspec.sampling.noise import NoiseStream, Positions, Shifted, gumbel, uniform
from mlxspec.sampling.processors import Failure, draw, process
from mlxspec.sampling.rejection import reject
from mlxspec.sampling.sampler import BatchSampler


@dataclass(frozen=True, kw_only=True)
class SampledRound:
    """sampled (N,) int32: equal to the draft behind it where that stands. logprobs: of the sampled tokens, where a row asks for them.

    failed: index of a request -> at which of its positions its own callables failed; tokens from there on mean nothing.
    """

    sampled: mx.array
    vocab_size: int
    logprobs: Logprobs | None
    failed: Mapping[int, Failure] = field(default_factory=dict)

    def take(self, index: int, tokens: list[int]) -> tuple[list[int], str | BaseException | None]:
        """What request `index` takes of tokens a round gives it, and why no more: something of its own failed there."""
        failed = self.failed.get(index)
        if failed is not None and failed.place < len(tokens):
            return tokens[: failed.place], failed.why
        strange = next((i for i, t in enumerate(tokens) if not 0 <= t < self.vocab_size), None)
        if strange is not None:
            why = f"The sampler chose {tokens[strange]}, which is no token id of this model."
            return tokens[:strange], why
        return tokens, None

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
    ahead: int | Unread = 0,
) -> SampledRound:
    """Choices for logits (N, V) behind tokens (N,): each row's last token and its draft.

    ahead: how many tokens of each row are on their way but not in its history yet, or the round that they come from. Raises ValueError
    where a constraint must know those. A draft on the device is waited for where a constraint must know it.
    """
    vocab = logits.shape[1]
    sampler = BatchSampler([r.sampler for r in requests], vocab)
    owners = [r for r, width in enumerate(rows.widths) for _ in range(width)]
    positions = _positions(requests, rows, owners, ahead)
    drafts = _drafts_before(rows, tokens, vocab) if sampler.needs_drafts and rows.max_width > 1 else None
    masks = _masks(requests, proposals, rows, ahead)
    failed: dict[int, Failure] = {}
    hooked = any(r.params.has_hooks for r in requests)
    if hooked and ahead:
        raise ValueError("callables must know the tokens before them")
    own, logits = logits, _processed(requests, rows, tokens, logits, failed) if hooked else logits
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
    if hooked:
        sampled = _drawn(requests, rows, sampler, (logits, owners, drafts, masks), sampled, failed)
    tops = [r.params.top_logprobs for r in requests if r.params.wants_logprobs]
    found = logprobs(own, sampled, max(tops)) if tops else None
    return SampledRound(sampled=sampled, vocab_size=vocab, logprobs=found, failed=failed)


def _positions(
    requests: Sequence[Request], rows: FlatRows, owners: Sequence[int], ahead: int | Unread
) -> Positions:
    """Where each choice will stand in its row."""
    behind = 0 if isinstance(ahead, Unread) else ahead
    lengths = [len(r.history) + behind for r in requests]
    found = [n + i for n, width in zip(lengths, rows.widths, strict=True) for i in range(width)]
    return Shifted(found, ahead.num[mx.array(owners)], ahead.width) if isinstance(ahead, Unread) else found


def _processed(
    requests: Sequence[Request],
    rows: FlatRows,
    tokens: mx.array,
    logits: mx.array,
    failed: dict[int, Failure],
) -> mx.array:
    """Logits (N, V) behind each row's own logits processors."""
    parts = []
    for i, (request, start, end) in enumerate(zip(requests, rows.starts, rows.starts[1:], strict=False)):
        piece = logits[start:end]
        if request.params.logits_processors:
            drafts = tokens[start + 1 : end]
            piece, failure = process(request.params.logits_processors, request.shown, drafts, piece)
            if failure is not None:
                failed[i] = failure
        parts.append(piece)
    return mx.concatenate(parts)


def _drawn(
    requests: Sequence[Request],
    rows: FlatRows,
    sampler: BatchSampler,
    given: tuple[mx.array, list[int], mx.array | None, list[Bits | None] | None],
    sampled: mx.array,
    failed: dict[int, Failure],
) -> mx.array:
    """`sampled` with what each row's own sampler draws in its place. given: what `BatchSampler.scores` takes."""
    drawing = [i for i, r in enumerate(requests) if r.params.sampler is not None]
    scores = sampler.scores(*given) if drawing else sampled
    for i in drawing:
        start, end, hook = rows.starts[i], rows.starts[i + 1], requests[i].params.sampler
        if hook is None:
            continue
        own, failure = draw(hook, scores[start:end])
        if failure is not None and (i not in failed or failure.place < failed[i].place):
            failed[i] = failure
        sampled = mx.concatenate([sampled[:start], own, sampled[end:]])
    return sampled


def choose_apart(
    requests: Sequence[Request],
    proposals: Sequence[Proposal],
    rows: FlatRows,
    tokens: mx.array,
    logits: mx.array,
    *,
    ahead: int | Unread = 0,
) -> SampledRound:
    """`choose`, but what goes wrong for one row (a grammar, a processor of ours) is that row's failure and costs the others nothing."""
    try:
        return choose(requests, proposals, rows, tokens, logits, ahead=ahead)
    except Exception as error:
        if len(requests) == 1:
            nothing = mx.zeros((rows.num_tokens,), mx.int32)
            failed = {0: Failure(0, error)}
            return SampledRound(sampled=nothing, vocab_size=logits.shape[1], logprobs=None, failed=failed)
    parts, failures = [], {}
    for i, (request, proposal) in enumerate(zip(requests, proposals, strict=True)):
        start, end = rows.starts[i], rows.starts[i + 1]
        own = FlatRows((end - start,))
        before = ahead.select([i]) if isinstance(ahead, Unread) else ahead
        part = choose_apart([request], [proposal], own, tokens[start:end], logits[start:end], ahead=before)
        parts.append(part.sampled)
        if part.failed:
            failures[i] = part.failed[0]
    sampled = mx.concatenate(parts)
    tops = [r.params.top_logprobs for r in requests if r.params.wants_logprobs]
    found = logprobs(logits, sampled, max(tops)) if tops else None
    return SampledRound(sampled=sampled, vocab_size=logits.shape[1], logprobs=found, failed=failures)


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
        uniform(seeds, positions, NoiseStream.ACCEPT),
        gumbel(seeds, positions, scores.shape[1]),
    )
    return mx.concatenate([sampled[:start], decided, sampled[end:]])


def _masks(
    requests: Sequence[Request], proposals: Sequence[Proposal], rows: FlatRows, ahead: int | Unread
) -> list[Bits | None] | None:
    """What may come at each position, None where anything may everywhere."""
    found: list[Bits | None] = []
    most = ahead.width if isinstance(ahead, Unread) else ahead
    for request, proposal, width in zip(requests, proposals, rows.widths, strict=True):
        constraints, draft = request.sampler.constraints, proposal.draft
        if constraints is None or not constraints.reaches(width + most):
            found += [None] * width
            continue
        if most:
            raise ValueError("constraints must know the tokens before them")
        known = draft.tokens if isinstance(draft.tokens, list) else numbers(draft.tokens).tolist()
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
