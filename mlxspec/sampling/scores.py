"""Turns logits into scores: the numerics of sampling as pure functions of many positions of many requests.

Order: repetition, presence and frequency penalties, logit bias, forbidden tokens, top-n-sigma (`processed`), then temperature, top-k,
top-p, min-p, typical-p and XTC (`truncated`). A position's result depends on its own logits, request and history alone, never on what else
is in the batch; parameters that a row does not use are neutral for it, bit for bit. Of drafts it knows only which tokens come before a
position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.config import SamplingParams
from mlxspec.sampling import filters
from mlxspec.sampling.bits import Bits, num_words, unpack
from mlxspec.sampling.noise import Positions, xtc_coins
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.survivors import COLDEST, cuts, survivors
from mlxspec.sampling.truncate import top_p_floor


def truncated(
    rows: Sequence[RowSampler], logits: mx.array, owners: Sequence[int], positions: Positions | None = None
) -> mx.array:
    """Return, (N, V) float32, the logits that tokens are drawn from, made of `processed` logits. Those of a greedy row have temperature
    1. positions: the index in its row of each token to be sampled, which XTC needs."""
    used, vocab = Positioned(rows, owners), logits.shape[1]
    scores = _truncate(logits, _temper(logits.astype(mx.float32), used), used)
    ranked = [i for i, p in enumerate(used.params) if p.temperature > 0.0 and 0 < p.top_k < vocab]
    if ranked:  # what stays by top-k is found as where tokens are drawn from it alone
        places = mx.array(ranked)
        found = survivors(logits[places], cuts([used.params[i] for i in ranked], vocab))
        scores[places] = spread(found.scores, found.ids, vocab)
    if any(p.has_filters for p in used.params):
        scores = _filtered(scores, used, owners, rows, positions)
    return scores


def processed(
    rows: Sequence[RowSampler],
    logits: mx.array,
    owners: Sequence[int],
    drafts: DraftedBefore | None = None,
    masks: Sequence[Bits | None] | None = None,
    ids: mx.array | None = None,
) -> mx.array:
    """Return logits (N, V) with penalties, bias and forbidden tokens; the same array where no request has any. owners: for each position
    the index of its row. drafts: the drafted tokens between a row's final tokens and each position; None for none. masks: the allowed
    tokens at each position. ids (R,): logits are (N, R), of these tokens; not with drafts or masks, which are of all tokens."""
    if not all(rows[o].is_plain for o in owners):
        logits = _penalize(logits.astype(mx.float32), Positioned(rows, owners), drafts, ids)
    if masks is not None and any(m is not None for m in masks):
        logits = mx.where(allowed(masks, logits.shape[1]), logits, -mx.inf)
    if any(rows[o].params.top_n_sigma > 0.0 and not rows[o].is_greedy for o in set(owners)):
        used, off = Positioned(rows, owners), math.inf
        sigmas = used.column(lambda r: off if r.is_greedy else float(r.params.top_n_sigma) or off)
        logits = filters.top_n_sigma(logits.astype(mx.float32), sigmas)
    return logits


def _filtered(
    scores: mx.array,
    used: Positioned,
    owners: Sequence[int],
    rows: Sequence[RowSampler],
    positions: Positions | None,
) -> mx.array:
    """Apply typical-p and XTC to scores. Greedy rows have neither."""

    def column(read: Callable[[SamplingParams], float], off: float) -> mx.array:
        return used.column(lambda r: off if r.is_greedy else float(read(r.params)))

    if any(p.typical_p < 1.0 for p in used.params):
        scores = filters.typical(scores, column(lambda p: p.typical_p, 1.0))
    if any(p.xtc_probability > 0.0 for p in used.params):
        if positions is None:
            raise ValueError("XTC must know where tokens stand")
        coins = xtc_coins([rows[o].seed for o in owners], positions)[:, None]
        happens = coins < column(lambda p: p.xtc_probability, 0.0)
        scores = filters.xtc(scores, column(lambda p: p.xtc_threshold, 1.0), happens)
    return scores


class DraftedBefore:
    """The drafted tokens between a row's final tokens and each position. places, tokens (M,): at position places[i] the row's draft holds
    tokens[i] before it, once for each pair."""

    def __init__(self, places: Sequence[int] | NDArray[np.int32], tokens: mx.array) -> None:
        self._places, self._tokens = np.asarray(places, np.int32), tokens

    def __getitem__(self, some: slice) -> DraftedBefore:
        """Return the drafted tokens before some of the positions."""
        (inside,) = np.nonzero((self._places >= some.start) & (self._places < some.stop))
        return DraftedBefore(
            self._places[inside] - some.start, self._tokens[mx.array(inside.astype(np.int32))]
        )

    def added_to(self, counts: mx.array, num: int) -> mx.array:
        """Return counts (num, V) float32 in which these tokens are counted in addition to counts (1 or num, V)."""
        counts = mx.broadcast_to(counts, (num, counts.shape[1]))
        return counts.at[mx.array(self._places), self._tokens].add(1.0) if len(self._places) else counts


class Positioned:
    """The distinct rows that own positions, and how their properties become columns (N, 1) or tables (N, V)."""

    def __init__(self, rows: Sequence[RowSampler], owners: Sequence[int]) -> None:
        order = {owner: place for place, owner in enumerate(dict.fromkeys(owners))}
        self.rows = [rows[o] for o in order]
        self._is_aligned = len(order) == len(owners)
        self._index = None if self._is_aligned else np.asarray([order[o] for o in owners], np.int32)
        self.params = [rows[o].params for o in owners]  # of each position

    def column(self, read: Callable[[RowSampler], float]) -> mx.array:
        """Return a number for each position, (N, 1), or (1, 1) where all positions are of one row."""
        values = np.asarray([[read(r)] for r in self.rows])
        values = values.astype(np.float32 if values.dtype.kind == "f" else values.dtype)
        return mx.array(values if self._index is None or len(self.rows) == 1 else values[self._index])

    def table(self, read: Callable[[RowSampler], mx.array]) -> mx.array:
        """Return `read(row)`, an array (V,), of the row that owns each position, stacked to (N, V). Where all positions belong to one row
        the result is (1, V), which broadcasts."""
        if len(self.rows) == 1:
            return read(self.rows[0])[None]
        found = mx.stack([read(r) for r in self.rows])
        return found if self._index is None else found[mx.array(self._index)]


def allowed(masks: Sequence[Bits | None], vocab_size: int) -> mx.array:
    """Return a mask (N, V) bool of the allowed tokens at each position."""
    everything = np.full(num_words(vocab_size), 0xFFFFFFFF, np.uint32)
    return unpack(mx.array(np.stack([everything if m is None else m for m in masks])), vocab_size)


def _penalize(
    logits: mx.array, used: Positioned, drafts: DraftedBefore | None, ids: mx.array | None = None
) -> mx.array:
    vocab = logits.shape[1]

    def of_ids(values: mx.array) -> mx.array:
        return values if ids is None else values[ids]

    if any(r.counts is not None for r in used.rows):
        zero, nothing = mx.zeros((vocab,)), mx.zeros((vocab,), mx.bool_)
        counts = used.table(lambda r: zero if r.counts is None else of_ids(r.counts))
        counts = counts if drafts is None else drafts.added_to(counts, logits.shape[0])
        seen = used.table(lambda r: nothing if r.prompt_seen is None else of_ids(r.prompt_seen))
        logits = filters.penalized(
            logits,
            seen | (counts > 0),
            counts,
            used.column(lambda r: 1.0 if r.counts is None else float(r.params.repetition_penalty)),
            used.column(lambda r: 0.0 if r.counts is None else float(r.params.presence_penalty)),
            used.column(lambda r: 0.0 if r.counts is None else float(r.params.frequency_penalty)),
        )
    if any(r.bias is not None for r in used.rows):
        none = mx.zeros((vocab,))
        logits = logits + used.table(lambda r: none if r.bias is None else of_ids(r.bias))
    return logits


def _temper(logits: mx.array, used: Positioned) -> mx.array:
    if all(r.is_greedy or r.params.temperature == 1.0 for r in used.rows):
        return logits
    return logits / used.column(lambda r: 1.0 if r.is_greedy else max(float(r.params.temperature), COLDEST))


def _truncate(logits: mx.array, tempered: mx.array, used: Positioned) -> mx.array:
    """Return `tempered` with -inf for every score below the thresholds of top-p and min-p at its position. All tokens tied at a
    threshold stay. logits (N, V): what was tempered, in any float type. Top-p's threshold is computed only for positions that have top-p
    and no top-k."""
    params, vocab = used.params, tempered.shape[1]
    places = [
        i for i, p in enumerate(params) if p.top_p < 1.0 and p.temperature > 0.0 and not 0 < p.top_k < vocab
    ]
    floor: mx.array | None = None
    if places:
        some = len(places) < len(params)
        x, scores = (a[mx.array(places)] if some else a for a in (logits, tempered))
        floor = top_p_floor(x, scores, [float(params[i].top_p) for i in places])
        if some:
            found, floor = floor, mx.full((len(params), 1), -mx.inf)
            floor[mx.array(places)] = found
    if any(p.min_p > 0.0 for p in params):
        logs = used.column(lambda r: math.log(r.params.min_p) if r.params.min_p > 0.0 else -math.inf)
        least = mx.max(tempered, axis=-1, keepdims=True) + logs
        floor = least if floor is None else mx.maximum(floor, least)
    return tempered if floor is None else mx.where(tempered < floor, -mx.inf, tempered)


def spread(scores: mx.array, ids: mx.array, vocab_size: int) -> mx.array:
    """Return logits or scores (N, R) of the tokens ids, (R,) or (N, R), as (N, V), with -inf for all other tokens."""
    everything = mx.full((scores.shape[0], vocab_size), -mx.inf, scores.dtype)
    return mx.put_along_axis(everything, mx.broadcast_to(ids, scores.shape), scores, axis=-1)
