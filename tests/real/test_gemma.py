"""Gemma 3 270M as it is published: it loads, says what mlx-lm says, drafted as plain, in every dtype, and its tokenizer's traits hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlxspec import Engine, SamplingParams, SpecConfig, load
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.quantize import Format
from mlxspec.errors import ConfigError, GrammarError
from mlxspec.loading.token_bytes import TokenBytes

pytestmark = pytest.mark.slow

TOKENS = 24
PROMPTS = {
    "fact": "The capital of France is",
    "code": "def fibonacci(n):\n",
    "json": '[\n  {"id": 1, "name": "Ada"},\n  {"id": 2, "name": "Ben"},\n  {"id": 3,',
    "copy": "one two three four five six seven eight\none two three four five six seven eight\none two",
}
OFF, LOOKUP = SpecConfig(drafters=()), SpecConfig(drafters=("ngram-simple",), policy="fixed")
GREEDY = SamplingParams(max_tokens=TOKENS)


@pytest.fixture(scope="module")
def engine(real_model: Path) -> Iterator[Engine]:
    made = load(str(real_model), dtype="float32")
    yield made
    made.close()


def test_its_text_is_mlx_lms(real_model: Path, engine: Engine) -> None:
    assert engine.tokenizer is not None
    model, _ = load_model(real_model)
    model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
    for prompt in PROMPTS.values():
        ids = engine.tokenizer.encode(prompt)
        expected = [int(t) for t, _ in generate_step(mx.array(ids), model, max_tokens=TOKENS)]
        ends = [i for i, t in enumerate(expected) if t in engine.tokenizer.eos_ids]
        assert list(engine.generate(prompt, GREEDY, spec=OFF).tokens) == expected[: min(ends, default=TOKENS)]


def test_it_knows_the_capital_of_france(engine: Engine) -> None:
    """The weights are where they belong: text of a wrong conversion would be equal to mlx-lm's too."""
    found = engine.generate("Paris is the capital of France. Berlin is the capital of", GREEDY, spec=OFF)
    assert found.text.startswith(" Germany")


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_text_is_the_plain_one(engine: Engine, name: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=5)
    plain, drafted = (engine.generate(PROMPTS[name], params, spec=spec) for spec in (OFF, LOOKUP))
    assert drafted.tokens == plain.tokens
    if name == "copy" and temperature == 0:
        assert drafted.stats.num_accepted > 4


@pytest.mark.parametrize("kind", ["bfloat16", "4bit"])
def test_it_drafts_in_16_and_4_bits(real_model: Path, tmp_path: Path, kind: str) -> None:
    """Texts may differ where two tokens are nearly tied (docs/measurements.md counts that); a draft must be made and accepted."""
    folder = real_model
    if kind == "4bit":
        folder = tmp_path / "4bit"
        convert(str(real_model), folder, Wish(trunk=Format(bits=4, group_size=64, mode="affine")))
    made = load(str(folder), dtype="bfloat16" if kind == "bfloat16" else None)
    drafted = made.generate(PROMPTS["copy"], GREEDY, spec=LOOKUP)
    assert drafted.error is None
    assert drafted.stats.num_accepted > 4
    assert not drafted.stats.notices


def test_a_grammar_at_262_thousand_ids(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "maximum": 99},
        },
        "required": ["first_name", "age"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=48, json_schema=schema)
    plain = engine.generate("A person as JSON: ", params, spec=OFF)
    forced = engine.generate(
        "A person as JSON: ", params, spec=SpecConfig(drafters=("forced",), policy="fixed")
    )
    assert forced.tokens == plain.tokens
    assert forced.stats.num_rounds < plain.stats.num_rounds
    assert plain.text.startswith('{"first_name": "')


# --- its tokenizer


def test_the_token_beyond_its_rows_is_refused_where_it_is_used(engine: Engine) -> None:
    assert engine.tokenizer is not None
    assert (engine.model.vocab_size, engine.tokenizer.vocab_size) == (262_144, 262_145)
    with pytest.raises(ConfigError, match="'<image_soft_token>', whose id 262144 is beyond the rows"):
        engine.generate("what is <image_soft_token>?")
    asked = engine.chat_prompt([{"role": "user", "content": "<image_soft_token>"}])
    assert 262144 not in asked  # a message's text is text, whatever it looks like
    with pytest.raises(GrammarError, match="262144"):
        engine.generate("a", SamplingParams(lark="start: <[262144]>"))


def test_its_tokens_have_the_bytes_that_its_decoder_writes(engine: Engine) -> None:
    assert engine.tokenizer is not None
    inner = engine.tokenizer._inner
    found = TokenBytes(engine.tokenizer, engine.model.vocab_size)
    anchor = inner.encode("a", add_special_tokens=False).ids
    wrong = [
        token
        for token, data in enumerate(found.tokens)
        if inner.decode([*anchor, token, *anchor], skip_special_tokens=False)
        != f"a{data.decode(errors='replace')}a"
    ]
    assert wrong == []


def test_both_of_its_ends_end_an_answer(engine: Engine) -> None:
    assert engine.tokenizer is not None
    assert engine.tokenizer.eos_ids == {1, 106}
    for end in (1, 106):
        found = engine.generate("a", SamplingParams(max_tokens=4, logit_bias={end: 100.0}))
        assert (found.tokens, found.finish_reason) == ((), "stop")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([("user", "a"), ("user", "b")], "Conversation roles must alternate"),
        ([("assistant", "a")], "Conversation roles must alternate"),
        ([("user", 5)], "Invalid content type"),
    ],
    ids=str,
)
def test_its_template_refuses_in_one_sentence(engine: Engine, messages: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        engine.chat([{"role": role, "content": content} for role, content in messages])
    assert "\n" not in str(caught.value)


def test_its_template_puts_a_system_prompt_before_the_first_message(engine: Engine) -> None:
    assert engine.tokenizer is not None
    ids = engine.chat_prompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert ids.count(2) == 1  # one beginning of text
    assert "".join(engine.tokenizer.token_text(i) or "" for i in ids).startswith(
        "<bos><start_of_turn>user\nBe"
    )
