"""Commands of a chat that change its turns and its sampling: retry, undo, set, copy, resume; and what a model recommends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Run
from planting import catches, rewritten

import mlxspec
from mlxspec.cli import chat, chat_commands, clipboard, saved
from mlxspec.cli.chat_commands import Session, obey
from mlxspec.cli.conversation import Conversation
from mlxspec.cli.recommended import USUAL, recommended
from mlxspec.cli.view import View
from mlxspec.config import MAX_CONTEXT, SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError, ContextOverflowError

RECOMMENDED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 3}


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return mlxspec.load(str(model))


@pytest.fixture
def session(engine: Engine) -> Session:
    talk = Conversation(engine=engine, params=SamplingParams(max_tokens=6), spec=engine.spec)
    return Session(talk=talk, view=View(), load=lambda name: (engine, {}), ask=chat.run_turn)


@catches(
    "the answer proves itself",
    "mlxspec.cli.conversation:Conversation.prove",
    lambda right: lambda self, interrupt: replace(right(self, interrupt), difference=None),
)
def test_prove_decodes_the_last_answer_again(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no answer to prove"):
        obey(session, "/prove")
    chat.run_turn(session, "one")
    capsys.readouterr()
    obey(session, "/prove")
    assert capsys.readouterr().err.startswith("proved: plain decoding gives the same 6 tokens")
    assert session.talk.last is not None
    session.talk.last[1].history[-1] += 1
    obey(session, "/prove")
    assert capsys.readouterr().err.startswith("NOT THE SAME: at token 6")


def test_retry_and_undo(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    talk = session.talk
    with pytest.raises(ConfigError, match="no turn"):
        obey(session, "/retry")
    chat.run_turn(session, "one")
    chat.run_turn(session, "two")
    first, both = talk.turns[:2], list(talk.turns)
    capsys.readouterr()
    obey(session, "/retry")
    assert talk.turns == both  # greedy: the same again, and that is said
    assert "The same answer comes again" in capsys.readouterr().err
    obey(session, "/set temp 1")
    obey(session, "/set seed 5")
    obey(session, "/retry")
    assert talk.turns[:3] == both[:3]
    assert talk.turns[3] != both[3]
    obey(session, "/undo")
    assert talk.turns == first
    assert "Taken back: two" in capsys.readouterr().err
    obey(session, "/undo")
    with pytest.raises(ConfigError, match="no turn"):
        obey(session, "/undo")


def test_a_retry_that_is_refused_changes_nothing(session: Session) -> None:
    chat.run_turn(session, "one")
    before = list(session.talk.turns)
    session.talk.system = "x" * 300
    with pytest.raises(ContextOverflowError):
        obey(session, "/retry")
    assert session.talk.turns == before


def test_a_full_context_forgets_the_first_turns_and_says_so(session: Session) -> None:
    """The model is shown the last turns; the conversation keeps all of them, and a question that is refused changes nothing."""
    talk = session.talk
    notices = []
    for number in range(12):
        chat.run_turn(session, f"question {number:02d} with some words")
        notices += talk.answers[-1].stats.notices
    assert len(talk.turns) == 24
    begin = talk.num_forgotten
    assert 2 <= begin < 24
    assert (
        notices[-1] == f"The first {begin // 2} turns are no longer shown to the model: the context is full."
    )
    assert len(notices) < 6  # not with every turn
    with pytest.raises(ContextOverflowError):
        chat.run_turn(session, "x" * 300)
    assert (talk.num_forgotten, len(talk.turns)) == (begin, 24)
    obey(session, "/clear")
    assert talk.num_forgotten == 0


@catches(
    "turns that are taken back stay forgotten",
    "mlxspec.cli.conversation:Conversation.undo",
    rewritten("self.num_forgotten = min(self.num_forgotten, len(self.turns))", "pass"),
    errors=(ConfigError,),
)
def test_turns_taken_back_down_to_the_forgotten_ones_are_shown_again(session: Session) -> None:
    """What is asked next is in the prompt, however many turns were taken back."""
    talk, engine = session.talk, session.talk.engine
    while talk.num_forgotten < 4:
        chat.run_turn(session, f"question {len(talk.turns) // 2:02d} with some words")
    while talk.turns:
        obey(session, "/undo")
        assert talk.num_forgotten <= len(talk.turns)
        before = list(talk.turns)
        if len(before) in (0, 2):
            chat.run_turn(session, "and what now?")
            assert talk.last is not None
            assert "and what now?" in engine.tokenizer.decode(list(talk.last[0]))
            obey(session, "/undo")
            assert talk.turns == before


def test_set(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    talk = session.talk
    obey(session, "/set top-p 0.9")
    obey(session, "/set max-tokens=9")
    obey(session, "/set stop END")
    assert (talk.params.top_p, talk.params.max_tokens, talk.params.stop) == (0.9, 9, ("END",))
    obey(session, "/set top-p off")
    assert talk.params.top_p == 1.0
    capsys.readouterr()
    obey(session, "/set")
    listed = capsys.readouterr().err
    assert "max-tokens           9" in listed
    assert "seed                 not set" in listed
    before = talk.params
    for line, words in (
        ("/set tmep 1", "did you mean temp"),
        ("/set temp hot", "--temp must be a number"),
        ("/set temp 900", "--temp must be between"),
        ("/set top-p 0", "--top-p must be above 0"),
        ("/set lark", None),
    ):
        if words is None:
            obey(session, line)
        else:
            with pytest.raises(ConfigError, match=words):
                obey(session, line)
        assert talk.params == before
    with pytest.raises(ConfigError, match="did you mean /undo"):
        obey(session, "/undoo")


def test_answers_end_at_the_context(
    engine: Engine, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = session.talk
    obey(session, "/set max-tokens off")
    assert "to the end of the context" in capsys.readouterr().err
    assert talk.params.max_tokens == MAX_CONTEXT
    talk.params = replace(talk.params, ignore_eos=True)
    for question in ("one", "and two"):
        talk.turns = []
        chat.run_turn(session, question)
        stats = talk.answers[-1].stats
        assert stats.num_prompt + stats.num_generated == engine.max_context
        assert talk.answers[-1].ending == "cut at the end of the context"
    obey(session, "/set")
    assert "max-tokens           to the end of the context" in capsys.readouterr().err


def test_answers_end_where_memory_does(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no turn is refused, and the prefix cache keeps its room."""
    talk = session.talk
    talk.params = replace(talk.params, max_tokens=MAX_CONTEXT, ignore_eos=True)
    monkeypatch.setattr(talk.engine.memory, "most_tokens", lambda spec: 40)
    chat.run_turn(session, "one")
    stats = talk.answers[-1].stats
    assert stats.num_prompt + stats.num_generated == 40
    assert talk.answers[-1].ending == "cut at the token limit"


def test_copy(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no answer"):
        obey(session, "/copy")
    chat.run_turn(session, "one")
    program = tmp_path / "pbcopy"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    obey(session, "/copy")
    assert (tmp_path / "copied").read_text() == session.talk.turns[-1]["content"]


def test_copy_by_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="no clipboard"):
        clipboard.copy("é")
    monkeypatch.setattr("mlxspec.cli.terminal.can_move", lambda stream: stream is sys.stdout)
    clipboard.copy("é")
    assert capsys.readouterr().out == "\x1b]52;c;w6k=\x07"


def test_resume(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="No earlier conversation"):
        obey(session, "/resume")
    for i in range(saved.KEPT + 3):
        path = saved.new_file()
        assert path is not None
        session.kept = path.with_name(f"2026-01-01 00.00.{i:02} 1.json")
        session.talk.clear()
        chat.run_turn(session, f"question {i}")
    assert len(saved.kept_files()) == saved.KEPT
    newest = saved.KEPT + 2
    session.kept = None
    session.talk.clear()
    obey(session, "/resume")
    assert session.talk.turns[0]["content"] == f"question {newest}"
    obey(session, "/resume 3")
    assert session.talk.turns[0]["content"] == f"question {newest - 2}"
    capsys.readouterr()
    obey(session, "/resume list")
    assert f"  2  2026-01-01 00.00  question {newest - 1} (1 turn)" in capsys.readouterr().err
    for wrong in ("0", "99", "x", "-1"):
        with pytest.raises(ConfigError, match="1, the newest, to 20"):
            obey(session, f"/resume {wrong}")
    assert chat_commands.COMMANDS["resume"].do is chat_commands.resume


# ---- what a model recommends


def test_what_a_model_recommends(copied: Path) -> None:
    assert recommended(str(copied)) == ({}, None)
    path = copied / "generation_config.json"

    def found(data: object) -> tuple[dict[str, Any], str | None]:
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return recommended(str(copied))

    assert found(RECOMMENDED) == ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, None)
    assert found(RECOMMENDED | {"do_sample": False}) == ({}, None)
    assert found({"do_sample": True, "top_k": 5}) == ({"temperature": 1.0, "top_k": 5}, None)
    assert found({"eos_token_id": 1}) == (USUAL, None)
    path.unlink()
    assert recommended(str(copied)) == (USUAL, None)
    for wrong in ("", "[]", "{", {"temperature": "hot"}, {"temperature": -1}, {"temperature": 1, "top_p": 7}):
        fields, said = found(wrong)
        assert fields == USUAL
        assert said is not None
        assert said.startswith(f"The sampling that {copied} recommends cannot be used: ")


def test_a_chat_samples_as_recommended_unless_told_otherwise(
    run: Run, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    asked: list[SamplingParams] = []
    submit = Engine.submit

    def listening(self: Engine, prompt: Any, params: Any = None, **more: Any) -> Any:
        asked.append(params)
        return submit(self, prompt, params, **more)

    monkeypatch.setattr(Engine, "submit", listening)
    short = ("--model", copied, "--max-tokens", 3)
    run("chat", "x", *short)
    run("chat", "x", *short, "--temp", 0)
    run("generate", "x", *short)
    assert [(p.temperature, p.top_p, p.top_k) for p in asked if p.max_tokens == 3] == [
        (0.6, 0.95, 20),
        (0.0, 0.95, 20),
        (0.0, 1.0, 0),
    ]


def test_another_model_brings_its_own_recommendation(engine: Engine) -> None:
    params = SamplingParams(temperature=0.6, top_k=20, top_p=0.5)
    old = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    talk = Conversation(engine=engine, params=params, spec=engine.spec, recommended=old)
    talk.go_on_with(engine, {"temperature": 1.0, "min_p": 0.1})
    p = talk.params
    assert (p.temperature, p.top_k, p.min_p) == (1.0, 0, 0.1)
    assert p.top_p == 0.5  # what somebody chose stays


@catches(
    "the next model is not shown what the one before had no room for",
    "mlxspec.cli.conversation:Conversation.go_on_with",
    rewritten("self.num_forgotten = 0", "pass"),
)
@catches(
    "the answer of the model before can be proved by the next one",
    "mlxspec.cli.conversation:Conversation.go_on_with",
    rewritten("self.last = None", "pass"),
)
def test_another_model_begins_with_the_turns_alone(
    session: Session, engine: Engine, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever followed from the model before is gone: what did not fit into its context, its answer, its statistics."""
    with mlxspec.load(str(model), max_context=160) as small:
        talk = Conversation(engine=small, params=session.talk.params, spec=small.spec)
        session.talk = talk
        while not talk.num_forgotten:
            chat.run_turn(session, f"question {len(talk.turns) // 2} with some words")
        turns = list(talk.turns)
        talk.go_on_with(engine, {})
        capsys.readouterr()
        with pytest.raises(ConfigError, match="no answer to prove"):
            obey(session, "/prove")
        obey(session, "/stats")
        assert "no answer yet" in capsys.readouterr().err
    chat.run_turn(session, "and now?")
    assert talk.turns[: len(turns)] == turns
    assert talk.num_forgotten == 0
    assert talk.last is not None
    assert "question 0" in engine.tokenizer.decode(list(talk.last[0]))


def test_set_takes_underscores_as_other_programs_write_them(session: Session) -> None:
    obey(session, "/set min_tokens 2")
    assert session.talk.params.min_tokens == 2
