"""A table of counts: n-gram -> which tokens followed it, how often. It can be counted down again, merged, and kept in a
file.

Knows token ids and their vocabulary's size; knows no text, no rows and no drafting.

File, little-endian: magic "mlxngram", u32 version 1, u32 vocabulary size, u32 number of sizes; for each size u32 n,
u64 n-grams, u64 successors; then for each size int32 tokens of its n-grams (sorted), u32 successors of each, int32
tokens and u32 counts of those; at the end u32 CRC-32 of all before. Written beside its place and moved there whole.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxspec.errors import ConfigError

Ngram = tuple[int, ...]
# The most frequent successor (of equal ones the smallest id), how often it came, and how often any did.
Top = tuple[int, int, int]  # (plain, as making a named one costs more than finding it)
MAX_SIZE = 4  # tokens of the longest n-grams

_MAGIC, _VERSION = b"mlxngram", 1
_HEAD, _SIZE, _CHECK = struct.Struct("<8sIII"), struct.Struct("<IQQ"), struct.Struct("<I")
_LOW, _MAX_COUNT = (1 << 32) - 1, (1 << 32) - 1


class _Spread:
    """Successors of an n-gram that has had several."""

    __slots__ = ("best", "counts", "total")

    def __init__(self, counts: dict[int, int]) -> None:
        self.counts = counts
        self.total = sum(counts.values())
        self.best: int | None = None  # None: to be found when asked for

    def add(self, token: int, more: int) -> None:
        count = self.counts[token] = self.counts.get(token, 0) + more
        self.total += more
        if self.best is not None and token != self.best:
            best = self.counts[self.best]
            if count > best or (count == best and token < self.best):
                self.best = token

    def top(self) -> Top:
        if self.best is None:
            self.best = max(self.counts, key=lambda token: (self.counts[token], -token))
        return self.best, self.counts[self.best], self.total


class NgramTable:
    """Counts of n-grams of 1 to 4 tokens. Most have one successor: those are a single number (count << 32 | token) in the dict."""

    def __init__(self) -> None:
        self._next: dict[Ngram, int | _Spread] = {}

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], sizes: Sequence[int] = (1, 2, 3, 4)) -> NgramTable:
        """The table of token sequences, each counted for itself. Raises ConfigError for sizes outside 1 to 4."""
        if not sizes or any(n not in range(1, MAX_SIZE + 1) for n in sizes):
            raise ConfigError(f"Sizes of n-grams must be from 1 to {MAX_SIZE}, not {list(sizes)}.")
        table = cls()
        for tokens in texts:
            for end in range(1, len(tokens)):
                for n in sizes:
                    if n <= end:
                        table.add(tuple(tokens[end - n : end]), tokens[end])
        return table

    def __len__(self) -> int:
        """How many n-grams it knows."""
        return len(self._next)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({len(ngram) for ngram in self._next}))

    def add(self, ngram: Ngram, token: int, count: int = 1) -> None:
        """`token` followed `ngram` `count` more times. O(1)."""
        held = self._next.get(ngram)
        if held is None:
            self._next[ngram] = count << 32 | token
        elif isinstance(held, _Spread):
            held.add(token, count)
        elif held & _LOW == token:
            self._next[ngram] = held + (count << 32)
        else:
            self._next[ngram] = _Spread({held & _LOW: held >> 32, token: count})

    def top(self, ngram: Ngram) -> Top | None:
        """Its most frequent successor, None for an unknown n-gram. O(1)."""
        held = self._next.get(ngram)
        if held is None:
            return None
        if isinstance(held, _Spread):
            return held.top()
        return held & _LOW, held >> 32, held >> 32

    def counts(self, ngram: Ngram) -> Mapping[int, int]:
        """Successor -> count, empty for an unknown n-gram. To be read only."""
        held = self._next.get(ngram)
        if held is None:
            return {}
        return held.counts if isinstance(held, _Spread) else {held & _LOW: held >> 32}

    def merge(self, other: NgramTable) -> None:
        """Add all counts of another table."""
        for ngram in list(other._next):
            for token, count in list(other.counts(ngram).items()):
                self.add(ngram, token, count)

    def save(self, path: str | Path, vocab_size: int) -> None:
        """Write the table. Raises ConfigError if that fails or an id is outside the vocabulary; a file there before stays then."""
        path = Path(path)
        data = self._packed(vocab_size)
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
                temporary = Path(file.name)
                file.write(data)
                file.write(_CHECK.pack(zlib.crc32(data)))
            os.replace(temporary, path)
        except (OSError, ValueError) as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            raise ConfigError(f"The n-gram file {path} cannot be written: {error}.") from error

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> NgramTable:
        """Read what `save` wrote. Raises ConfigError for a missing, damaged or foreign file or one of another vocabulary."""
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(f"The n-gram file {path} cannot be read: {error}.") from error
        try:
            return cls._unpacked(data, vocab_size)
        except _Refused as error:
            raise ConfigError(f"The n-gram file {path} {error}.") from error

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self._next) + 104 * len(self._next)  # a key of 4 tokens and a number

    def _packed(self, vocab_size: int) -> bytes:
        sizes = self.sizes
        heads, bodies = [_HEAD.pack(_MAGIC, _VERSION, vocab_size, len(sizes))], []
        for n in sizes:
            ngrams = sorted(ngram for ngram in self._next if len(ngram) == n)
            spreads = [sorted(self.counts(ngram).items()) for ngram in ngrams]
            pairs = [pair for spread in spreads for pair in spread]
            tokens = {t for ngram in ngrams for t in ngram} | {t for t, _ in pairs}
            if min(tokens) < 0 or max(tokens) >= vocab_size:
                raise ConfigError(
                    f"The n-grams hold token ids outside the vocabulary of {vocab_size}; they are not saved."
                )
            heads.append(_SIZE.pack(n, len(ngrams), len(pairs)))
            bodies += [
                np.array(ngrams, "<i4"),
                np.array([len(spread) for spread in spreads], "<u4"),
                np.array([t for t, _ in pairs], "<i4"),
                np.array([min(c, _MAX_COUNT) for _, c in pairs], "<u4"),
            ]
        return b"".join([*heads, *(body.tobytes() for body in bodies)])

    @classmethod
    def _unpacked(cls, data: bytes, vocab_size: int) -> NgramTable:
        table = cls()
        place = 0
        sizes = _read_head(data, vocab_size)
        place = _HEAD.size + len(sizes) * _SIZE.size

        def take(kind: str, count: int) -> np.ndarray[Any, Any]:
            nonlocal place
            array = np.frombuffer(data, kind, count, place)
            place += array.nbytes
            return array

        for n, num_ngrams, num_pairs in sizes:
            ngrams = take("<i4", n * num_ngrams).reshape(num_ngrams, n)
            widths, tokens, counts = take("<u4", num_ngrams), take("<i4", num_pairs), take("<u4", num_pairs)
            for ids in (ngrams, tokens):
                if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
                    raise _Refused(f"holds token ids outside the vocabulary of {vocab_size}")
            if widths.sum(dtype=np.uint64) != num_pairs or not widths.all() or not counts.all():
                raise _Refused("is damaged: its counts do not fit together")
            table._fill(ngrams, widths, tokens, counts)
        return table

    def _fill(self, ngrams: Any, widths: Any, tokens: Any, counts: Any) -> None:
        """Enter the arrays of one size."""
        ids, numbers = tokens.tolist(), counts.tolist()
        before, start = len(self._next), 0
        for ngram, width in zip(map(tuple, ngrams.tolist()), widths.tolist(), strict=True):
            if width == 1:
                self._next[ngram] = numbers[start] << 32 | ids[start]
            else:
                spread = dict(zip(ids[start : start + width], numbers[start : start + width], strict=True))
                if len(spread) != width:
                    raise _Refused("is damaged: a successor is there twice")
                self._next[ngram] = _Spread(spread)
            start += width
        if len(self._next) - before != len(widths):
            raise _Refused("is damaged: an n-gram is there twice")


class _Refused(Exception):
    """Why a file is not taken; completes the sentence `The n-gram file X ...`."""


def _read_head(data: bytes, vocab_size: int) -> list[tuple[int, int, int]]:
    """(n, number of n-grams, number of successors) of each size, with the file's length and check sum known to be right."""
    if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
        raise _Refused("is not one: it does not begin as those do")
    _, version, vocabulary, num_sizes = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise _Refused(f"has version {version}; this program reads version {_VERSION}")
    if num_sizes > MAX_SIZE or len(data) < _HEAD.size + num_sizes * _SIZE.size + _CHECK.size:
        raise _Refused("is damaged: its head is incomplete")
    sizes = [_SIZE.unpack_from(data, _HEAD.size + i * _SIZE.size) for i in range(num_sizes)]
    body = sum(4 * (n * num_ngrams + num_ngrams + 2 * num_pairs) for n, num_ngrams, num_pairs in sizes)
    if len(data) != _HEAD.size + num_sizes * _SIZE.size + body + _CHECK.size:
        raise _Refused("is damaged: its length does not fit its head")
    if zlib.crc32(data[: -_CHECK.size]) != _CHECK.unpack_from(data, len(data) - _CHECK.size)[0]:
        raise _Refused("is damaged: its check sum is wrong")
    order = [n for n, _, _ in sizes]
    if order != sorted(set(order)) or any(not 1 <= n <= MAX_SIZE for n in order):
        raise _Refused("is damaged: its sizes are out of order")
    if vocabulary != vocab_size:
        raise _Refused(f"was made for a vocabulary of {vocabulary} tokens, but this model has {vocab_size}")
    return sizes
