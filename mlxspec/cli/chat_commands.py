"""Commands of a chat: lines that begin with a slash. A command that is refused leaves everything as it was.

Knows the conversation and how answers are shown; knows no keys, and of streams only the one for remarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxspec.cli import clipboard, header, options, saved, stats_line, terminal
from mlxspec.cli.interrupt import Interrupt
from mlxspec.cli.parser import CommandParser
from mlxspec.cli.progress_bar import Waiting
from mlxspec.config import DRAFTER_NAMES, MAX_CONTEXT, SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.option import near

if TYPE_CHECKING:
    from mlxspec.cli.conversation import Conversation
    from mlxspec.cli.line_editor import Completions
    from mlxspec.cli.view import View
    from mlxspec.engine.engine import Engine


@dataclass(kw_only=True)
class Session:
    """A running chat, on which commands act. talk: the conversation; view: shows answers. load: returns the engine of a model by its
    name, loaded with the options of the command line, and the sampling that the model recommends. ask: answers a question and returns
    whether Ctrl-C stopped the answer. kept: the file to which the conversation is saved after each answer, None for none.
    all_figures: print all figures of an answer. stopped: whether Ctrl-C stopped the last command's answer; leaving: whether the chat
    is to end."""

    talk: Conversation
    view: View
    load: Callable[[str], tuple[Engine, Mapping[str, Any]]]
    ask: Callable[[Session, str], bool] = lambda session, text: False
    kept: Path | None = None
    all_figures: bool = False
    stopped: bool = field(default=False, init=False)
    leaving: bool = field(default=False, init=False)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of a chat. usage: its arguments, as /help shows them; about: what it does. do: runs it with the text after its name.
    words: returns the arguments that completion offers ("path": files)."""

    usage: str
    about: str
    do: Callable[[Session, str], None]
    words: Callable[[Session], tuple[str, ...]] = lambda session: ()


def obey(session: Session, line: str) -> bool:
    """Run the command of a line. Returns whether Ctrl-C stopped an answer. Raises MlxspecError where the command is unknown or refused;
    nothing has changed then."""
    name, _, rest = line[1:].strip().partition(" ")
    command = COMMANDS.get({"quit": "exit", "bye": "exit", "?": "help"}.get(name, name))
    if command is None:
        tip = near(name, COMMANDS).replace("mean ", "mean /") or "/help lists them."
        raise ConfigError(f"There is no command /{name}; {tip}")
    session.stopped = False
    command.do(session, rest.strip())
    return session.stopped


def completions(session: Session) -> Completions:
    return {name: lambda words=command.words: words(session) for name, command in COMMANDS.items()}  # type: ignore[misc]


def _help(session: Session, rest: str) -> None:
    for name, command in COMMANDS.items():
        terminal.note_row(f"/{name} {command.usage}".rstrip(), command.about, 32)
    for line in (
        "Enter sends; Alt-Enter, or a backslash at the end of a line, begins a new line.",
        "A line that shall begin with a slash begins with two.",
        "Ctrl-C stops an answer and keeps what came; Ctrl-D leaves.",
    ):
        terminal.note(line)


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


def _set(session: Session, rest: str) -> None:
    """Set an option of sampling, or show one or all of them. rest: "NAME VALUE", with the value as on the command line, "NAME off" for
    the default, "NAME", or ""."""
    talk, known = session.talk, {flag[2:]: name for name, flag in options.SAMPLING.items()}
    name, _, value = rest.replace("=", " ", 1).partition(" ")
    name = name.replace("_", "-")
    if name not in known:
        if name:
            tip = near(name, known) or f"there are: {', '.join(known)}."
            raise ConfigError(f"There is no option {name}; {tip}")
        for word, own in known.items():
            terminal.note_row(word, _told(own, talk.params), 20)
        return
    if value in ("off", "default"):
        default = SamplingParams(max_tokens=MAX_CONTEXT)
        talk.params = replace(talk.params, **{known[name]: getattr(default, known[name])})
    elif value:
        reader = CommandParser(prog="/set")
        options.add_sampling(reader, talk.params.max_tokens)
        given = options.sampling_params(reader.parse_args([f"--{name}={value}"]))
        with options.named_by_flags():
            talk.params = replace(talk.params, **{known[name]: getattr(given, known[name])})
    terminal.note(f"{name}: {_told(known[name], talk.params)}")


def _told(name: str, params: SamplingParams) -> str:
    """Return the value of the field `name` of `params` as text for the user."""
    value = getattr(params, name)
    if name == "max_tokens" and value == MAX_CONTEXT:
        return "to the end of the context"
    return "not set" if value in (None, ()) else f"{value:g}" if isinstance(value, float) else str(value)


def _retry(session: Session, rest: str) -> None:
    """Ask the last question again in place of its last answer. Where that fails, the last answer is restored."""
    talk, before = session.talk, session.talk.turns
    question = talk.undo()
    if talk.params.temperature == 0 or talk.params.seed is not None:
        terminal.note(
            "The same answer comes again unless something is changed, like /temp 0.8 or /set seed 2."
        )
    try:
        session.stopped = session.ask(session, question)
    except BaseException:
        if len(talk.turns) < len(before):
            talk.turns, talk.pictures = before, []
        raise


def _image(session: Session, rest: str) -> None:
    talk = session.talk
    if rest == "-":
        talk.pictures = []
    elif rest:
        talk.show(_unquoted(rest))
    names = ", ".join(Path(p.path).name for p in talk.pictures)
    terminal.note(f"With the next question: {names}." if names else "No image goes with the next question.")


def _unquoted(rest: str) -> str:
    """Return a path without the quotes or backslashes that a terminal adds when it is pasted."""
    if len(rest) > 1 and rest[0] == rest[-1] and rest[0] in "'\"":
        return rest[1:-1]
    return rest if Path(rest).expanduser().exists() else rest.replace("\\ ", " ")


def _undo(session: Session, rest: str) -> None:
    question = terminal.sentence(session.talk.undo())
    session.talk.pictures = []
    terminal.note(f"Taken back: {question if len(question) <= 60 else question[:57] + '...'}")


def _copy(session: Session, rest: str) -> None:
    if not session.talk.turns:
        raise ConfigError("There is no answer to copy.")
    text = session.talk.turns[-1]["content"]
    clipboard.copy(text)
    terminal.note(f"Copied the last answer, {len(text):,} characters.")


def resume(session: Session, rest: str) -> None:
    """Continue an earlier conversation, or list them. rest: its number, 1 being the newest, "" for the newest, or "list". Raises
    ConfigError where there is none."""
    earlier = [path for path in saved.kept_files() if path != session.kept]
    if rest == "list":
        for i, path in enumerate(earlier, 1):
            terminal.note_as_is(f"{i:>3}  {path.stem[:16]}  {saved.title(path)}")
        if earlier:
            return
    if not earlier:
        raise ConfigError("No earlier conversation is kept.")
    if rest and rest != "list" and not (rest.isdecimal() and 1 <= int(rest[:6]) <= len(earlier)):
        raise ConfigError(f"/resume takes a number from 1, the newest, to {len(earlier)}, or list.")
    load(session, str(earlier[int(rest or 1) - 1]))


def _stats(session: Session, rest: str) -> None:
    answers = session.talk.answers
    if not answers:
        terminal.note("There was no answer yet.")
        return
    terminal.note(stats_line.line(answers, session.talk.engine.stats.plain))
    terminal.note(stats_line.details(answers))


def _save(session: Session, rest: str) -> None:
    path = file_of("/save", rest)
    saved.save(path, session.talk.saved())
    terminal.note(f"Saved {stats_line.counted(len(session.talk.turns) // 2, 'turn')} in {path}.")


def load(session: Session, rest: str) -> None:
    path = file_of("/load", rest)
    found = saved.load(path)
    session.talk.restore(found)
    other = "" if found.model == session.talk.engine.name else f", held with {found.model}"
    terminal.note(f"Took up {stats_line.counted(len(found.messages) // 2, 'turn')} from {path}{other}.")


def file_of(command: str, rest: str) -> Path:
    """Return the path of the file that the argument `rest` names. command: the command or option, for errors. Raises ConfigError where
    no file can have that name."""
    if not rest:
        raise ConfigError(f"{command} needs a file, like {command} talk.json.")
    if rest != terminal.clean(rest):
        raise ConfigError("A file's name must not have control characters.")
    try:
        path = Path(rest).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{rest} stands for nobody's home.") from error
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file.")
    return path


def _prove(session: Session, rest: str) -> None:
    with Interrupt() as interrupt, Waiting("decoding the answer again without drafts"):
        receipt = session.talk.prove(interrupt)
    session.stopped = receipt is None
    proved = receipt and stats_line.proof(receipt, session.talk.engine.tokenizer)
    terminal.note(proved or "Stopped: nothing is known of the text.")


def _model(session: Session, rest: str) -> None:
    """Load another model and continue the conversation with it; then show the header. rest: the model, "" to show the header alone. The
    earlier model stays in memory until the new one has been loaded."""
    if rest:
        session.talk.go_on_with(*session.load(rest))
        _release()
    header.tell(session.talk)


def _release() -> None:
    """Release the memory of the model that was replaced to the system."""
    from mlxspec.platform import device

    device.give_back()


def _exit(session: Session, rest: str) -> None:
    session.leaving = True


def _named(*words: str) -> Callable[[Session], tuple[str, ...]]:
    return lambda session: words


# name: usage, what it does, function, words for completion
_ROWS: tuple[
    tuple[str, str, str, Callable[[Session, str], None], Callable[[Session], tuple[str, ...]]], ...
] = (
    ("help", "", "this list", _help, _named()),
    ("retry", "", "ask the last question again", _retry, _named()),
    ("undo", "", "take the last question and its answer back", _undo, _named()),
    ("image", "[FILE]", "an image for the next question; - takes it away", _image, _named("path")),
    ("copy", "", "put the last answer on the clipboard", _copy, _named()),
    ("clear", "", "forget the conversation (the system prompt stays)", _clear, _named()),
    (
        "system",
        "[TEXT]",
        "show or set the system prompt; - removes it",
        _system,
        _named(),
    ),
    (
        "think",
        "[show|hide|on|off|budget N]",
        "show or fold the model's thinking, ask for it or not, limit it to N tokens",
        _think,
        _named("show", "hide", "on", "off", "budget ", "budget off"),
    ),
    ("temp", "[T]", "show or set the temperature; 0 takes the likeliest token", _temp, _named()),
    (
        "set",
        "[NAME [VALUE|off]]",
        "show or set any option of sampling, like top-p 0.9",
        _set,
        lambda s: tuple(f"{flag[2:]} " for flag in options.SAMPLING.values()),
    ),
    (
        "draft",
        "[LIST]",
        "show or choose who drafts: off, auto, or names separated by commas",
        _draft,
        lambda s: ("off", "auto", *(n for n in DRAFTER_NAMES if n in s.talk.engine.drafts.drafters)),
    ),
    ("stats", "", "all figures of the answers so far", _stats, _named()),
    (
        "prove",
        "",
        "decode the last answer again without drafts, and say whether the text is the same",
        _prove,
        _named(),
    ),
    ("save", "FILE", "keep the conversation in a file", _save, _named("path")),
    ("load", "FILE", "take up a saved conversation", load, _named("path")),
    ("resume", "[N|list]", "take up an earlier conversation, 1 is the newest", resume, _named("list")),
    ("model", "[MODEL]", "show the model, or go on with another one", _model, _named("demo", "path")),
    ("exit", "", "leave", _exit, _named()),
)
COMMANDS = {row[0]: Command(usage=row[1], about=row[2], do=row[3], words=row[4]) for row in _ROWS}
