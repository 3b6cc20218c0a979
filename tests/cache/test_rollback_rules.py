"""What the ways of rollback refuse, and what they hold in bytes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.rollback import (
    TAPE,
    Checkpoint,
    Rollback,
    Snapshots,
    TapeRollback,
    TrailRollback,
    by_tape,
    rollback,
)
from mlxspec.config import ROLLBACKS, EngineConfig
from mlxspec.errors import CacheError, ConfigError
from mlxspec.kernels.flat import FlatRows
from mlxspec.platform import device
from tests import tiny_models
from tests.cache.mixers import AT_ONCE, NEAR, WAYS, Mixer, as_numpy, full_size, is_near, same_state, tiny

pytestmark = pytest.mark.smoke

FULL = 48  # value heads of 27B


def verify(cache: ModelCache, widths: tuple[int, ...], mixer: Mixer, *, certain: bool = False) -> None:
    """Run tokens 0, 1, ... of each row without evaluating anything; leaves the transaction open."""
    flat = mx.array([t % 4 for width in widths for t in range(width)], mx.int32)
    mixer.forward(flat, FlatRows(widths), cache, certain=certain)


@pytest.fixture(params=sorted(WAYS))
def way(request: pytest.FixtureRequest) -> Rollback:
    return WAYS[request.param]


def test_transactions_out_of_order_are_refused_and_change_nothing(way: Rollback) -> None:
    mixer = tiny("float32")
    cache = mixer.make_cache(2, way)
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


@pytest.mark.parametrize("num_states", [2, 3, 5])
def test_snapshots_take_back_as_many_tokens_as_they_keep_states_for(num_states: int) -> None:
    mixer, limit = tiny("float32"), num_states - 1
    cache = mixer.make_cache(2, Snapshots(num_states))
    assert cache.max_rollback == limit
    verify(cache, (8, 1), mixer)
    with pytest.raises(CacheError, match=f"Cannot take back {num_states} tokens: only {num_states} states"):
        cache.commit([8 - num_states, 1])
    cache.commit([8 - limit, 0])  # the transaction is still open
    same_state(cache, [[t % 4 for t in range(8 - limit)], []], mixer)


def test_an_aborted_forward_is_taken_back_whatever_its_width(way: Rollback) -> None:
    mixer = tiny("float32")
    cache = mixer.make_cache(1, way)
    verify(cache, (2,), mixer)
    cache.commit([2])
    verify(cache, (9,), mixer)
    cache.abort()
    same_state(cache, [[0, 1]], mixer)


def test_facts_and_attention_alone_know_no_limit() -> None:
    mixer = tiny("float32")
    cache = mixer.make_cache(1, Snapshots(2))
    verify(cache, (12,), mixer, certain=True)
    cache.commit()
    assert tiny_models.stack("attention").make_cache(1, Snapshots(2)).max_rollback is None
    assert tiny_models.stack("hybrid").make_cache(1).max_rollback is None


def test_caches_of_different_ways_share_snapshots_and_rows() -> None:
    mixer = tiny("float32")
    caches = [mixer.make_cache(1, w) for w in WAYS.values()]
    for cache in caches:
        verify(cache, (3,), mixer)
        cache.commit([2])
    joined = mixer.make_cache(1, Snapshots(4))
    joined.restore(caches[0].snapshot(0))
    for cache in caches[1:]:
        joined.join(cache)
    verify(joined, (2, 0, 1, 2, 2), mixer)
    joined.commit([1, 0, 1, 2, 1])
    same_state(joined, [[0, 1, 0], [0, 1], [0, 1, 0], [0, 1, 0, 1], [0, 1, 0]], mixer)


def test_states_passed_are_held_while_they_are_few_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = tiny("float32")
    size = mixer.make_cache(1).recurrent(0).current.state.nbytes
    monkeypatch.setattr("mlxspec.kernels.gdn_few._PASSED_AT_MOST", 3 * size)
    cache = mixer.make_cache(2, TrailRollback(one_by_one=3))
    held = []
    for widths, kept in (
        ((3, 3), [2, 0]),
        ((4, 4), [1, 3]),
        ((5, 1), [3, 1]),
        ((2, 1), [2, 1]),
        ((3, 3), [3, 3]),
    ):
        verify(cache, widths, mixer)
        cache.commit(kept)
        held.append([x.shape for x in cache.recurrent(0).current.held])
    heads, v_dim, k_dim = cache.recurrent(0).current.state.shape[1:]
    passed = (2, 1, heads, v_dim, k_dim)

    def written(num_rows: int, width: int) -> list[tuple[int, ...]]:
        head = num_rows, heads
        return [(*head, v_dim, width), (*head, width, k_dim), (*head, width + 1, width)]

    one = (1, heads, v_dim, k_dim)
    assert held == [[passed] * 3, written(2, 4), [one, *written(1, 5)], [one] * 3, [passed] * 3]
    cache.flush()
    texts = [[0, 1, 0, 0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 0, 0, 0, 1, 2]]
    for r, tokens in enumerate(texts):
        wanted = as_numpy(mixer.plainly(tuple(tokens))[1][0][0])
        assert is_near(as_numpy(cache.recurrent(0).current.state[r]), wanted, NEAR[mx.float32])


@pytest.mark.parametrize("widths", [(1,), (3,), (4,), (5,), (9,), (9, 2, 5, 1)])
@pytest.mark.parametrize("way", [TAPE, TrailRollback(), TrailRollback(one_by_one=64), AT_ONCE], ids=repr)
def test_no_row_holds_more_than_is_said(way: TapeRollback | TrailRollback, widths: tuple[int, ...]) -> None:
    mixer = tiny("float32")
    cache = mixer.make_cache(len(widths), way)
    verify(cache, widths, mixer)
    cache.commit(list(widths))
    current = cache.recurrent(0).current
    said = len(widths) * way.bytes_for(max(widths), current.state.shape[1:])
    assert sum(x.nbytes for x in current.held) <= said


def test_ways_have_names() -> None:
    ways = TrailRollback() if device.backend() == "cpu" else TAPE, Snapshots(4), Checkpoint()
    assert tuple(rollback(name, 4) for name in ROLLBACKS) == ways
    assert by_tape() == ways[0]
    assert by_tape(exact=True) == rollback("tape", 4, exact=True) == TAPE
    for make in (lambda: rollback("rewind", 4), lambda: Snapshots(1)):
        with pytest.raises(ConfigError):
            make()


@pytest.mark.parametrize(
    "options",
    [
        {"rollback": "rewind"},
        {"rollback": None},
        {"rollback": "snapshots", "num_states": 1},
        {"rollback": "snapshots", "num_states": 3.0},
        {"rollback": "snapshots", "num_states": 10**6},
        {"num_states": 4},
        {"rollback": "checkpoint", "num_states": 4},
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=r"rollback|num_states"):
        EngineConfig(**options)


# ---- bytes, from shapes: nothing is evaluated


def held(way: Rollback, widths: tuple[int, ...], heads: int = FULL) -> int:
    """Bytes of a layer's cache after a verify of these widths."""
    mixer = full_size(heads)
    cache = mixer.make_cache(len(widths), way)
    verify(cache, widths, mixer)
    cache.commit(list(widths))
    return cache.nbytes


def a_token(way: Rollback) -> float:
    """Bytes that one more drafted token holds."""
    return (held(way, (9,)) - held(way, (1,))) / 8


def test_a_tape_holds_a_fortieth_of_what_snapshots_hold() -> None:
    projection = 2 * (
        2 * 16 * 128 + 2 * 48 * 128 + 2 * 48
    )  # q, k, v, z, b, a of the convolution's inputs, bfloat16
    tape = 2 * 16 * 128 + 4 * 48 * 128 + 4 * 48  # k bfloat16, delta and log_g float32
    state = 4 * 48 * 128 * 128
    assert a_token(TAPE) == tape + projection
    assert a_token(Snapshots(64)) == state + projection
    assert a_token(Checkpoint()) == 2 * 16 * 128 + 2 * 48 * 128 + 8 * 48 + projection
    assert 40 * a_token(TAPE) <= a_token(Snapshots(64))
    assert 40 * tape <= state  # also without what both of them hold


def test_snapshots_hold_no_more_states_than_asked_nor_than_the_width_needs() -> None:
    state = 4 * 48 * 128 * 128
    counts = {w: round(held(Snapshots(4), (w,)) / state) for w in (1, 2, 3, 4, 16)}
    assert counts == {1: 2, 2: 3, 3: 4, 4: 4, 16: 4}


def test_bytes_are_those_of_active_rows(way: Rollback) -> None:
    mixer = tiny("bfloat16")
    assert mixer.make_cache(0, way).nbytes == 0
    cache = mixer.make_cache(3, way)
    one = cache.nbytes // 3
    assert one == 4 * 4 * 32 * 32 + 2 * 3 * mixer.config.conv_dim
    verify(cache, (2, 2, 2), mixer)
    cache.commit([1, 2, 2])
    assert cache.nbytes > 3 * one
    cache.select([2, 0])  # applies what was deferred
    assert cache.nbytes == 2 * one


def test_bytes_count_what_a_transaction_keeps_twice(way: Rollback) -> None:
    """Between begin and commit the states before and after are both alive; afterwards one of them is."""
    mixer = tiny("float32")
    cache = mixer.make_cache(1, way)
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
