"""Qwen3.6's vocabulary: text to ids by rank and back, streams, grammars and call tags, on a tiny model with its 248,320 rows."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as InnerTokenizer

from mlxspec import Engine, SamplingParams, SpecConfig
from mlxspec.drafters.draft_model import check_vocabularies
from mlxspec.loading.fill_in import FillIn
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.parsers.call_grammar import calls_grammar
from mlxspec.parsers.formats import ChatFormat, ToolStyle, detect
from mlxspec.server import rules
from tests import tiny_models

pytestmark = pytest.mark.slow

ROWS = 248_320  # of the published models: 243 more than there are tokens
TEXTS = (
    "def f(x):\n    return x  # twice\n",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}',
    "Größe, naïve café — “quotes” … ½",
    "日本語のテキストと한국어 그리고 中文。",
    "मानक हिन्दी और العربية",
    "🙂👩\u200d👩\u200d👧 \U0001d54f\n\n\t x   \r\n",
    "1234567890 3.14159",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n</think>",
)


@pytest.fixture(scope="module")
def known(qwen_vocabulary: Path) -> Tokenizer:
    return Tokenizer.from_folder(qwen_vocabulary)


@pytest.fixture(scope="module")
def engine(known: Tokenizer) -> Engine:
    return Engine(tiny_models.small(vocab=ROWS), known)


def _by_rank(word: str, inner: InnerTokenizer, ranks: dict[str, int]) -> list[int]:
    """A word of the pre-tokenizer cut by the table alone: the pair that makes the token of lowest rank is merged first."""
    pieces = [word] if word in ranks else list(word)
    while len(pieces) > 1:
        pairs = [
            (ranks.get(a + b, len(ranks)), i)
            for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
        ]
        rank, place = min(pairs)
        if rank == len(ranks):
            break
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return [ranks[p] for p in pieces]


def test_texts_are_cut_by_rank(known: Tokenizer) -> None:
    inner = known._inner
    ranks = inner.get_vocab(with_added_tokens=False)
    for text in TEXTS[:-1]:
        normal = inner.normalizer.normalize_str(text)
        words = [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(normal)]
        assert known.encode(text) == [i for word in words for i in _by_rank(word, inner, ranks)]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_comes_back_whole_and_in_whole_characters(known: Tokenizer, text: str) -> None:
    ids = known.encode(text)
    stream = known.stream()
    pieces = [stream.push(t) for t in ids]
    assert "".join(pieces) + stream.rest() == known.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    if "<|" not in text:
        assert known.decode(ids) == text


def test_random_ids_lose_nothing(known: Tokenizer) -> None:
    rnd = random.Random(4)
    for _ in range(50):
        ids = [rnd.randrange(ROWS) for _ in range(40)]
        stream = known.stream()
        assert "".join(stream.push(t) for t in ids) + stream.rest() == known.decode(ids)


def test_tokens_have_the_bytes_that_the_decoder_writes(known: Tokenizer) -> None:
    found = TokenBytes(known, ROWS)
    assert found.tokens[known.vocab_size :] == (b"",) * (ROWS - known.vocab_size)
    wrong = [
        token
        for token, data in enumerate(found.tokens[: known.vocab_size])
        if known._inner.decode([64, token, 64], skip_special_tokens=False)
        != f"a{data.decode(errors='replace')}a"
    ]
    assert wrong == []


def test_both_ends_end(known: Tokenizer, engine: Engine) -> None:
    assert known.eos_ids == {248_044, 248_046}
    for end in known.eos_ids:
        found = engine.generate("a", SamplingParams(max_tokens=9, regex="[a-c]{2}", logit_bias={end: 100.0}))
        assert (len(found.text), found.finish_reason) == (2, "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_drafts_what_it_forces(engine: Engine, temperature: float) -> None:
    names = ["temperature_celsius", "wind_direction", "humidity"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 10, "maximum": 99} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=3, json_schema=schema)
    plain = engine.generate("weather", params, spec=SpecConfig(drafters=()))
    forced = engine.generate("weather", params, spec=SpecConfig(drafters=("forced",), policy="fixed"))
    assert forced.tokens == plain.tokens
    assert list(json.loads(plain.text)) == names
    assert 2 * forced.stats.num_rounds < plain.stats.num_rounds


def test_a_call_is_written_with_the_vocabularys_own_tags(engine: Engine, known: Tokenizer) -> None:
    assert known.template is not None
    form = detect(known.template.source)
    assert form.tools == "xml"
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
        "required": ["city"],
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    # the tags are added tokens, but none that are hidden from a text
    assert rules.special_tags(form, engine) == {}
    lark = calls_grammar(form, [tool], tokens={}, several=False)
    found = engine.generate("call", SamplingParams(max_tokens=60, lark=lark))
    assert found.text in [
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
        for city in ("Oslo", "Lima")
    ]
    parser = form.parser("", [tool])
    pieces = parser.push(found.text) + parser.finish()
    assert [type(p).__name__ for p in pieces if "Call" in type(p).__name__]


def test_a_vocabulary_equals_itself(known: Tokenizer) -> None:
    check_vocabularies(known, known, ROWS, ROWS)


_KINDS: tuple[Any, ...] = (
    lambda name, rnd: {"type": "string", "description": f"The {name}."},
    lambda name, rnd: {"type": "integer", "minimum": 0, "maximum": rnd.choice([10, 100, 2000])},
    lambda name, rnd: {"type": "boolean"},
    lambda name, rnd: {"type": "string", "enum": [f"{name}_{word}" for word in ("read", "write", "append")]},
    lambda name, rnd: {"type": "array", "items": {"type": "string"}},
    lambda name, rnd: {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    lambda name, rnd: {"type": "number"},
    lambda name, rnd: {
        "type": "object",
        "properties": {f"{name}_depth": {"type": "integer"}, "name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    },
)


MOST_RULES = {"json": 3, "xml": 12, "gemma4": 30, "function-gemma": 30}  # a tool; one tool alone has up to 41


def ordinary_tools(seed: int, num_tools: int = 128) -> list[dict[str, Any]]:
    """Tools of six parameters each, whose names no two of them share."""
    rnd, tools = random.Random(seed), []
    for i in range(num_tools):
        names = [f"{word}_{seed}_{i}" for word in ("path", "limit", "mode", "tags", "options", "query")]
        properties = {name: rnd.choice(_KINDS)(name, rnd) for name in names}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": names[:2],
            "additionalProperties": False,
        }
        tools.append({"type": "function", "function": {"name": f"tool_{seed}_{i}", "parameters": parameters}})
    return tools


@pytest.mark.parametrize("style", ["json", "xml", "gemma4", "function-gemma"])
def test_128_tools_share_their_rules(engine: Engine, style: ToolStyle) -> None:
    """Tools not seen before, once the vocabulary has been prepared. Prints processor seconds (pytest -rP), of which the first holds
    the vocabulary's; what is asserted is the number of rules, which the seconds follow."""
    taken = []
    for seed in range(5):
        tools = ordinary_tools(seed)
        started = time.process_time()
        lark = calls_grammar(ChatFormat(tools=style), tools, tokens={}, several=True)
        engine.compile(SamplingParams(lark=lark))
        taken.append(time.process_time() - started)
        rules = sum(": " in line for line in lark.splitlines())
        assert rules <= MOST_RULES[style] * len(tools), rules / len(tools)
    print(f"\n{style}: {[round(seconds, 3) for seconds in taken]} s")


def test_a_gap_is_written_with_its_tokens(known: Tokenizer) -> None:
    form = FillIn.of(known, ROWS)
    assert form is not None
    before, behind = "def f(x):\n    return ", "\n\nprint('<|fim_middle|>', f(3))  # é日本\n"
    ids, added = form.prompt(before, behind, [("a.py", "x = 1")]), known.added_tokens()
    assert [known.token_text(i) for i in ids if i in added] == [
        "<|repo_name|>", "<|file_sep|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
    ]  # fmt: skip
    prefix, suffix, _ = (ids.index(token) for token in form.tokens)
    assert ids[prefix + 1 : suffix] == known.encode(before)
    assert known.decode(ids[suffix + 1 : -1]) == behind
    assert known.id_of("<|endoftext|>") in form.ends
