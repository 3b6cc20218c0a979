"""Two vocabularies are the same or the message says where they differ."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import models

from mlxspec.drafters.draft_model import check_vocabularies
from mlxspec.errors import VocabularyError
from mlxspec.loading.tokenizer import Tokenizer


def tokenizer(words: list[str], eos: frozenset[int] = frozenset({0})) -> Tokenizer:
    inner = InnerTokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    return Tokenizer(inner, eos, None)


WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


def test_equal_vocabularies_pass_also_when_one_is_padded() -> None:
    check_vocabularies(tokenizer(WORDS), tokenizer(WORDS), 8, 8)
    check_vocabularies(tokenizer(WORDS), tokenizer(WORDS), 8, 8 + 128)
    check_vocabularies(tokenizer(WORDS), tokenizer(WORDS), 8 + 128, 8)


@pytest.mark.parametrize(("target", "draft"), [(8, 8 + 129), (8 + 129, 8)])
def test_padding_has_its_limit(target: int, draft: int) -> None:
    with pytest.raises(VocabularyError, match=r"137.*8|8.*137"):
        check_vocabularies(tokenizer(WORDS), tokenizer(WORDS), target, draft)


def test_ids_that_differ_are_named_with_both_spellings() -> None:
    other = ["a", "b", "x", "d", "e", "f", "y", "h"]
    with pytest.raises(VocabularyError) as caught:
        check_vocabularies(tokenizer(WORDS), tokenizer(other), 8, 8)
    assert "2 token ids" in str(caught.value)
    assert "2 ('c' / 'x')" in str(caught.value)
    assert "6 ('g' / 'y')" in str(caught.value)


def test_of_many_differences_a_few_are_shown() -> None:
    with pytest.raises(VocabularyError) as caught:
        check_vocabularies(tokenizer(WORDS), tokenizer([*WORDS[1:], "z"]), 8, 8)
    assert "8 token ids" in str(caught.value)
    assert str(caught.value).count(" / ") == 5


@pytest.mark.parametrize("longer", ["target", "draft"])
def test_an_id_that_only_one_knows_differs(longer: str) -> None:
    pair = [tokenizer(WORDS), tokenizer(WORDS[:-1])]
    target, draft = pair if longer == "target" else pair[::-1]
    with pytest.raises(VocabularyError, match=r"7 \("):
        check_vocabularies(target, draft, 8, 8)


def test_a_text_must_be_able_to_end_the_same_way() -> None:
    check_vocabularies(tokenizer(WORDS, frozenset({0, 1})), tokenizer(WORDS, frozenset({1})), 8, 8)
    with pytest.raises(VocabularyError, match="end"):
        check_vocabularies(tokenizer(WORDS, frozenset({0})), tokenizer(WORDS, frozenset({1})), 8, 8)
