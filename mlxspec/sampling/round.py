"""The one entry of a round into sampling: from logits at every verified position to what the target chooses there.

`sample` reads top to bottom: logits processors of the caller, what constraints allow, scores, a draw, samplers of the caller,
log-probabilities. A place where nothing is left is marked. It builds lazy arrays only. What goes wrong for one row (a grammar, a callable
of the caller) is that row's failure and costs the others nothing. Knows rows as `RoundRow`s; knows no requests, no drafters and no caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.config import SamplingParams
from mlxspec.errors import GrammarError, HookError, NotANumberError
from mlxspec.platform.host import numbers
from mlxspec.sampling.bits import Bits
from mlxspec.sampling.logprobs import Logprobs, logprobs
from mlxspec.sampling.noise import Positions, Shifted
from mlxspec.sampling.processors import Failure, draw, process
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import NO_TOKEN, BatchSampler, possible
from mlxspec.sampling.scores import DraftedBefore

# In place of a token. A round that is launched before this one is read embeds it as the last row but one of the vocabulary
NO_NUMBER = -2
NO_TOKEN_LEFT = "What was asked of the answer (allowed tokens, grammar, bad words, thinking, logits processors) left no token to follow."
_DAMAGED = "The model's logits are not numbers. The likely cause is a damaged weight: fetch or convert the model again."
_CAUSES = {
    mx.float16: "The model's logits are not numbers. The likely cause is that its values overflow in float16: load it with dtype "
    "bfloat16 or float32 (--dtype)."
}


@dataclass(frozen=True, kw_only=True)
class RoundRow:
    """One row of a round. sampler: its parameters and constraints. length: number of its known tokens, which the first choice follows.
    history: returns those tokens, under the vocabulary's ids, for logits processors.

    draft: the drafted tokens that are verified, on the host or, integer (n,), on the device.
    """

    sampler: RowSampler
    length: int
    history: Callable[[], NDArray[np.int32]]
    draft: Sequence[int] | mx.array = ()
    num_drafted: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.sampler.params


class Ahead(NamedTuple):
    """Tokens that rows have committed and the host has not read: num_committed (B,) int32, of each row, and the largest possible number."""

    num_committed: mx.array
    most: int


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The tokens that a round chose. tokens (N,) int32: equal to the next drafted token where that is accepted, NO_NUMBER where the
    logits are not numbers, NO_TOKEN where no token is possible. logprobs: of those tokens, where a row requests them. dtype: of the
    logits.

    failed: by row index, the position at which a caller's own function failed; the row's tokens from there on are invalid.
    """

    tokens: mx.array
    vocab_size: int
    logprobs: Logprobs | None
    dtype: mx.Dtype
    failed: Mapping[int, Failure] = field(default_factory=dict)

    def take(self, row: int, tokens: list[int]) -> tuple[list[int], BaseException | None]:
        """Return the valid tokens of a row, and the exception that ended them where a caller's own function failed, otherwise None."""
        failed = self.failed.get(row)
        if failed is not None and failed.place < len(tokens):
            return tokens[: failed.place], failed.why
        strange = next((i for i, t in enumerate(tokens) if not 0 <= t < self.vocab_size), None)
        if strange is not None and tokens[strange] == NO_NUMBER:
            return tokens[:strange], NotANumberError(_CAUSES.get(self.dtype, _DAMAGED))
        if strange is not None and tokens[strange] == NO_TOKEN:
            return tokens[:strange], GrammarError(NO_TOKEN_LEFT)
        if strange is not None:
            why = f"The sampler chose {tokens[strange]}, which is no token id of this model."
            return tokens[:strange], HookError(why)
        return tokens, None

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens, *(self.logprobs.arrays if self.logprobs else [])]


def sample(
    rows: Sequence[RoundRow], tokens: mx.array, logits: mx.array, *, ahead: int | Ahead = 0
) -> Sampled:
    """Choose a token for each of logits (N, V) after tokens (N,): each row's last token and its draft.

    ahead: number of each row's tokens that are being computed and not known yet. A draft on the device is waited for where a constraint
    must read it. A failure in one row is in `Sampled.failed`. Raises ValueError where a constraint or a caller's function must read
    tokens that are not known yet.
    """
    layout, vocab = _layout(rows), logits.shape[1]
    sampler = BatchSampler([r.sampler for r in rows], vocab)
    failed: dict[int, Failure] = {}
    hooked = any(r.params.needs_text for r in rows)
    if hooked and ahead:
        raise ValueError("callables must know the tokens before them")
    adjusted = _processed(rows, layout, tokens, logits, failed) if hooked else logits
    given = (
        adjusted,
        [i for i, width in enumerate(layout.widths) for _ in range(width)],
        _positions(rows, layout, ahead),
        _drafts_before(layout, tokens) if sampler.needs_drafts and max(layout.widths) > 1 else None,
        _masks(rows, ahead, failed),
    )
    chosen = sampler.sample(*given)
    if hooked:
        chosen = possible(adjusted, chosen)
    if any(r.params.sampler is not None for r in rows):
        chosen = _by_own_samplers(rows, layout, sampler.scores(*given), chosen, failed)
    chosen = _marked(logits, chosen)
    return Sampled(
        tokens=chosen,
        vocab_size=vocab,
        logprobs=_logprobs(rows, logits, chosen),
        dtype=logits.dtype,
        failed=failed,
    )


@mx.compile
def _marked(logits: mx.array, chosen: mx.array) -> mx.array:
    """Return chosen (N,) with NO_NUMBER where logits (N, V) hold a NaN or no finite maximum. The mark is read with the tokens, so it
    costs no wait."""
    return mx.where(mx.isfinite(logits.max(axis=-1)), chosen, NO_NUMBER)


class _Layout(NamedTuple):
    """Positions of each row: widths (B), and starts (B + 1) on the flat axis."""

    widths: Sequence[int]
    starts: Sequence[int]


def _layout(rows: Sequence[RoundRow]) -> _Layout:
    widths = [1 + r.num_drafted for r in rows]
    return _Layout(widths, [0, *accumulate(widths)])


def _positions(rows: Sequence[RoundRow], layout: _Layout, ahead: int | Ahead) -> Positions:
    """Return the position in its row of each choice."""
    known = 0 if isinstance(ahead, Ahead) else ahead
    found = [r.length + known + i for r, width in zip(rows, layout.widths, strict=True) for i in range(width)]
    if not isinstance(ahead, Ahead):
        return found
    owners = [i for i, width in enumerate(layout.widths) for _ in range(width)]
    return Shifted(found, ahead.num_committed[mx.array(owners)], ahead.most)


def _masks(
    rows: Sequence[RoundRow], ahead: int | Ahead, failed: dict[int, Failure]
) -> list[Bits | None] | None:
    """Return the allowed tokens at each position; None where all are allowed everywhere. Adds rows whose constraints fail to `failed`."""
    found: list[Bits | None] = []
    most = ahead.most if isinstance(ahead, Ahead) else ahead
    for i, row in enumerate(rows):
        constraints, width = row.sampler.constraints, 1 + row.num_drafted
        own: list[Bits | None] = [None] * width
        is_seen = not most and not isinstance(row.draft, mx.array)
        if constraints is not None and (
            constraints.reaches(width + most) or (is_seen and constraints.watches)
        ):
            if most:
                raise ValueError("constraints must know the tokens before them")
            try:
                own = constraints.masks(
                    numbers(row.draft).tolist() if isinstance(row.draft, mx.array) else row.draft
                )
            except Exception as error:  # this row's own: a grammar that cannot be applied any further
                failed[i] = Failure(0, error)
        found += own
    return found if any(m is not None for m in found) else None


def _drafts_before(layout: _Layout, tokens: mx.array) -> DraftedBefore:
    """Return, for each position on the flat axis, the drafted tokens that precede the choice made there, including the token at the
    position itself, as pairs of position and token. tokens (N,): each row's last token and its draft."""
    pairs = [
        (place, token)
        for start, end in zip(layout.starts, layout.starts[1:], strict=False)
        for place in range(start + 1, end)
        for token in range(start + 1, place + 1)
    ]
    of = mx.array(np.asarray([token for _, token in pairs], np.int32))
    return DraftedBefore([place for place, _ in pairs], tokens[of])


def _processed(
    rows: Sequence[RoundRow],
    layout: _Layout,
    tokens: mx.array,
    logits: mx.array,
    failed: dict[int, Failure],
) -> mx.array:
    """Return logits (N, V) after each row's own logits processors."""
    parts = []
    for i, (row, start, end) in enumerate(zip(rows, layout.starts, layout.starts[1:], strict=False)):
        piece = logits[start:end]
        if row.sampler.processors:
            drafts = tokens[start + 1 : end]
            num_ours = len(row.sampler.processors) - len(row.params.logits_processors)
            piece, failure = process(row.sampler.processors, row.history(), drafts, piece, num_ours=num_ours)
            if failure is not None:
                failed[i] = failure
        parts.append(piece)
    return mx.concatenate(parts)


def _by_own_samplers(
    rows: Sequence[RoundRow],
    layout: _Layout,
    scores: mx.array,
    chosen: mx.array,
    failed: dict[int, Failure],
) -> mx.array:
    """Return chosen (N,) where the tokens of rows with a sampler of their own are drawn by it from scores (N, V). NO_TOKEN stays. Adds
    samplers' failures to `failed`, by row index; of two failures in a row the earlier place is kept."""
    for i, row in enumerate(rows):
        if row.params.sampler is None:
            continue
        start, end = layout.starts[i], layout.starts[i + 1]
        own, failure = draw(row.params.sampler, scores[start:end])
        if failure is not None and (i not in failed or failure.place < failed[i].place):
            failed[i] = failure
        own = mx.where(chosen[start:end] == NO_TOKEN, NO_TOKEN, own)
        chosen = mx.concatenate([chosen[:start], own, chosen[end:]])
    return chosen


def _logprobs(rows: Sequence[RoundRow], logits: mx.array, chosen: mx.array) -> Logprobs | None:
    """Return the log-probabilities of the chosen tokens under the model's unchanged logits; None where no row asks for them."""
    tops = [r.params.top_logprobs for r in rows if r.params.wants_logprobs]
    return logprobs(logits, chosen, max(tops)) if tops else None
