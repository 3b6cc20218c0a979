"""Transactions out of order are refused with a CacheError and change nothing; small promises of caches beside the contract."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.unread import UnreadCommit, fork_behind
from mlxspec.cache.windowed import WindowedLayerCache
from mlxspec.errors import CacheError
from mlxspec.kernels.flat import FlatRows
from tests import tiny_models

pytestmark = pytest.mark.smoke


def forward(
    cache: ModelCache, widths: tuple[int, ...], *, certain: bool = False, stack: str = "hybrid"
) -> mx.array:
    tokens = mx.arange(sum(widths)) % tiny_models.VOCAB
    return tiny_models.stack(stack).forward(tokens, FlatRows(widths), cache, certain=certain).logits


def cache_of(num_rows: int, length: int = 3, stack: str = "hybrid") -> ModelCache:
    cache = tiny_models.stack(stack).make_cache(num_rows)
    forward(cache, (length,) * num_rows, certain=True, stack=stack)
    cache.commit()
    return cache


def test_a_second_commit_is_refused() -> None:
    cache = cache_of(1)
    with pytest.raises(CacheError, match="nothing to commit"):
        cache.commit()
    forward(cache, (2,))
    cache.commit([1])
    with pytest.raises(CacheError, match="nothing to commit"):
        cache.commit([1])
    assert cache.lengths == [4]


def test_a_commit_after_an_abort_is_refused() -> None:
    cache = cache_of(1)
    forward(cache, (2,))
    cache.abort()
    with pytest.raises(CacheError, match="nothing to commit"):
        cache.commit([1])


@pytest.mark.parametrize("kept", [[3, 1], [-1, 1], [1], [1, 1, 1], [2, 2]])
def test_keeping_more_than_there_is_is_refused_and_the_transaction_stays_open(kept: list[int]) -> None:
    cache = cache_of(2)
    forward(cache, (2, 1))
    with pytest.raises(CacheError, match="Cannot keep"):
        cache.commit(kept)
    cache.commit([2, 1])
    assert cache.lengths == [5, 4]


def unread(cache: ModelCache, *kept: int) -> UnreadCommit:
    """Commit what only the device knows."""
    forward(cache, (3,) * cache.num_rows)
    return UnreadCommit(cache, mx.array(kept, mx.int32))


def test_lengths_are_bounds_until_an_unread_commit_is_settled() -> None:
    cache = cache_of(2)
    commit = unread(cache, 1, 3)
    assert cache.lengths == [6, 6]
    assert cache.exact is not None
    assert cache.exact.tolist() == [4, 6]
    commit.settle([1, 3])
    assert (cache.lengths, cache.exact) == ([4, 6], None)


@pytest.mark.parametrize("operation", ["flush", "snapshot", "select", "join"])
def test_nothing_but_a_forward_or_a_fork_goes_on_from_an_unread_commit(operation: str) -> None:
    cache = cache_of(2)
    commit = unread(cache, 1, 3)
    arguments = {"snapshot": (0,), "select": ([0],), "join": (cache_of(1),)}
    with pytest.raises(CacheError, match="settle first"):
        getattr(cache, operation)(*arguments.get(operation, ()))
    commit.settle([1, 3])
    assert cache.lengths == [4, 6]


def test_one_commit_may_be_unread_at_a_time() -> None:
    cache = cache_of(1)
    commit = unread(cache, 2)
    forward(cache, (2,))
    for kept in (None, [1]):
        with pytest.raises(CacheError, match="has not been settled"):
            cache.commit(kept)
    with pytest.raises(CacheError, match="not settled"):
        UnreadCommit(cache, mx.array([1], mx.int32))
    commit.settle([2])
    cache.commit([1])
    assert cache.lengths == [6]
    with pytest.raises(CacheError, match="nothing to settle"):
        commit.settle([1])


@pytest.mark.parametrize("kept", [[4], [-1], [1, 1], []])
def test_settling_on_what_there_is_not_is_refused(kept: list[int]) -> None:
    cache = cache_of(1)
    commit = unread(cache, 2)
    with pytest.raises(CacheError, match="Cannot keep"):
        commit.settle(kept)
    commit.settle([2])


def test_what_must_know_its_numbers_refuses_arrays() -> None:
    one = mx.array([1], mx.int32)
    cache = cache_of(1)
    forward(cache, (2,), certain=True)
    with pytest.raises(CacheError, match="by numbers"):
        UnreadCommit(cache, one)
    cache.commit()
    windowed = ModelCache([WindowedLayerCache(1, 2, 8, mx.float32, 1)], 1)
    windowed.begin(FlatRows((2,)))
    with pytest.raises(CacheError, match="where its rows end"):
        UnreadCommit(windowed, one)
    windowed.commit([2])
    with pytest.raises(CacheError, match="sliding window"):
        fork_behind(windowed, one, [1]).begin(FlatRows((1,)))
    windowed.begin(FlatRows((1,)))


def test_facts_are_committed_whole() -> None:
    cache = cache_of(1)
    forward(cache, (3,), certain=True)
    with pytest.raises(CacheError, match="certain"):
        cache.commit([2])
    cache.commit()
    assert cache.lengths == [6]


@pytest.mark.parametrize("operation", ["fork", "flush", "snapshot", "select", "join", "begin"])
def test_nothing_else_happens_in_the_middle_of_a_transaction(operation: str) -> None:
    cache = cache_of(2)
    forward(cache, (2, 2))
    arguments = {
        "snapshot": (0,),
        "select": ([1],),
        "join": (cache_of(1),),
        "begin": (FlatRows((1, 1)),),
    }.get(operation, ())
    with pytest.raises(CacheError):
        getattr(cache, operation)(*arguments)
    cache.commit([1, 2])
    assert cache.lengths == [4, 5]


def test_a_forward_must_have_the_caches_rows() -> None:
    cache = cache_of(2)
    with pytest.raises(CacheError, match="2"):
        cache.begin(FlatRows((1, 1, 1)))
    assert cache.pending is None


@pytest.mark.parametrize("killer", ["parent's forward", "younger fork", "join", "select"])
@pytest.mark.parametrize("use", ["begin", "fork", "snapshot"])
def test_a_fork_dies_when_somebody_else_may_write(killer: str, use: str) -> None:
    cache = cache_of(2)
    fork = cache.fork()
    forward(fork, (1, 2))
    fork.commit([1, 1])
    if killer == "parent's forward":
        forward(cache, (1, 1))
        cache.commit()
    elif killer == "younger fork":
        cache.fork()
    elif killer == "join":
        cache.join(cache_of(1))
    else:
        cache.select([1])
    arguments = {"begin": (FlatRows((1,) * fork.num_rows),), "snapshot": (0,)}.get(use, ())
    with pytest.raises(CacheError, match="fork"):
        getattr(fork, use)(*arguments)


@pytest.mark.parametrize("operation", ["join", "select"])
def test_a_fork_cannot_move_rows(operation: str) -> None:
    cache = cache_of(2)
    fork = cache.fork()
    arguments = {"join": (cache_of(1),), "select": ([1],)}[operation]
    with pytest.raises(CacheError, match="borrows"):
        getattr(fork, operation)(*arguments)


def test_a_fork_cannot_be_joined_into_another_cache() -> None:
    with pytest.raises(CacheError, match="borrows"):
        cache_of(1).join(cache_of(1).fork())


def test_a_snapshot_goes_into_a_fresh_cache_of_one_row_only() -> None:
    snapshot = cache_of(1).snapshot(0)
    for used in (cache_of(1), tiny_models.stack("hybrid").make_cache(2)):
        with pytest.raises(CacheError, match="fresh"):
            used.restore(snapshot)


def test_a_snapshot_outlives_its_cache_and_counts_its_bytes() -> None:
    cache = cache_of(1, length=5)
    snapshot = cache.snapshot(0)
    before = [np.asarray(x).copy() for x in snapshot.arrays]
    for _ in range(3):
        forward(cache, (4,))
        cache.commit([2])
    mx.eval(cache.arrays)
    after = [np.asarray(x) for x in snapshot.arrays]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert snapshot.nbytes == sum(x.nbytes for x in before)


def test_an_abort_without_a_transaction_is_harmless() -> None:
    cache = cache_of(1)
    cache.abort()
    assert cache.lengths == [3]


def test_a_rejected_draft_costs_no_copy_of_the_buffers() -> None:
    """Committing, aborting and dropping a fork leave one reference to each buffer: the next write is in place."""
    cache = cache_of(1, stack="attention")
    mx.eval(cache.arrays)
    size = [x.nbytes for x in cache.arrays]
    for kept in (0, 2, 4):
        fork = cache.fork()
        mx.eval(forward(fork, (2,), stack="attention"))
        fork.abort()
        mx.eval(forward(cache, (4,), stack="attention"), cache.arrays)
        cache.commit([kept])
    assert cache.lengths == [9]
    assert [x.nbytes for x in cache.arrays] == size
    assert cache.nbytes == sum(size)
    assert cache.fork().nbytes == 0


def test_buffers_grow_without_losing_what_they_hold() -> None:
    model = tiny_models.stack("attention")
    cache, seen = model.make_cache(2), []
    for start in range(0, 600, 50):
        tokens = (mx.arange(100) * 7 + start) % tiny_models.VOCAB
        model.forward(tokens, FlatRows((50, 50)), cache, certain=True)
        cache.commit()
        seen.append(np.asarray(cache.layers[0].keys[1][0, :, start : start + 50]))
    assert cache.layers[0].keys[0].shape[2] >= 600
    assert np.array_equal(np.asarray(cache.layers[0].keys[1][0, :, :600]), np.concatenate(seen, axis=1))
