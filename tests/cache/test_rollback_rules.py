"""Transactions that rollback refuses, and the bytes that a tape holds."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.places import Places
from mlxspec.cache.rollback import tape_bytes
from mlxspec.config import EngineConfig
from mlxspec.errors import CacheError, ConfigError
from mlxspec.kernels.flat import FlatRows
from tests.cache.mixers import Mixer, full_size, same_state, tiny

pytestmark = pytest.mark.smoke

FULL = 48  # value heads of 27B


def verify(cache: ModelCache, widths: tuple[int, ...], mixer: Mixer, *, certain: bool = False) -> None:
    """Run tokens 0, 1, ... of each row without evaluating anything; leaves the transaction open."""
    flat = mx.array([t % 4 for width in widths for t in range(width)], mx.int32)
    mixer.forward(flat, FlatRows(widths), cache, certain=certain)


def test_transactions_out_of_order_are_refused_and_change_nothing() -> None:
    mixer = tiny("float32")
    cache = mixer.make_cache(2)
    verify(cache, (3, 2), mixer)
    for kept in ([4, 1], [-1, 1], [1], [2, 3]):
        with pytest.raises(CacheError, match="Cannot keep"):
            cache.commit(kept)
    for forbidden in (lambda: cache.snapshot(0), cache.fork, cache.flush, lambda: cache.select([1])):
        with pytest.raises(CacheError, match="commit or abort first"):
            forbidden()
    cache.commit([2, 1])
    with pytest.raises(CacheError, match="nothing to commit"):
        cache.commit([1, 1])
    same_state(cache, [[0, 1], [0]], mixer)


def test_an_aborted_forward_is_taken_back_whatever_its_width() -> None:
    mixer = tiny("float32")
    cache = mixer.make_cache(1)
    verify(cache, (2,), mixer)
    cache.commit([2])
    verify(cache, (9,), mixer)
    cache.abort()
    same_state(cache, [[0, 1]], mixer)


@pytest.mark.parametrize("widths", [(1,), (3,), (4,), (5,), (9,), (9, 2, 5, 1)])
def test_no_row_holds_more_than_is_said(widths: tuple[int, ...]) -> None:
    mixer = tiny("float32")
    cache = mixer.make_cache(len(widths))
    verify(cache, widths, mixer)
    cache.commit(list(widths))
    current = cache.recurrent(0).current
    said = len(widths) * tape_bytes(max(widths), current.state.shape[1:])
    assert current.tape is not None
    assert sum(x.nbytes for x in current.tape) <= said


@pytest.mark.parametrize("name", ["rollback", "num_states"])
def test_there_is_one_rollback_and_no_option_for_it(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: 4})


# ---- bytes, from shapes: nothing is evaluated


def held(width: int) -> int:
    """Bytes of a layer's cache after a verify of that width."""
    mixer = full_size(FULL)
    cache = mixer.make_cache(1)
    verify(cache, (width,), mixer)
    cache.commit([width])
    return cache.nbytes


def test_a_token_of_the_tape_takes_a_fortieth_of_a_state() -> None:
    # q, k, v, z, b, a of the convolution's inputs, bfloat16
    projection = 2 * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48)
    tape = 2 * 16 * 128 + 4 * 48 * 128 + 4 * 48  # k bfloat16, delta and log_g float32
    state = 4 * 48 * 128 * 128
    assert (held(9) - held(1)) / 8 == tape + projection
    assert 40 * (tape + projection) <= state + projection


def test_bytes_are_those_of_active_rows() -> None:
    mixer = tiny("bfloat16")
    assert mixer.make_cache(0).nbytes == 0
    cache = mixer.make_cache(3)
    one = cache.nbytes // 3
    assert one == 4 * 4 * 32 * 32 + 2 * 3 * mixer.config.conv_dim
    verify(cache, (2, 2, 2), mixer)
    cache.commit([1, 2, 2])
    assert cache.nbytes > 3 * one
    cache.select([2, 0])  # applies what was deferred
    assert cache.nbytes == 2 * one


def test_bytes_count_what_a_transaction_keeps_twice() -> None:
    """Between begin and commit the states before and after are both alive; afterwards one of them is."""
    mixer = tiny("float32")
    cache = mixer.make_cache(1)
    verify(cache, (3,), mixer)
    cache.commit([2])
    before = cache.nbytes
    verify(cache, (3,), mixer)
    assert cache.nbytes == 2 * before
    cache.commit([1])
    assert cache.nbytes == before
    fork = cache.fork()
    assert fork.nbytes == before
    cache.flush()
    assert cache.nbytes < before


def test_ends_of_rows_are_the_sums_of_their_masks() -> None:
    """Where only the device knows how long rows are."""
    places = Places(FlatRows((3, 1)), [7, 4], mx.array([5, 2], mx.int32))
    for row, mask in enumerate(places.masks):
        ends = places.ends(row)
        assert mask is not None
        assert ends is not None
        assert ends.tolist() == mask.astype(mx.int32).sum(axis=1).tolist()


@pytest.mark.parametrize("widths", [(3,), (3, 1, 2)])
def test_rotary_positions_behind_unread_rounds_are_those_of_the_true_lengths(widths: tuple[int, ...]) -> None:
    """Behind images, too, whose rows have positions that are not their tokens' indices."""
    rows, bounds, lengths = FlatRows(widths), [9, 7, 8][: len(widths)], [6, 7, 5][: len(widths)]
    for shifts in (None, [0, -4, 11][: len(widths)], [5, 0, 0][: len(widths)]):
        unread = Places(rows, bounds, mx.array(lengths, mx.int32), shifts)
        known = Places(rows, lengths, None, shifts)
        assert unread.positions.tolist() == known.positions.tolist()
        assert unread.turns.astype(mx.float32).tolist() == known.turns.tolist()
