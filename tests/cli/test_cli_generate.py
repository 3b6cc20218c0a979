"""`mlxspec generate`: the text alone on stdout, statistics on stderr, the same text whoever drafts."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from cli_runs import Run

import mlxspec
from mlxspec.cli import stats_line, terminal
from mlxspec.cli.main import main
from mlxspec.config import SamplingParams
from mlxspec.engine import receipt
from mlxspec.engine.engine import Engine
from mlxspec.engine.stats import DrafterStats, PlainRounds, RequestStats
from mlxspec.events import TokensEvent

WRONG = receipt.Receipt(
    num_tokens=40,
    num_accepted=9,
    seconds=1.0,
    plain_seconds=2.0,
    difference=receipt.Difference(place=2, answer=5, plain=None, answer_logprob=-0.5, plain_logprob=None),
)
PROMPT = "abcabcabcabcab"
LINE = re.compile(
    r"^(.*: )?\d+ tokens?( · [\d.]+ tok/s( \((plain about \d+|while compiling; the next answer is faster)\))?)? · "
    r"(nothing drafted|\d+ % of \d+ drafted tokens? accepted( · same (text, proved|bits in rounds to \d+ tokens))?)$"
)
DETAILS = re.compile(
    r"^prompt \d+ tokens?, [\d.]+ tok/s · \d+ rounds?(, [\d.]+ tokens a round)?"
    r"( · [a-z-]+ \d+/\d+ \([\d.]+ deep, [\d.]+ accepted\))*"
    r"( · drafting \d+ %, verifying \d+ % of the time)? · peak memory [\d.]+ [kM]B"
)


@pytest.fixture(scope="module")
def plain(model: Path) -> str:
    """What the engine says without a command line."""
    engine = mlxspec.load(str(model), draft="off")
    ids = engine.chat_prompt([{"role": "user", "content": PROMPT}])
    return str(engine.generate(ids, SamplingParams(max_tokens=40)).text)


@pytest.mark.parametrize(
    "drafting",
    [
        ["--draft", "off"],
        [],
        ["--policy", "fixed", "--draft", "ngram-simple", "--ngram-n", "2", "--ngram-m", "5"],
        ["--policy", "fixed", "--draft", "mtp", "--draft-max", "2"],
        ["--policy", "fixed", "--draft", "draft-model", "--draft-p-min", "0.01"],
        ["--policy", "fixed", "--draft", "ngram-simple, mtp ,draft-model", "--draft-min", "1"],
    ],
    ids=" ".join,
)
def test_text_to_stdout_and_statistics_to_stderr(
    run: Run, model: Path, draft_model: Path, plain: str, drafting: list[str]
) -> None:
    ran = run(
        "generate",
        "-p",
        PROMPT,
        "--model",
        model,
        *(("--draft-model", draft_model) if "draft-model" in " ".join(drafting) else ()),
        "--max-tokens",
        40,
        "--stats",
        *drafting,
    )
    assert (ran.code, ran.out) == (0, plain + "\n")
    lines = ran.err.splitlines()
    assert LINE.match(lines[0]), lines[0]
    assert DETAILS.match(lines[1]), lines[1]
    assert lines[0].startswith("cut at the token limit: 40 tokens")
    assert "\x1b" not in ran.err
    if drafting == ["--draft", "off"]:
        assert "nothing drafted" in lines[0]
        assert "39 rounds, 1.00 tokens a round" in lines[1]
    if "mtp" in drafting:
        assert re.search(r" mtp \d+/\d+", lines[1])


def test_statistics_name_the_blas_on_linux(run: Run, model: Path) -> None:
    from mlxspec.platform import device

    ran = run("generate", "-p", "x", "--model", model, "--max-tokens", 3, "--stats")
    assert (device.report().blas in ran.err) == (sys.platform == "linux" and device.backend() == "cpu")
    for notice in device.report().notices:
        assert terminal.sentence(notice) in ran.err.splitlines()


def test_stdin_is_the_prompt_without_its_last_newline(run: Run, model: Path, plain: str) -> None:
    for stdin in (PROMPT.encode(), PROMPT.encode() + b"\n", PROMPT.encode() + b"\r\n"):
        assert (
            run("generate", "-p", "-", "--model", model, "--max-tokens", 40, stdin=stdin).out == plain + "\n"
        )


def test_seeded_sampling_is_the_same_with_drafting(run: Run, model: Path) -> None:
    texts = {
        run(
            "generate",
            "-p",
            PROMPT,
            "--model",
            model,
            "--max-tokens",
            40,
            "--temp",
            1,
            "--top-p",
            0.95,
            "--seed",
            seed,
            "--draft",
            d,
        ).out
        for d in ("off", "auto")
        for seed in (1, 1)
    }
    assert len(texts) == 1
    assert (
        run("generate", "-p", PROMPT, "--model", model, "--max-tokens", 40, "--temp", 1, "--seed", 2).out
        not in texts
    )


def test_the_chat_template_is_used_unless_told_otherwise(run: Run, model: Path) -> None:
    def prompt_tokens(*more: str) -> int:
        ran = run("generate", "-p", "hello", "--model", model, "--max-tokens", 2, "--json", *more)
        return int(json.loads(ran.out)["stats"]["num_prompt"])

    as_it_stands = prompt_tokens("--ignore-chat-template")
    asked = prompt_tokens()
    assert as_it_stands == len("hello")
    assert asked == len("user\nhello\nassistant\n") + 3
    assert prompt_tokens("--system-prompt", "brief") == asked + len("system\nbrief\n") + 2


def test_stop_strings(run: Run, model: Path, plain: str) -> None:
    stop = plain[10:13]
    ran = run(
        "generate", "-p", PROMPT, "--model", model, "--max-tokens", 40, "--stop", "\x00", "--stop", stop
    )
    assert ran.out == plain[: plain.index(stop)] + "\n"
    assert not ran.err.startswith("cut")


def test_several_prompts_stand_under_headers(run: Run, model: Path) -> None:
    prompts = ["one", "the second", "3\nwith a line"]
    alone = [run("generate", "-p", p, "--model", model, "--max-tokens", 12).out for p in prompts]
    ran = run("generate", *(a for p in prompts for a in ("-p", p)), "--model", model, "--max-tokens", 12)
    assert ran.out == "\n".join(
        f"=== {i + 1} of 3: {' '.join(p.split())}\n{a}"
        for i, (p, a) in enumerate(zip(prompts, alone, strict=True))
    )
    assert ran.err.startswith("3 answers (3 cut at the token limit): 36 tokens")


def test_more_prompts_than_rows(run: Run, model: Path) -> None:
    ran = run(
        "generate",
        *(a for i in range(11) for a in ("-p", f"number {i}")),
        "--model",
        model,
        "--max-tokens",
        3,
    )
    assert re.findall(r"(?m)^=== (\d+) of 11: number", ran.out) == [str(i + 1) for i in range(11)]


def test_json_holds_the_answer_where_no_record_can_be_made(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no record is like this")

    monkeypatch.setattr("mlxspec.engine.record.record", fails)
    ran = run("generate", "-p", PROMPT, "--model", model, "--max-tokens", 4, "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["finish_reason"], found["stats"]["num_generated"]) == (0, "length", 4)
    assert found["text"]
    assert (
        "An answer has no record, so it cannot be proved later: ValueError: no record is like this."
        in ran.err
    )


def test_json_is_one_object_a_prompt(run: Run, model: Path, plain: str) -> None:
    ran = run("generate", "-p", PROMPT, "-p", "x", "--model", model, "--max-tokens", 40, "--json")
    first, second = (json.loads(line) for line in ran.out.splitlines())
    assert (ran.code, ran.err) == (0, "")
    assert (first["prompt"], first["text"], first["finish_reason"]) == (PROMPT, plain, "length")
    assert second["prompt"] == "x"
    assert len(first["tokens"]) == first["stats"]["num_generated"] == 40
    assert first["stats"]["num_accepted"] <= first["stats"]["num_drafted"]
    assert set(first["stats"]["drafters"]) <= {"suffix", "ngram-simple", "mtp"}
    assert {"backend", "blas", "peak_memory_bytes", "notices"} <= set(first["device"])


def test_an_answer_is_proved(run: Run, model: Path, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that plain decoding does not give ends with exit code 1, and what was printed stays."""
    given = ("generate", "-p", PROMPT, "--model", model, "--max-tokens", 40, "--prove")
    ran = run(*given)
    assert (ran.code, ran.out) == (0, plain + "\n")
    assert "proved: plain decoding gives the same 40 tokens, in " in ran.err
    monkeypatch.setattr(Engine, "prove", lambda *_: WRONG)
    ran = run(*given)
    assert (ran.code, ran.out) == (1, plain + "\n")
    assert "NOT THE SAME: at token 3 the answer says " in ran.err
    assert "(log-probability -0.5000) and plain decoding ends" in ran.err
    ran = run(*given, "--json")
    assert (ran.code, json.loads(ran.out)["receipt"]["difference"]["place"]) == (1, 2)


@pytest.mark.parametrize(
    ("width", "widest", "said"),
    [
        (8, 8, "accepted · same text, proved"),
        (8, 9, "accepted · same bits in rounds to 8 tokens"),
        (1, 9, "accepted"),
        (None, 2, "accepted"),
    ],
)
def test_answers_say_what_is_known_of_their_text(width: int | None, widest: int, said: str) -> None:
    answers = [
        stats_line.Finished(
            stats=RequestStats(exact_width=width, widest=w, drafters={"mtp": DrafterStats(num_drafted=3)})
        )
        for w in (2, widest)
    ]
    assert stats_line.line(answers, PlainRounds()).endswith(said)
    plain = stats_line.Finished(stats=RequestStats(exact_width=8, widest=1))
    assert stats_line.line([plain], PlainRounds()).endswith("nothing drafted")


def test_a_drafter_that_fails_is_named(
    run: Run, model: Path, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxspec.drafters.lookup import NgramRow

    def fail(*_: object) -> None:
        raise RuntimeError("out of\x1b[31m ideas")

    monkeypatch.setattr(NgramRow, "draft", fail)
    ran = run("generate", "-p", PROMPT, "--model", model, "--max-tokens", 40)
    assert (ran.code, ran.out) == (0, plain + "\n")
    notice = next(line for line in ran.err.splitlines() if "ideas" in line)
    assert notice.startswith("ngram-simple drafting ended")
    assert "\x1b" not in notice


def test_ctrl_c_keeps_what_came(run: Run, model: Path, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say, before, asked = terminal.say, signal.getsignal(signal.SIGINT), list[bool]()

    def interrupting(text: str) -> None:
        say(text)
        if text and text != "\n" and not asked:
            asked.append(True)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal, "say", interrupting)
    ran = run("generate", "-p", PROMPT, "--model", model, "--max-tokens", 40, "--draft", "off")
    assert ran.code == 130
    assert ran.out.strip()
    assert plain.startswith(ran.out.removesuffix("\n"))
    assert ran.err.startswith("stopped: ")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(text: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal, "say", twice)
    ran = run("generate", "-p", PROMPT, "--model", model, "--max-tokens", 40)
    assert (ran.code, ran.out, ran.err) == (130, "", "")


def test_a_closed_pipe_is_quiet(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(terminal, "say", closed)
    monkeypatch.setattr(terminal, "discard_output", lambda *_: None)  # pytest still reads this stdout
    ran = run("generate", "-p", PROMPT, "--model", model, "--max-tokens", 40)
    assert (ran.code, ran.err) == (141, "")


def test_what_is_unexpected_ends_with_a_hint(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxspec.engine.engine import Engine

    def broken(self: Engine) -> None:
        raise ZeroDivisionError("what\never")

    monkeypatch.setattr(Engine, "step", broken)
    ran = run("generate", "-p", "x", "--model", model)
    assert ran.code == 1
    assert (
        ran.err
        == "mlxspec: error: Something unexpected happened: ZeroDivisionError: what ever. Run it again with --debug to see where.\n"
    )
    ran = run("generate", "-p", "x", "--model", model, "--debug")
    assert ran.code == 1
    assert "Traceback" in ran.err
    assert "--debug" not in ran.err.splitlines()[-1]


def test_debug_shows_where_a_model_was_refused(run: Run) -> None:
    ran = run("generate", "-p", "x", "--model", "nowhere", "--debug")
    assert ran.code == 2
    assert "Traceback" in ran.err


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


NASTY = "a\x1b[31mb\x9b2Jc\x07d\re\x08f\x7fg\ttab\nline\x1b]0;title\x1b\\é"


def test_no_escapes_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    terminal.say(NASTY)
    assert screen.getvalue() == "a[31mb2Jcdefg\ttab\nline]0;title\\é"


def test_a_pipe_gets_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    terminal.say(NASTY)
    assert pipe.getvalue() == NASTY


@pytest.mark.parametrize(
    ("screen", "environment", "dim"),
    [
        (Screen, {}, True),
        (Screen, {"NO_COLOR": "1"}, False),
        (Screen, {"NO_COLOR": ""}, True),
        (Screen, {"TERM": "dumb"}, False),
        (io.StringIO, {}, False),
    ],
)
def test_dim_only_where_it_shows(
    monkeypatch: pytest.MonkeyPatch, screen: type[io.StringIO], environment: dict[str, str], dim: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = screen()
    monkeypatch.setattr(sys, "stderr", stream)
    terminal.note("hello\x1b[0m")
    assert stream.getvalue() == ("\x1b[2mhello[0m\x1b[0m\n" if dim else "hello[0m\n")


def test_nothing_prints_a_few_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"(?m)^  mlxspec( \w+)? ", shown)) == 5
    assert "--help" in shown


def test_a_revision_of_a_repository(
    run: Run, model: Path, plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tag in the local cache, whose newest commit is another, damaged one."""
    home, commits = tmp_path / "models--owner--tiny", {"v1": 40 * "a", "main": 40 * "b"}
    (home / "refs").mkdir(parents=True)
    for name, commit in commits.items():
        (home / "refs" / name).write_text(commit)
        shutil.copytree(model, home / "snapshots" / commit)
    (home / "snapshots" / commits["main"] / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    given = ["generate", "-p", PROMPT, "--model", "owner/tiny", "--max-tokens", 40]
    for revision in commits["v1"], "v1":
        assert run(*given, "--revision", revision).out == plain + "\n"
    assert run(*given).code == 2
    for missing in (["chat", "-p", "x"], ["generate", "-p", "x"]):
        assert run(*missing, "--model", "owner/tiny", "--revision", "main").code == 2


# ---- --show-draft


def shown(output: str) -> list[tuple[str, bool]]:
    """Each character of a terminal's output, and whether it is green."""
    found, green = [], False
    for part in re.split(r"(\x1b\[[0-9;]*m)", output):
        if part.startswith("\x1b"):
            green = part == "\x1b[32m"
        else:
            found += [(c, green) for c in part]
    assert not green  # whatever was coloured has ended
    return found


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_what_was_drafted_and_stood_is_green(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, num_prompts: int
) -> None:
    """By the events: of this tokenizer every token is one character, so the first `num_drafted` of each event's text."""
    from mlxspec.cli import generate

    follow, events = generate.follow, []

    def listened(*arguments):
        for event in follow(*arguments):
            events.append(event)
            yield event

    monkeypatch.setattr(generate, "follow", listened)
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is sys.stdout)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    prompts = [PROMPT, "the same, the same, the same"][:num_prompts]
    options = ["--model", model, "--ngram-n", "2", "--max-tokens", "40", "--policy", "fixed", "--show-draft"]
    ran = run("generate", *(word for p in prompts for word in ("-p", p)), *options)
    assert ran.code == 0
    wanted: dict[int, list[tuple[str, bool]]] = {}
    for event in events:
        if isinstance(event, TokensEvent):
            assert len(event.text) == len(event.tokens)
            answer = wanted.setdefault(event.request, [])
            answer += [(c, i < event.num_drafted) for i, c in enumerate(event.text)]
    everything = shown(ran.out)
    for answer in wanted.values():
        text, place = "".join(c for c, _ in answer), "".join(c for c, _ in everything)
        assert everything[place.index(text) : place.index(text) + len(text)] == answer
    assert {green for answer in wanted.values() for _, green in answer} == {True, False}
    assert sum(green for _, green in everything) == sum(green for a in wanted.values() for _, green in a)
    plain = run("generate", "-p", PROMPT, *options[:-1])
    assert "\x1b" not in plain.out


def test_green_is_for_terminals_that_show_it(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["generate", "-p", PROMPT, "--model", model, "--max-tokens", "20", "--show-draft"]
    piped = run(*arguments)
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is sys.stdout)
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(*arguments).out == piped.out
    assert "\x1b" not in piped.out
