"""Tokens that files beside tokenizer.json add, and vocabularies in vocab.json and merges.txt, are those of transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from planting import catches, rewritten
from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import pre_tokenizers

from mlxspec.errors import TokenizerError
from mlxspec.loading.added_tokens import declared
from mlxspec.loading.tokenizer import Tokenizer
from tests.loading import byte_tokenizer

NAMES = ["<|user|>", "<|stop|>", "<tool>", "[X]", "<|end|>", "<|begin|>", "abc", "e"]
FREE = 258  # the first id behind those of byte_tokenizer
TEXTS = (
    "<|user|> hi <|stop|>abc <tool> [X] e",
    "xabcx <|end|><|begin|>  <|user|>\n<|stop|>",
    "none of them",
)


def write(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    path = str(byte_tokenizer.write(folder) / "tokenizer.json")
    inner = InnerTokenizer.from_file(path)
    inner.no_padding()  # transformers would add its token
    inner.save(path)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def numbered(names: list[str]) -> list[tuple[int, str]]:
    """The ids that a folder would declare for them: those of the vocabulary, else the next ones."""
    there = {"<|end|>": 256, "<|begin|>": 257, "e": sorted(pre_tokenizers.ByteLevel.alphabet()).index("e")}
    free = iter(range(FREE, FREE + 99))
    return [(there[name] if name in there else next(free), name) for name in names]


def some_files(rng: random.Random) -> dict[str, dict[str, Any]]:
    """One of the ways in which folders add tokens."""
    form = rng.choice(["decoder", "extra", "listed", "map", "mixed"])
    settings: dict[str, Any] = {
        "eos_token": rng.choice(NAMES[:6]),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files = {"tokenizer_config.json": settings}
    names = rng.sample(NAMES, rng.randrange(1, 5))
    if form in ("decoder", "mixed"):
        settings["added_tokens_decoder"] = {
            str(i): {"content": name, "special": rng.random() < 0.6}
            | {flag: rng.random() < 0.3 for flag in ("lstrip", "rstrip", "single_word", "normalized")}
            for i, name in numbered(names)
        }
    if form in ("extra", "mixed"):
        key = rng.choice(["extra_special_tokens", "additional_special_tokens"])
        settings[key] = rng.sample(NAMES[:7], 2)
    if rng.random() < 0.3:
        settings["image_token"] = rng.choice(NAMES[:6])
    if form == "listed":
        files["added_tokens.json"] = {name: i for i, name in numbered(names)}
    if form == "map" or (form in ("decoder", "mixed") and rng.random() < 0.4):
        strips = {"lstrip": rng.random() < 0.4, "rstrip": False, "normalized": False, "single_word": False}
        role = {"content": rng.choice(NAMES[:6]), **strips}
        extra = rng.sample(NAMES[:6], 2)
        files["special_tokens_map.json"] = {"eos_token": role, "additional_special_tokens": extra}
    return files


@catches(
    "the flags of added tokens are dropped",
    "mlxspec.loading.added_tokens:_FLAGS",
    lambda right: (),
    case="0",
)
@catches(
    "extra special tokens are not added",
    "mlxspec.loading.added_tokens:_EXTRA",
    lambda right: ("none",),
    case="1",
)
@pytest.mark.parametrize("seed", range(4))
def test_added_tokens_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    auto = pytest.importorskip("transformers", reason="needs transformers").AutoTokenizer
    rng = random.Random(seed)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = some_files(rng)
        theirs = auto.from_pretrained(str(write(folder, files)))
        ours = Tokenizer.from_folder(folder)
        ids = [ours.encode(text, special=False) for text in TEXTS]
        assert ids == [theirs.encode(text, add_special_tokens=False) for text in TEXTS], files
        assert theirs.eos_token_id in ours.eos_ids, files
        special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
        assert {i for i, is_special in ours.added_tokens().items() if is_special} == special, files


def test_a_chat_prompt_has_their_ids(tmp_path: Path) -> None:
    write(tmp_path, {"added_tokens.json": {"<|user|>": FREE, "<|stop|>": FREE + 1}})
    template = "{% for m in messages %}<|user|>{{ m.content }}<|stop|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.template is not None
    prompt = tokenizer.template.render([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(prompt) == [FREE, *tokenizer.encode("hi"), FREE + 1]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"added_tokens.json": {"<|user|>": 300}}, "declared with id 300, and the vocabulary goes on at 258"),
        ({"added_tokens.json": {"<|user|>": "x"}}, "its id is none"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "a"}}}},
            "no list of tokens by id",
        ),
        ({"tokenizer_config.json": {"added_tokens_decoder": ["a"]}}, "no list of tokens by id"),
    ],
)
def test_what_cannot_be_had_is_refused(files: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=said):
        Tokenizer.from_folder(write(tmp_path, files))


MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "h"), ("1", "2"), ("'", "s"), ("hell", "o")]


def spelled(folder: Path, settings: dict[str, Any]) -> Path:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in MERGES:
        vocab["".join(pair)] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in MERGES), ""]
    (folder / "merges.txt").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


@pytest.mark.parametrize("beginning", [False, True])
@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", None])
def test_vocab_and_merges_are_a_vocabulary(kind: str | None, beginning: bool, tmp_path: Path) -> None:
    auto = pytest.importorskip("transformers", reason="needs transformers").AutoTokenizer
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_end|>", "add_bos_token": beginning}
    settings |= {} if kind is None else {"tokenizer_class": kind}
    theirs = auto.from_pretrained(str(spelled(tmp_path, settings)))
    ours = Tokenizer.from_folder(tmp_path)
    text = "hello  hell's 1234 é he\u0301\n\n x<|im_end|> <|endoftext|>"
    assert ours.encode(text) == theirs.encode(text)
    assert theirs.eos_token_id in ours.eos_ids


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    spelled(tmp_path, {"tokenizer_class": "LlamaTokenizer"})
    with pytest.raises(TokenizerError, match="not of LlamaTokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "merges.txt").rename(tmp_path / "tiktoken.model")
    with pytest.raises(TokenizerError, match=r"tiktoken\.model alone is not read"):
        Tokenizer.from_folder(tmp_path)


@catches(
    "roles of another file count beside a list of tokens by id",
    "mlxspec.loading.added_tokens:declared",
    rewritten("**({} if by_id is not None else beside)", "**beside"),
)
@catches(
    "roles of another file never count",
    "mlxspec.loading.added_tokens:declared",
    rewritten("**({} if by_id is not None else beside)", ""),
)
@pytest.mark.parametrize("role", ["eos_token", "pad_token", "image_token"])
def test_where_tokens_are_listed_by_id_no_other_file_adds_any(role: str) -> None:
    """Else special_tokens_map.json goes over the settings."""
    listed = {"added_tokens_decoder": {"5": {"content": "<own>", "special": True}}}
    beside = {role: "<other>", "additional_special_tokens": ["<more>"]}
    for by_id, wanted in ((listed, ["<own>"]), ({}, ["<other>", "<more>"])):
        found = declared({role: "<own>", **by_id}, beside, {})
        assert [token["content"] for token in found] == wanted
