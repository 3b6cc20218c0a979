"""Lists of a vocabulary's most frequent tokens: those that are part of the package, those counted from the user's own texts, and where
there is neither, the order of the tokenizer's merges.

A list belongs to a vocabulary, which is known by a digest of a sample of its spellings, and holds ids by falling frequency. A list that
does not fit costs acceptance and nothing else, so nothing here has to be exact. Knows tokenizers and files; knows no model.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.platform import folders

Source = Literal["own texts", "package", "merges"]
_SAMPLED = 509  # every so-manieth ordinary token is part of the digest
_FORMAT = 1
_MOST = 1 << 20  # ids of a list
_AT_ONCE = 1 << 20  # characters
_PACKAGED = Path(__file__).resolve().parent / "lists"


class RowList(NamedTuple):
    """A list of token ids by falling frequency. source: "own texts" or "package" where the list was counted from texts (tokens that
    those lack follow in the order of the merges); "merges" where it is in that order alone."""

    ids: np.ndarray
    source: Source


def digest(tokenizer: Tokenizer) -> str:
    """Return a digest of a vocabulary, 32 hexadecimal digits, by which its lists are found."""
    some = [tokenizer.token_text(i) for i in range(0, tokenizer.num_ordinary, _SAMPLED)]
    described = json.dumps([tokenizer.num_ordinary, some])
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def most_frequent(tokenizer: Tokenizer, num_rows: int, num: int) -> RowList:
    """Return a list of the `num` most frequent token ids of a vocabulary, fewer where it has fewer. All added tokens are included, and
    are first.

    num_rows: number of token ids that the model has (rows of its embedding); higher ids are left out. Added tokens are those that are
    found as they are spelled: special tokens, and the tags of tool calls and of thinking.
    """
    ids, source = _listed(digest(tokenizer))
    added = [i for i in tokenizer.added_tokens() if i < num_rows]
    # a vocabulary's merges come in the order in which its makers' texts needed them
    whole = np.concatenate(
        [np.asarray(added, np.int64), ids, np.arange(min(tokenizer.num_ordinary, num_rows))]
    )
    whole = whole[(whole >= 0) & (whole < num_rows)]
    _, first = np.unique(whole, return_index=True)
    return RowList(whole[np.sort(first)][: max(num, len(added))].astype(np.int32), source)


def count(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """Return how often each token id occurs in the texts: (vocab_size,) int64."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for text in texts:
        for begin in range(0, len(text), _AT_ONCE):
            found = tokenizer.encode(text[begin : begin + _AT_ONCE], special=False)
            counts += np.bincount(np.asarray(found, np.int64), minlength=len(counts))
    return counts


def by_frequency(counts: np.ndarray, num_ordinary: int, most: int) -> np.ndarray:
    """Return up to `most` token ids by falling frequency, equally frequent ones by rising id. counts (ids,): occurrences in sample texts,
    or any multiple of them. The frequency is an equal mix of the token's share of `counts` and a Zipf prior. The prior ranks the first
    `num_ordinary` ids in the order of their merges, from rank 1000 on, because the first merges are mere parts of words."""
    zipf = np.zeros(len(counts))
    zipf[:num_ordinary] = 1.0 / (np.arange(num_ordinary) + 1000.0)
    shares = counts / (counts.sum() or 1) + zipf / zipf.sum()
    return np.argsort(-shares, kind="stable")[:most]


def own_path(tokenizer: Tokenizer) -> Path:
    """Return the path, in the cache folder, of the list counted from the user's own texts."""
    return folders.private_folder("tokens")[0] / f"{digest(tokenizer)}.ids"


def write(path: Path, tokenizer: Tokenizer, ids: np.ndarray) -> None:
    """Write a list of ids, by falling frequency, to a file, completely or not at all. Raises OSError."""
    header = json.dumps({"format": _FORMAT, "vocabulary": digest(tokenizer), "num": len(ids)})
    data = header.encode() + b"\n" + zlib.compress(ids.astype("<u4").tobytes(), 9)
    folders.write_whole(path, data)


def read(path: Path) -> tuple[str, np.ndarray]:
    """Return the digest of the vocabulary and the ids (n,) int64 of a list that `write` wrote. Raises OSError where the file cannot be
    read, ValueError or zlib.error where it is damaged."""
    header, _, data = path.read_bytes().partition(b"\n")
    found = json.loads(header)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError("it is no list of tokens")
    unpacked = zlib.decompressobj()
    ids = np.frombuffer(unpacked.decompress(data, 4 * _MOST), "<u4").astype(np.int64)
    if len(ids) != found.get("num") or len(np.unique(ids)) != len(ids):
        raise ValueError("it is damaged")
    return str(found.get("vocabulary")), ids


def _listed(vocabulary: str) -> tuple[np.ndarray, Source]:
    own = folders.private_folder("tokens")[0] / f"{vocabulary}.ids"
    named: list[tuple[Path, Source]] = [(own, "own texts")]
    named += [(path, "package") for path in sorted(_PACKAGED.glob("*.ids"))]
    for path, source in named:
        with suppress(OSError, ValueError, zlib.error):
            found, ids = read(path)
            if found == vocabulary:
                return ids, source
    return np.zeros(0, np.int64), "merges"
