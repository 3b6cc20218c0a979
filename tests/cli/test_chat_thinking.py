"""Thinking in a chat: told apart from the answer, folded, limited, switched; templates get earlier thinking to do with as they please."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_checkpoints import write_checkpoint

import mlxspec
from mlxspec.cli.chat import run_turn
from mlxspec.cli.chat_commands import Session, obey
from mlxspec.cli.conversation import Conversation
from mlxspec.cli.interrupt import Interrupt
from mlxspec.cli.view import View
from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError, MlxspecError
from mlxspec.loading.template import ChatTemplate
from mlxspec.sampling import loops

# As Qwen's: a switch, an opened tag, thinking kept for the turns behind the last question only.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    made = mlxspec.load(str(write_checkpoint(tmp_path_factory.mktemp("models") / "thinker")))
    assert made.tokenizer is not None
    made.tokenizer.template = ChatTemplate(TEMPLATE, {})
    return made


@pytest.fixture
def talk(engine: Engine) -> Conversation:
    return Conversation(engine=engine, params=SamplingParams(max_tokens=8), spec=engine.spec)


def test_a_turn_behind_an_opened_tag_is_thinking(talk: Conversation) -> None:
    with Interrupt() as interrupt:
        pieces = list(talk.ask("hi", interrupt))
    assert pieces
    assert all(piece.is_thinking for piece in pieces)
    thought = "".join(p.text for p in pieces)
    assert talk.turns[-1] == {"role": "assistant", "content": "", "reasoning_content": thought}
    first = talk.engine.chat_prompt([talk.turns[0]])
    later = talk.engine.chat_prompt([*talk.turns, {"role": "user", "content": "more"}])
    assert talk.engine.tokenizer is not None
    assert thought not in talk.engine.tokenizer.decode(later)  # this template drops it
    assert first[:10] == later[:10]


def test_a_loop_in_thinking_is_told(
    talk: Conversation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "LEAST", 40)  # this model's context is short
    talk.params = SamplingParams(max_tokens=600, ignore_eos=True, logit_bias={65: 100.0})
    run_turn(Session(talk=talk, view=View(), load=lambda name: (talk.engine, {})), "hi")
    told = "".join(capsys.readouterr()).casefold()
    assert "thinking looped and was closed: it repeats every 1 tokens (loop_breaker)" in told


def test_commands_on_thinking(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(talk=talk, view=View(), load=lambda name: (talk.engine, {}))
    obey(session, "/think off")
    assert talk.thinking is False
    with Interrupt() as interrupt:
        assert not any(piece.is_thinking for piece in talk.ask("hi", interrupt))
    obey(session, "/think budget 2")
    obey(session, "/think on")
    assert (talk.thinking, talk.params.thinking_budget) == (True, 2)
    obey(session, "/think hide")
    session.view.begin()
    session.view.think("one two")
    session.view.end()
    assert "2 words (/think show tells them)" in capsys.readouterr().err
    obey(session, "/think show")
    assert "one two" in capsys.readouterr().err
    for line in (
        "/think budget x",
        "/think budget -1",
        "/think maybe",
        "/temp 900",
        "/temp nan",
        "/save",
        "/load ",
        "/save a\tb\x00",
    ):
        before = (talk.params, talk.thinking, list(talk.turns))
        with pytest.raises(ConfigError):
            obey(session, line)
        assert before == (talk.params, talk.thinking, list(talk.turns))


def test_a_model_or_file_that_is_refused_changes_nothing(talk: Conversation, tmp_path: Path) -> None:
    def load(name: str) -> tuple[Engine, dict[str, object]]:
        if name == "bad":
            raise ConfigError("There is no bad.")
        return mlxspec.load(str(write_checkpoint(tmp_path / name))), {}

    session = Session(talk=talk, view=View(), load=load)
    with Interrupt() as interrupt:
        list(talk.ask("hi", interrupt))
    (tmp_path / "broken.json").write_text("{}")
    before = talk.engine, list(talk.turns), list(talk.answers)
    for line in ("/model bad", f"/load {tmp_path / 'broken.json'}"):
        with pytest.raises(MlxspecError):
            obey(session, line)
        assert (talk.engine, talk.turns, talk.answers) == before
    obey(session, f"/save {tmp_path / 'talk.json'}")
    obey(session, "/model other")
    assert talk.engine is not before[0]
    assert (talk.turns, talk.answers) == (before[1], [])
    obey(session, "/clear")
    obey(session, f"/load {tmp_path / 'talk.json'}")
    assert talk.turns == before[1]
    with Interrupt() as interrupt:
        assert list(talk.ask("and on", interrupt))
