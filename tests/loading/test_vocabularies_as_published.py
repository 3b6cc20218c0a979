"""Vocabularies as they are published: added tokens beyond the model's rows, more rows than tokens, several ends, byte fallback.

An id without a row is harmless until it is used; each way to use one is refused in one sentence, or spells the token out as text.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec import Engine, SamplingParams, load
from mlxspec.demo import GEMMA
from mlxspec.drafters.draft_model import check_vocabularies
from mlxspec.errors import ConfigError, GrammarError, ModelError, TokenizerError
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.parsers.formats import ChatFormat
from mlxspec.server import rules
from tests import tiny_models
from tests.loading import gemma_tokenizer
from tests.loading.gemma_tokenizer import NUM_IDS

IMAGE = "<image_soft_token>"
ROWS = 384  # of the padded model


@cache
def tokenizer(*beyond: str) -> Tokenizer:
    return Tokenizer.from_folder(gemma_tokenizer.write(Path(mkdtemp()), beyond=beyond))


@cache
def engine(rows: int = NUM_IDS) -> Engine:
    """A tiny model whose tokenizer has IMAGE at id NUM_IDS: beyond its rows unless it has more of them."""
    return Engine(tiny_models.small(vocab=rows), tokenizer(IMAGE))


def answer(params: dict[str, Any], rows: int = NUM_IDS) -> Any:
    return engine(rows).generate("ab", SamplingParams(max_tokens=40, **params))


def with_added(folder: Path, *texts: str) -> Path:
    """The demo Gemma, all of whose rows have a token, with added tokens behind them."""
    shutil.copytree(GEMMA, folder)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    first = len(state["model"]["vocab"])
    for number, text in enumerate(texts):
        state["added_tokens"].append(state["added_tokens"][0] | {"id": first + number, "content": text})
    path.write_text(json.dumps(state))
    return folder


# --- ids beyond the rows


def test_a_model_loads_with_an_added_token_beyond_its_rows(tmp_path: Path) -> None:
    made = load(str(with_added(tmp_path / "model", IMAGE)), draft="off")
    assert made.tokenizer is not None
    assert made.tokenizer.vocab_size == made.model.vocab_size + 1
    params = SamplingParams(max_tokens=8)
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (
        made.generate(prompt, params).tokens
        == load("demo-gemma", draft="off").generate(prompt, params).tokens
    )
    with pytest.raises(ConfigError, match=rf"holds the token '{IMAGE}', whose id 2048 is beyond the rows"):
        made.generate(f"what is in {IMAGE}?", params)
    assert made.chat(
        [{"role": "user", "content": f"what is in {IMAGE}?"}], params
    ).tokens  # spelled, not meant


def test_a_vocabulary_whose_text_lies_beyond_the_rows_is_refused(tmp_path: Path) -> None:
    """A tokenizer of another model: ordinary text would be cut into ids without rows."""
    folder = with_added(tmp_path / "model")
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["vocab"]["xyzzy"] = len(state["model"]["vocab"])
    path.write_text(json.dumps(state))
    with pytest.raises(ModelError, match=r"2049 tokens for text, the model only 2048 rows\.$"):
        load(str(folder))


def test_a_prompt_that_uses_one_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=rf"^The prompt holds the token '{IMAGE}', whose id {NUM_IDS} is beyond"
    ):
        engine().generate(f"an {IMAGE} here")
    with pytest.raises(ConfigError, match=rf"^The prompt holds the token '{IMAGE}'"):
        engine().generate([5, NUM_IDS])
    with pytest.raises(
        ConfigError, match=rf"^The prompt holds {NUM_IDS + 1}, which is no token id of this model"
    ):
        engine().generate([5, NUM_IDS + 1])


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        ({"logit_bias": {NUM_IDS: 2.0}}, ConfigError, f"logit_bias names token {NUM_IDS}"),
        ({"lark": f"start: <[{NUM_IDS}]>"}, GrammarError, "The Lark grammar cannot be used"),
        ({"lark": f"start: {IMAGE}"}, GrammarError, "The Lark grammar cannot be used"),
    ],
    ids=str,
)
def test_options_that_name_one_are_refused(params: dict, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        answer(params)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {"regex": f"{IMAGE} [ab]"},
        {"lark": f'start: "{IMAGE} " /[ab]/'},
        {"json_schema": {"enum": [IMAGE]}},
    ],
    ids=str,
)
def test_a_grammar_spells_it_out_as_text(params: dict) -> None:
    found = answer(params)
    assert found.finish_reason == "stop"
    assert IMAGE in found.text
    assert max(found.tokens) < NUM_IDS


def test_a_closing_tag_is_spelled_out_as_text() -> None:
    """A thinking budget forces it."""
    tags = {"thinking_tags": ("<a>", IMAGE), "thinking_budget": 1}
    params = SamplingParams(max_tokens=30, ignore_eos=True, **tags)  # type: ignore[arg-type]
    found = engine().generate("b<a>", params)
    assert found.text[1:].startswith(IMAGE) or IMAGE in found.text
    assert max(found.tokens) < NUM_IDS


@pytest.mark.parametrize("params", [{"bad_words": (IMAGE,)}, {"stop": (IMAGE,)}], ids=str)
def test_words_to_avoid_may_be_spelled_like_it(params: dict) -> None:
    assert answer(params).tokens == answer({}).tokens


def test_a_call_tag_is_spelled_out_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = ChatFormat(tools="xml")
    assert tags.call_tags is not None
    known = tokenizer(tags.call_tags.open, tags.call_tags.close)
    low, high = (Engine(tiny_models.small(vocab=n), known) for n in (NUM_IDS + 1, NUM_IDS + 2))
    assert rules.special_tags(tags, low) == {tags.call_tags.open: NUM_IDS}
    assert rules.special_tags(tags, high) == {
        tags.call_tags.open: NUM_IDS,
        tags.call_tags.close: NUM_IDS + 1,
    }


def test_a_draft_model_need_not_know_ids_beyond_the_rows() -> None:
    check_vocabularies(tokenizer(IMAGE), tokenizer(), NUM_IDS, NUM_IDS)
    check_vocabularies(tokenizer(), tokenizer(IMAGE), NUM_IDS + 64, NUM_IDS)


# --- ends


def test_only_ends_with_rows_end_a_grammar(tmp_path: Path) -> None:
    gemma_tokenizer.write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [NUM_IDS + 7]}))
    known = Tokenizer.from_folder(tmp_path)
    assert known.eos_ids == {4, NUM_IDS + 7}
    assert TokenBytes(known, NUM_IDS).eos_ids == {4}
    made = Engine(tiny_models.small(vocab=NUM_IDS), known)
    assert made.generate("a", SamplingParams(max_tokens=20, regex="[ab]{3}")).finish_reason == "stop"


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_that_the_vocabulary_lacks_is_refused(file: str, tmp_path: Path) -> None:
    folder = with_added(tmp_path / "model")
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | {"eos_token_id": [5000, -4]}))
    with pytest.raises(TokenizerError, match=rf"{file} ends texts with token -4, which"):
        load(str(folder), draft="off")
    (folder / file).write_text(json.dumps(content | {"eos_token_id": [5000, 2047]}))
    assert {5000, 2047} <= Tokenizer.from_folder(folder).eos_ids


def test_without_an_end_no_grammar_ends(tmp_path: Path) -> None:
    folder = with_added(tmp_path / "model")
    for name in ("generation_config.json", "config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": None}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")  # which closes no turn
    made = load(str(folder), draft="off")
    with pytest.raises(GrammarError, match="no token that ends a text"):
        made.generate("a", SamplingParams(regex="b"))


@pytest.mark.parametrize("end", [1, 4])
def test_each_of_several_ends_ends_an_answer_and_a_grammar(end: int) -> None:
    likely = {"logit_bias": {end: 100.0}}
    assert answer(likely).tokens == ()
    found = answer({**likely, "regex": "[ab]{2}"})
    assert (len(found.text), found.finish_reason) == (2, "stop")


# --- more rows than tokens


def test_a_row_without_a_token_says_nothing() -> None:
    bias = {"logit_bias": {ROWS - 1: 100.0}}
    found = answer({**bias, "top_logprobs": 2}, ROWS)
    assert set(found.tokens) == {ROWS - 1}
    assert found.text == ""
    assert found.logprobs is not None
    assert found.logprobs[0].data == b""
    assert answer({**bias, "regex": "[ab]{2}"}, ROWS).text in ("aa", "ab", "ba", "bb")


def test_an_added_token_within_the_rows_is_read() -> None:
    assert engine(ROWS).generate(f"an {IMAGE} here", SamplingParams(max_tokens=2)).finish_reason is not None


# --- bytes


def test_bytes_are_those_that_the_decoder_writes() -> None:
    """Also of added tokens that are runs of spaces, and of single bytes."""
    known = tokenizer(IMAGE)
    found = TokenBytes(known, NUM_IDS + 1)
    anchor = known.encode("a", special=False)
    for token, data in enumerate(found.tokens):
        written = known._inner.decode([*anchor, token, *anchor], skip_special_tokens=False)
        assert written == f"a{data.decode(errors='replace')}a"


def test_a_grammar_allows_runs_of_spaces_as_one_token() -> None:
    known = tokenizer()
    run = known._inner.token_to_id(3 * gemma_tokenizer.MARK)
    found = answer({"regex": " {3}[ab]", "logit_bias": {run: 100.0}})
    assert found.text in ("   a", "   b")
    assert found.tokens[0] == run


@pytest.mark.parametrize("text", ["é", "日本語", "a  b   c", "🙂 ok", "\t\n x"])
def test_text_that_the_vocabulary_lacks_comes_back_byte_by_byte(text: str) -> None:
    known = tokenizer(IMAGE)
    ids = known.encode(text)
    assert known.decode(ids) == text
    stream = known.stream()
    pieces = [stream.push(t) for t in ids]
    assert "".join(pieces) + stream.rest() == text
    assert not any("\ufffd" in piece for piece in pieces)
    data = TokenBytes(known, NUM_IDS)
    assert b"".join(data.tokens[t] for t in known.encode(text, special=False)).decode() == text


@given(tokens=st.lists(st.integers(0, NUM_IDS - 1), max_size=12))
def test_a_stream_takes_bytes_that_are_no_text(tokens: list[int]) -> None:
    """A stray byte behind others changes their text, which has been given out. What a stream gave stays, and it goes on."""
    known = tokenizer(IMAGE)
    tail = known.encode("ab", special=False)
    stream = known.stream()
    found = "".join(stream.push(token) for token in [*tokens, *tail, *tail]) + stream.rest()
    assert found.endswith("abab")


def test_an_answer_of_stray_bytes_ends_and_harms_no_other() -> None:
    known = tokenizer(IMAGE)
    names = known._inner.get_vocab()
    stray = [names[f"<0x{byte}>"] for byte in ("7B", "88", "7B")]
    lark = "start: " + " ".join(f"<[{token}]>" for token in stray)
    params = [SamplingParams(max_tokens=8, ignore_eos=True), SamplingParams(max_tokens=8, lark=lark)]
    plain = engine().generate("ab", params[0])
    both = engine().generate(["ab", "ab"], params)
    assert both[0].tokens == plain.tokens
    assert list(both[1].tokens) == stray
