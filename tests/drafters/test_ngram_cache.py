"""ngram-cache: levels and thresholds in hand-written cases, and drafts against counting everything anew."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.drafters.ngram_cache import LAX, STRICT, CacheRow, NgramCache, pick
from mlxspec.drafters.ngram_table import NgramTable
from mlxspec.errors import ConfigError

TEXT = st.lists(st.integers(0, 3), max_size=40)


def table(*entries: tuple[tuple[int, ...], int, int]) -> NgramTable:
    """A table of (n-gram, token, count)."""
    made = NgramTable()
    for ngram, token, count in entries:
        made.add(ngram, token, count)
    return made


def cache(
    text: list[int], dynamic: NgramTable | None = None, static: NgramTable | None = None, m: int = 8
) -> CacheRow:
    row = CacheRow(m, dynamic, static)
    row.extend(text)
    return row


class TestThresholds:
    @pytest.mark.parametrize(
        ("ngram", "thresholds", "times", "others", "stands"),
        [
            # lax: samples 2, 2, 1, 1; share 66, 50, 50, 50 %
            ((1,), LAX, 1, 0, False),
            ((1,), LAX, 2, 0, True),
            ((1,), LAX, 2, 1, True),
            ((1,), LAX, 3, 2, False),
            ((1, 2), LAX, 1, 0, False),
            ((1, 2), LAX, 1, 1, True),
            ((1, 2), LAX, 2, 3, False),
            ((1, 2, 3), LAX, 1, 0, True),
            ((1, 2, 3), LAX, 2, 3, False),
            ((1, 2, 3, 4), LAX, 1, 0, True),
            ((1, 2, 3, 4), LAX, 1, 1, True),
            # strict: samples 4, 3, 2, 2; share 75, 66, 66, 66 %
            ((1,), STRICT, 3, 0, False),
            ((1,), STRICT, 3, 1, True),
            ((1,), STRICT, 5, 2, False),
            ((1, 2), STRICT, 2, 0, False),
            ((1, 2), STRICT, 2, 1, True),
            ((1, 2), STRICT, 3, 2, False),
            ((1, 2, 3), STRICT, 1, 0, False),
            ((1, 2, 3), STRICT, 2, 1, True),
            ((1, 2, 3, 4), STRICT, 1, 0, False),
            ((1, 2, 3, 4), STRICT, 2, 0, True),
            ((1, 2, 3, 4), STRICT, 3, 2, False),
        ],
    )
    def test_samples_and_share(self, ngram, thresholds, times, others, stands) -> None:  # type: ignore[no-untyped-def]
        entries = [(ngram, 7, times)] + ([(ngram, 8 + i, 1) for i in range(others)])
        choice = pick(table(*entries), [ngram], thresholds, {})
        assert (choice is not None) == stands
        if choice is not None:
            assert choice == (7, (times + 0.5) / (times + others + 1))

    def test_longer_ones_first(self) -> None:
        counts = table(((1, 2, 3), 7, 1), ((2, 3), 8, 9), ((3,), 9, 99))
        ngrams = [(0, 1, 2, 3), (1, 2, 3), (2, 3), (3,)]
        assert pick(counts, ngrams, LAX, {}) == (7, 0.75)
        assert pick(counts, ngrams, STRICT, {}) == (8, 0.95)

    def test_equal_counts_give_the_smaller_id(self) -> None:
        assert pick(table(((1, 2), 9, 3), ((1, 2), 4, 3)), [(1, 2)], LAX, {}) == (4, 0.5)


class TestStaticWeights:
    def test_the_static_level_decides_between_equals(self) -> None:
        counts = table(((1, 2), 4, 3), ((1, 2), 9, 3))
        assert pick(counts, [(1, 2)], LAX, {9: 1}) == (9, 0.5)

    def test_larger_counts_weigh_more(self) -> None:
        counts = table(((1, 2), 4, 3), ((1, 2), 9, 3))
        for known in ({4: 1, 9: 2}, {9: 2, 4: 1}, {5: 99, 9: 2, 4: 1, 6: 99}):
            assert pick(counts, [(1, 2)], LAX, known) == (9, 0.5)

    def test_equal_products_give_the_smaller_id(self) -> None:
        counts = table(((1, 2), 9, 2), ((1, 2), 4, 1))
        assert pick(counts, [(1, 2)], LAX, {9: 1, 4: 1}) == (9, 2.5 / 4)
        assert pick(counts, [(1, 2)], LAX, {9: 1, 4: 2}) is None, "4, which is too rare"

    def test_it_vetoes_what_it_contradicts(self) -> None:
        """The product prefers 9, which is too rare in the row's own text: neither stands."""
        counts = table(((1, 2), 4, 3), ((1, 2), 9, 2))
        assert pick(counts, [(1, 2)], LAX, {}) == (4, 3.5 / 6)
        assert pick(counts, [(1, 2)], LAX, {9: 1}) is None

    def test_a_weight_can_be_outweighed(self) -> None:
        counts = table(((1, 2), 4, 101), ((1, 2), 9, 1))
        assert pick(counts, [(1, 2)], LAX, {9: 1}) == (4, 101.5 / 103)

    def test_one_successor_needs_no_weighing(self) -> None:
        assert pick(table(((1, 2), 4, 2)), [(1, 2)], LAX, {9: 50}) == (4, 2.5 / 3)


class TestLevels:
    def test_the_row_s_own_text_comes_first(self) -> None:
        other = table(((1, 2, 3), 50, 9))
        assert cache([1, 2, 3, 4, 1, 2, 3], dynamic=other).draft(1).tokens == [4]

    def test_dynamic_next(self) -> None:
        dynamic, static = table(((2, 3), 50, 9)), table(((2, 3), 60, 9))
        draft = cache([1, 2, 3], dynamic, static).draft(1)
        assert draft.tokens == [50]
        assert draft.confidences == [0.95]

    def test_static_last_and_only_by_pairs(self) -> None:
        static = table(((2, 3), 60, 2), ((1, 2, 3), 70, 9), ((3,), 80, 9), ((3, 60), 61, 2))
        assert cache([1, 2, 3], table(((2, 3), 50, 1)), static).draft(8).tokens == [60, 61]
        assert cache([3], None, static).draft(8).length == 0
        assert cache([1, 2, 3], None, table(((2, 3), 60, 1))).draft(8).length == 0

    def test_drafts_go_on_over_their_own_tokens(self) -> None:
        assert cache([7, 8, 9, 7, 8, 9]).draft(20).tokens == [7, 8, 9, 7, 8, 9, 7, 8]

    def test_tables_are_only_read(self) -> None:
        dynamic, static = table(((1, 2), 3, 9)), table(((1, 2), 3, 9))
        drafter = NgramCache(8, dynamic, static)
        drafter.begin(0)
        drafter.observe(0, [1, 2, 1, 2, 5, 6], None)
        drafter.close(0)
        assert [len(t) for t in (dynamic, static)] == [1, 1]
        assert dynamic.counts((1, 2)) == static.counts((1, 2)) == {3: 9}

    def test_single_tokens_are_learned(self) -> None:
        """A round that commits one token teaches as much as any other."""
        row = cache([])
        for token in [1, 2, 3, 4, 5, 1, 2]:
            row.extend([token])
        assert row.draft(3).tokens == []
        row.extend([3])
        assert row.draft(3).tokens == [4, 5, 1]

    def test_a_static_table_without_pairs(self) -> None:
        with pytest.raises(ConfigError, match="no pairs"):
            NgramCache(8, None, table(((1,), 2, 3)))


def reference(text: list[int], limit: int, dynamic: list[int], static: list[int]) -> list[int]:
    """The algorithm with nothing kept: every count is taken anew, candidates are searched among all."""

    def spread(source: list[int], ngram: list[int]) -> Counter[int]:
        n = len(ngram)
        return Counter(source[e] for e in range(n, len(source)) if source[e - n : e] == ngram)

    tokens: list[int] = []
    while len(tokens) < limit:
        longer = text + tokens
        known = spread(static, longer[-2:]) if len(longer) > 1 else Counter()

        def level(
            source: list[int], samples: list[int], percents: list[int], longer=longer, known=known
        ) -> int | None:  # type: ignore[no-untyped-def]
            for n in (4, 3, 2, 1):
                found = spread(source, longer[-n:]) if len(longer) >= n else Counter()
                if not found:
                    continue
                best = min(found, key=lambda t: (-found[t] * 100 * known[t] if t in known else -found[t], t))
                total = sum(found.values())
                if total >= samples[n - 1] and 100 * found[best] >= percents[n - 1] * total:
                    return best
            return None

        token = level(text, [2, 2, 1, 1], [66, 50, 50, 50])
        if token is None:
            token = level(dynamic, [4, 3, 2, 2], [75, 66, 66, 66])
        if token is None and known:
            best = min(known, key=lambda t: (-known[t], t))
            token = best if known.total() >= 2 and 100 * known[best] >= 50 * known.total() else None
        if token is None:
            break
        tokens.append(token)
    return tokens


@settings(max_examples=150, deadline=None)
@given(text=TEXT, dynamic=TEXT, static=TEXT, limit=st.integers(1, 9))
def test_like_counting_anew(text: list[int], dynamic: list[int], static: list[int], limit: int) -> None:
    known = NgramTable.of([static], [2])
    row = cache(text, NgramTable.of([dynamic]), known if len(known) else None, m=20)
    assert row.draft(limit).tokens == reference(text, limit, dynamic, static)
