"""Drafting with a block drafter: DFlash, DFlash2 or DSpark. A whole draft is one forward, so its cost hardly depends on its length.

Each known token's context cell is made of what the target's chosen layers gave out for it, so the newest token has none: it is the
block's first. Cells are of committed tokens only and blocks are not kept, so nothing is ever rolled back. A row that takes shorter
drafts gets a shorter block. Behind an unread round cells are made of all its places, and a block sees those of accepted tokens. Knows rows
and queues by model_based.py; the network is models/dflash.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN
from mlxspec.drafters.base import Ask, Draft, Needs, Unread
from mlxspec.drafters.behind_unread import BehindUnread
from mlxspec.drafters.model_based import DraftStep
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Output
from mlxspec.models.dflash import DFlash
from mlxspec.models.head_rows import HeadRows
from mlxspec.platform import device
from mlxspec.sampling.noise import Positions, Shifted
from mlxspec.sampling.sampler import OF_A_DRAW, BatchSampler, Drawn
from mlxspec.sampling.truncate import highest


class DFlashDrafter(BehindUnread):
    """A drafter that drafts blocks with a DFlash model. Its cache has one context cell for each known token but the newest. max_draft:
    tokens of a whole block."""

    name = "dflash"
    skips = 1  # a token comes with what was given out for the one before it
    drafts_at_once = True
    sees_images = True  # in what the target's layers gave out
    turns_by_axes = False

    def __init__(
        self,
        model: DFlash,
        max_context: int,
        head_rows: HeadRows | None = None,
        *,
        kv_bits: int = PLAIN,
    ) -> None:
        """Draft with `model`. head_rows: the rows of the target's language-model head to score, None for all; not for models that choose
        tokens in order. Raises ConfigError as ModelDrafter does."""
        super().__init__(model, min(max_context, model.config.text.max_context), head_rows, kv_bits=kv_bits)
        self.needs = Needs(layers=model.config.layer_ids)
        self.max_draft = model.config.num_drafts

    def _forward(self, step: DraftStep) -> Output:
        """Compute context cells from the outputs of the target's layers and return the model's output. Token ids are not used."""
        if step.hidden is None:
            raise ValueError("a block drafter needs what the target's layers gave out for every token")
        return self.model.remember(step.hidden, step.rows, step.cache, certain=step.certain)

    def _draft_behind(
        self,
        fork: ModelCache,
        hidden: mx.array,
        asks: Sequence[Ask],
        sampler: BatchSampler,
        unread: Unread,
    ) -> dict[int, Draft]:
        return self._block(fork, asks, sampler, {a.row: i for i, a in enumerate(asks)}, unread)

    def _draft(self, asks: Sequence[Ask], sampler: BatchSampler, owners: dict[int, int]) -> dict[int, Draft]:
        self._open(asks)
        cache, _ = self._run({a.row: self._rows[a.row].take() for a in asks}, "none")
        return self._block(cache, asks, sampler, owners)

    def _block(
        self,
        cache: ModelCache,
        asks: Sequence[Ask],
        sampler: BatchSampler,
        owners: dict[int, int],
        unread: Unread | None = None,
    ) -> dict[int, Draft]:
        """Return drafts by row number, drafted after the cells of `cache`. unread: the round that follows the histories of all these rows,
        in the order of the cache, None where there is none."""
        c = self.model.config
        asked = {a.row: a for a in asks}
        active = [asked[name] for name in self._order if name in asked]  # in the cache's order
        masks = 0 if c.starts_at_anchor else 1
        widths = tuple(asked[n].limit + masks if n in asked else 0 for n in self._order)
        given = [t for a in active for t in (a.history[-1], *[c.mask_id] * (a.limit + masks - 1))]
        tokens, newest = (
            mx.array(np.asarray(given, np.int32)),
            mx.array([a.history[-1] for a in active], mx.int32),
        )
        if unread is not None:
            newest = unread.newest
            firsts = np.cumsum([0, *(a.limit + masks for a in active)])[:-1]
            tokens[mx.array(firsts.astype(np.int32))] = newest
        out = self.model.block(tokens, FlatRows(widths), cache)
        self.is_warm = self.is_warm and out.is_warm
        hidden = out.hidden
        if masks:
            starts = np.cumsum([0, *(a.limit + 1 for a in active)])
            kept = np.concatenate(
                [np.arange(s + 1, s + 1 + a.limit) for s, a in zip(starts, active, strict=False)]
            )
            hidden = hidden[mx.array(kept.astype(np.int32))]
        if self.model.picks_in_order:
            return self._in_order(active, hidden, newest, sampler, owners, unread)
        return self._all_at_once(active, hidden, sampler, owners, unread)

    def _all_at_once(
        self,
        active: Sequence[Ask],
        hidden: mx.array,
        sampler: BatchSampler,
        owners: dict[int, int],
        unread: Unread | None,
    ) -> dict[int, Draft]:
        """Return drafts by row number whose tokens are chosen at each place independently. hidden (sum of limits, H): hidden states row by
        row."""
        each = [(a, d) for a in active for d in range(a.limit)]
        ids = self.model.ids
        if self.proposals is None:
            logits = self.model.head(hidden)
        else:
            logits, ids = self.proposals.logits(hidden, [a.row for a, _ in each]), self.proposals.ids
        places = [i for i, a in enumerate(active) for _ in range(a.limit)]
        positions = _positions([len(a.history) + d for a, d in each], places, unread)
        logits = self._scored(logits, [a.row for a, _ in each], positions)
        drawn = sampler.draft(logits, [owners[a.row] for a, _ in each], positions, ids)
        # the tokens only: their confidences are read where a limit on them is set
        device.start(drawn.tokens, num_launches=OF_A_DRAW)
        found, start = {}, 0
        for ask in active:
            end = start + ask.limit
            found[ask.row] = Draft(ask.limit, drawn.tokens[start:end], drawn.confidence[start:end])
            start = end
        return found

    def _in_order(
        self,
        active: Sequence[Ask],
        hidden: mx.array,
        before: mx.array,
        sampler: BatchSampler,
        owners: dict[int, int],
        unread: Unread | None,
    ) -> dict[int, Draft]:
        """Return drafts by row number whose tokens are chosen place after place, each given the token drawn before it, for all rows
        together. before (rows,) int32: the token before the first place of each row."""
        logits, candidates = self.model.head(hidden), None
        if self.model.config.top_k:  # of all places together: to find them is the dear part
            candidates, logits = highest(logits, self.model.config.top_k)
        starts = np.cumsum([0, *(a.limit for a in active)])
        drafted: dict[int, list[tuple[Drawn, int, mx.array]]] = {a.row: [] for a in active}
        going = list(range(len(active)))
        depth = 0
        while going:
            places = mx.array([int(starts[i]) + depth for i in going], mx.int32)
            seen, own = hidden[places], logits[places]
            rows = [active[i] for i in going]
            positions = _positions([len(a.history) + depth for a in rows], going, unread)
            followed = self.model.follow(
                seen, own, before, None if candidates is None else candidates[places]
            )
            scored = self._scored(followed, [a.row for a in rows], positions)
            drawn = sampler.draft(scored, [owners[a.row] for a in rows], positions, self.model.ids)
            sure = self.model.sureness(seen, before)
            sure = drawn.confidence if sure is None else sure
            for i, ask in enumerate(rows):
                drafted[ask.row].append((drawn, i, sure))
            device.start(drawn.tokens, num_launches=OF_A_DRAW)
            depth += 1
            left = [i for i, a in enumerate(rows) if a.limit > depth]
            before = drawn.tokens if len(left) == len(rows) else drawn.tokens[mx.array(left, mx.int32)]
            going = [going[i] for i in left]
        return {a.row: _joined(drafted[a.row]) for a in active}

    def _scored(self, logits: mx.array, rows: Sequence[int], positions: Positions) -> mx.array:
        """Return the logits (N, V) to draw from, here unchanged; a subclass may read or change them. rows, positions: the row of each
        logits vector, and its position in that row."""
        return logits


def _positions(known: Sequence[int], places: Sequence[int], unread: Unread | None) -> Positions:
    """Return the positions of the next tokens of some rows. places: indices of these rows in `unread`. known: the positions if no round
    were unread; the tokens that the unread round commits are added."""
    if unread is None:
        return known
    return Shifted(known, unread.num_committed[mx.array(places, mx.int32)], unread.width)


def _joined(steps: Sequence[tuple[Drawn, int, mx.array]]) -> Draft:
    """Return the draft of one row. steps: for each token of the draft, what was drawn for all rows, the row's index among them, and the
    confidences."""

    def of(values: Sequence[tuple[mx.array, int]]) -> mx.array:
        parts = [x[i : i + 1] for x, i in values]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    return Draft(
        len(steps), of([(drawn.tokens, i) for drawn, i, _ in steps]), of([(sure, i) for _, i, sure in steps])
    )
