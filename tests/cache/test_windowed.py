"""Sliding-window caches: whatever happened before, a forward sees the window of the committed tokens, all of it and in order.

Keys here are (token, position), so what a view holds can be read off it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.cache import windowed
from mlxspec.cache.attention import AttentionLayerCache
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.windowed import ALIGNMENT, WindowedLayerCache
from mlxspec.kernels.flat import FlatRows

MAX_ROWS, MAX_LENGTH = 4, 400
WINDOWS = (1, 7, ALIGNMENT, 50)


def fresh(window: int, num_rows: int = 1) -> ModelCache:
    layers = [
        WindowedLayerCache(1, 2, window, mx.float32, num_rows),
        AttentionLayerCache(1, 2, mx.float32, num_rows),
    ]
    return ModelCache(layers, num_rows)


def forward(
    cache: ModelCache, pieces: Sequence[Sequence[int]], known: Sequence[Sequence[int]], *, certain: bool
) -> None:
    """Append pieces to all layers, and look at the views of those rows that have any."""
    rows = FlatRows(tuple(len(p) for p in pieces))
    written = cache.begin(rows, certain=certain)
    places = [range(n, n + len(p)) for n, p in zip(cache.lengths, pieces, strict=True)]
    pairs = [*zip(chain.from_iterable(pieces), chain.from_iterable(places), strict=True)]
    keys = mx.array(np.asarray(pairs, np.float32)[:, None])
    for i, layer in enumerate(cache.layers):
        for r, (k, v) in enumerate(cache.attention(i).append(keys, -keys, written)):
            if pieces[r]:
                whole = [*known[r], *pieces[r]]
                first = layer.first_seen(len(known[r])) if isinstance(layer, WindowedLayerCache) else 0
                wanted = np.asarray([*enumerate(whole)], np.float32)[first:, ::-1]
                np.testing.assert_array_equal(np.asarray(k[0, 0]), wanted)
                np.testing.assert_array_equal(np.asarray(v[0, 0]), -wanted)


class Driver:
    """A cache under test, and for each row the tokens that were committed."""

    def __init__(self, window: int) -> None:
        self.window, self.cache, self.known = window, fresh(window), [[]]

    def draft(self, pieces: list[list[int]], kept: list[int], aborted: bool) -> None:
        if not any(pieces := self._fit(pieces)):
            return
        forward(self.cache, pieces, self.known, certain=False)
        if aborted:
            self.cache.abort()
            return
        kept = [kept[r % len(kept)] % (len(p) + 1) for r, p in enumerate(pieces)]
        self.cache.commit(kept)
        self.known = [k + p[:n] for k, p, n in zip(self.known, pieces, kept, strict=True)]

    def certain(self, pieces: list[list[int]], repeat: int) -> None:
        if not any(pieces := self._fit([p * repeat for p in pieces])):
            return
        forward(self.cache, pieces, self.known, certain=True)
        self.cache.commit()
        self.known = [k + p for k, p in zip(self.known, pieces, strict=True)]

    def fork(self, pieces: list[list[int]], repeat: int, times: int) -> None:
        """Run on, far enough at times for the fork to make room, on a fork or a fork of a fork."""
        fork, known = self.cache.fork(), self.known
        for n in range(times):
            if not any(grown := self._fit([p * repeat for p in pieces], known)):
                break
            forward(fork, grown, known, certain=True)
            fork.commit()
            known = [k + p for k, p in zip(known, grown, strict=True)]
            if n == 1:
                fork = fork.fork()

    def join(self, piece: list[int], repeat: int) -> None:
        if len(self.known) < MAX_ROWS:
            other = fresh(self.window)
            if piece:
                forward(other, [piece * repeat], [[]], certain=True)
                other.commit()
            self.cache.join(other)
            self.known.append(piece * repeat)

    def select(self, order: list[int]) -> None:
        rows = list(dict.fromkeys(r % len(self.known) for r in order))
        self.cache.select(rows)
        self.known = [self.known[r] for r in rows]

    def snapshot(self, row: int, joined: bool) -> None:
        row %= len(self.known)
        snapshot = self.cache.snapshot(row)
        for _ in range(2):
            restored = fresh(self.window)
            restored.restore(snapshot)
            forward(restored.fork(), [[9] * 3], [self.known[row]], certain=True)
        if joined and len(self.known) < MAX_ROWS:
            self.cache.join(restored)
            self.known.append(list(self.known[row]))

    def look(self) -> None:
        assert self.cache.lengths == [len(k) for k in self.known]
        forward(self.cache.fork(), [[5, 6]] * len(self.known), self.known, certain=False)

    def _fit(self, pieces: list[list[int]], known: list[list[int]] | None = None) -> list[list[int]]:
        """A piece for every row, none of which grows too long."""
        known = self.known if known is None else known
        return [
            pieces[r % len(pieces)][: MAX_LENGTH - len(k)] if r < len(pieces) else []
            for r, k in enumerate(known)
        ]


piece = st.lists(st.integers(0, 99), max_size=9)
pieces = st.lists(piece, min_size=1, max_size=MAX_ROWS)
numbers = st.lists(st.integers(0, 9), min_size=1, max_size=MAX_ROWS)
operation = st.one_of(
    st.tuples(st.just("draft"), pieces, numbers, st.booleans()),
    st.tuples(st.just("draft"), pieces, numbers, st.just(False)),
    st.tuples(st.just("certain"), pieces, st.integers(1, 20)),
    st.tuples(st.just("fork"), pieces, st.integers(1, 20), st.integers(1, 3)),
    st.tuples(st.just("join"), piece, st.integers(1, 20)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    st.tuples(st.just("snapshot"), st.integers(0, 3), st.booleans()),
)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("slack", [1, 40])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(script=st.lists(operation, min_size=2, max_size=14))
def test_a_forward_sees_the_window_of_what_was_committed(
    window: int, slack: int, script: list[tuple]
) -> None:
    """With little slack buffers drop tokens all the time; with more they also keep some too many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windowed, "_SLACK", slack)
        driver = Driver(window)
        for name, *arguments in script:
            getattr(driver, name)(*arguments)
            driver.look()


def test_a_buffer_holds_little_more_than_the_window() -> None:
    cache, known, window = fresh(64), [[]], 64
    for n in range(900):
        forward_piece = [n % 90] * (1 + n % 4)
        forward(cache, [forward_piece], known, certain=False)
        cache.commit([1 + n % 2 if n % 4 else 1])
        known[0] += forward_piece[: cache.lengths[0] - len(known[0])]
        mx.eval(cache.arrays)
    assert cache.lengths[0] > 5 * windowed._SLACK  # the buffer was cut as often
    assert cache.layers[0].keys[0].shape[2] <= window + windowed._SLACK + ALIGNMENT + 4


def test_a_wide_prompt_leaves_no_wide_buffer() -> None:
    cache, known = fresh(16), [[1] * 5000]
    forward(cache, known, [[]], certain=True)
    cache.commit()
    for _ in range(300):
        forward(cache, [[7]], known, certain=False)
        cache.commit()
        known[0].append(7)
    assert cache.layers[0].keys[0].shape[2] < 400
