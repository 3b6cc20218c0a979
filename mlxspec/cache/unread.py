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
    """The commit of a forward whose counts the host has not read."""

    def __init__(self, cache: ModelCache, num_committed: mx.array) -> None:
        """End the cache's transaction and keep the first num_committed (B,) int32 tokens of each row: 1 to width, 0 for a row of width 0.

        Raises CacheError when nothing is pending, before an earlier unread commit is settled, for certain tokens, and where a layer must
        know the counts. The transaction stays open then.
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
        """Give the cache the counts. They may be lower than the device's only if no forward continues from those: an open one must be
        aborted next. Raises CacheError where that has been done, or on a count outside 0..width."""
        if self._is_settled:
            raise CacheError("There is nothing to settle.")
        counts, cache = checked(num_committed, self._rows), self._cache
        cache.lengths = [n + k for n, k in zip(self._before, counts, strict=True)]
        cache.deferred, cache.exact, self._is_settled = Committed.of(self._rows, counts), None, True


def fork_behind(cache: ModelCache, num: mx.array, most: Sequence[int], *, tails: bool = False) -> ModelCache:
    """Return a fork that begins behind tokens that the last forward wrote and that were not committed: `num` (B,) int32 of each row, which
    has not been computed, and at most so many."""
    twin = cache.fork(tails=tails)
    twin.exact, twin.least = mx.array(cache.lengths, mx.int32) + num, list(cache.lengths)
    twin.lengths = [length + more for length, more in zip(cache.lengths, most, strict=True)]
    return twin


def extend(cache: ModelCache, row: int, num: int) -> None:
    """Commit the next `num` tokens of one row: the last forward wrote them, they were not committed, and only forks have written since.
    Raises CacheError where a layer keeps a state in the place of tokens."""
    cache.require_own("extend")
    if cache.has_recurrent:
        raise CacheError("A recurrent state does not hold tokens that were not committed.")
    cache.lengths[row] += num
