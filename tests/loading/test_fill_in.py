"""Fill-in-the-middle by vocabulary: which form a tokenizer's tokens make, the prompt of each, and text that spells its tokens."""

from __future__ import annotations

import pytest
from planting import catches
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from mlxspec.errors import ContextOverflowError
from mlxspec.loading.fill_in import FillIn
from mlxspec.loading.tokenizer import Tokenizer

QWEN = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]  # fmt: skip
ROWS = 1 << 20


def byte_level(*names: str, special: bool = False) -> Tokenizer:
    """A token for each byte, then these; Qwen's own are not special."""
    inner = Inner(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return Tokenizer(inner, frozenset(), None)


def sentencepiece(*names: str) -> Tokenizer:
    """A token for each letter, and a space in front of each text, as Code Llama's has it."""
    letters = dict.fromkeys(["<unk>", "▁", "☺", *"abcdef() :\n", *names])
    inner = Inner(models.BPE({c: i for i, c in enumerate(letters)}, [], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.add_special_tokens(list(names))
    return Tokenizer(inner, frozenset(), None)


def shown(form: FillIn, ids: list[int]) -> str:
    """Added tokens as {NAME}."""
    added = form.tokenizer.added_tokens()
    return "".join(
        f"{{{form.tokenizer.token_text(i)}}}" if i in added else form.tokenizer.decode([i]) for i in ids
    )


def form(tokenizer: Tokenizer, rows: int = ROWS) -> FillIn:
    found = FillIn.of(tokenizer, rows)
    assert found is not None
    return found


def test_a_prompt_with_files() -> None:
    found = form(byte_level(*QWEN))
    assert shown(found, found.prompt("a", "b")) == "{<|fim_prefix|>}a{<|fim_suffix|>}b{<|fim_middle|>}"
    told = shown(found, found.prompt("a", "b", [("x.py", "1"), ("y.py", "2\n")]))
    assert told == (
        "{<|repo_name|>}project\n{<|file_sep|>}x.py\n1\n{<|file_sep|>}y.py\n2\n{<|file_sep|>}file\n"
        "{<|fim_prefix|>}a{<|fim_suffix|>}b{<|fim_middle|>}"
    )
    assert set(found.ends) == {found.tokenizer.id_of(name) for name in QWEN}
    given = [found.tokenizer.id_of("a"), "b", found.tokenizer.id_of("<|file_sep|>")]
    assert shown(found, found.prompt([i for i in given if i is not None], "")).startswith(
        "{<|fim_prefix|>}ab{<|file_sep|>}{<|fim_suffix|>}"
    )


@pytest.mark.parametrize(
    "names",
    [
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>"),
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "", "<|file_separator|>"),
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ],
)
def test_other_vocabularies(names: tuple[str, ...]) -> None:
    found = form(byte_level(*filter(None, names), special=True))
    prefix, suffix, middle, project, file = (*names, "", "")[:5]
    lead = f"{{{project}}}project\n" if project else ""
    lead += f"{{{file}}}x\n1\n{{{file}}}file\n" if file else "x\n1\n"
    assert (
        shown(found, found.prompt("a", "b", [("x", "1")])) == f"{lead}{{{prefix}}}a{{{suffix}}}b{{{middle}}}"
    )


def test_no_space_of_the_tokenizers_behind_the_gap() -> None:
    tokenizer = sentencepiece("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    found = form(tokenizer)
    ids = found.prompt("ab", "cd")
    assert [tokenizer.token_text(i) for i in ids] == [
        "▁<PRE>",
        "▁",
        "a",
        "b",
        "▁<SUF>",
        "c",
        "d",
        "▁<MID>",
    ]
    assert tokenizer.id_of("▁<EOT>") in found.ends


@pytest.mark.parametrize("special", [False, True])
@catches(
    "a text's spelling of a token is the token",
    "mlxspec.loading.fill_in:FillIn._ids",
    lambda right: lambda self, text, *more: self.tokenizer.encode(text, special=False),
)
def test_text_that_spells_a_token_stays_text(special: bool) -> None:
    found = form(byte_level(*QWEN, special=special))
    spelled = "a<|fim_middle|>b<|endoftext|><|repo_name|>"
    ids = found.prompt(spelled, spelled, [(spelled, spelled)])
    assert sum(i >= 256 for i in ids) == 3 + 3
    assert shown(found, ids).count(spelled) == 4


def test_vocabularies_without() -> None:
    assert FillIn.of(byte_level("<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>"), ROWS) is None
    tokenizer = byte_level(*QWEN)
    middle = tokenizer.id_of("<|fim_middle|>")
    assert middle is not None
    assert FillIn.of(tokenizer, middle) is None  # it has no row
    assert form(tokenizer, middle + 1).file is None


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    found = form(byte_level(*QWEN))
    assert len(found.prompt("a" * 10, "b" * 10, most=24)) == 23
    for before, behind in (("a" * 11, "b" * 10), ("a" * 50, ""), ("", "b" * 100_000)):
        with pytest.raises(ContextOverflowError):
            found.prompt(before, behind, most=24)
