"""Forks that write no buffers: what is drafted is kept in tails, so that no key or value that stands is copied."""

from __future__ import annotations

from collections.abc import Sequence

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from mlxspec.cache import attention
from mlxspec.cache.attention import AttentionLayerCache, Tailed
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.unread import UnreadCommit
from mlxspec.errors import CacheError
from mlxspec.kernels.attention import attend, attend_tailed
from mlxspec.kernels.flat import FlatRows

HEADS, KV_HEADS, DIM = 4, 2, 64
LONG = (32 << 10) - 100  # tokens; no whole step of a buffer, which would be the projection itself


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails of short rows too."""
    monkeypatch.setattr(attention, "_WORTH_A_TAIL", 0)


def draw(rng: np.random.Generator, *size: int) -> mx.array:
    return mx.array(rng.standard_normal(size, np.float32))


def step(cache: ModelCache, widths: Sequence[int], rng: np.random.Generator) -> list[mx.array]:
    """One forward: what each row's queries find, committed."""
    rows = FlatRows(tuple(widths))
    places = cache.begin(rows)
    q = draw(rng, rows.num_tokens, HEADS, DIM)
    k, v = (draw(rng, rows.num_tokens, KV_HEADS, DIM) for _ in range(2))
    found = []
    for r, view in enumerate(cache.attention(0).append(k, v, places)):
        if not widths[r]:
            continue
        own = q[rows.starts[r] : rows.starts[r + 1]].swapaxes(0, 1)[None]
        if isinstance(view, Tailed):
            found.append(attend_tailed(own, *view[:4], 0.25, view.mask))
        else:
            found.append(attend(own, *view, 0.25, places.masks[r]))
    cache.commit()
    return found


def read(lengths: Sequence[int], seed: int = 0) -> ModelCache:
    cache = ModelCache([AttentionLayerCache(KV_HEADS, DIM, mx.float32, len(lengths))], len(lengths))
    step(cache, lengths, np.random.default_rng(seed))
    mx.eval(cache.arrays)
    return cache


@pytest.mark.parametrize("unread", [False, True])
def test_a_tail_sees_what_a_buffer_would(unread: bool) -> None:
    """Rows of their own lengths, some of them sitting a step out; also while only the device knows how long they are."""
    found = []
    for tails in (False, True):
        cache, rng = read((5, 300, 40)), np.random.default_rng(1)
        if unread:
            rows = FlatRows((3, 3, 3))
            places = cache.begin(rows)
            k, v = (draw(rng, 9, KV_HEADS, DIM) for _ in range(2))
            cache.attention(0).append(k, v, places)
            UnreadCommit(cache, mx.array([1, 3, 2], mx.int32))
        fork = cache.fork(tails=tails)
        found.append(
            [x for widths in ((1, 1, 1), (1, 0, 1), (1, 1, 0), (2, 1, 3)) for x in step(fork, widths, rng)]
        )
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=2e-5, atol=2e-6)


def test_the_parent_goes_on_as_though_nothing_had_been_drafted() -> None:
    found = []
    for drafts in (False, True):
        cache, rng = read((20,)), np.random.default_rng(2)
        if drafts:
            fork = cache.fork(tails=True)
            for _ in range(3):
                mx.eval(step(fork, (1,), np.random.default_rng(9)))
        found.append(step(cache, (2,), rng)[0])
    assert mx.array_equal(*found).item()


def test_a_fork_with_tails_cannot_be_forked() -> None:
    fork = read((5,)).fork(tails=True)
    with pytest.raises(CacheError):
        fork.fork()


def test_short_rows_have_no_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    fork = read((20,)).fork(tails=True)
    fork.begin(FlatRows((1,)))
    assert fork.attention(0)._tails is None


def drafted(num_steps: int, *, tails: bool, length: int = LONG) -> int:
    """Bytes that a draft of so many tokens takes behind a long text, where the device holds what it reads until all is handed over:
    a long product is before it in the queue."""
    cache, rng = read((length,)), np.random.default_rng(3)
    busy = draw(rng, 1500, 1500)
    mx.eval(busy)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    fork = cache.fork(tails=tails)
    for _ in range(3):
        busy = busy @ busy
    mx.async_eval(busy)
    found = [x for _ in range(num_steps) for x in step(fork, (1,), rng)]
    mx.async_eval(found)
    mx.eval(found, busy)
    return mx.get_peak_memory() - before - 6 * busy.nbytes


def test_drafts_behind_a_long_text_copy_no_keys() -> None:
    buffer = LONG * KV_HEADS * DIM * 4
    copied = {tails: [drafted(num, tails=tails) for num in (1, 5)] for tails in (False, True)}
    print(f"\nbytes of drafts of 1 and 5 tokens behind {LONG}, buffers of {buffer}: {copied}")
    per_token = {tails: (five - one) / 4 for tails, (one, five) in copied.items()}
    assert per_token[False] > buffer
    assert per_token[True] < buffer / 2


@pytest.mark.parametrize("waits", [False, True])
def test_a_round_begun_behind_an_unfinished_one_copies_its_keys(waits: bool) -> None:
    """Why the engine holds such a round back where there is much to copy."""
    cache, rng = read((LONG,)), np.random.default_rng(4)
    busy = draw(rng, 1500, 1500)
    mx.eval(busy)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        busy = busy @ busy
    mx.async_eval(busy)
    for _ in range(2):
        found = step(cache, (1,), rng)
        mx.async_eval(found, cache.arrays)
        if waits:
            mx.eval(found, busy)
            mx.synchronize()
    mx.eval(found, busy)
    taken = mx.get_peak_memory() - before - 3 * busy.nbytes
    buffers = sum(x.nbytes for x in cache.arrays)
    print(f"\n{taken} bytes, buffers of {buffers}")
    assert (taken < buffers / 2) == waits
