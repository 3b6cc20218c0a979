"""Long texts have the very ids of the whole text, in pieces; they end where somebody ends them, and hold up no other thread."""

from __future__ import annotations

import random
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from mlxspec.errors import ConfigError, ContextOverflowError
from mlxspec.loading import pieces
from mlxspec.loading.pieces import SLICE, Pieces, UncuttableError
from mlxspec.loading.tokenizer import Tokenizer

DEMO = Path(str(files("mlxspec"))) / "demo" / "target"
# that of Qwen's tokenizers
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "def main(arg):\n    return  arg + 1\n\n\n# 12345 caf\u00e9 \u4f60\u597d isn't it?\n\tx = 'ab  c'\r\n"
] * 4


def _without_margin(right: Any) -> Any:
    def init(self: Pieces, *arguments: Any, **more: Any) -> None:
        right(self, *arguments, **more)
        self._margin = 0

    return init


def words(pattern: str = QWEN, added: AddedToken | str = "<|im_end|>") -> Inner:
    """Byte-level BPE over words, with NFC, as Qwen's."""
    made = Inner(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    made.add_special_tokens([added])
    return made


def groups() -> Inner:
    """The same with groups of three digits: where a group begins depends on where the number does."""
    return words(QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))


def lines() -> Inner:
    """BPE over whole texts, spaces replaced, as Gemma's."""
    made = Inner(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    texts = [piece for text in CORPUS for piece in (*text.splitlines(), "\n", "\n\n")]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    trainer.vocab_size = 700
    made.train_from_iterator(texts, trainer)
    return made


def demo() -> Inner:
    return Tokenizer.from_folder(DEMO)._inner


TEXTS = st.lists(
    st.sampled_from(
        ["\n", "\n\n", " ", "  ", "\t", "\r\n", "a", "def", "main", "123", "4", "'s", "'", "e\u0301", "\u0301", "\u4f60", "\U0001f600",
         "<|im_end|>", "<|im_", ".", "!!\n", "_x", "I", "\u1100", "\u1161"]
    ),
    max_size=60,
).map("".join)  # fmt: skip


@catches(
    "texts are cut right at the end of a piece",
    "mlxspec.loading.pieces:Pieces.__init__",
    _without_margin,
    case="words-words",
)
@pytest.mark.parametrize(
    ("make", "cuts"), [(words, "words"), (groups, "words"), (lines, "lines"), (demo, "words")]
)
def test_pieces_have_the_ids_of_the_whole(make, cuts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pieces, "_MARGIN", 12
    )  # as long as the longest added token, and more than one character
    inner = make()
    cutter = Pieces(inner, size=24)
    assert cutter.cuts == cuts
    num_cut = 0

    @settings(deadline=None, max_examples=300, derandomize=True)
    @given(TEXTS)
    def check(text: str) -> None:
        nonlocal num_cut
        found = list(cutter.encode(text))
        num_cut += len(found) > 1
        whole = inner.encode(text, add_special_tokens=False).ids
        assert [i for piece in found for i in piece] == whole

    check()
    assert num_cut > 25


def test_what_looks_around_is_not_cut() -> None:
    assert Pieces(words(r"(?<=a)\w+|\s+")).cuts is None
    assert Pieces(words(r"\d+(?=\d{3})|\s+")).cuts is None
    assert Pieces(words(r"^\w+|\s+")).cuts is None
    assert Pieces(words(added=AddedToken("<|im_end|>", lstrip=True))).cuts is None
    glued = lines()
    glued.add_tokens(["\nUser:"])
    assert Pieces(glued).cuts is None


def test_a_stretch_without_an_end_is_refused() -> None:
    with pytest.raises(UncuttableError):
        list(Pieces(demo(), size=16, longest=64).encode("a" * 1000))
    with pytest.raises(ConfigError, match="in a row"):
        Tokenizer.from_folder(DEMO).encode("a" * (1 << 20))


def test_a_long_text_ends_with_the_context() -> None:
    tokenizer, pauses = Tokenizer.from_folder(DEMO), []
    text = "os path " * (15 << 17)  # 15 MiB
    with pytest.raises(ContextOverflowError, match="at least") as caught:
        tokenizer.encode(text, most=2048, pause=lambda: pauses.append(1))
    assert not pauses  # the first piece was enough
    assert 2048 <= caught.value.num_prompt <= SLICE
    with pytest.raises(ContextOverflowError, match=r"the prompt has 2049;"):
        tokenizer.encode("os path " * 1024, most=2048)
    assert len(tokenizer.encode("os path " * 1023, most=2048)) == 2047


def test_a_long_text_ends_where_nobody_wants_it() -> None:
    tokenizer, done = Tokenizer.from_folder(DEMO), []

    def stop() -> None:
        done.append(1)
        if len(done) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        tokenizer.encode("os path " * (1 << 20), pause=stop)
    assert len(done) == 3


def test_special_tokens_stand_around_the_whole_text() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_folder(DEMO)
    tokenizer._inner.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    text = "os path\n" * (SLICE // 4)
    found = tokenizer.encode(text)
    assert found == tokenizer._inner.encode(text).ids
    assert found[0] == 1
    assert found[1:] == tokenizer.encode(text, special=False)


def test_other_threads_run_meanwhile() -> None:
    """Counted in what another thread does while a piece is encoded: with Python's lock held it would do nothing."""
    tokenizer = Tokenizer.from_folder(DEMO)
    rng = random.Random(3)
    text = "".join(rng.choice("abcdefgh ") for _ in range(SLICE))
    turns, counts, is_done = 0, [], threading.Event()

    def count() -> None:
        nonlocal turns
        while not is_done.wait(0.001):
            turns += 1

    other = threading.Thread(target=count)
    other.start()
    try:
        for _ in range(5):
            before = turns
            tokenizer.encode(text)
            counts.append(turns - before)
    finally:
        is_done.set()
        other.join()
    assert max(counts) > 4  # with the lock held there is a turn before and one behind
