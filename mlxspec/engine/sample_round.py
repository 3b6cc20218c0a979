"""What the target chooses at every verified position of a round: samples, or by rejection the drafts themselves.

Ties requests and their proposals to samplers, constraints and log-probabilities; builds lazy arrays only. Knows no cache and no events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxspec.drafters.base import Unread
from mlxspec.drafters.chain import Proposal
from mlxspec.engine.request import Request
from mlxspec.kernels.flat import FlatRows
from mlxspec.platform.host import numbers
from mlxspec.sampling.acceptance import ForRejection
from mlxspec.sampling.bits import Bits
from mlxspec.sampling.blocks import in_blocks, part_of, positions_at
from mlxspec.sampling.logprobs import Logprobs, logprobs
from mlxspec.sampling.noise import NoiseStream, Positions, Shifted, gumbel, uniform
from mlxspec.sampling.processors import Failure, draw, process
from mlxspec.sampling.rejection import reject
from mlxspec.sampling.sampler import BatchSampler, DraftedBefore

# logits, owners, drafts and masks, as `BatchSampler.sample` takes them
_Given = tuple[mx.array, list[int], DraftedBefore | None, list[Bits | None] | None]


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
    drafts = _drafts_before(rows, tokens) if sampler.needs_drafts and rows.max_width > 1 else None
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
        sampled = _sampled_or_rejected(
            requests, proposals, rows, rejecting, sampler, (logits, owners, drafts, masks), positions, tokens
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
    return (
        Shifted(found, ahead.num_committed[mx.array(owners)], ahead.width)
        if isinstance(ahead, Unread)
        else found
    )


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
    given: _Given,
    sampled: mx.array,
    failed: dict[int, Failure],
) -> mx.array:
    """`sampled` with what each row's own sampler draws in its place."""
    drawing = [i for i, r in enumerate(requests) if r.params.sampler is not None]
    logits, owners, drafts, masks = given
    scores = sampler.scores(logits, owners, drafts, masks) if drawing else sampled
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


def _sampled_or_rejected(
    requests: Sequence[Request],
    proposals: Sequence[Proposal],
    rows: FlatRows,
    rejecting: Sequence[int],
    sampler: BatchSampler,
    given: _Given,
    positions: Positions,
    tokens: mx.array,
) -> mx.array:
    """Choices (N,): drafted positions of the rows `rejecting` are decided by rejection. All others are sampled, such as the bonus token."""
    logits, owners, drafts, masks = given

    def block(some: slice, own: mx.array) -> mx.array:
        counts = None if drafts is None else drafts[some]
        scores = sampler.scores(own, owners[some], counts, part_of(masks, some))
        parts: list[mx.array] = []
        order: list[int] = []  # the positions of `parts`
        for row in rejecting:
            start, draft = rows.starts[row], proposals[row].draft
            inside = range(max(start, some.start), min(start + draft.length, some.stop))
            if inside:
                decided = _rejected(
                    requests[row],
                    None
                    if draft.scores is None
                    else draft.scores[inside.start - start : inside.stop - start],
                    inside.start - start,
                    tokens[inside.start + 1 : inside.stop + 1],
                    scores[inside.start - some.start : inside.stop - some.start],
                )
                parts.append(decided)
                order += inside
        rest = sorted({*range(some.start, some.stop)}.difference(order))
        if rest:
            own_scores = scores[mx.array(rest) - some.start] if parts else scores
            owned = [owners[i] for i in rest]
            parts.append(sampler.choose(own_scores, owned, positions_at(positions, rest)))
            order += rest
        return mx.concatenate(parts)[mx.array(np.argsort(order).astype(np.int32))]

    return in_blocks(logits, sampler.block_size(owners, masks, rejects=True), block)


def _rejected(
    request: Request,
    drafted_by: mx.array | None,
    first: int,
    drafted: mx.array,
    scores: mx.array,
) -> mx.array:
    """What rejection decides of a row's drafted tokens (n,), of which the first is number `first` of the draft. drafted_by (n, V): the
    drafter's scores; scores (n, V): the target's."""
    num = scores.shape[0]
    seeds = [request.sampler.seed] * num
    begin = len(request.history) + first
    positions = range(begin, begin + num)
    return reject(
        scores,
        drafted_by,
        drafted,
        uniform(seeds, positions, NoiseStream.ACCEPT),
        gumbel(seeds, positions, scores.shape[1]),
    )


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


def _drafts_before(rows: FlatRows, tokens: mx.array) -> DraftedBefore:
    """The drafts read up to each position of its row."""
    pairs = [
        (place, token)
        for start, end in zip(rows.starts, rows.starts[1:], strict=False)
        for place in range(start + 1, end)
        for token in range(start + 1, place + 1)
    ]
    of = mx.array(np.asarray([token for _, token in pairs], np.int32))
    return DraftedBefore([place for place, _ in pairs], tokens[of])
