"""`mlxspec chat`: turns out of a pipe or from -p, commands, what is kept when an answer is stopped or refused."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from cli_runs import Run

import mlxspec
from mlxspec.cli import chat, line_editor, terminal
from mlxspec.cli.conversation import Conversation
from mlxspec.cli.interrupt import Interrupt
from mlxspec.cli.line_editor import Typed
from mlxspec.cli.view import View
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError, ContextOverflowError


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return mlxspec.load(str(model))


@pytest.fixture
def talk(engine: Engine) -> Conversation:
    return Conversation(engine=engine, params=SamplingParams(max_tokens=8), spec=engine.spec)


def say(talk: Conversation, text: str) -> str:
    with Interrupt() as interrupt:
        return "".join(p.text for p in talk.ask(text, interrupt) if not p.is_thinking)


def answers(engine: Engine, questions: list[str], *, system: str | None = None) -> list[str]:
    """The same conversation without a Conversation, without drafting."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = engine.chat_prompt(messages)
        found.append(engine.generate(prompt, SamplingParams(max_tokens=8), spec=SpecConfig()).text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_history_is_kept(engine: Engine, talk: Conversation) -> None:
    assert [say(talk, q) for q in ("one", "two", "three")] == answers(engine, ["one", "two", "three"])
    assert [t["role"] for t in talk.turns] == ["user", "assistant"] * 3
    talk.clear()
    assert [say(talk, "two")] == answers(engine, ["two"])


def test_each_line_of_a_pipe_is_a_turn(run: Run, engine: Engine, model: Path) -> None:
    ran = run("chat", "--model", model, "--max-tokens", 8, stdin=b"one\n\n  \ntwo\r\nthree")
    assert (ran.code, ran.out.splitlines()) == (0, answers(engine, ["one", "two", "three"]))
    assert len(re.findall(r"(?m)^cut at the token limit: 8 tokens", ran.err)) == 3


def test_prompts_are_turns_and_no_commands(run: Run, engine: Engine, model: Path) -> None:
    ran = run(
        "chat",
        "--model",
        model,
        "--max-tokens",
        8,
        "-p",
        "one",
        "-p",
        "/help",
        "--system-prompt",
        "be",
        stdin=b"never read",
    )
    assert (ran.code, ran.out.splitlines()) == (0, answers(engine, ["one", "/help"], system="be"))


def test_commands(run: Run, engine: Engine, model: Path) -> None:
    lines = [
        "one",
        "/draft",
        "/draft off",
        "/clear",
        "two",
        "/stats",
        "/system be",
        "/system",
        "/system -",
        "//slash",
        "/help",
        "/exit",
        "no",
    ]
    ran = run("chat", "--model", model, "--max-tokens", 8, stdin="\n".join(lines).encode())
    assert ran.code == 0
    assert ran.out.splitlines()[:2] == answers(engine, ["one"]) + answers(engine, ["two"])
    assert len(ran.out.splitlines()) == 3
    for words in (
        "Drafting: suffix, ngram-simple, mtp.", "Drafting: off.", "forgotten", "nothing drafted", "2 answers (2 cut at the token limit)",
        "System prompt: be",
        "There is no system prompt.", "/stats  ",
    ):  # fmt: skip
        assert words in ran.err, words
    assert "no " not in ran.out.splitlines()[-1]


def test_a_command_out_of_a_pipe_that_is_refused_ends_it(run: Run, model: Path) -> None:
    for command, said in (
        ("/draft frobnicate", "frobnicate"),
        ("/hlep", "There is no command /hlep; did you mean /help?"),
    ):
        ran = run("chat", "--model", model, "--max-tokens", 8, stdin=f"{command}\nnever\n".encode())
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err


def test_choosing_drafters(talk: Conversation) -> None:
    for names, chosen in (
        ("off", ()),
        ("mtp", ("mtp",)),
        ("mtp, ngram-simple", ("mtp", "ngram-simple")),
        ("auto", talk.engine.spec.drafters),
    ):
        talk.draft_with(names)
        assert talk.spec.drafters == chosen
        assert say(talk, "hello")
    before = talk.spec
    for names in ("draft-model", "frobnicate", "mtp,mtp", "", "off,mtp"):
        with pytest.raises(ConfigError):
            talk.draft_with(names)
    assert talk.spec == before


def test_overflow_keeps_the_conversation(talk: Conversation) -> None:
    say(talk, "one")
    turns = list(talk.turns)
    with pytest.raises(ContextOverflowError):
        say(talk, "x" * 300)
    assert talk.turns == turns
    assert len(talk.answers) == 1
    assert say(talk, "two")


def test_overflow_out_of_a_pipe_is_one_sentence(run: Run, engine: Engine, model: Path) -> None:
    ran = run("chat", "--model", model, "--max-tokens", 8, stdin=b"one\n" + b"x" * 300 + b"\ntwo\n")
    assert (ran.code, ran.out.splitlines()) == (2, answers(engine, ["one"]))
    assert ran.err.splitlines()[-1].startswith("mlxspec: error: This model's maximum context length is ")


def test_ctrl_c_keeps_what_came(talk: Conversation) -> None:
    with Interrupt() as interrupt:
        pieces = []
        for piece in talk.ask("hello", interrupt):
            pieces.append(piece.text)
            if not interrupt.asked:
                signal.raise_signal(signal.SIGINT)
    assert interrupt.asked
    assert talk.turns[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert talk.answers[-1].ending == "stopped"
    assert talk.engine.is_idle
    assert say(talk, "and on")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str | Typed | BaseException]:
    """What a person types: lines, or what the keyboard raises; afterwards the input ends. Answers appear as bare text."""
    keys: list[str | Typed | BaseException] = []

    class Reader:
        def read(self) -> Typed:
            key = keys.pop(0) if keys else EOFError()
            if isinstance(key, BaseException):
                raise key
            return key if isinstance(key, Typed) else Typed(key)

    monkeypatch.setattr(line_editor, "best_reader", lambda completions, keeps: Reader())
    monkeypatch.setattr(chat, "best_view", View)
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is not None)
    return keys


def test_at_a_terminal_errors_do_not_end_it(
    run: Run, engine: Engine, model: Path, typed: list[str | Typed | BaseException]
) -> None:
    typed += ["", "one", KeyboardInterrupt(), "x" * 300, "/draft frobnicate", "\udcff", "two"]
    ran = run("chat", "--model", model, "--max-tokens", 8)
    assert ran.code == 0
    assert ran.out.splitlines() == answers(engine, ["one", "two"])
    assert ran.err.count("mlxspec: error: ") == 3
    assert "/help" in ran.err
    assert "Ctrl-D" in ran.err


def test_exit_at_a_terminal(run: Run, model: Path, typed: list[str | Typed | BaseException]) -> None:
    typed += ["/exit", "one"]
    assert run("chat", "--model", model).out == ""
