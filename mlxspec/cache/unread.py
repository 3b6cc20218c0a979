"""Commits whose counts only the device knows, so that the next forward can be built before the host has read the last one.

`ModelCache.exact` has the lengths then, and the host's `lengths` are upper bounds. One forward may begin on such a cache, and forks may run
on; nothing else may happen until `settle`. Knows caches; knows no rounds and no drafters.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache, checked
from mlxspec.cache.rollback import Committed
from mlxspec.errors import CacheError


class UnreadCommit:
    """The commit of a forward whose counts of committed tokens are on the device and have not been read by the host."""

    def __init__(self, cache: ModelCache, num_committed: mx.array) -> None:
        """End the cache's transaction and keep the first num_committed (B,) int32 tokens of each row. A count is from 1 to the row's
        width, and 0 for a row of width 0.

        Raises CacheError where no transaction is open, where an earlier unread commit has not been settled, where the forward's tokens
        cannot be rejected (`begin` with certain=True), and where a layer needs the counts on the host. The transaction stays open then.
        """
        rows = cache.pending
        if rows is None:
            raise CacheError("There is nothing to commit.")
        if cache.pending_certain or cache.exact is not None:
            raise CacheError(
                "A forward of certain tokens, or on lengths that are not settled, is committed by numbers."
            )
        if cache.needs_lengths:
            raise CacheError("This cache must know where its rows end: commit by numbers.")
        self._cache, self._rows, self._before = cache, rows, list(cache.lengths)
        self._is_settled = False
        cache.exact = mx.array(cache.lengths, mx.int32) + num_committed
        cache.close(Committed.of(rows, num_committed), rows.widths)

    def settle(self, num_committed: Sequence[int]) -> None:
        """Set the cache's exact lengths from the counts that the host has read. A count may be lower than the device's only where no
        forward is kept that continues from the device's counts: an open forward must be aborted next. Raises CacheError where the commit is
        already settled, and on a count outside 0..width."""
        if self._is_settled:
            raise CacheError("There is nothing to settle.")
        counts, cache = checked(num_committed, self._rows), self._cache
        cache.lengths = [n + k for n, k in zip(self._before, counts, strict=True)]
        cache.deferred, cache.exact, self._is_settled = Committed.of(self._rows, counts), None, True


def fork_behind(cache: ModelCache, num: mx.array, most: Sequence[int], *, tails: bool = False) -> ModelCache:
    """Return a fork that begins after tokens that the last forward wrote but that are not committed. num (B,) int32: the number of these
    tokens in each row, which may not have been computed yet. most: the upper bound of this number for each row. tails: as in
    AttentionLayerCache.fork."""
    twin = cache.fork(tails=tails)
    twin.exact, twin.least = mx.array(cache.lengths, mx.int32) + num, list(cache.lengths)
    twin.lengths = [length + more for length, more in zip(cache.lengths, most, strict=True)]
    return twin


def extend(cache: ModelCache, row: int, num: int) -> None:
    """Commit the next `num` tokens of one row. The last forward of this cache must have written these tokens, and only forks may have
    written since. Raises CacheError where the cache has recurrent layers, as their states do not hold tokens that were not committed."""
    cache.require_own("extend")
    if cache.has_recurrent:
        raise CacheError("A recurrent state does not hold tokens that were not committed.")
    cache.lengths[row] += num
