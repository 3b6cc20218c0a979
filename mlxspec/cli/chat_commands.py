"""What a line that begins with a slash does in a chat. A command that is refused leaves everything as it was.

Knows the conversation and how answers are shown; knows no keys and no stream but the remarks beside the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.cli import header, saved, stats_line, terminal
from mlxspec.config import DRAFTER_NAMES
from mlxspec.errors import ConfigError

if TYPE_CHECKING:
    from mlxspec.cli.conversation import Conversation
    from mlxspec.cli.line_editor import Completions
    from mlxspec.cli.view import View
    from mlxspec.engine.engine import Engine


@dataclass(kw_only=True)
class Session:
    """What commands act on. load: a model's name to an engine, as the options at the start would have it."""

    talk: Conversation
    view: View
    load: Callable[[str], Engine]
    leaving: bool = field(default=False, init=False)


@dataclass(frozen=True, kw_only=True)
class Command:
    """usage: what stands behind the name. words: what it may be, for completion ("path": a file)."""

    usage: str
    about: str
    do: Callable[[Session, str], None]
    words: Callable[[Session], tuple[str, ...]] = lambda session: ()


def obey(session: Session, line: str) -> None:
    """Do what a line asks for. Raises MlxspecError where that cannot be; nothing has changed then."""
    name, _, rest = line[1:].strip().partition(" ")
    command = COMMANDS.get({"quit": "exit", "bye": "exit", "?": "help"}.get(name, name))
    if command is None:
        terminal.note(f"There is no command /{name}; /help lists them.")
    else:
        command.do(session, rest.strip())


def completions(session: Session) -> Completions:
    return {name: lambda words=command.words: words(session) for name, command in COMMANDS.items()}  # type: ignore[misc]


def _help(session: Session, rest: str) -> None:
    for name, command in COMMANDS.items():
        terminal.note_as_is(f"{f'/{name} {command.usage}':<32} {command.about}".rstrip())
    for line in (
        "Enter sends; Alt-Enter, or a backslash at the end of a line, begins a new line.",
        "A line that shall begin with a slash begins with two.",
        "Ctrl-C stops an answer and keeps what came; Ctrl-D leaves.",
    ):
        terminal.note_as_is(line)


def _clear(session: Session, rest: str) -> None:
    session.talk.clear()
    terminal.note("The conversation is forgotten.")


def _system(session: Session, rest: str) -> None:
    talk = session.talk
    if rest:
        talk.system = None if rest == "-" else rest
    terminal.note("There is no system prompt." if talk.system is None else f"System prompt: {talk.system}")


def _think(session: Session, rest: str) -> None:
    talk, view = session.talk, session.view
    word, _, value = rest.partition(" ")
    if word in ("on", "off"):
        talk.think(word == "on")
    elif word == "budget":
        talk.params = replace(talk.params, thinking_budget=_budget(value.strip()))
    elif word in ("show", "hide"):
        folded = view.show == "hide"
        view.show = "show" if word == "show" else "hide"
        if word == "show" and folded:
            view.unfold()
    elif word:
        raise ConfigError(f"/think takes show, hide, on, off or budget N, not {rest!r}.")
    switch = {None: "as the model's template has it", True: "on", False: "off"}[talk.thinking]
    budget = talk.params.thinking_budget
    limit = "no budget" if budget is None else f"a budget of {budget:,} tokens"
    terminal.note(f"Thinking: {switch}, {limit}, {'shown' if view.show == 'show' else 'hidden'}.")


def _budget(text: str) -> int | None:
    if text in ("off", "none", "-"):
        return None
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError("/think budget needs a number of tokens, or off.")
    return int(text)


def _temp(session: Session, rest: str) -> None:
    talk = session.talk
    if rest:
        try:
            value = float(rest)
        except ValueError as error:
            raise ConfigError(f"/temp needs a number like 0.7, not {rest!r}.") from error
        talk.params = replace(talk.params, temperature=value)
    told = "always the most likely token" if talk.params.temperature == 0 else "sampled"
    terminal.note(f"Temperature: {talk.params.temperature:g} ({told}).")


def _draft(session: Session, rest: str) -> None:
    if rest:
        session.talk.draft_with(rest)
    terminal.note(f"Drafting: {', '.join(session.talk.spec.drafters) or 'off'}.")


def _stats(session: Session, rest: str) -> None:
    answers = session.talk.answers
    if not answers:
        terminal.note("There was no answer yet.")
        return
    terminal.note(f"{stats_line.summary(answers)} · {stats_line.machine()}")


def _save(session: Session, rest: str) -> None:
    path = _path("save", rest)
    saved.save(path, session.talk.saved())
    terminal.note(f"Saved {len(session.talk.turns) // 2} turns in {path}.")


def _load(session: Session, rest: str) -> None:
    path = _path("load", rest)
    found = saved.load(path)
    session.talk.restore(found)
    other = "" if found.model == session.talk.engine.name else f", held with {found.model}"
    terminal.note(f"Took up {len(found.messages) // 2} turns from {path}{other}.")


def _path(command: str, rest: str) -> Path:
    if not rest:
        raise ConfigError(f"/{command} needs a file, like /{command} talk.json.")
    if rest != terminal.clean(rest):
        raise ConfigError("A file's name must not have control characters.")
    try:
        path = Path(rest).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{rest} stands for nobody's home.") from error
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file.")
    return path


def _model(session: Session, rest: str) -> None:
    """Both models are in memory until the new one is known to be good."""
    if rest:
        session.talk.go_on_with(session.load(rest))
        _release()
    for line in header.lines(session.talk):
        terminal.note_as_is(line)


def _release() -> None:
    """Give the memory of the model before back."""
    import gc

    import mlx.core as mx

    gc.collect()
    mx.clear_cache()


def _exit(session: Session, rest: str) -> None:
    session.leaving = True


COMMANDS: dict[str, Command] = {
    "help": Command(usage="", about="this list", do=_help),
    "clear": Command(usage="", about="forget the conversation (the system prompt stays)", do=_clear),
    "system": Command(
        usage="[TEXT]", about="show or set what stands before the conversation; - takes it away", do=_system
    ),
    "think": Command(
        usage="[show|hide|on|off|budget N]",
        about="fold or show the model's thinking, ask for it or not, limit it to N tokens",
        do=_think,
        words=lambda s: ("show", "hide", "on", "off", "budget ", "budget off"),
    ),
    "temp": Command(usage="[T]", about="show or set the temperature; 0 takes the likeliest token", do=_temp),
    "draft": Command(
        usage="[LIST]",
        about="show or choose who drafts: off, auto, or names separated by commas",
        do=_draft,
        words=lambda s: (
            "off",
            "auto",
            *(n for n in DRAFTER_NAMES if n in s.talk.engine.chain.drafters),
        ),
    ),
    "stats": Command(usage="", about="what drafting did in all answers so far", do=_stats),
    "save": Command(
        usage="FILE", about="keep the conversation in a file", do=_save, words=lambda s: ("path",)
    ),
    "load": Command(usage="FILE", about="take up a saved conversation", do=_load, words=lambda s: ("path",)),
    "model": Command(
        usage="[MODEL]",
        about="show the model, or go on with another one",
        do=_model,
        words=lambda s: ("demo", "path"),
    ),
    "exit": Command(usage="", about="leave", do=_exit),
}
