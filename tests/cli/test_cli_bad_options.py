"""Every option of every command with every kind of mistake: exit code 2, one sentence on stderr that names the option and ends properly,
nothing on stdout, no traceback; and before any model is looked for."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest
from cli_runs import Run, refused

from mlxspec.cli import options
from mlxspec.cli.other_programs import aliases
from mlxspec.cli.parser import CommandParser
from mlxspec.errors import ConfigError

NOWHERE = "/there-is-no-model-here"
REPO = "nobody/nothing"
# What makes a command right but for the option that is tried. A model that is not there is found last.
RIGHT: dict[str, list[str]] = {
    "generate": ["-p", "x", "--model", NOWHERE],
    "chat": ["-p", "x", "--model", NOWHERE],
    "demo": ["--model", NOWHERE],
    "bench": ["--model", NOWHERE],
    "tune": ["--model", NOWHERE],
    "try": ["--model", NOWHERE],
    "pull": [REPO],
    "rm": [REPO],
    "inspect": [NOWHERE],
    "convert": [NOWHERE, "-o", "/there-is-no-folder-here/out"],
    "run": ["-p", "x", "--model", NOWHERE],
    "serve": ["--model", NOWHERE],
    "launch": ["claude", "--model", NOWHERE],
    "prove": ["/there-is-no-file"],
    "versus": ["http://127.0.0.1:1", "--model", NOWHERE],
    "completion": ["bash"],
}
# Values that a text option may have although they look wrong; and flags whose text means something only to a model or a hub.
MAY_BE_EMPTY = {"--system", "--prompt"}
NO_NUMBERS = ("", "abc", "1,5", "0x1F", "-99999999999", "9" * 30, "9" * 5000, "nan")
NO_CHOICES = ("", "nonsense", "TAPE", "fixed,auto")
PAIRS: list[tuple[list[str], list[str]]] = [
    (["generate", "-p", "x", "--draft-min", "9", "--draft-max", "2"], ["--draft-min", "--draft-max"]),
    (["generate", "-p", "x", "--regex", "a", "--lark", "b"], ["--regex", "--lark"]),
    (["generate", "-p", "x", "--json-schema", "{}", "--regex", "a"], ["--json-schema", "--regex"]),
    (["generate", "-p", "-", "-p", "-"], ["-p -"]),
    (["generate"], ["empty"]),
    (["generate", "x", "-p", "y"], ["'x'", "-p"]),
    (["generate", "x", "y"], ["'y'", "quotes"]),
    (["chat", "-p", "x", "y"], ["'y'", "-p"]),
    (
        ["generate", "-p", "x", "--system-prompt", "a", "--ignore-chat-template"],
        ["--system", "--ignore-chat-template"],
    ),
    (["generate", "-p", "x", "--draft", "off,mtp"], ["off"]),
    (["generate", "-p", "x", "--revision", "v1"], ["revisions"]),
    (["generate", "-p", "x", "--model", REPO, "--revision", "a b"], ["--revision"]),
    (["serve", "--model", "a=demo", "--model", "b=demo", "--revision", "v1"], ["--revision"]),
    (["generate", "-p", "x", "--draft", "mtp,mtp"], ["twice"]),
    (["generate", "-p", "x", "--draft", "mtq"], ["'mtq'", "mtp"]),
    (["demo", "--draft", "off"], ["--draft off"]),
    (["demo", "--draft", "auto", "--draft", "mtp"], ["--draft auto"]),
    (["bench", "--draft", "off"], ["--draft off"]),
    (["bench", "mtp"], ["--workloads mtp"]),
    (["tune", "demo"], ["'demo' belongs to no option", "--model names a model"]),
    (["serve", "--prefix-states", "half"], ["no option --prefix-states", "--prefix-disk"]),
    (["generate", "--prompts", "p.txt"], ["no option --prompts", "-p given again"]),
    (["generate", "-p", "x", "--output", "r.jsonl"], ["no option --output", "--json"]),
    (["tune", "--context"], ["no option --context", "--max-context"]),
    (["bench", "--url", "http://127.0.0.1:8080"], ["no option --url", "--model"]),
    (["generate", "-p", "x", "--draft-sampling", "greedy"], ["no option --draft-sampling", "the same text"]),
    (["bench", "--workloads", "nonsense"], ["'nonsense'"]),
    (["bench", "--plot", "x.doc"], ["--plot", ".png"]),
    (["tune", "--draft", "off"], ["--draft off"]),
    (["tune", "--prompts", "/there-is-no-file"], ["--prompts"]),
    (["tune", "--plot", "/nowhere/x.png"], ["--plot"]),
]


def parsers() -> dict[str, argparse.ArgumentParser]:
    made = {name: CommandParser(prog=name) for name in options.COMMANDS}
    for name, parser in made.items():
        options.builder(name)(parser)
    return made


def own_options() -> list[tuple[str, argparse.Action]]:
    return [
        (name, action)
        for name, parser in parsers().items()
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    ]


TAKING = [(n, a) for n, a in own_options() if a.nargs is None]
SWITCHES = [(n, a) for n, a in own_options() if a.nargs == 0]
NUMERIC = [
    (n, a)
    for n, a in TAKING
    if a.type is not None and getattr(a.type, "__qualname__", "").split(".")[0] in ("number", "size")
]
CHOICES = [
    (n, a) for n, a in TAKING if a.type is not None and "choice" in getattr(a.type, "__qualname__", "")
]


def name_of(value: object) -> str:
    return value.option_strings[-1] if isinstance(value, argparse.Action) else str(value)


def flag(action: argparse.Action) -> str:
    """Its name in messages: the first long one."""
    return next((s for s in action.option_strings if s.startswith("--")), action.option_strings[0])


def right(command: str, but: argparse.Action | None = None) -> list[str]:
    """Arguments in which nothing is wrong; those of option `but` left out."""
    given = list(RIGHT.get(command, []))
    if but is not None and given[:1] and any(s in given for s in but.option_strings):
        place = next(i for i, a in enumerate(given) if a in but.option_strings)
        del given[place : place + 2]
    return given


@pytest.mark.parametrize(("command", "action"), TAKING, ids=name_of)
def test_a_missing_value(run: Run, command: str, action: argparse.Action) -> None:
    for spelling in action.option_strings:
        refused(run(command, *right(command, action), spelling), spelling, "needs a value")
    refused(run(command, flag(action), "--help-me", *right(command, action)), "needs a value")


@pytest.mark.parametrize(("command", "action"), SWITCHES, ids=name_of)
def test_a_value_for_what_takes_none(run: Run, command: str, action: argparse.Action) -> None:
    refused(run(command, *right(command), f"{flag(action)}=1"), flag(action))


@pytest.mark.parametrize(("command", "action"), NUMERIC, ids=name_of)
def test_a_number_that_is_none_or_out_of_range(run: Run, command: str, action: argparse.Action) -> None:
    for value in NO_NUMBERS:
        refused(run(command, *right(command, action), f"{flag(action)}={value}"), flag(action))


@pytest.mark.parametrize(("command", "action"), CHOICES, ids=name_of)
def test_a_choice_that_is_none(run: Run, command: str, action: argparse.Action) -> None:
    for value in NO_CHOICES:
        refused(run(command, *right(command, action), f"{flag(action)}={value}"), flag(action))


@pytest.mark.parametrize(
    ("command", "action"),
    [(n, a) for n, a in TAKING if a.type is None and not set(a.option_strings) & MAY_BE_EMPTY],
    ids=name_of,
)
def test_an_empty_text(run: Run, command: str, action: argparse.Action) -> None:
    refused(run(command, *right(command, action), f"{flag(action)}="))


@pytest.mark.parametrize("command", options.COMMANDS)
def test_words_nobody_knows(run: Run, command: str) -> None:
    refused(run(command, *right(command), "--xyzzy"), "--xyzzy", "--help")
    refused(run(command, *right(command), "--jsom"), "--jsom")
    refused(run(command, *right(command), "-z"), "-z")
    refused(run(command, *right(command), "--debug=yes"), "--debug")
    if command != "models":  # takes any number
        refused(run(command, *right(command), "one", "word", "too", "many"))


@pytest.mark.parametrize(("arguments", "words"), PAIRS, ids=lambda v: " ".join(v)[:60])
def test_what_contradicts(run: Run, arguments: list[str], words: list[str]) -> None:
    refused(run(*arguments), *words)


@pytest.mark.parametrize("command", ["pull", "rm", "inspect", "convert"])
def test_a_model_that_was_not_named(run: Run, command: str) -> None:
    refused(run(command))


def test_the_commands_that_are_right_fail_at_the_model_only(run: Run) -> None:
    for command in ("generate", "demo", "bench", "tune", "inspect"):
        refused(run(command, *right(command)), NOWHERE)


def test_aliases_are_the_flags_they_stand_for() -> None:
    arguments = (
        "-p x -n 7 --temperature 0.5 --repeat-penalty 1.1 -s 3 -c 900 --num-draft-tokens=5 -m demo".split()
    )
    args = options.parse(["generate", *arguments])
    assert (args.max_tokens, args.temp, args.repetition_penalty) == (7, 0.5, 1.1)
    assert (args.seed, args.max_context, args.draft_max, args.model) == (3, 900, 5, "demo")
    generate = parsers()["generate"]
    for alias, own in aliases().items():
        if own in options.flags(generate) and not any(own in a.option_strings for _, a in SWITCHES):
            found = options.in_own_words("generate", generate, [alias, "3", f"{alias}=3"])
            assert found.words == [f"{own}=3"] * 2, alias
    assert options.in_own_words("models", parsers()["models"], ["-n"]).words == ["-n"]
    with pytest.raises(ConfigError, match="--max-tokens must be"):
        options.parse(["generate", "-n", "many"])
    with pytest.raises(ConfigError, match="no option -n"):
        options.parse(["models", "-n", "3"])
    assert Path(NOWHERE).is_absolute()


def test_what_is_wrong_is_said_before_a_port_is_taken(run: Run) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = f"--port={busy.getsockname()[1]}"
        refused(run("serve", port, "--max-rows=0"), "--max-rows")
        refused(run("serve", port, "--model", ""), "--model")
        assert "in use" in run("serve", port).err


def test_a_command_that_moved_says_where_it_is(run: Run) -> None:
    refused(run("list"), "`mlxspec models` lists")
    refused(run("search", "qwen"), "`mlxspec models WORD` searches")
