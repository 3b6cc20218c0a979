"""Samples tokens from logits, for many positions of many requests at once: argmax of scores + keyed Gumbel noise.

Scores are those of scores.py. Many positions are sampled in blocks (blocks.py). Drafters draw here too, with the noise that the target
will have at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlxspec.platform import device
from mlxspec.sampling import survivors
from mlxspec.sampling.bits import Bits
from mlxspec.sampling.blocks import FEW_COPIES, MOST_COPIES, block_size
from mlxspec.sampling.noise import Positions, gumbel_of, keys_of, noisiest, positions_at
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.scores import DraftedBefore, processed, truncated
from mlxspec.sampling.truncate import confidence

# In place of a token, where none was possible. A round that is launched before this one is read embeds it as a row of the vocabulary
NO_TOKEN = -3
OF_A_DRAW = 25  # kernels that Metal launches for one drafted token and its confidence, for `device.start`


class Drawn(NamedTuple):
    """Tokens (N,) that a drafter drew, and their confidences (N,) under its logits after penalties and bias."""

    tokens: mx.array
    confidence: mx.array


class BatchSampler:
    """The samplers of several rows, used for all their positions at once."""

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
        """Return tokens (N,) for logits (N, V), lazily; NO_TOKEN where no token is possible. owners: for each position the index of its
        row. positions: the index in its row of each token to be sampled. drafts: the drafted tokens between a row's final tokens and
        each position; None for none. masks: the allowed tokens at each position."""
        num, size = len(owners), self.block_size(owners, masks)
        if size >= num:
            return self.sample_at_once(logits, owners, positions, drafts, masks)
        parts: list[mx.array] = []
        for start in range(0, num, size):
            device.finish(*parts[-1:])
            some = slice(start, min(start + size, num))
            parts.append(
                self.sample_at_once(
                    logits[some],
                    owners[some],
                    positions_at(positions, range(some.start, some.stop)),
                    None if drafts is None else drafts[some],
                    None if masks is None else masks[some],
                )
            )
        return mx.concatenate(parts)

    def block_size(self, owners: Sequence[int], masks: Sequence[Bits | None] | None) -> int:
        """Return how many positions of these owners are sampled at a time."""
        rows = [self.rows[o] for o in set(owners)]
        is_drawn = any(not r.is_greedy for r in rows)
        is_processed = masks is not None or any(
            r.counts is not None or r.params.top_n_sigma > 0.0 for r in rows
        )
        shares = any(r.params.has_filters or (r.params.top_p < 1.0 and not r.params.top_k) for r in rows)
        copies = MOST_COPIES if is_processed or (is_drawn and shares) else FEW_COPIES if is_drawn else 0
        return block_size(len(owners), self.vocab_size, copies)

    def sample_at_once(
        self,
        logits: mx.array,
        owners: Sequence[int],
        positions: Positions,
        drafts: DraftedBefore | None = None,
        masks: Sequence[Bits | None] | None = None,
    ) -> mx.array:
        """Sample all positions in one block: the plain twin of `sample`."""
        given = processed(self.rows, logits, owners, drafts, masks)
        chosen = self._drawn(given, owners, positions)
        is_plain = given is logits  # nothing is forbidden, so something is left
        return chosen if is_plain else possible(given, chosen)

    def _drawn(
        self, logits: mx.array, owners: Sequence[int], positions: Positions, ids: mx.array | None = None
    ) -> mx.array:
        """Draw tokens (N,) from `processed` logits: each position from top-k's survivors or from all tokens, as it would be drawn alone."""
        if all(self.rows[o].is_greedy for o in set(owners)):
            return _likeliest(logits, ids)
        params, parts, order = [self.rows[o].params for o in owners], list[mx.array](), list[int]()
        has_survivors = [survivors.has_survivors(p, logits.shape[1]) for p in params]
        for kind in dict.fromkeys(has_survivors):
            places = [i for i, found in enumerate(has_survivors) if found == kind]
            is_all = len(places) == len(owners)
            some = logits if is_all else logits[mx.array(places)]
            own = owners if is_all else [owners[i] for i in places]
            at = positions if is_all else positions_at(positions, places)
            if kind:
                keys, noisy = self._noise(own, at)
                asked = survivors.cuts([params[i] for i in places], logits.shape[1])
                parts.append(survivors.draw(some, asked, keys, noisy, self.vocab_size, ids))
            else:
                parts.append(self.choose(truncated(self.rows, some, own, at), own, at, ids))
            order += places
        if len(parts) == 1:
            return parts[0]
        return mx.concatenate(parts)[mx.array(sorted(range(len(order)), key=order.__getitem__))]

    def scores(
        self,
        logits: mx.array,
        owners: Sequence[int],
        positions: Positions | None = None,
        drafts: DraftedBefore | None = None,
        masks: Sequence[Bits | None] | None = None,
    ) -> mx.array:
        """Return, (N, V) float32, the logits of the distributions that `choose` draws from. Those of a greedy row have temperature 1.
        positions: see `sample`; XTC needs them."""
        return truncated(self.rows, processed(self.rows, logits, owners, drafts, masks), owners, positions)

    def choose(
        self,
        scores: mx.array,
        owners: Sequence[int],
        positions: Positions,
        ids: mx.array | None = None,
    ) -> mx.array:
        """Draw tokens (N,) from `scores`. ids (R,): scores are (N, R), of these tokens; each has the noise that it has among all tokens."""
        keys, noisy = self._noise(owners, positions)
        if ids is None and noisy is None:
            return noisiest(scores, keys).view(mx.int32)
        noise = gumbel_of(keys, self.vocab_size)
        if ids is not None:
            noise = noise[:, ids]
        return _likeliest(scores + (noise if noisy is None else mx.where(noisy, noise, 0.0)), ids)

    def draft(
        self, logits: mx.array, owners: Sequence[int], positions: Positions, ids: mx.array | None = None
    ) -> Drawn:
        """Draw the tokens that a drafter proposes, with the noise that the target will use at these positions. ids (R,) int32, all
        different: the tokens that logits (N, R) belong to; all other tokens are impossible. None: logits are (N, V). A token keeps the
        noise, penalties and bias that it has among all V tokens, so the result is that of `spread` logits."""
        given = processed(self.rows, logits, owners, ids=ids)
        return Drawn(self._drawn(given, owners, positions, ids), confidence(given))

    def _noise(self, owners: Sequence[int], positions: Positions) -> tuple[mx.array, mx.array | None]:
        """Return the keys (N, 2) of the positions' noise, and which positions have noise, (N, 1) bool; None: all."""
        used = [self.rows[o] for o in owners]
        keys = keys_of([r.seed for r in used], positions)
        return keys, mx.array([[not r.is_greedy] for r in used]) if any(r.is_greedy for r in used) else None

    @property
    def needs_drafts(self) -> bool:
        """Return whether `sample` needs the drafted tokens before a position."""
        return any(r.counts is not None for r in self.rows)


@mx.compile
def possible(logits: mx.array, chosen: mx.array) -> mx.array:
    """Return chosen (N,) int32 with NO_TOKEN where logits (N, V) make the token impossible. All filters keep one possible token, so
    there was none. The mark is read with the tokens, so it costs no wait."""
    found = mx.take_along_axis(logits, chosen[:, None], axis=1)[:, 0]
    return mx.where(found > -mx.inf, chosen, NO_TOKEN)


def _likeliest(scores: mx.array, ids: mx.array | None) -> mx.array:
    """Return the likeliest tokens (N,) int32 of scores (N, R), which belong to tokens ids (R,), or of scores (N, V)."""
    places = mx.argmax(scores, axis=-1)
    return places.view(mx.int32) if ids is None else ids[places]  # uint32 places are the same bits
