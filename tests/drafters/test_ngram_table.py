"""Tables of counts: adding, taking back, merging; and their files, whole, damaged and foreign."""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.config import SpecConfig
from mlxspec.drafters.ngram_table import NgramTable
from mlxspec.drafters.ngrams import make_ngram_drafter
from mlxspec.errors import ConfigError

VOCAB = 100
TEXT = [random.Random(1).randrange(12) for _ in range(400)]


def content(table: NgramTable) -> dict[tuple[int, ...], dict[int, int]]:
    return {ngram: dict(table.counts(ngram)) for ngram in table._next}


def same(a: NgramTable, b: NgramTable) -> bool:
    return content(a) == content(b) and all(a.top(ngram) == b.top(ngram) for ngram in a._next)


class TestCounts:
    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 3)), max_size=60))
    def test_like_a_counter(self, changes: list[tuple[int, int, int]]) -> None:
        table, truth = NgramTable(), Counter[tuple[int, int]]()
        for key, token, count in changes:
            table.add((key,), token, count)
            truth[key, token] += count
            for k in range(3):
                expected = {t: c for (kk, t), c in truth.items() if kk == k and c}
                assert dict(table.counts((k,))) == expected
                top = table.top((k,))
                if expected:
                    best = min(expected, key=lambda t: (-expected[t], t))
                    assert top == (best, expected[best], sum(expected.values()))
                else:
                    assert top is None
        assert len(table) == len({k for (k, _), c in truth.items() if c})

    def test_of_texts(self) -> None:
        table = NgramTable.of([[1, 2, 3], [2, 3, 4]], [1, 2])
        assert content(table) == {(1,): {2: 1}, (2,): {3: 2}, (3,): {4: 1}, (1, 2): {3: 1}, (2, 3): {4: 1}}
        assert table.sizes == (1, 2)
        assert NgramTable.of([[1, 2, 3, 4, 5, 6]]).sizes == (1, 2, 3, 4)
        assert len(NgramTable.of([])) == 0

    @pytest.mark.parametrize("sizes", [[], [0], [5], [1, 2, -1]])
    def test_sizes_are_checked(self, sizes: list[int]) -> None:
        with pytest.raises(ConfigError, match="from 1 to 4"):
            NgramTable.of([[1, 2]], sizes)

    def test_merging_is_counting_both(self) -> None:
        one, other = NgramTable.of([TEXT[:150]]), NgramTable.of([TEXT[150:]])
        one.merge(other)
        assert same(one, NgramTable.of([TEXT[:150], TEXT[150:]]))
        assert same(other, NgramTable.of([TEXT[150:]]))
        one.merge(one)
        assert same(one, NgramTable.of([TEXT[:150], TEXT[150:]] * 2))


class TestFiles:
    @pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (2,), (1, 3)])
    def test_what_is_saved_is_loaded(self, tmp_path: Path, sizes: tuple[int, ...]) -> None:
        table, path = NgramTable.of([TEXT], sizes), tmp_path / "counts"
        table.save(path, VOCAB)
        assert same(NgramTable.load(path, VOCAB), table)
        assert [p.name for p in tmp_path.iterdir()] == ["counts"], "nothing is left beside it"

    def test_equal_tables_give_equal_files(self, tmp_path: Path) -> None:
        one, other = NgramTable.of([TEXT, TEXT[:99]]), NgramTable.of([TEXT[:99], TEXT])
        one.save(tmp_path / "one", VOCAB)
        other.save(tmp_path / "other", VOCAB)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()

    def test_an_empty_table(self, tmp_path: Path) -> None:
        NgramTable().save(tmp_path / "x", VOCAB)
        assert len(NgramTable.load(tmp_path / "x", VOCAB)) == 0

    def test_a_loaded_table_grows(self, tmp_path: Path) -> None:
        NgramTable.of([TEXT]).save(tmp_path / "x", VOCAB)
        table = NgramTable.load(tmp_path / "x", VOCAB)
        table.merge(NgramTable.of([TEXT]))
        assert same(table, NgramTable.of([TEXT, TEXT]))

    def test_another_vocabulary(self, tmp_path: Path) -> None:
        NgramTable.of([TEXT]).save(tmp_path / "x", VOCAB)
        with pytest.raises(ConfigError, match=f"vocabulary of {VOCAB} tokens, but this model has 99"):
            NgramTable.load(tmp_path / "x", VOCAB - 1)

    def test_ids_outside_the_vocabulary_are_not_saved(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_text("before")
        for text in ([[1, 2, 100]], [[100, 2, 1]], [[-1, 2]]):
            with pytest.raises(ConfigError, match="outside the vocabulary"):
                NgramTable.of(text).save(path, VOCAB)
        assert path.read_text() == "before"

    @pytest.mark.parametrize("path", ["missing", "missing/x", ".", "a\0b"])
    def test_paths_that_do_not_work(self, tmp_path: Path, path: str) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            NgramTable.load(tmp_path / path, VOCAB)
        if path != "missing":
            with pytest.raises(ConfigError, match="cannot be written"):
                NgramTable.of([TEXT]).save(tmp_path / path, VOCAB)
            assert list(tmp_path.iterdir()) == []

    def test_every_cut_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        NgramTable.of([TEXT[:12]]).save(path, VOCAB)
        data = path.read_bytes()
        for length in range(len(data)):
            path.write_bytes(data[:length])
            with pytest.raises(ConfigError, match=r"The n-gram file .*(is not one|is damaged)"):
                NgramTable.load(path, VOCAB)
        path.write_bytes(data + b"\0")
        with pytest.raises(ConfigError, match="length"):
            NgramTable.load(path, VOCAB)

    def test_every_changed_byte_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        NgramTable.of([TEXT[:12]]).save(path, VOCAB)
        data = path.read_bytes()
        for i in range(len(data)):
            path.write_bytes(data[:i] + bytes([data[i] ^ 0x41]) + data[i + 1 :])
            with pytest.raises(ConfigError, match="The n-gram file"):
                NgramTable.load(path, VOCAB)

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ([[1, 2], [1], [VOCAB], [1]], "outside the vocabulary"),
            ([[-1, 2], [1], [3], [1]], "outside the vocabulary"),
            ([[1, 2], [2], [3], [1]], "do not fit"),
            ([[1, 2], [1], [3], [0]], "do not fit"),
            ([[1, 2, 1, 2], [1, 1], [3, 4], [1, 1]], "n-gram is there twice"),
            ([[1, 2], [2], [3, 3], [1, 1]], "successor is there twice"),
        ],
    )
    def test_well_sealed_nonsense(self, tmp_path: Path, body: list[list[int]], reason: str) -> None:
        """Files with the right check sum whose content cannot be."""
        path = tmp_path / "x"
        path.write_bytes(sealed([2], body, num_ngrams=len(body[1]), num_pairs=len(body[2])))
        with pytest.raises(ConfigError, match=reason):
            NgramTable.load(path, VOCAB)

    def test_well_sealed_heads(self, tmp_path: Path) -> None:
        path, body = tmp_path / "x", [[1, 2], [1], [3], [1]]
        path.write_bytes(sealed([2], body))
        assert content(NgramTable.load(path, VOCAB)) == {(1, 2): {3: 1}}
        for sizes, version, reason in (
            ([2], 2, "version 2"),
            ([5], 1, "damaged"),
            ([2, 2], 1, "damaged"),
            ([2] * 9, 1, "damaged"),
        ):
            path.write_bytes(sealed(sizes, body * len(sizes), version=version))
            with pytest.raises(ConfigError, match=reason):
                NgramTable.load(path, VOCAB)

    def test_a_head_that_promises_more_than_there_is(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_bytes(sealed([2], [[1, 2], [1], [3], [1]], num_ngrams=1 << 62, num_pairs=1 << 62))
        with pytest.raises(ConfigError, match="length"):
            NgramTable.load(path, VOCAB)


def sealed(
    sizes: list[int], body: list[list[int]], *, version: int = 1, num_ngrams: int = 1, num_pairs: int = 1
) -> bytes:
    """A file of this content with a right check sum."""
    data = struct.pack("<8sIII", b"mlxngram", version, VOCAB, len(sizes))
    data += b"".join(struct.pack("<IQQ", n, num_ngrams, num_pairs) for n in sizes)
    data += b"".join(struct.pack(f"<{len(part)}i", *part) for part in body)
    return data + struct.pack("<I", zlib.crc32(data))


def test_files_reach_the_drafter(tmp_path: Path) -> None:
    dynamic, static = NgramTable(), NgramTable()
    dynamic.add((1, 2), 3, 9)
    static.add((2, 3), 4, 9)
    dynamic.save(tmp_path / "dynamic", VOCAB)
    static.save(tmp_path / "static", VOCAB)
    spec = SpecConfig(
        drafters=("ngram-cache",),
        ngram_dynamic=str(tmp_path / "dynamic"),
        ngram_static=str(tmp_path / "static"),
    )
    drafter = make_ngram_drafter("ngram-cache", spec, VOCAB)
    drafter.begin(0)
    drafter.observe(0, [1, 2], None)
    assert drafter._rows[0].draft(8).tokens == [3, 4]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="vocabulary"):
        make_ngram_drafter("ngram-cache", spec, VOCAB + 1)


@pytest.mark.parametrize("name", ["ngram_dynamic", "ngram_static"])
@pytest.mark.parametrize("value", ["", 3, True, b"x", ["x"], float("nan")])
def test_paths_are_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SpecConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ngram_min_hits", "ngram_mod_n"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40, 1.5, True, "3", None, float("nan")])
def test_numbers_are_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SpecConfig(**{name: value})  # type: ignore[arg-type]
