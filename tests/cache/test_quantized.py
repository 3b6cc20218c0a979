"""Keys and values in 8 and 4 bits through every operation of a cache: what is seen of a token is what quantizing that token alone gives.

Tokens have keys and values by a table, so bits can be compared: no matrix product is involved.
"""

from __future__ import annotations

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.cache import attention
from mlxspec.cache.attention import AttentionLayerCache, Tailed
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import QuantizedLayerCache, attention_cache
from mlxspec.cache.snapshot import Snapshot
from mlxspec.cache.unread import UnreadCommit
from mlxspec.errors import CacheError
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.quantized_kv import QuantizedTokens, token_bytes

HEADS, DIM, VOCAB, MAX_ROWS, MAX_LENGTH = 2, 128, 23, 3, 600
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
BITS = (8, 4)


def table(dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Keys and values (VOCAB, HEADS, DIM) of tokens: some of them large, one all zero."""
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((VOCAB, HEADS, DIM)).astype(np.float32) for _ in range(2))
    keys[3] *= 50
    values[5] = 0
    return mx.array(keys).astype(dtype), mx.array(values).astype(dtype)


def plain(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def wanted(tokens: list[int], dtype: mx.Dtype, bits: int) -> list[np.ndarray]:
    """Codes, scales and biases of keys and of values, each token quantized by itself."""
    found = []
    for of in table(dtype):
        parts = [mx.quantize(of[t], group_size=64, bits=bits) for t in tokens]
        found += [np.stack([plain(p[i]) for p in parts], axis=1) for i in range(3)] if tokens else []
    return found


class Driver:
    """A cache with a layer of each number of bits, and for each row the tokens that were committed."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self.dtype, self.tables = dtype, table(dtype)
        self.cache, self.known = self.fresh(), [[]]

    def fresh(self) -> ModelCache:
        return ModelCache([QuantizedLayerCache(HEADS, DIM, self.dtype, bits, 1) for bits in BITS], 1)

    def forward(
        self, cache: ModelCache, pieces: list[list[int]], known: list[list[int]], *, certain: bool
    ) -> None:
        """Looks at what the forward itself sees, the host's lengths being right or bounds."""
        rows = FlatRows(tuple(map(len, pieces)))
        places = cache.begin(rows, certain=certain)
        ids = mx.array([t for p in pieces for t in p], mx.int32)
        for layer, bits in zip(cache.layers, BITS, strict=True):
            views = layer.append(self.tables[0][ids], self.tables[1][ids], places)
            for r, view in enumerate(views):
                if pieces[r]:
                    self.check(
                        view, [*known[r], *pieces[r]], bits, len(pieces[r]), exact=places.exact is None
                    )

    def check(self, view: tuple | Tailed, tokens: list[int], bits: int, width: int, *, exact: bool) -> None:
        pairs = [view[:2], view[2:4]] if isinstance(view, Tailed) else [view]
        assert all(isinstance(x, QuantizedTokens) and x.bits == bits for pair in pairs for x in pair)
        parts = [
            np.concatenate([plain(pair[i].parts[j])[0] for pair in pairs], axis=1)
            for i in range(2)
            for j in range(3)
        ]
        if (
            not exact
        ):  # behind unread commits the tokens stand where the device says; what is behind is masked
            at = len(tokens)
            parts = [p[:, :at] for p in parts]
            assert not isinstance(view, Tailed)
        for got, right in zip(parts, wanted(tokens, self.dtype, bits), strict=True):
            assert np.array_equal(got, right)

    # ---- operations

    def draft(self, pieces: list[list[int]], kept: list[int], aborted: bool) -> None:
        pieces = self.fit(pieces)
        if not any(pieces):
            return
        self.forward(self.cache, pieces, self.known, certain=False)
        if aborted:
            self.cache.abort()
            return
        kept = [kept[r % len(kept)] % (len(p) + 1) for r, p in enumerate(pieces)]
        self.cache.commit(kept)
        self.known = [k + p[:n] for k, p, n in zip(self.known, pieces, kept, strict=True)]

    def unread(self, pieces: list[list[int]], kept: list[int], more: list[int]) -> None:
        """A commit whose counts only the device knows, a round behind it, then the host reads."""
        pieces = self.fit([p or [1] for p in pieces])
        if not all(pieces):
            return
        self.forward(self.cache, pieces, self.known, certain=False)
        kept = [1 + kept[r % len(kept)] % len(p) for r, p in enumerate(pieces)]
        unread = UnreadCommit(self.cache, mx.array(kept, mx.int32) + 0)
        self.known = [k + p[:n] for k, p, n in zip(self.known, pieces, kept, strict=True)]
        more = [[more[r % len(more)]] for r in range(len(self.known))]
        self.forward(self.cache, more, self.known, certain=False)
        unread.settle(kept)
        self.cache.commit()
        self.known = [k + m for k, m in zip(self.known, more, strict=True)]

    def certain(self, pieces: list[list[int]], repeat: int) -> None:
        pieces = self.fit([p * repeat for p in pieces])
        if any(pieces):
            self.forward(self.cache, pieces, self.known, certain=True)
            self.cache.commit()
            self.known = [k + p for k, p in zip(self.known, pieces, strict=True)]

    def fork(self, steps: list[int], tails: bool) -> None:
        """What is run ahead is seen there, and leaves no trace."""
        fork, known = self.cache.fork(tails=tails), [list(k) for k in self.known]
        for token in steps:
            pieces = [[token] for _ in known]
            self.forward(fork, pieces, known, certain=True)
            fork.commit()
            known = [[*k, token] for k in known]

    def join(self, tokens: list[int]) -> None:
        if len(self.known) < MAX_ROWS:
            other = self.fresh()
            if tokens:
                self.forward(other, [tokens], [[]], certain=True)
                other.commit()
            self.cache.join(other)
            self.known.append(list(tokens))

    def select(self, order: list[int]) -> None:
        rows = list(dict.fromkeys(r % len(self.known) for r in order))
        self.cache.select(rows)
        self.known = [self.known[r] for r in rows]

    def pieces(self, row: int, cut: int) -> None:
        """A text in two pieces, as edges of the prefix cache are, becomes a row."""
        row %= len(self.known)
        cut %= len(self.known[row]) + 1
        whole, end = self.cache.snapshot(row), self.cache.snapshot(row, cut)
        assert end.start == cut
        begin = [tuple(x[:, :, :cut] for x in kv) for kv in whole.segments[0]]
        other = self.fresh()
        other.restore(Snapshot(whole.length, [begin, *end.segments], []))
        assert whole.nbytes == len(self.known[row]) * sum(
            2 * HEADS * token_bytes(DIM, self.dtype, bits) for bits in BITS
        )
        if len(self.known) < MAX_ROWS:
            self.cache.join(other)
            self.known.append(list(self.known[row]))

    def fit(self, pieces: list[list[int]]) -> list[list[int]]:
        return [
            (pieces[r] if r < len(pieces) else [])[: MAX_LENGTH - len(known)]
            for r, known in enumerate(self.known)
        ]

    def look(self) -> None:
        """At what each row holds."""
        for layer, bits in zip(self.cache.layers, BITS, strict=True):
            for r, tokens in enumerate(self.known):
                if tokens:
                    self.check(layer.view(r, len(tokens)), tokens, bits, 0, exact=True)


tokens = st.integers(0, VOCAB - 1)
piece = st.lists(tokens, max_size=6)
several = st.lists(piece, min_size=1, max_size=MAX_ROWS)
numbers = st.lists(st.integers(0, 6), min_size=1, max_size=MAX_ROWS)
operation = st.one_of(
    st.tuples(st.just("draft"), several, numbers, st.booleans()),
    st.tuples(st.just("draft"), several, numbers, st.just(False)),
    st.tuples(st.just("unread"), several, numbers, st.lists(tokens, min_size=1, max_size=3)),
    st.tuples(
        st.just("certain"), several, st.sampled_from([1, 3, 50])
    ),  # buffers grow in steps of 256 tokens
    st.tuples(st.just("fork"), st.lists(tokens, min_size=1, max_size=4), st.booleans()),
    st.tuples(st.just("join"), piece),
    st.tuples(st.just("select"), st.lists(st.integers(0, 2), min_size=1, max_size=3)),
    st.tuples(st.just("pieces"), st.integers(0, 2), st.integers(0, MAX_LENGTH)),
)


def play(dtype: mx.Dtype, script: list[tuple]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_WORTH_A_TAIL", 0)
        driver = Driver(dtype)
        for name, *arguments in script:
            getattr(driver, name)(*arguments)
        driver.look()


def _settings(num: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=num, deadline=None, derandomize=True, suppress_health_check=checks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@_settings(20)
@given(script=st.lists(operation, min_size=2, max_size=8))
def test_a_forward_sees_each_committed_token_quantized_by_itself(
    dtype: mx.Dtype, script: list[tuple]
) -> None:
    play(dtype, script)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@_settings(100)
@given(script=st.lists(operation, min_size=2, max_size=14))
def test_the_same_for_many_more_sequences(dtype: mx.Dtype, script: list[tuple]) -> None:
    play(dtype, script)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_bytes(dtype: mx.Dtype, bits: int) -> None:
    """Of a token in a snapshot, and of a row, which is at most what was said."""
    layer = attention_cache(HEADS, DIM, dtype, 1, bits)
    assert layer.snapshot_bytes == 2 * HEADS * token_bytes(DIM, dtype, bits)
    cache = ModelCache([layer], 1)
    for width in (100, 3, 400, 1):
        rows = FlatRows((width,))
        places = cache.begin(rows, certain=True)
        layer.append(*(mx.zeros((width, HEADS, DIM), dtype) for _ in range(2)), places)
        cache.commit()
    assert layer.snapshot_bytes * 504 <= sum(x.nbytes for x in layer.arrays) <= layer.bytes_for(504, 400)


@pytest.mark.parametrize("widths", [(1, 255), (17, 100), (400,)])
def test_a_row_takes_no_more_bytes_than_was_said_at_any_length(widths: tuple[int, ...]) -> None:
    """Growth by an eighth is no whole number of steps: the bound must be rounded up as the buffers are."""
    layer = attention_cache(1, DIM, mx.float16, 1)
    cache = ModelCache([layer], 1)
    while cache.lengths[0] < 5000:
        for width in widths:
            places = cache.begin(FlatRows((width,)), certain=True)
            layer.append(*(mx.zeros((width, 1, DIM), mx.float16) for _ in range(2)), places)
            cache.commit()
            length = cache.lengths[0]
            assert sum(x.nbytes for x in layer.arrays) <= layer.bytes_for(length, max(widths)), length


def test_what_cannot_be_kept_in_groups_is_refused() -> None:
    for dim, bits in ((80, 8), (32, 4), (64, 3), (64, 16)):
        with pytest.raises(CacheError, match="cannot be kept"):
            QuantizedLayerCache(HEADS, dim, mx.float32, bits)
    assert type(attention_cache(HEADS, 80, mx.float32, 1)) is AttentionLayerCache
