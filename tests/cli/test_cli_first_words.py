"""What a person types first: a prompt without an option, a pipe, a schema in a file, a word that is nearly right; and what is said then."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
from cli_runs import Run, refused

import mlxspec
from mlxspec.cli import progress_bar, terminal
from mlxspec.cli.main import main
from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.events import Event

SHORT = ("--max-tokens", 6)


def texts(engine: Engine, prompts: list[str]) -> list[str]:
    params = SamplingParams(max_tokens=6)
    return [engine.chat([{"role": "user", "content": p}], params).text for p in prompts]


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return mlxspec.load(str(model), draft="off")


def test_a_prompt_needs_no_option_and_a_pipe_no_dash(run: Run, model: Path, engine: Engine) -> None:
    given = ("--model", model, *SHORT)
    plain, joined = texts(engine, ["hello", "hello\n\nfrom a file"])
    assert run("generate", "hello", *given).out == plain + "\n"
    assert run("generate", *given, "hello").out == plain + "\n"
    assert run("generate", *given, stdin=b"hello\n").out == plain + "\n"
    assert run("generate", "hello", *given, stdin=b"from a file\n").out == joined + "\n"
    assert run("generate", "-p", "hello", *given, stdin=b"never read").out == plain + "\n"
    assert run("generate", "-", *given, stdin=b"hello").out == plain + "\n"
    assert run("chat", "hello", *given).out == plain + "\n"
    assert run("chat", "hello", *given, stdin=b"from a file").out == joined + "\n"


def test_a_kept_conversation_is_taken_up_from_the_command_line(run: Run, model: Path, tmp_path: Path) -> None:
    kept, given = tmp_path / "talk.json", ("chat", "--model", model, *SHORT)
    assert run(*given, stdin=f"hello\n/save {kept}\n".encode()).code == 0
    by_command = run(*given, stdin=f"/load {kept}\nand now?\n".encode())
    by_option = run(*given, "--load", kept, stdin=b"and now?\n")
    assert "Took up 1 turn from" in by_option.err
    assert by_option.out == by_command.out != run(*given, stdin=b"and now?\n").out
    refused(run(*given, "--load", tmp_path / "absent"), "absent")
    refused(run(*given, "--load", kept, "--resume"), "--load", "--resume")


def test_at_a_terminal_without_a_prompt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is sys.stdin)
    refused(run("generate"), 'generate "TEXT"', "pipe")


def test_schemas_out_of_files(run: Run, model: Path, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    (tmp_path / "s.json").write_text(json.dumps(schema))
    (tmp_path / "r").write_text("[0-9]{2}\n")
    (tmp_path / "empty").write_text("")
    given = ("generate", "x", "--model", model, "--max-tokens", 40)
    assert json.loads(run(*given, "--json-schema", f"@{tmp_path}/s.json").out) == {"a": 1}
    assert run(*given, "--regex", f"@{tmp_path}/r").out.strip().isdecimal()
    assert run(*given, "--regex", "[@]x").out == "@x\n"
    for flag in ("--json-schema", "--regex", "--lark"):
        refused(run(*given, flag, f"@{tmp_path}/absent"), flag, "absent", "No such file")
        refused(run(*given, flag, f"@{tmp_path}/empty"), flag, "is empty")
        refused(run(*given, flag, f"@{tmp_path}"), flag, "directory")
    (tmp_path / "bytes").write_bytes(b"\xff")
    refused(run(*given, "--lark", f"@{tmp_path}/bytes"), "--lark", "UTF-8")


@pytest.mark.parametrize(
    ("arguments", "tip"),
    [
        ("chta", "did you mean chat?"),
        ("Chat", "did you mean chat?"),
        ("generate x --no-stream", "answers always stream"),
        ("generate x --tempreature 1", "did you mean --temperature?"),
        ("generate x --draft mpt", "did you mean mtp?"),
        ("generate x --draft ngram", "did you mean ngram-simple"),
        ("generate x --dtype bf16", "bfloat16"),
        ("generate x --dtype bfloat", "did you mean bfloat16?"),
        ("generate x --policy atuo", "did you mean auto?"),
        ("bench --workloads edt", "did you mean edit?"),
        ("serve --limit max_bdy=3", "did you mean max_body?"),
        ("serve --samplers top_k", "the order of samplers is fixed"),
        ("pull a/b --froce", "did you mean --force?"),
    ],
)
def test_close_words(run: Run, arguments: str, tip: str) -> None:
    refused(run(*arguments.split()), tip)


def test_a_trace_has_lines_of_its_own(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where answer and trace share a terminal, a line of the trace waits until the answer's line has ended."""
    monkeypatch.setenv("TERM", "dumb")
    both = io.StringIO()
    both.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    terminal.say("an answer")
    terminal.trace("round 1")
    terminal.say(" goes on\nand")
    terminal.trace("round 2")
    terminal.say(" ends\n")
    terminal.trace("round 3")
    assert both.getvalue() == "an answer goes on\nand ends\nround 1\nround 2\nround 3\n"


def test_a_trace_of_a_pipe_does_not_wait(run: Run, model: Path) -> None:
    ran = run("generate", "abcabcabc", "--model", model, "--max-tokens", 20, "--trace")
    lines = ran.err.splitlines()
    assert len(lines) > 1
    assert lines[0].startswith("row 0 at ")
    assert len(ran.out.splitlines()) == 1


def test_the_end_of_the_context_is_not_the_token_limit(run: Run, model: Path) -> None:
    ran = run(
        "generate", "hello", "--model", model, "--max-context", 60, "--max-tokens", 200, "--regex", "a*"
    )
    assert ran.code == 0
    assert ran.err.startswith("cut at the end of the context: ")
    ran = run("generate", "hello", "--model", model, "--max-tokens", 5)
    assert ran.err.startswith("cut at the token limit: 5 tokens")


def test_more_context_than_the_model_has_is_said(run: Run, model: Path) -> None:
    ran = run("generate", "hello", "--model", model, "--max-context", 100_000, *SHORT)
    assert ran.code == 0
    assert "The model has 256 tokens of context, less than --max-context 100,000; 256 are used" in ran.err


def test_waits_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that lasts says what it is for, one within the other too; on a pipe and after the end nothing is left."""
    from cli_window import Window

    window = Window(80, 10)
    monkeypatch.setattr(progress_bar, "_PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", window)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar.Waiting("loading demo") as outer:
        outer._show()  # what the timer does
        assert "loading demo" in window.text
        with progress_bar.Waiting("reading the prompt", 8000, "tokens") as inner:
            inner._show()
            inner.tell(3000)
            assert progress_bar.Waiting._board is not None
            progress_bar.Waiting._board.refresh()
            assert "3,000 of 8,000 tokens" in window.text
            inner._since = time.monotonic() - 10.0
            inner.tell(5000, num_free=3000)  # 2,000 of them in 10 s
            progress_bar.Waiting._board.refresh()
            assert re.search(r"5,000 of 8,000 tokens, (200|199) a second, 15 s left", window.text), (
                window.text
            )
            assert "loading demo" in window.text
        progress_bar.Waiting._board.refresh()
        assert "reading" not in window.text
    assert window.text.strip() == ""
    assert progress_bar.Waiting._board is None
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with progress_bar.Waiting("loading demo"):
        pass
    assert pipe.getvalue() == ""
    with progress_bar.Waiting("measuring", unit="answers", is_long=True) as wait:
        for done in range(41):
            wait.tell(done, 40)
    tenths = [f"measuring: {4 * i} of 40 answers" for i in range(1, 11)]
    assert pipe.getvalue().splitlines() == ["measuring", *tenths]


def test_every_wait_of_a_command_has_a_name(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    init = progress_bar.Waiting.__init__

    def listed(self: progress_bar.Waiting, what: str, *more: object, **named: object) -> None:
        names.append(what)
        init(self, what, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(progress_bar.Waiting, "__init__", listed)
    run("generate", "--model", model, *SHORT, stdin=b"x")
    assert [n for n in names if n != "loading"] == [
        "reading the standard input",
        f"loading {model}",
        "reading the prompt",
    ]


def test_a_long_prompt_says_how_long_it_takes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, once a piece has been read."""
    from cli_window import Window

    from mlxspec.engine.prefill import Prefill

    window, advance = Window(120, 10), Prefill.advance

    def slow(self: Prefill, end: int) -> list[Event]:
        time.sleep(0.1)
        return advance(self, end)

    monkeypatch.setattr(Prefill, "advance", slow)
    monkeypatch.setattr("mlxspec.checkpoints.memory._CHUNK_ON_CPU", 32)
    monkeypatch.setattr(progress_bar, "_PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", window)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setenv("TERM", "xterm")
    main(["generate", "abc" * 60, "--model", str(model), "--max-tokens", "6"])
    told = re.findall(r"(\d+) of \d+ tokens, [\d,]+ a second, \d+ s left", window.getvalue())
    assert {"32", "64", "96"} <= set(told), window.getvalue()
