"""Text to ids and back, and text as it becomes whole, token by token."""

from __future__ import annotations

import json
import random
import threading
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches
from tokenizers import Tokenizer as InnerTokenizer

from mlxspec.errors import ContextOverflowError, TokenizerError
from mlxspec.loading import hub
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.loading.tokenizer import Tokenizer, read_json
from tests.loading import byte_tokenizer

pytestmark = pytest.mark.smoke


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(byte_tokenizer.write(Path(mkdtemp())))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=40))
def test_text_comes_back_whole(text: str) -> None:
    """Also longer than the truncation and shorter than the padding that the file asks for."""
    ids = tokenizer().encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer().decode(ids) == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=20))
def test_streamed_text_is_the_whole_text_in_whole_characters(text: str) -> None:
    stream, given_out = tokenizer().stream(), ""
    for token in tokenizer().encode(text):
        piece = stream.push(token)
        assert "\ufffd" not in piece or "\ufffd" in text
        given_out += piece
        assert text.startswith(given_out)
    assert given_out + stream.rest() == text
    assert stream.rest() == ""


@settings(max_examples=400, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(0, 255), max_size=24))
def test_streamed_bytes_that_are_no_text_lose_nothing(tokens: list[int]) -> None:
    """A model may say anything: broken characters come out as the whole decoding shows them."""
    stream = tokenizer().stream()
    text = "".join(stream.push(t) for t in tokens)
    assert text + stream.rest() == tokenizer().decode(tokens)


def test_special_tokens_are_no_text() -> None:
    ids = tokenizer().encode(f"a{byte_tokenizer.END}b")
    assert 256 in ids
    assert tokenizer().decode(ids) == "ab"
    stream = tokenizer().stream()
    assert "".join(stream.push(t) for t in ids) + stream.rest() == "ab"


def test_templates_write_their_own_beginning(tmp_path: Path) -> None:
    made = Tokenizer.from_folder(byte_tokenizer.write(tmp_path, beginning=True))
    assert made.encode("a")[0] == 257
    assert made.encode("a", special=False) == made.encode("a")[1:]


def test_ids_have_spellings_and_unknown_ones_have_none() -> None:
    assert tokenizer().token_text(256) == byte_tokenizer.END
    assert tokenizer().token_text(100_000) is None
    assert tokenizer().vocab_size == 258


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, {256}),
        ({"config.json": {"eos_token_id": 3}}, {3, 256}),
        ({"config.json": {"text_config": {"eos_token_id": 4}}}, {4, 256}),
        ({"generation_config.json": {"eos_token_id": [5, 6]}}, {5, 6, 256}),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [5]}}, {3, 5, 256}),
        ({"config.json": {"eos_token_id": None, "text_config": 7}}, {256}),
        (
            {"config.json": {"eos_token_id": True}, "generation_config.json": {"eos_token_id": ["x", 9]}},
            {9, 256},
        ),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|begin|>"}}}, {257}),
        ({"tokenizer_config.json": {"eos_token": "<|nowhere|>"}}, {258}),
        ({"tokenizer_config.json": {}}, set()),
    ],
    ids=str,
)
def test_every_id_that_any_file_calls_an_end_is_one(tmp_path: Path, files: dict, wanted: set[int]) -> None:
    byte_tokenizer.write(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).eos_ids == wanted


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": "1.0"}', b"\xff\xfe\x00", b"null"], ids=repr
)
def test_a_damaged_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"5", b"\xff", b"[" * 100_000], ids=lambda c: repr(c[:5]))
def test_damaged_files_beside_it(tmp_path: Path, name: str, content: bytes) -> None:
    byte_tokenizer.write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_json_file_is_an_empty_one(tmp_path: Path) -> None:
    assert read_json(tmp_path / "nothing.json") == {}


def added(folder: Path, name: str) -> int:
    """Add a token to a folder's vocabulary; returns its id."""
    inner = InnerTokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens([name])
    inner.save(str(folder / "tokenizer.json"))
    return int(inner.token_to_id(name))


@catches(
    "only what files call an end ends an answer",
    "mlxspec.loading.tokenizer:_turn_ends",
    lambda right: lambda *_: set(),
    case="[<end_of_turn>]",
)
@pytest.mark.parametrize("name", ["<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>"])
def test_the_token_that_closes_a_turn(name: str, tmp_path: Path) -> None:
    """Where no file calls it an end of text, the chat template tells."""
    byte_tokenizer.write(tmp_path, eos_token=None)
    token = added(tmp_path, name)
    assert Tokenizer.from_folder(tmp_path).eos_ids == frozenset()
    text = "{% for m in messages %}{{ m.role }}:{{ m.content }}" + name + "{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(text)
    assert Tokenizer.from_folder(tmp_path).eos_ids == {token}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == {3, token}
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer.from_folder(tmp_path).eos_ids == {3}


@catches(
    "the tokenizer's own beginning comes before a template's",
    "mlxspec.loading.tokenizer:Tokenizer._begins_whole",
    lambda right: lambda self, text: False,
)
@pytest.mark.parametrize("text", ["abc", "abc" * (1 << 16)], ids=["short", "long"])
def test_a_text_that_begins_as_the_tokenizer_would_begin_it(text: str, tmp_path: Path) -> None:
    """A template has written the token, say: it stands once."""
    found = Tokenizer.from_folder(byte_tokenizer.write(tmp_path, beginning=True))
    once = found.encode(text)
    assert once[0] == 257
    assert found.encode("<|begin|>" + text) == once
    assert found.encode("<|begin|>" + text, special=False) == once
    assert found.encode("a<|begin|>")[:1] == [257]
    assert found.encode("<|end|>" + text)[:2] == [257, 256]


@catches(
    "the beginning of a long text is not looked at",
    "mlxspec.loading.tokenizer:Tokenizer._check_beginning",
    lambda right: lambda self, text, most: None,
)
def test_a_long_text_ends_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 15 MiB no more is tokenized than tells that they are too long."""
    made, sizes = Tokenizer.from_folder(hub.resolve("demo")), list[int]()
    right = Tokenizer._ids

    def counted(self: Tokenizer, inner: Any, text: str, **more: Any) -> list[int]:
        sizes.append(len(text))
        return right(self, inner, text, **more)

    monkeypatch.setattr(Tokenizer, "_ids", counted)
    with pytest.raises(ContextOverflowError, match="at least"):
        made.encode("os path " * (15 << 17), most=2048)
    assert sum(sizes) <= 1 << 17
    with pytest.raises(ContextOverflowError, match=r"the prompt has 2049;"):
        made.encode("os path " * 1024, most=2048)
    assert len(made.encode("os path " * 1023, most=2048)) == 2047
    assert len(made.encode("os path " * 30_000, most=60_002)) == 60_001


def test_other_threads_run_meanwhile() -> None:
    """Counted in what another thread does while a text is encoded: with Python's lock held it would do nothing."""
    made, rng = Tokenizer.from_folder(hub.resolve("demo")), random.Random(3)
    text = "".join(rng.choice("abcdefgh ") for _ in range(1 << 16))
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
            made.encode(text)
            counts.append(turns - before)
    finally:
        is_done.set()
        other.join()
    assert max(counts) > 4  # with the lock held there is a turn before and one behind


@pytest.mark.parametrize("num_rows", [256, 257, 258])
def test_an_added_token_without_a_row_is_cut_like_any_text(num_rows: int, tmp_path: Path) -> None:
    """A model whose rows end just before the token, too."""
    vocabulary = TokenBytes(Tokenizer.from_folder(byte_tokenizer.write(tmp_path)), num_rows)
    ids = vocabulary.encode(byte_tokenizer.END)
    assert max(ids) < num_rows
    assert (len(ids) == 1) == (num_rows > 256)
    assert b"".join(map(vocabulary.spelled, ids)).decode() == byte_tokenizer.END
