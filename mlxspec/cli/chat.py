"""`mlxspec chat`: a conversation at a terminal, out of a pipe (a line is a turn), or from `-p`.

Knows lines, commands and streams; the conversation itself is conversation.py. Only answers go to stdout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.conversation import Conversation
from mlxspec.cli.generate import INTERRUPTED, read_prompts
from mlxspec.cli.interrupt import Interrupt
from mlxspec.errors import CacheError, MlxspecError

HELP = """\
/help            this list
/clear           forget the conversation (the system prompt stays)
/system [TEXT]   show or set what stands before the conversation; - takes it away
/draft [LIST]    show or choose who drafts: off, auto, or names separated by commas
/stats           what drafting did in all answers so far
/exit            leave; so does Ctrl-D
Ctrl-C stops an answer and keeps what came. A line that shall begin with a slash begins with two."""
_PROMPT = "> "


def run(args: argparse.Namespace) -> int:
    """Hold the conversation. Returns 0, or 130 where Ctrl-C ended an answer nobody was there to continue from."""
    params, spec = (
        options.sampling_params(args, max_tokens=options.CHAT_MAX_TOKENS),
        options.spec_config(args),
    )
    system = None if args.system_prompt is None else terminal.checked(args.system_prompt, "--system-prompt")
    given = None if args.prompt is None else read_prompts(args.prompt)
    engine = options.load_engine(args, spec)
    talk = Conversation(engine=engine, params=params, spec=engine.spec, system=system)
    if given is not None:
        return _answer_all(talk, given, commands=False)
    if not terminal.is_terminal(sys.stdin):
        return _answer_all(talk, _piped_lines(), commands=True)
    _greet(talk)
    _converse(talk)
    return 0


def _answer_all(talk: Conversation, lines: Iterable[str], *, commands: bool) -> int:
    """Turn after turn without a person: the first thing that goes wrong ends it. `commands`: lines may be commands."""
    for line in lines:
        if commands and (done := _command(talk, line)) is not None:
            if done:
                return 0
        elif _turn(talk, _unescaped(line) if commands else line):
            return INTERRUPTED
    return 0


def _converse(talk: Conversation) -> None:
    """Turns at a terminal until /exit or the end of input. What goes wrong is said; the conversation goes on."""
    with suppress(ImportError):  # line editing and recall, where Python has it
        import readline  # noqa: F401
    while True:
        try:
            line = _read_line()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            terminal.note("/exit or Ctrl-D leaves.")
            continue
        try:
            line = terminal.checked(line, "This line")
            if not line.strip():
                continue
            done = _command(talk, line)
            if done:
                return
            if done is None:
                _turn(talk, _unescaped(line))
        except CacheError:
            raise
        except MlxspecError as error:
            terminal.complain(str(error))


def _read_line() -> str:
    """A line from the person. Raises EOFError at the end of input."""
    if terminal.is_terminal(sys.stdout):
        line = input(_PROMPT)
    else:  # the answers go elsewhere, the prompt must not
        print(_PROMPT, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
    return line.removesuffix("\n")


def _piped_lines() -> Iterator[str]:
    """Lines of stdin that hold anything."""
    for number, line in enumerate(terminal.stdin_lines(), 1):
        text = terminal.checked(line, f"Line {number} of the standard input").strip()
        if text:
            yield text


def _turn(talk: Conversation, text: str) -> bool:
    """Stream one answer and its statistics; returns whether Ctrl-C stopped it."""
    with Interrupt() as interrupt:
        for piece in talk.ask(text, interrupt):
            terminal.say(piece)
        terminal.say("\n")
    last = talk.answers[-1]
    terminal.note(f"{stats_line.summary([last])} · {stats_line.machine()}")
    # what the machine lacks is said once, what became of a drafter with each answer
    for notice in stats_line.notices([last.stats]) if len(talk.answers) == 1 else last.stats.notices:
        terminal.note(notice)
    return interrupt.asked


def _unescaped(line: str) -> str:
    return line[1:] if line.startswith("//") else line


def _command(talk: Conversation, line: str) -> bool | None:
    """Obey a line that is a command: True to leave, False to go on; None for a line that is none. Raises ConfigError."""
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, rest = line[1:].strip().partition(" ")
    if name in ("exit", "quit"):
        return True
    action = _COMMANDS.get(name)
    if action is None:
        terminal.note(f"There is no command /{name}; /help lists them.")
    else:
        action(talk, rest.strip())
    return False


def _help(talk: Conversation, rest: str) -> None:
    for line in HELP.splitlines():
        terminal.note_as_is(line)


def _clear(talk: Conversation, rest: str) -> None:
    talk.clear()
    terminal.note("The conversation is forgotten.")


def _system(talk: Conversation, rest: str) -> None:
    if rest:
        talk.system = None if rest == "-" else rest
    terminal.note("There is no system prompt." if talk.system is None else f"System prompt: {talk.system}")


def _draft(talk: Conversation, rest: str) -> None:
    if rest:
        talk.draft_with(rest)
    terminal.note(f"Drafting: {', '.join(talk.spec.drafters) or 'off'}.")


def _stats(talk: Conversation, rest: str) -> None:
    if not talk.answers:
        terminal.note("There was no answer yet.")
        return
    terminal.note(f"{stats_line.summary(talk.answers)} · {stats_line.machine()}")


_COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "help": _help,
    "clear": _clear,
    "system": _system,
    "draft": _draft,
    "stats": _stats,
}


def _greet(talk: Conversation) -> None:
    engine = talk.engine
    what = (
        "demo, the small model that comes with mlxspec (--model names another)"
        if engine.name == options.DEMO
        else engine.name
    )
    drafters = ", ".join(talk.spec.drafters) or "off"
    terminal.note(f"{what} · drafting: {drafters} · {engine.max_context} tokens of context · /help, /exit")
