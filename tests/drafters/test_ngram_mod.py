"""ngram-mod: sliding look-ups and the rest after poor drafts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.drafters.ngram_mod import MAX_DOUBLINGS, MAX_POOR, REST, ModRow, Quality

TEXT = st.lists(st.integers(0, 2), max_size=40)


def mod(text: list[int], *, n: int = 3, m: int = 8) -> ModRow:
    row = ModRow(n, m)
    row.extend(text)
    return row


def searched(text: list[int], n: int, length: int) -> list[int]:
    """Step by step: what followed the latest earlier occurrence of the last n tokens in the text itself."""
    tokens: list[int] = []
    while len(text) >= n and len(tokens) < length:
        window = (text + tokens)[len(text) + len(tokens) - n :]
        found = [text[i + n] for i in range(len(text) - n) if text[i : i + n] == window]
        if not found:
            break
        tokens.append(found[-1])
    return tokens


class TestDrafts:
    def test_a_repeated_text_is_continued(self) -> None:
        text = list(range(1, 30))
        assert mod([*text, *text[:5]]).draft(8).tokens == text[5:13]

    def test_a_draft_crosses_from_one_place_to_another(self) -> None:
        row = mod([1, 2, 3, 4, 5, 90, 3, 4, 5, 6, 7, 91, 1, 2, 3], n=3)
        assert row.draft(4).tokens == [4, 5, 6, 7], "the continuation of 3 4 5 is the one seen last"

    def test_a_repeating_pattern_is_drafted_at_full_length(self) -> None:
        assert mod([7, 8, 9] * 2).draft(8).tokens == [7, 8, 9, 7, 8, 9, 7, 8]

    def test_no_lag(self) -> None:
        assert mod([5] * 4).draft(8).tokens == [5] * 8

    def test_nothing_without_a_match(self) -> None:
        for text in ([], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 1, 2, 9]):
            assert mod(text).draft(8).length == 0

    def test_token_zero_is_a_token(self) -> None:
        assert mod([0, 0, 0, 5, 0, 0, 0]).draft(1).tokens == [5]
        assert mod([0, 0, 0, 0, 1, 2]).draft(1).length == 0

    @settings(max_examples=200, deadline=None)
    @given(text=TEXT, n=st.integers(1, 4), m=st.integers(1, 9))
    def test_like_a_search(self, text: list[int], n: int, m: int) -> None:
        tokens = mod(text, n=n, m=m).draft(20).tokens
        assert tokens == searched(text, n, m)
        assert len(tokens) in (0, m), "a run that begins never ends"


class TestQuality:
    def test_five_poor_drafts_in_a_row_lead_to_a_rest(self) -> None:
        quality = Quality()
        for i in range(MAX_POOR - 1):
            quality = quality.after(0, 8, 100 + i)
            assert quality == Quality(num_poor=i + 1)
        assert quality.after(0, 8, 200) == Quality(0, 1, 200 + REST)

    def test_a_good_draft_ends_the_streak(self) -> None:
        quality = Quality(num_poor=4, num_rests=3)
        assert quality.after(2, 8, 100) == Quality(), "a quarter is enough"
        assert quality.after(1, 8, 100).num_rests == 4

    def test_rests_double_up_to_a_bound(self) -> None:
        quality, rests = Quality(), []
        for _ in range(MAX_DOUBLINGS + 3):
            for _ in range(MAX_POOR):
                quality = quality.after(0, 8, 0)
            rests.append(quality.resting_until)
        assert rests == [REST << min(i, MAX_DOUBLINGS) for i in range(MAX_DOUBLINGS + 3)]


class TestRest:
    def poor(self) -> ModRow:
        """A row whose every draft failed, MAX_POOR times."""
        row = mod([1, 2, 3, 4, 5, 6, 1, 2, 3])
        for i in range(MAX_POOR):
            assert row.draft(8).length > 0, i
            row.extend([100 + i, 1, 2, 3])
        return row

    def test_it_rests_and_comes_back(self) -> None:
        row = self.poor()
        until = row.quality.resting_until
        # the last draft failed when its first token came; three more came since
        assert until == len(row.history) - 3 + REST
        assert row.draft(8).length == 0
        row.extend([*range(1000, 1000 + until - len(row.history) - 4), 1, 2, 3])
        assert len(row.history) == until - 1
        assert row.draft(8).length == 0
        row.extend([100 + MAX_POOR - 1, 1, 2, 3])
        assert row.draft(1).tokens == [1000 - 900 + MAX_POOR - 1]

    def test_what_came_during_a_rest_is_learned(self) -> None:
        row = self.poor()
        loop = [50, 51, 52, 53]
        row.extend(loop * REST)
        assert row.draft(4).tokens == loop

    def test_a_good_draft_in_between_prevents_it(self) -> None:
        row = mod([1, 2, 3, 4, 5, 6, 1, 2, 3])
        for i in range(4 * MAX_POOR):
            draft = row.draft(8).tokens
            assert isinstance(draft, list)
            row.extend([*draft, 100 + i] if i % MAX_POOR == MAX_POOR - 1 else [100 + i])
            row.extend([1, 2, 3])
        assert row.quality.num_rests == 0

    def test_a_draft_cut_to_the_budget_is_judged_by_what_was_proposed(self) -> None:
        row = mod([1, 2, 3, 4, 5, 6, 1, 2, 3])
        for _ in range(MAX_POOR + 1):
            assert row.draft(2).length == 2
            row.extend([4, 99, 1, 2, 3, 4, 5, 6, 1, 2, 3])  # one of two stood
        assert row.quality == Quality()
