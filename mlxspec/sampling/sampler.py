"""Samples the next token from logits, for many positions of many requests at once.

Order: repetition, presence and frequency penalties, logit bias, forbidden tokens, temperature, top-k, top-p, min-p, then argmax of
logits + keyed Gumbel noise. A position's result depends on its own logits, request and history alone, never on what else is in the
batch; parameters that a row does not use are neutral for it, bit for bit. Of drafts it knows only which tokens come before a position.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.cache.attention import copied
from mlxspec.config import DraftSampling, SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.sampling.bits import Bits, num_words, unpack
from mlxspec.sampling.blocks import block_size, in_blocks, part_of, positions_of
from mlxspec.sampling.constraints import Constraints
from mlxspec.sampling.noise import NoiseStream, Positions, gumbel
from mlxspec.sampling.truncate import top_k_floor, top_p_floor

# arrays (n, V) of float32 that sampling n positions holds at once, where nothing is fused: for penalties, for masks, for drawing, and
# beside that for top-p and for rejection; and what of penalties and masks is left when those begin
_PENALIZED, _MASKED, _DRAWN, _SHARED, _REJECTED, _LEFT = 7, 3, 4, 8, 5, 2
_COLDEST = 1e-6  # as good as greedy; float32 logits over much less would be infinite


class RowSampler:
    """One request's parameters, seed, token counts and constraints.

    `observe` is told of every token of the answer, in order; the prompt is given at the start. drafts_by: how drafters choose for it;
    keeps_drafts: whether the distributions they chose from are wanted. constraints: told of tokens by whoever owns them.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        *,
        drafts_by: DraftSampling = "shared",
        keeps_drafts: bool = False,
        constraints: Constraints | None = None,
    ) -> None:
        """Raises ConfigError for a logit bias on a token the model does not have."""
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.is_greedy = params.temperature == 0.0
        self.is_plain = not (params.has_penalties or params.logit_bias or params.has_hooks)
        self.drafts_by = drafts_by
        self.keeps_drafts = keeps_drafts and not self.is_greedy
        self.constraints = constraints
        self._vocab_size = vocab_size
        self.prompt_seen: mx.array | None = None
        self.counts: mx.array | None = None
        self.bias: mx.array | None = None
        if params.has_penalties:
            self.prompt_seen = mx.array(np.bincount(list(prompt), minlength=vocab_size)[:vocab_size] > 0)
            self.counts = mx.zeros((vocab_size,), mx.float32)
        if params.logit_bias:
            if max(params.logit_bias) >= vocab_size:
                raise ConfigError(
                    f"logit_bias names token {max(params.logit_bias)}; this model has 0 to {vocab_size - 1}."
                )
            bias = np.zeros(vocab_size, np.float32)
            bias[list(params.logit_bias)] = list(params.logit_bias.values())
            self.bias = mx.array(bias)

    def observe(self, tokens: Sequence[int]) -> None:
        """These tokens of the answer are final."""
        if self.counts is not None and tokens:
            self.counts = self.counts + mx.array(
                np.bincount(list(tokens), minlength=self._vocab_size).astype(np.float32)
            )

    def needs_tokens(self, width: int) -> bool:
        """Whether the host must know the tokens before any of the next `width` positions to sample there."""
        return self.constraints is not None and self.constraints.reaches(width)

    def sealed(self) -> RowSampler:
        """A read-only view for drafters that mlxspec did not write: the facts as they are now, arrays and mappings that can be changed
        without effect on this one, and no constraints, whose state moves with the text. Costs the same whatever has been sampled."""
        facts = dict(vars(self), constraints=None, params=_sealed_params(self.params))
        for name in ("prompt_seen", "counts", "bias"):
            if facts[name] is not None:
                facts[name] = copied(facts[name])
        view = object.__new__(_Sealed)
        vars(view).update(facts)
        return view


class _Sealed(RowSampler):
    """See RowSampler.sealed. Raises AttributeError where it would be changed."""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a row's sampler is read-only for drafters: {name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a row's sampler is read-only for drafters: {name} cannot be deleted")

    def observe(self, tokens: Sequence[int]) -> None:
        raise AttributeError("a row's sampler is read-only for drafters: it cannot observe tokens")


def _sealed_params(params: SamplingParams) -> SamplingParams:
    """The same parameters; their mappings cannot be assigned to."""
    if not params.logit_bias and not isinstance(params.json_schema, Mapping):
        return params
    view = copy(params)
    for name in ("logit_bias", "json_schema"):
        value = getattr(params, name)
        if isinstance(value, Mapping):
            object.__setattr__(view, name, MappingProxyType(dict(value)))
    return view


class Drawn(NamedTuple):
    """What a drafter drew: tokens (N,), and the scores (N, V) it drew them from, None where nobody wants them."""

    tokens: mx.array
    scores: mx.array | None


class DraftedBefore:
    """Which drafted tokens stand between a row's final tokens and each position. places, tokens (M,): at position places[i] the row's draft
    holds tokens[i] before it, once for each pair."""

    def __init__(self, places: Sequence[int] | NDArray[np.int32], tokens: mx.array) -> None:
        self._places, self._tokens = np.asarray(places, np.int32), tokens

    def __getitem__(self, some: slice) -> DraftedBefore:
        """Of some positions."""
        (inside,) = np.nonzero((self._places >= some.start) & (self._places < some.stop))
        return DraftedBefore(
            self._places[inside] - some.start, self._tokens[mx.array(inside.astype(np.int32))]
        )

    def added_to(self, counts: mx.array, num: int) -> mx.array:
        """counts (1, V) or (num, V) float32, with these tokens counted: (num, V)."""
        counts = mx.broadcast_to(counts, (num, counts.shape[1]))
        return counts.at[mx.array(self._places), self._tokens].add(1.0) if len(self._places) else counts


class BatchSampler:
    """Samples for positions of several rows in one go."""

    def __init__(self, rows: Sequence[RowSampler], vocab_size: int) -> None:
        self.rows = list(rows)
        self.vocab_size = vocab_size

    def sample(
        self,
        logits: mx.array,
        owners: Sequence[int],
        positions: Positions,
        drafts: DraftedBefore | None = None,
        masks: Sequence[Bits | None] | None = None,
    ) -> mx.array:
        """Tokens (N,) for logits (N, V), lazily.

        owners: index into rows of each position. positions: where in its row each sampled token will stand. drafts: which tokens
        stand between the row's final tokens and each position; None for none. masks: what may come at each position.
        """

        def block(some: slice, own: mx.array) -> mx.array:
            return self.sample_at_once(
                own,
                owners[some],
                positions_of(positions, some),
                None if drafts is None else drafts[some],
                part_of(masks, some),
            )

        return in_blocks(logits, self.block_size(owners, masks), block)

    def block_size(
        self, owners: Sequence[int], masks: Sequence[Bits | None] | None, *, rejects: bool = False
    ) -> int:
        """Positions of these owners that are sampled at once. rejects: whether drafts among them are decided by rejection."""
        return block_size(len(owners), self.vocab_size, self._copies(owners, masks, rejects))

    def _copies(self, owners: Sequence[int], masks: Sequence[Bits | None] | None, rejects: bool) -> int:
        """Arrays (N, V) of float32 that are held at once, at most."""
        rows = [self.rows[o] for o in set(owners)]
        is_masked = masks is not None and any(m is not None for m in masks)
        processed = _PENALIZED if any(r.counts is not None for r in rows) else _MASKED if is_masked else 0
        if all(r.is_greedy for r in rows):
            return processed
        shares = any(r.params.top_p < 1.0 and not r.params.top_k for r in rows)
        beside = (_SHARED if shares else 0) + (_REJECTED if rejects else 0)
        return _DRAWN + max(processed, beside + (_LEFT if processed else 0))

    def sample_at_once(
        self,
        logits: mx.array,
        owners: Sequence[int],
        positions: Positions,
        drafts: DraftedBefore | None = None,
        masks: Sequence[Bits | None] | None = None,
    ) -> mx.array:
        """`sample` in one block: its plain twin."""
        if self._is_greedy(owners):
            return mx.argmax(self._processed(logits, owners, drafts, masks), axis=-1).astype(mx.int32)
        return self.choose(self.scores(logits, owners, drafts, masks), owners, positions)

    def scores(
        self,
        logits: mx.array,
        owners: Sequence[int],
        drafts: DraftedBefore | None = None,
        masks: Sequence[Bits | None] | None = None,
        ids: mx.array | None = None,
    ) -> mx.array:
        """(N, V) float32: logits of the distributions that `choose` draws from (a greedy row's are tempered by 1). ids (R,): logits and
        scores are (N, R), of these tokens."""
        used = _Used(self.rows, owners)
        logits = self._processed(logits, owners, drafts, masks, ids)
        return _truncate(logits, _temper(logits.astype(mx.float32), used), used)

    def choose(
        self,
        scores: mx.array,
        owners: Sequence[int],
        positions: Positions,
        stream: NoiseStream = NoiseStream.TARGET,
        ids: mx.array | None = None,
    ) -> mx.array:
        """Tokens (N,) drawn from `scores`, with the noise of `stream`; the likeliest ones for greedy rows. ids (R,): scores are (N, R), of
        these tokens, each of which has the noise that it has among all."""
        used = [self.rows[o] for o in owners]
        noise = gumbel([r.seed for r in used], positions, self.vocab_size, stream)
        if ids is not None:
            noise = noise[:, ids]
        if any(r.is_greedy for r in used):
            noise = mx.where(_column([r.is_greedy for r in used]), 0.0, noise)
        return _likeliest(scores + noise, ids)

    def draft(
        self, logits: mx.array, owners: Sequence[int], positions: Positions, ids: mx.array | None = None
    ) -> Drawn:
        """What drafters take: each row's way of drafting, and the distribution drawn from where acceptance needs it.

        ids (R,) int32, different ones: of which tokens logits (N, R) tell; all others are impossible. None: of all V. Each token keeps the
        noise, the penalties and the bias that it has among all V, and scores are (N, V) in any case: so this is what `spread` logits give.
        """
        used = [self.rows[o] for o in owners]
        ways = {r.drafts_by for r in used if not r.is_greedy}
        if ways <= {"argmax"}:
            return Drawn(_likeliest(self._processed(logits, owners, ids=ids), ids), None)
        scores = self.scores(logits, owners, ids=ids)
        tokens = _likeliest(scores, ids)
        for way, stream in (("shared", NoiseStream.TARGET), ("independent", NoiseStream.DRAFT)):
            if way in ways:
                drawn = self.choose(scores, owners, positions, stream, ids)
                mine = mx.array([r.drafts_by == way for r in used])
                tokens = drawn if len(ways) == 1 else mx.where(mine, drawn, tokens)
        if not any(r.keeps_drafts and r.drafts_by != "argmax" for r in used):
            return Drawn(tokens, None)
        return Drawn(tokens, scores if ids is None else spread(scores, ids, self.vocab_size))

    @property
    def needs_drafts(self) -> bool:
        """Whether `sample` needs the drafted tokens before a position."""
        return any(r.counts is not None for r in self.rows)

    def _is_greedy(self, owners: Sequence[int]) -> bool:
        return all(self.rows[o].is_greedy for o in set(owners))

    def _processed(
        self,
        logits: mx.array,
        owners: Sequence[int],
        drafts: DraftedBefore | None = None,
        masks: Sequence[Bits | None] | None = None,
        ids: mx.array | None = None,
    ) -> mx.array:
        """Logits with penalties, bias and what is forbidden; the very ones given where a request has none of it. ids: as in `scores`;
        drafts and masks are of all tokens, so they do not go with it."""
        used = _Used(self.rows, owners)
        if not all(r.is_plain for r in used.rows):
            logits = _penalize(logits.astype(mx.float32), used, drafts, ids)
        if masks is not None and any(m is not None for m in masks):
            logits = mx.where(allowed(masks, self.vocab_size), logits, -mx.inf)
        return logits


class _Used:
    """The distinct rows that own positions, and how their properties become columns (N, 1) or tables (N, V)."""

    def __init__(self, rows: Sequence[RowSampler], owners: Sequence[int]) -> None:
        order = {owner: place for place, owner in enumerate(dict.fromkeys(owners))}
        self.rows = [rows[o] for o in order]
        self._is_aligned = len(order) == len(owners)
        self._index = None if self._is_aligned else np.asarray([order[o] for o in owners], np.int32)
        self.params = [rows[o].params for o in owners]  # of each position

    def column(self, read: Callable[[RowSampler], float]) -> mx.array:
        """(N, 1), or (1, 1) where all have the same row."""
        values = np.asarray([[read(r)] for r in self.rows])
        values = values.astype(np.float32 if values.dtype.kind == "f" else values.dtype)
        return mx.array(values if self._index is None or len(self.rows) == 1 else values[self._index])

    def table(self, read: Callable[[RowSampler], mx.array]) -> mx.array:
        """(N, V), or (1, V) where all have the same row."""
        if len(self.rows) == 1:
            return read(self.rows[0])[None]
        found = mx.stack([read(r) for r in self.rows])
        return found if self._index is None else found[mx.array(self._index)]


def confidence(logits: mx.array) -> mx.array:
    """(N, V) of any float dtype -> (N,) float32: the probability of the most likely token.

    The difference is taken in float32: logits of 16 bits are spaced up to 6 % apart near 10.
    """
    logits = logits.astype(mx.float32)
    return mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))


def spread(logits: mx.array, ids: mx.array, vocab_size: int) -> mx.array:
    """Logits or scores (N, R) of the tokens ids (R,) as those of all, (N, V): -inf for all others."""
    everything = mx.full((logits.shape[0], vocab_size), -mx.inf, logits.dtype)
    return mx.put_along_axis(everything, mx.broadcast_to(ids[None], logits.shape), logits, axis=-1)


def allowed(masks: Sequence[Bits | None], vocab_size: int) -> mx.array:
    """(N, V) bool."""
    everything = np.full(num_words(vocab_size), 0xFFFFFFFF, np.uint32)
    return unpack(mx.array(np.stack([everything if m is None else m for m in masks])), vocab_size)


def _column(values: Sequence[bool]) -> mx.array:
    return mx.array(list(values))[:, None]


def _likeliest(scores: mx.array, ids: mx.array | None) -> mx.array:
    """(N,) int32 tokens; scores (N, R) of the tokens ids (R,), or (N, V)."""
    places = mx.argmax(scores, axis=-1)
    return places.astype(mx.int32) if ids is None else ids[places]


def _penalize(
    logits: mx.array, used: _Used, drafts: DraftedBefore | None, ids: mx.array | None = None
) -> mx.array:
    vocab = logits.shape[1]

    def of_ids(values: mx.array) -> mx.array:
        return values if ids is None else values[ids]

    if any(r.counts is not None for r in used.rows):
        zero, nothing = mx.zeros((vocab,)), mx.zeros((vocab,), mx.bool_)
        counts = used.table(lambda r: zero if r.counts is None else of_ids(r.counts))
        counts = counts if drafts is None else drafts.added_to(counts, logits.shape[0])
        seen = used.table(lambda r: nothing if r.prompt_seen is None else of_ids(r.prompt_seen))
        seen = seen | (counts > 0)
        repetition = used.column(lambda r: float(r.params.repetition_penalty))
        penalized = mx.where(logits > 0, logits / repetition, logits * repetition)
        logits = mx.where(seen, penalized, logits)
        presence = used.column(lambda r: float(r.params.presence_penalty))
        frequency = used.column(lambda r: float(r.params.frequency_penalty))
        logits = logits - presence * (counts > 0) - frequency * counts
    if any(r.bias is not None for r in used.rows):
        none = mx.zeros((vocab,))
        logits = logits + used.table(lambda r: none if r.bias is None else of_ids(r.bias))
    return logits


def _temper(logits: mx.array, used: _Used) -> mx.array:
    if all(r.is_greedy or r.params.temperature == 1.0 for r in used.rows):
        return logits
    return logits / used.column(lambda r: 1.0 if r.is_greedy else max(float(r.params.temperature), _COLDEST))


def _truncate(logits: mx.array, tempered: mx.array, used: _Used) -> mx.array:
    """`tempered` with every score below the highest of a position's thresholds made impossible. Ties at a threshold all stay.

    logits (N, V): what was tempered, in any float type. Only positions that ask for a threshold are searched for it; those that take the
    likeliest token ask for none.
    """
    vocab = logits.shape[1]
    params = used.params
    drawn = [i for i, p in enumerate(params) if p.temperature > 0.0]
    ranked = [i for i in drawn if 0 < params[i].top_k < vocab]
    shared = [i for i in drawn if params[i].top_p < 1.0 and not 0 < params[i].top_k < vocab]
    floor: mx.array | None = None
    for places in (ranked, shared):
        if not places:
            continue
        some = len(places) < len(params)
        x, scores = (a[mx.array(places)] if some else a for a in (logits, tempered))
        shares = [float(params[i].top_p) for i in places]
        if places is ranked:
            found = top_k_floor(x, scores, [params[i].top_k for i in places], shares)
        else:
            found = top_p_floor(x, scores, shares)
        if some:
            floor = mx.full((len(params), 1), -mx.inf) if floor is None else floor
            floor[mx.array(places)] = found
        else:
            floor = found
    if any(p.min_p > 0.0 for p in params):
        logs = used.column(lambda r: math.log(r.params.min_p) if r.params.min_p > 0.0 else -math.inf)
        least = mx.max(tempered, axis=-1, keepdims=True) + logs
        floor = least if floor is None else mx.maximum(floor, least)
    return tempered if floor is None else mx.where(tempered < floor, -mx.inf, tempered)
