"""Lists of frequent tokens: counted, written, read, found by vocabulary; whatever is wrong with a file, there is a list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxspec.loading import row_lists
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.platform.resources import demo_folder
from tests import tiny_models


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))


def demo() -> Tokenizer:
    return Tokenizer.from_folder(demo_folder("target"))


def test_counting() -> None:
    tokenizer = tiny_models.tokenizer()
    counts = row_lists.count(tokenizer, ["abba", "b"])
    a, b = tokenizer.encode("ab", special=False)
    assert (counts[a], counts[b], counts.sum()) == (2, 3, 5)
    assert row_lists.by_frequency(counts, 95, 2).tolist() == [b, a]
    rest = [i for i in range(95) if i not in (a, b)]  # in the order of merges
    assert row_lists.by_frequency(counts, 95, 95).tolist() == [b, a, *rest]


def test_a_rare_token_of_a_small_sample_does_not_come_before_a_common_merge() -> None:
    """Which the order of merges says to be common, as far as Zipf's law goes."""
    counts = np.zeros(100_000)
    counts[[5, 50, 90_000]] = 600, 400_000, 1
    order = row_lists.by_frequency(counts, 100_000, 100_000).tolist()
    assert order[:2] == [50, 5]
    assert order.index(90_000) > order.index(500)
    counts[90_000] = 40_000
    assert row_lists.by_frequency(counts, 100_000, 3).tolist() == [50, 90_000, 5]


def test_without_a_list_there_is_the_order_of_merges_and_every_added_token() -> None:
    tokenizer = demo()
    added = sorted(tokenizer.added_tokens())
    found = row_lists.most_frequent(tokenizer, 2048, 256)
    assert found.source == "merges"
    assert found.ids.tolist()[: len(added)] == added
    rest = [i for i in range(2048) if i not in added]
    assert found.ids.tolist()[len(added) :] == rest[: 256 - len(added)]
    assert len(row_lists.most_frequent(tokenizer, 2048, 10**6).ids) == 2048
    few = row_lists.most_frequent(tokenizer, 2048, 1).ids
    assert set(added) <= set(few.tolist())  # never without them
    assert max(row_lists.most_frequent(tokenizer, 100, 64).ids) < 100  # nor beyond the model's rows


def test_added_tokens_are_listed_wherever_their_ids_lie() -> None:
    tokenizer = tiny_models.tokenizer()
    assert tokenizer.added_tokens() == {tiny_models.EOS: True}
    assert row_lists.most_frequent(tokenizer, 96, 8).ids.tolist() == [tiny_models.EOS, *range(7)]


def test_own_texts_come_first() -> None:
    tokenizer = demo()
    ids = np.asarray([1900, 1000, 1800])
    row_lists.write(row_lists.own_path(tokenizer), tokenizer, ids)
    found, num_added = row_lists.most_frequent(tokenizer, 2048, 300), len(tokenizer.added_tokens())
    assert found.source == "own texts"
    assert [i for i in found.ids.tolist() if i in (1000, 1800, 1900)] == [1900, 1000, 1800]
    assert found.ids.tolist()[num_added : num_added + 3] == [1900, 1000, 1800]
    assert len(found.ids) == len(set(found.ids.tolist())) == 300
    # of another vocabulary
    assert row_lists.most_frequent(tiny_models.tokenizer(), 96, 8).source == "merges"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}\n",
        b"[]\nx",
        b'{"format": 1, "num": 2}\nnot deflated',
        b'{"format": 9, "num": 0}\n',
        b"\xff\xfe\n",
    ],
)
def test_a_damaged_file_is_passed_over(data: bytes) -> None:
    tokenizer = demo()
    path = row_lists.own_path(tokenizer)
    path.write_bytes(data)
    assert row_lists.most_frequent(tokenizer, 2048, 8).source == "merges"


def test_a_file_that_was_cut_or_names_an_id_twice(tmp_path: Path) -> None:
    tokenizer, path = demo(), row_lists.own_path(demo())
    row_lists.write(path, tokenizer, np.asarray([5, 5, 6]))
    assert row_lists.most_frequent(tokenizer, 2048, 8).source == "merges"
    row_lists.write(path, tokenizer, np.arange(1000))
    assert row_lists.most_frequent(tokenizer, 2048, 8).source == "own texts"
    path.write_bytes(path.read_bytes()[:-40])
    assert row_lists.most_frequent(tokenizer, 2048, 8).source == "merges"


def test_lists_of_the_package_are_whole() -> None:
    for path in sorted(row_lists._PACKAGED.glob("*.ids")):
        vocabulary, ids = row_lists.read(path)
        assert len(vocabulary) == 32
        assert 0 < len(ids) <= 32_768
        assert path.stat().st_size < 100_000
