"""`mlxspec chat`: holds a conversation at a terminal, from a pipe (each line is a question), or from prompts on the command line.

Knows lines, turns and streams; the conversation is conversation.py, commands are chat_commands.py. Only answers go to a stdout that is no
terminal.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

from mlxspec import __version__
from mlxspec.cli import chat_commands, header, line_editor, options, saved, stats_line, terminal
from mlxspec.cli.chat_commands import Session
from mlxspec.cli.conversation import Conversation
from mlxspec.cli.generate import INTERRUPTED, STATS, SYSTEM, add_prompts, read_prompts
from mlxspec.cli.images import pasted
from mlxspec.cli.interrupt import Interrupt
from mlxspec.cli.keys import no_echo
from mlxspec.cli.line_editor import LineEditor, PlainReader, Typed
from mlxspec.cli.parser import declare, declare_options
from mlxspec.cli.progress_bar import Waiting
from mlxspec.cli.recommended import recommended
from mlxspec.cli.view import View, best_view
from mlxspec.config import MAX_CONTEXT, EngineConfig
from mlxspec.errors import CacheError, ConfigError, ContextOverflowError, MlxspecError

_WRITING = 0.2  # seconds behind an answer, in which the prefix cache on disk is written
_REHEARSING = 0.5  # seconds before a person may type: the first answer waits for less then


def add_options(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser, "the next turn")
    options.add_model(parser)
    options.add_sampling(parser, MAX_CONTEXT, recommended=True)
    options.add_drafting(parser)
    declare(
        parser,
        SYSTEM,
        ("--image", list, "FILE", "an image for the first question; given again: one more image"),
        (
            "--show-thinking",
            bool,
            "",
            "show thinking as it comes instead of folding it into a line",
        ),
        ("--resume", bool, "", "go on with the last conversation held at a terminal"),
        ("--load", str, "FILE", "go on with a conversation that /save kept"),
        ("--no-history", bool, "", "keep neither what is typed nor the conversation"),
        STATS,
    )
    declare_options(parser, EngineConfig, "prefix_disk prefix_dir past_texts_disk")
    options.add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Hold a conversation. Returns 0, or 130 where Ctrl-C ended an answer and the questions were not typed at a terminal."""
    spec = options.spec_config(args)
    options.sampling_params(args)  # what is wrong with it is said before a model is looked for
    options.engine_config(args)
    if args.load is not None:
        if args.resume:
            raise ConfigError("--load and --resume both name the conversation to go on with; give one.")
        saved.load(
            chat_commands.file_of("--load", args.load)
        )  # what is wrong with it is said before a model is loaded
    system = None if args.system is None else terminal.checked(args.system, "--system")
    given = read_prompts(args) if args.prompt or args.words else None
    at_terminal = given is None and terminal.is_terminal(sys.stdin)
    keeps = at_terminal and not args.no_history

    def load(model: str):  # type: ignore[no-untyped-def]  # an Engine and what its model recommends
        ranks = getattr(args, "ranks", None)
        if ranks is not None and ranks.has_engine:
            raise ConfigError("The model is chosen at the start where it is divided among ranks.")
        chosen = copy.copy(args)
        chosen.model = model
        if model != args.model:  # what belongs to the model at the start
            chosen.revision = chosen.adapter = chosen.chat_template = None
        engine = options.load_engine(chosen, spec)
        if at_terminal:
            from mlxspec.engine.rehearsal import rehearse_for

            with Waiting("getting ready"):
                rehearse_for(engine, _REHEARSING)
        found, notice = recommended(model, chosen.revision)
        if notice is not None:
            terminal.note(notice)
        return engine, found

    with no_echo(sys.stdin):
        engine, found = load(args.model)
    talk = Conversation(
        engine=engine,
        params=options.sampling_params(args, max_tokens=MAX_CONTEXT, **found),
        spec=engine.spec,
        system=system,
        recommended=found,
    )
    session = Session(
        talk=talk,
        view=best_view("show" if args.show_thinking else "hide") if at_terminal else View(),
        load=load,
        ask=run_turn,
        all_figures=args.stats,
    )
    try:
        return _hold(args, session, given, at_terminal=at_terminal, keeps=keeps)
    finally:
        session.talk.engine.close()


def _hold(
    args: argparse.Namespace, session: Session, given: list[str] | None, *, at_terminal: bool, keeps: bool
) -> int:
    if args.resume:
        chat_commands.resume(session, "")
    if args.load is not None:
        chat_commands.load(session, args.load)
    session.talk.show(*(args.image or ()))
    if given is not None:
        return _answer_all(session, (Typed(text, may_command=False) for text in given))
    if not at_terminal:
        return _answer_all(session, _piped_lines())
    session.kept = saved.new_file() if keeps else None
    _greet(session.talk)
    _converse(session, line_editor.best_reader(chat_commands.completions(session), keeps=keeps))
    return 0


def _answer_all(session: Session, lines: Iterable[Typed]) -> int:
    """Answer questions that are not typed at a terminal, one after another. Returns 0, or 130 where Ctrl-C ended an answer. The first
    error is raised."""
    for line in lines:
        if _take(session, line):
            return INTERRUPTED
        if session.leaving:
            break
    return 0


def _converse(session: Session, reader: PlainReader | LineEditor) -> None:
    """Read and answer questions at a terminal until /exit or the end of input. Errors are printed, and the conversation continues."""
    while not session.leaving:
        try:
            line = reader.read()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            terminal.note("/exit or Ctrl-D leaves.")
            continue
        try:
            terminal.checked(line.text, "This line")
            if line.text.strip() and not _take(session, line) and not session.leaving:
                terminal.note_as_is("")
        except CacheError:
            raise
        except ContextOverflowError as error:
            terminal.complain(
                f"{error} Nothing was added: send less of it, or /clear the conversation before it."
            )
        except MlxspecError as error:
            terminal.complain(str(error))


def _take(session: Session, line: Typed) -> bool:
    """Execute a line as a command, or answer it as a question. Returns whether Ctrl-C stopped the answer."""
    text = line.text
    if (
        line.may_command
        and text.startswith("/")
        and not text.startswith("//")
        and not _is_pasted(session, text)
    ):
        return chat_commands.obey(session, text)
    if line.may_command and session.talk.engine.vision is not None:
        text, names = pasted(text)
        session.talk.show(*names)
        if names and not text:
            return chat_commands.obey(session, "/image")
    return run_turn(session, text[1:] if line.may_command and text.startswith("//") else text)


def _is_pasted(session: Session, text: str) -> bool:
    """Return whether a line that begins with a slash is the pasted path of an image, not a command."""
    if session.talk.engine.vision is None or text[1:].partition(" ")[0] in chat_commands.COMMANDS:
        return False
    return bool(pasted(text)[1])


def _piped_lines() -> Iterator[Typed]:
    """Yield the lines of stdin that are not blank. Raises ConfigError for a line that is not UTF-8."""
    for number, line in enumerate(terminal.stdin_lines(), 1):
        text = terminal.checked(line, f"Line {number} of the standard input").strip()
        if text:
            yield Typed(text)


def run_turn(session: Session, text: str) -> bool:
    """Answer a question: stream the answer, print its statistics, and save the conversation to its file. Returns whether Ctrl-C stopped
    the answer."""
    talk, view = session.talk, session.view
    with Interrupt() as interrupt, no_echo(sys.stdin):
        begun = False
        try:
            for piece in talk.ask(text, interrupt):
                if not begun:
                    view.begin()
                    begun = True
                if piece.is_thinking:
                    view.think(piece.text)
                else:
                    view.say(piece.text)
        finally:
            if begun:
                view.end()
    talk.engine.prefix.flush(_WRITING)
    last = talk.answers[-1]
    terminal.note(stats_line.line([last], talk.engine.stats.plain))
    if session.all_figures:
        terminal.note(stats_line.details([last]))
    # what the machine lacks is said once, what became of a drafter with each answer
    for notice in stats_line.notices([last.stats]) if len(talk.answers) == 1 else last.stats.notices:
        terminal.note(notice)
    if session.kept is not None:
        with suppress(ConfigError):  # a full disk does not end a conversation
            saved.save(session.kept, talk.saved())
    return interrupt.asked


def _greet(talk: Conversation) -> None:
    terminal.note_as_is(f"mlxspec {__version__}")
    header.tell(talk)
    if talk.engine.name in options.DEMO_FAMILY:
        terminal.note("This is a small model that comes with mlxspec; --model names another.")
    terminal.note_as_is("/help lists the commands, Ctrl-D leaves.")
    terminal.note_as_is("")
