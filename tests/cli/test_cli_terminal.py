"""A person at a terminal: what is typed into `mlxspec chat` and what the screen shows, through a pseudo-terminal and an emulated screen."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOW_STEPS = Path(__file__).with_name("slow_steps.py")
recorder = pytest.importorskip("recorder", reason="needs POSIX terminals and pyte")
pytestmark = pytest.mark.terminal

QUESTION = "what does os.path.join do?"
ANSWER = "Join two or more pathname components"
ESC = "\x1b"

Start = Callable[..., "recorder.Recorder"]


def ready(text: str) -> bool:
    """The prompt waits for something to be typed."""
    return text.endswith("\n>")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a chat with the demo model, is_slow: with an engine that sleeps before each step. Other keyword arguments set variables."""
    open_ones = []

    def chat(
        *arguments: str, columns: int = 90, rows: int = 40, is_slow: bool = False, **variables: str
    ) -> recorder.Recorder:
        kept = {
            k: v
            for k, v in os.environ.items()
            if k not in ("NO_COLOR", "COLORTERM", "TERM", "COLUMNS", "LINES")
        }
        settings = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "MLXSPEC_CACHE": str(tmp_path / "cache"),
            "MLX_DISABLE_COMPILE": "1",  # else a cache folder without kernels is worth a notice
            "TERM": "xterm-256color",
            # else the editor waits two seconds for the terminal to say where its cursor is, and then prints a warning
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }
        program = [str(SLOW_STEPS)] if is_slow else ["-m", "mlxspec"]
        command = [sys.executable, *program, "chat", *arguments]
        made = recorder.Recorder(command, environment=settings | variables, columns=columns, rows=rows)
        open_ones.append(made)
        return made

    yield chat
    for each in open_ones:
        each.__exit__(None, None, None)


def test_what_is_pasted_while_a_model_loads_or_answers_is_not_sent(start: Start) -> None:
    chat = start("--max-tokens", "8")
    while b"\x1b[?2004h" not in chat.received:
        chat.settle(0.05)
    chat.paste("one\n\n/clear\nthree\n")  # nothing is loaded yet
    text = chat.wait_for("> one\n…\n… /clear\n… three")
    assert "tok/s" not in text
    assert "forgotten" not in text
    chat.type("\r")
    before = len(chat.wait_for("tok/s"))
    assert chat.received.rindex(b"\x1b[?2004h") > chat.received.rindex(b"\x1b[?2004l")
    chat.paste("four\nfive\n")
    assert "tok/s" not in chat.wait_for("five", after=before)


def test_a_narrow_terminal_breaks_lines_between_words(start: Start) -> None:
    chat = start(columns=40)
    chat.wait_for(ready)
    for line in ("/help", "/temp hot", "/model nowhere-at-all", "/draft xyz"):
        before = len(chat.text())
        chat.type(line + "\r")
        chat.wait_for(ready, after=before)
    lines = chat.text().splitlines()
    assert "drafting  suffix, ngram-simple, mtp" in lines
    assert "(where it pays)" in [line.strip() for line in lines]
    assert "/clear forget the conversation (the" in lines
    assert "mlxspec: error: /temp needs a number" in lines
    text = " ".join(line.strip() for line in lines)
    for words in (
        "`mlxspec models nowhere at all` searches for others.",
        "(--draft at the start chooses others).",
    ):
        assert words in text


def test_a_conversation(start: Start, tmp_path: Path) -> None:
    """Header, typing, an answer with its statistics, commands with completion, several lines, paste, history, leaving."""
    chat = start("--max-tokens", "60")
    header = chat.wait_for(ready)
    for words in (
        "model     demo · ",
        "drafting  suffix, ngram-simple, mtp",
        "context   2,048 tokens",
        "--model names another",
    ):
        assert words in header

    chat.type(QUESTION + "\r")
    said = chat.wait_for(ready, after=len(header))
    assert ANSWER in said
    assert "`" not in said  # Markdown is shown, not spelled
    told = said.split(ANSWER)[1]
    for words in (" tokens · ", " tok/s", "% of ", "accepted"):
        assert words in told
    assert "prompt " not in told  # three numbers, all others where they are asked for
    before = len(chat.text())
    chat.type("/stats\r")
    told = chat.wait_for(ready, after=before)
    for words in ("tokens a round", "prompt ", " MB"):
        assert words in told

    before = len(chat.text())
    chat.type("/dra\t")
    chat.wait_for("> /draft", after=before - 1)
    chat.type(" off\r")
    assert "Drafting: off." in chat.wait_for(ready, after=before)
    for line, words in (
        ("/temp hot", "error: /temp needs a number"),
        ("/frobnicate", "no command /frobnicate"),
        ("/think on", "no switch for thinking"),
        ("/model nowhere-at-all", "no folder nowhere-at-all"),
        ("/load nothing.json", "error: nothing.json cannot be read"),
        (f"/save {tmp_path}", "is a folder"),
    ):
        before = len(chat.text())
        chat.type(line + "\r")
        said = chat.wait_for(ready, after=before)  # lines are broken where the screen ends
        assert re.sub(r"\s", "", words) in re.sub(r"\s", "", said)

    before = len(chat.text())
    chat.type("/system one\\\rtwo\\\r")
    chat.type("three" + ESC + "\rfour")
    assert chat.wait_for("four", after=before).count("…") == 3
    chat.type("\x03")
    assert "/exit or Ctrl-D leaves." in chat.wait_for(ready, after=before)

    before = len(chat.text())
    chat.paste("/exit\nis pasted\n")
    chat.wait_for("is pasted", after=before)
    chat.type("\r")  # had a line been sent before, what is saved below would not hold both
    assert "nothing drafted" in chat.wait_for(ready, after=before)

    before = len(chat.text())
    chat.type(f"/save {tmp_path}/talk.json\r")
    assert "Saved 2 turns" in chat.wait_for(ready, after=before)
    talk = json.loads((tmp_path / "talk.json").read_text())
    assert talk["messages"][2] == {"role": "user", "content": "/exit\nis pasted\n"}
    before = len(chat.text())
    chat.type("/clear\r")
    chat.wait_for(ready, after=before)
    before = len(chat.text())
    chat.type(f"/load {tmp_path}/talk.json\r")
    assert "Took up 2 turns" in chat.wait_for(ready, after=before)

    chat.type("\x1b[A")  # what was typed comes back
    chat.wait_for(
        lambda text: re.sub(r"[\s…]", "", text).endswith("talk.json")
    )  # lines are broken where the screen ends
    before = len(chat.text())
    chat.type("\x03")
    chat.wait_for(ready, after=before)
    chat.type("\x04")
    assert chat.wait() == 0
    kept = tmp_path / "cache" / "history" / "chat"
    assert QUESTION in kept.read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


ENDLESS = (*"--max-tokens 1900 --temp 1 --seed 3 --draft off --regex".split(), "([a-z]{2,8} ){999}end")
LONG = "Write a function that returns the sum of squares of a list of numbers."


def test_ctrl_c_resize_and_typing_ahead(start: Start) -> None:
    """An answer is stopped and kept; the window changes while it comes; keys pressed meanwhile wait for the prompt."""
    chat = start(*ENDLESS, rows=60, is_slow=True)
    chat.wait_for(ready)
    chat.type(LONG + "\r")
    grown = len(chat.wait_for(LONG))
    chat.wait_for(lambda text: len(text) > grown + 60)
    chat.resize(50, 60)
    chat.type("typed ahead")
    grown = len(chat.settle(0.0))
    chat.wait_for(lambda text: len(text) > grown + 60)
    chat.resize(70, 60)
    assert "typed ahead" not in chat.text()
    chat.interrupt()
    chat.wait_for("stopped: ")
    text = chat.wait_for(lambda text: text.endswith("> typed ahead"))
    assert "Traceback" not in text
    chat.type("\x15/stats\r")
    chat.wait_for("rounds, ")
    chat.type("/exit\r")
    assert chat.wait() == 0


def test_ctrl_s_holds_the_answer_until_ctrl_q_ctrl_c_or_a_signal(start: Start) -> None:
    """A terminal that is held takes nothing, so the chat waits in a write. It can be ended there."""
    chat = start(*ENDLESS, rows=60, is_slow=True)
    chat.wait_for(ready)

    def held() -> int:
        chat.type(LONG + "\r")
        grown = len(chat.wait_for(LONG))
        chat.wait_for(lambda text: len(text) > grown + 60)
        chat.type(b"\x13")
        text = chat.settle(1.0)
        assert not ready(text)  # else it was not held, and has come to its end
        return len(text)

    so_far = held()
    chat.type(b"\x11")
    chat.wait_for(lambda text: len(text) > so_far + 60)
    chat.type(b"\x13")
    so_far = len(chat.settle(1.0))
    chat.interrupt()
    chat.wait_for("stopped: ", after=so_far)
    assert "Traceback" not in chat.wait_for(ready, after=so_far)
    held()
    chat.end(signal.SIGTERM)
    assert chat.wait() == -signal.SIGTERM


def test_a_dumb_terminal_gets_no_escapes(start: Start) -> None:
    chat = start(TERM="dumb")
    header = chat.wait_for(ready)
    chat.type(QUESTION + "\r")
    assert ANSWER in chat.wait_for(ready, after=len(header))
    chat.type("/exit\r")
    assert chat.wait() == 0
    assert ESC.encode() not in chat.received


@pytest.mark.slow
def test_an_answer_is_proved_by_a_command(start: Start) -> None:
    chat = start()
    chat.wait_for(ready)
    chat.type(f"{QUESTION}\r")
    before = len(chat.wait_for("tok/s"))
    chat.wait_for(ready, after=before)
    chat.type("/prove\r")
    chat.wait_for("proved: plain decoding gives the same ", after=before)
    chat.wait_for(ready, after=before)
