"""What a Python caller writes: a string or several conversations to `chat`, a path object, `with`, max_context, and one name a figure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planting import catches

import mlxspec
from mlxspec import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.calls import ROLES
from mlxspec.engine.engine import Engine
from mlxspec.engine.stats import DrafterStats, RequestStats
from mlxspec.errors import ConfigError, ContextOverflowError, EngineStoppedError, ModelError
from mlxspec.platform.resources import demo_folder

QUESTION = "what does os.path.join do?"
PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with mlxspec.load("demo", draft="ngram-simple", spec=SpecConfig(policy="fixed")) as made:
        yield made


def test_a_string_is_what_the_user_says(engine: Engine) -> None:
    whole = engine.chat([{"role": "user", "content": QUESTION}], PARAMS)
    assert engine.chat(QUESTION, PARAMS).tokens == whole.tokens
    streamed = [
        e.text for e in engine.chat(QUESTION, PARAMS, stream=True) if isinstance(e, mlxspec.TokensEvent)
    ]
    assert "".join(streamed) == whole.text


def test_several_conversations_are_answered_in_order(engine: Engine) -> None:
    asked: list[Any] = [QUESTION, "what is a list?", "what does len do?"]
    longer = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It joins."}]
    asked.append([*longer, {"role": "user", "content": "and split?"}])
    alone = [engine.chat(each, PARAMS).tokens for each in asked]
    assert len({*alone}) >= 3  # else their order would show nothing
    assert [r.tokens for r in engine.chat(asked, PARAMS)] == alone
    lengths = [SamplingParams(max_tokens=n) for n in (3, 5, 8, 1)]
    assert [len(r.tokens) for r in engine.chat(asked, lengths)] == [3, 5, 8, 1]
    assert [r.tokens for r in engine.chat([QUESTION], PARAMS)] == alone[:1]


@catches(
    "keywords are not heard",
    "mlxspec.engine.api:with_fields",
    lambda right: lambda params, fields: params,
)
def test_fields_of_the_parameters_are_keywords(engine: Engine) -> None:
    assert len(engine.chat(QUESTION, max_tokens=3).tokens) == 3
    assert len(engine.generate("import os", PARAMS, max_tokens=2).tokens) == 2
    each = [SamplingParams(max_tokens=n, seed=n) for n in (3, 5)]
    assert [len(r.tokens) for r in engine.generate(["x = 1", "y ="], each, temperature=0.5)] == [3, 5]
    num = sum(len(e.tokens) for e in engine.stream("x =", max_tokens=4) if isinstance(e, mlxspec.TokensEvent))
    assert num == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_token": 3}, "There is no option 'max_token'; did you mean max_tokens?"),
        ({"enable_thinking": False}, "There is no option 'enable_thinking'"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
    ],
)
def test_a_keyword_that_is_wrong_is_told(engine: Engine, wrong: dict[str, Any], said: str) -> None:
    for call in (engine.chat, engine.generate, engine.stream):
        with pytest.raises(ConfigError) as raised:
            call(QUESTION, **wrong)
        assert str(raised.value).startswith(said)
    with pytest.raises(ConfigError, match=said[:20]):
        engine.chat(QUESTION, stream=True, **wrong)


def test_variables_of_the_template_have_a_place_of_their_own(engine: Engine) -> None:
    bare, whole = (
        engine.chat_prompt(QUESTION, template) for template in ({"add_generation_prompt": False}, None)
    )
    assert bare == whole[: len(bare)]
    assert len(bare) < len(whole)
    assert engine.chat(QUESTION, PARAMS, template={"add_generation_prompt": False}).stats.num_prompt == len(
        bare
    )


def test_the_same_in_an_event_loop() -> None:
    async def run() -> None:
        async with mlxspec.AsyncEngine(demo_folder("target"), draft="off") as made:
            one = await made.chat(QUESTION, PARAMS)
            several = await made.chat([QUESTION, "what is a list?"], PARAMS)
            assert several[0].tokens == one.tokens
            assert len(several) == 2
            assert len((await made.chat(QUESTION, max_tokens=3)).tokens) == 3
            assert len((await made.generate("x", max_tokens=2)).tokens) == 2
            with pytest.raises(ConfigError, match="did you mean max_tokens"):
                await made.chat(QUESTION, max_token=3)
            with pytest.raises(ConfigError, match="streamed"):
                made.chat([QUESTION, QUESTION], PARAMS, stream=True)  # type: ignore[call-overload]
            with pytest.raises(ConfigError, match="the roles are"):
                await made.chat([{"role": "bot", "content": "hi"}])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [{"role": "usr", "content": "hi"}],
            "messages[0] has the role 'usr'; the roles are " + ", ".join(ROLES),
        ),
        ([{"role": "user", "content": "hi"}, {"content": "ho"}], "messages[1] has no role; the roles are"),
        ([{"role": "user", "content": "hi"}, "ho"], "messages[1] must be like"),
        ([], "Give chat a string"),
        ({"role": "user", "content": "hi"}, "Give chat a string"),
        (None, "Give chat a string"),
        (7, "Give chat a string"),
        ([7], "a string or a list of messages, not 7"),
        ([[]], "a string or a list of messages, not []"),
        (["hi", [{"role": "me", "content": ""}]], "has the role 'me'"),
    ],
)
def test_what_is_no_conversation(engine: Engine, messages: Any, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        engine.chat(messages, PARAMS)
    assert words in str(told.value)
    assert engine.is_idle


def test_several_cannot_be_streamed(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="One conversation is streamed at a time"):
        engine.chat(["hi", "ho"], PARAMS, stream=True)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="2 prompts but 1"):
        engine.chat(["hi", "ho"], [PARAMS])


def test_with_closes_the_engine() -> None:
    with mlxspec.load("demo-draft", draft="off", max_context=64) as made:
        assert made.max_context == 64
        assert made.generate("x = 1\n", PARAMS).text
        with pytest.raises(ContextOverflowError):
            made.generate(list(range(5, 70)), PARAMS)
    with pytest.raises(EngineStoppedError):
        made.generate("x = 1\n", PARAMS)


def test_path_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path object is a folder, even where its name is that of a model that comes with mlxspec."""
    made = mlxspec.load(demo_folder("target"), draft="draft-model", draft_model=demo_folder("draft"))
    assert made.spec.drafters == ("draft-model",)
    made.close()
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "owner/name", "~nobody-here/x"):
        with pytest.raises(ModelError, match="There is no folder"):
            mlxspec.load(Path(name))
    with pytest.raises(ModelError, match="There is no folder"):
        mlxspec.load("demo", draft_model=Path("none"))


def test_one_context_is_given_once() -> None:
    with pytest.raises(ConfigError, match="max_context is 64, and config says 128"):
        mlxspec.load("demo", max_context=64, config=EngineConfig(max_context=128))
    with pytest.raises(ConfigError, match="max_context must be"):
        mlxspec.load("demo", max_context=1)


def test_a_figure_has_one_name_in_python_and_in_json(engine: Engine) -> None:
    """Every figure of `--json` is an attribute of that name and value; every public attribute is in it, except the times that a ratio is
    computed from."""
    stats = engine.chat("what does str.split do?", SamplingParams(max_tokens=40)).stats
    data = json.loads(json.dumps(stats.data()))
    for name, value in data.items():
        if name != "drafters":
            assert getattr(stats, name) == value, name
    public = {n for n in dir(RequestStats) if isinstance(getattr(RequestStats, n), property)}
    assert public | {*RequestStats.__dataclass_fields__} == {*data, "other_rounds"}
    work = data["drafters"]["ngram-simple"]
    own = {n for n in dir(DrafterStats) if isinstance(getattr(DrafterStats, n), property)}
    assert own | {*DrafterStats.__dataclass_fields__} == {*work}
    assert stats.drafters["ngram-simple"].acceptance == work["acceptance"]
