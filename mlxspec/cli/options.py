"""Options that several commands share, and their conversion to the config objects of `mlxspec.config`.

Each command's own options are in its file (`add_options`). A default stands in one place only, the config class: an option that is not
given is not passed on. Knows flags and argparse; knows no terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxspec import __version__
from mlxspec.cli import checkpoint_options, other_programs
from mlxspec.cli.parser import (
    CommandParser,
    aliases_of,
    declare,
    declare_options,
    flags,
    options_given,
    refuse,
    shorten,
)
from mlxspec.config import (
    DRAFTER_NAMES,
    MAX_CONTEXT,
    OTHER_NAMES,
    EngineConfig,
    SamplingParams,
    SpecConfig,
)
from mlxspec.errors import ConfigError, MemoryBudgetError
from mlxspec.option import near, shown
from mlxspec.option import options as option_rows
from mlxspec.server.settings import ServerConfig

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_ASKS_AGAIN = (
    "bench",
    "tune",
    "demo",
    "try",
)  # the same prompts, which must not be drafted from their own answers
COMMANDS = {
    "generate": "answer one prompt, or several together",
    "chat": "hold a conversation",
    "demo": "answer the same prompts with and without drafting, and compare texts and speeds",
    "try": "measure a model that is here on this machine, in about a minute; with FILE, edit a file of yours",
    "run": "fetch a model if it is not here, and hold a conversation; without a name, list what fits",
    "serve": "run a local HTTP server for clients of OpenAI, Anthropic and Ollama",
    "launch": "run Claude Code, Codex or opencode with a model on this machine",
    "bench": "measure drafting against plain decoding on recorded prompts",
    "tune": "measure what rounds and drafters cost and gain on this machine, and keep it for --policy auto",
    "versus": "ask another server on this machine and mlxspec the same prompts, in turns, and compare texts and speeds",
    "prove": "decode recorded answers again without drafts, and say whether the texts are the same",
    "doctor": "say what this machine is, what is wrong, and what to do",
    **checkpoint_options.COMMANDS,
    "flags": "list options, and what becomes of flags and fields of other programs here",
    "completion": "print a script that completes commands and options in a shell",
    "ps": "list the models of a server that runs here",
}
_MODULES = {"try": "try_own"}
_RARE = ("rm", "flags", "completion", "ps")  # of the commands: not in the list of --help
_HABITS = {"show": "inspect", "ls": "models"}  # other words for commands
_MOVED = {
    "list": "`mlxspec models` lists the models that are here.",
    "search": "`mlxspec models WORD` searches Hugging Face.",
    "cache": "`mlxspec doctor` says what is kept of earlier texts, and where; removing the folder clears it.",
    "stop": "Ctrl-C ends `mlxspec serve`; its --idle-unload unloads models by itself.",
    "bench mtp": "`mlxspec bench --workloads mtp` asks the ten tasks.",
}
DEMO = "demo"
DEMO_VISION = "demo-vision"
DEMO_AGENT = "demo-agent"
DEMO_FAMILY = (DEMO, "demo-gemma", DEMO_VISION, DEMO_AGENT)
DTYPES = ("float32", "float16", "bfloat16")
ENGINES = ("auto", "mlx-lm")

SAMPLING = {o.name: o.flag for o in option_rows(SamplingParams).values() if o.flag}
_CONFIGS = (SamplingParams, SpecConfig, EngineConfig, ServerConfig)
_FLAGS = {o.name: o.flag for config in _CONFIGS for o in option_rows(config).values() if o.flag}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command and its options from the arguments and the user's config file. Raises ConfigError for a mistake, SystemExit
    after --help and --version."""
    parser = CommandParser(
        prog="mlxspec", description="Speculative decoding on MLX that never changes the text."
    )
    parser.add_argument("--version", action="version", version=f"mlxspec {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parser.epilog = f"Also: {', '.join(_RARE)}. `mlxspec COMMAND --help` lists the common options of a command, --help-all all of them."
    parsers = {}
    for name, what in COMMANDS.items():
        listed: dict[str, Any] = {} if name in _RARE else {"help": what}
        parsers[name] = commands.add_parser(name, description=f"{what[:1].upper()}{what[1:]}.", **listed)
    arguments = _by_habit(arguments)
    first = next((a for a in arguments if not a.startswith("-")), None)
    notes, given = list[str](), list[str]()
    if first is not None and arguments[0] != first and arguments[0] not in ("-h", "--help", "--version"):
        raise ConfigError(f"The command comes before {arguments[0]}; there are: {', '.join(COMMANDS)}.")
    if first is not None and first not in COMMANDS:
        _refuse_command(first)
    if first is not None:
        builder(first)(parsers[first])
        if "--help-all" in arguments:
            parsers[first].epilog = aliases_of(parsers[first])
            arguments = ["--help" if a == "--help-all" else a for a in arguments]
        else:
            shorten(parsers[first])
        place = arguments.index(first) + 1
        own, behind = arguments[place:], list[str]()
        if first == "launch" and "--" in own:  # what follows is another program's
            own, behind = own[: own.index("--")], list(own[own.index("--") + 1 :])
        given, notes = in_own_words(first, parsers[first], own)
        parsers[first].set_defaults(behind=behind)
        from mlxspec.cli.settings import arguments_from_file

        arguments = [
            *arguments[:place],
            *arguments_from_file(first, {name: partial(parser_of, name) for name in COMMANDS}, given),
            *given,
        ]
    args, extra = parser.parse_known_args(arguments)
    args.notes, args.given = notes, given
    if args.command is None:
        tip = near(extra[0], ("--help", "--version")) if extra else ""
        raise ConfigError(
            f"There is no option {extra[0]}; {tip}"
            if tip
            else f"No command was named; there are: {', '.join(COMMANDS)}."
        )
    if extra:
        _refuse_moved(f"{args.command} {extra[0]}")
        refuse(extra[0], args.command, parsers[args.command])
    return args


def _by_habit(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with other programs' names of commands replaced by mlxspec's, such as `help`, `version` and `ls`."""
    first, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if first == "help":
        return [*rest[:1], "--help"]
    if first in ("version", "-v", "-V"):
        return ["--version"]
    return [_HABITS.get(first, first), *rest] if arguments else []


def in_own_words(command: str, parser: argparse.ArgumentParser, given: Sequence[str]) -> other_programs.Said:
    """Return the arguments of a command with flags of other programs replaced by mlxspec's, and notes on the replacements. Raises
    ConfigError for a flag that is refused."""
    takes = {s for action in parser._actions if action.nargs != 0 for s in action.option_strings}
    return other_programs.translated(given, flags(parser), takes, command)


def for_model(args: argparse.Namespace, *names: str) -> argparse.Namespace:
    """Return the options with those of a model's table in the config file, except where the command line sets them. names: names of the
    model. Raises ConfigError."""
    from mlxspec.cli.settings import arguments_of_model

    parser = parser_of(args.command)
    words = arguments_of_model(names, parser, args.given)
    known = {s: a.dest for a in parser._actions for s in a.option_strings}
    found = vars(parser.parse_args(words))
    changed = {known[word.partition("=")[0]] for word in words}
    return argparse.Namespace(**vars(args) | {dest: found[dest] for dest in changed})


def parser_of(command: str) -> CommandParser:
    """Return a new parser of one command's options."""
    made = CommandParser(prog=command)
    builder(command)(made)
    return made


def builder(command: str) -> Callable[[argparse.ArgumentParser], None]:
    """Return the function that adds the options of a command to its parser."""
    found = checkpoint_options.BUILDERS.get(command)
    if found is not None:
        return found
    add: Callable[[argparse.ArgumentParser], None] = module_of(command).add_options
    return add


def module_of(command: str) -> Any:
    """Return the module that runs a command. Its name differs where the command is a keyword of Python (`try`)."""
    return import_module(f"mlxspec.cli.{_MODULES.get(command, command)}")


def _refuse_command(word: str) -> None:
    if " " in word.strip():
        raise ConfigError('There was no command before the text; `mlxspec generate "TEXT"` answers it.')
    _refuse_moved(word)
    tip = near(word, COMMANDS) or f"there are: {', '.join(COMMANDS)}."
    raise ConfigError(f"There is no command {word!r}; {tip}")


def _refuse_moved(words: str) -> None:
    if words in _MOVED:
        raise ConfigError(_MOVED[words])


NAMES = "a folder, a Hugging Face id like owner/name, or a short name like qwen3.5:4b"
MODEL = f"demo (the default), demo-gemma, demo-vision, {NAMES}"


def add_model(parser: argparse.ArgumentParser, *, several: bool = False, about: str = MODEL) -> None:
    more = "; NAME=M serves it under another name, NAME=M+DIR with an adapter; given again: another one, loaded when asked for"
    group = parser.add_argument_group("model")
    declare(
        group,
        ("--model", list, "M", about + more) if several else ("--model", str, "M", about, DEMO),
        ("--revision", str, "R", "branch, tag or commit of a Hugging Face id (default: the newest)"),
        ("--preset", str, "NAME", "options kept under this name in the config file (docs/commands.md)"),
        ("--dtype", DTYPES, "TYPE", f"{', '.join(DTYPES)} (default: as stored, on M1 and M2 float16 for bfloat16, on a CPU float32)"),
        ("--engine", ENGINES, "NAME", "whose code runs the model: auto, or mlx-lm for any that mlx-lm has", "auto"),
        ("--adapter", str, "DIR", "LoRA or DoRA layers as mlx-lm's training or PEFT writes them"),
        ("--chat-template", str, "FILE", "a chat template that counts instead of the model's own"),
        ("--thinking", ("on", "off"), "on|off", "whether the model thinks before it answers (default: as its chat template says)"),
        ("--preserve-thinking", bool, "", "keep the thinking of earlier turns in the prompt"),
        ("--chat-template-args", list, "JSON", "an object of variables of the chat template; may be given again"),
        ("--no-images", bool, "", "do not load the vision tower of a model that reads images"),
    )  # fmt: skip
    declare_options(group, EngineConfig, "max_context kv_bits exact")


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int, *, recommended: bool = False) -> None:
    """Add the options of sampling to a parser. max_tokens: the default, for the help; MAX_CONTEXT is the end of the context.
    recommended: whether the help names the model's recommendation as the default of the temperature."""
    longest = "to the end of the context" if max_tokens == MAX_CONTEXT else str(max_tokens)
    told = {"max_tokens": longest} | (
        {"temperature": "the model's recommendation, else 0.8, with top-p 0.95"} if recommended else {}
    )
    declare_options(parser.add_argument_group("sampling"), SamplingParams, defaults=told)


def add_drafting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting")
    declare(
        group,
        ("--draft", str, "LIST", f"off, auto (the default), or drafters, asked in this order: {', '.join(DRAFTER_NAMES)}", "auto"),
        DRAFT_MODEL,
    )  # fmt: skip
    declare_options(group, SpecConfig)


def add_debug(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        ("--trace", bool, "", "print for each round which drafter was used and why (policy auto)"),
        DEBUG,
    )


_DRAFT_MODEL = "a small model of the same vocabulary, an MTP head, a Gemma 4 assistant, an EAGLE-3 or a block drafter: folder or id"
DRAFT_MODEL = ("--draft-model", str, "D", _DRAFT_MODEL)
DEBUG = ("--debug", bool, "", "show the traceback when something goes wrong")
JSON = ("--json", bool, "", "everything as one JSON object")
PLOT = ("--plot", str, "FILE", "draw costs, speed by depth, acceptance by position (.png, .svg, .pdf)")


@contextmanager
def named_by_flags() -> Iterator[None]:
    """Replace names of config fields by their flags in the message of a ConfigError that is raised in the block."""
    try:
        yield
    except ConfigError as error:
        names = "|".join(sorted(_FLAGS, key=len, reverse=True))
        said = re.sub(rf"\b(?:{names})\b(?! drafting)", lambda m: _FLAGS[m[0]], str(error))
        raise ConfigError(said) from error


@contextmanager
def _budget_by_flag() -> Iterator[None]:
    try:
        yield
    except MemoryBudgetError as error:
        raise MemoryBudgetError(str(error).replace("memory_budget", "--memory-budget")) from error


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Return the sampling that the command line sets. defaults: values of fields whose options are not given. Raises ConfigError for
    wrong values."""
    found = defaults | options_given(args, SamplingParams)
    if found.get("dry_sequence_breakers") == ["none"]:
        found["dry_sequence_breakers"] = ()
    with named_by_flags():
        return SamplingParams(**found)


def spec_config(args: argparse.Namespace) -> SpecConfig:
    """Return a SpecConfig with the options of the command line. It has no drafters, because loading chooses them; the options are
    checked as if it had. Raises ConfigError."""
    found = options_given(args, SpecConfig)
    with named_by_flags():
        SpecConfig(drafters=("mtp",), **found)  # what only matters with drafters, before anything is loaded
        return SpecConfig(**found)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the EngineConfig that the options set; check the other options of loading, too, before any model is read. Raises
    ConfigError."""
    template_variables(args)
    for flag in ("--model", "--draft-model", "--adapter", "--chat-template"):
        if getattr(args, flag[2:].replace("-", "_")) == "":
            raise ConfigError(f"{flag} must not be empty.")
    is_elsewhere = "/" in args.model or os.path.exists(args.model)
    if args.model not in DEMO_FAMILY and not is_elsewhere and (tip := near(args.model, DEMO_FAMILY)):
        raise ConfigError(f"There is no folder {shown(args.model)}; {tip}")
    listed = args.draft.split(",") if isinstance(args.draft, str) else ()
    if isinstance(args.draft, str) and args.draft.isdecimal():
        raise ConfigError(
            f"--draft names drafters; --draft-max {args.draft} sets how long their drafts may be."
        )
    for name in () if args.draft in ("off", "auto") else listed:
        known = (*DRAFTER_NAMES, *OTHER_NAMES, "off", "auto")
        if name.strip() not in known and (tip := near(name.strip(), known)):
            raise ConfigError(
                f"There is no drafter {name.strip()!r}; {tip} All are: {', '.join(DRAFTER_NAMES)}."
            )
    with named_by_flags():
        sizes = options_given(args, EngineConfig)
        if args.command in _ASKS_AGAIN:
            sizes["past_texts"] = 0
        return EngineConfig(**sizes)


def template_variables(args: argparse.Namespace) -> dict[str, Any]:
    """Return the variables that the chat template receives where a request does not set them. Raises ConfigError."""
    found: dict[str, Any] = {}
    for text in args.chat_template_args or ():
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--chat-template-args must be a JSON object, not {shown(text)}.") from error
        if not isinstance(given, dict):
            raise ConfigError(f"--chat-template-args must be a JSON object, not {shown(text)}.")
        found |= given
    if args.thinking is not None:
        found["enable_thinking"] = args.thinking == "on"
    if args.preserve_thinking:
        found["preserve_thinking"] = True
    return found


def _tell_template(engine: Engine, variables: Mapping[str, Any]) -> list[str]:
    """Set the default variables of the engine's chat template. Returns notices on variables that the template does not use. Raises
    ConfigError where there is no template."""
    template = None if engine.tokenizer is None else engine.tokenizer.template
    if variables and template is None:
        raise ConfigError(
            f"{engine.name} has no chat template, which --thinking and --chat-template-args are for."
        )
    if template is None:
        return []
    template.defaults = variables
    unread = template.unread(variables)
    return [f"The chat template of {engine.name} does not read {', '.join(unread)}."] if unread else []


def compile_kernels() -> None:
    """Compile MLX's kernels for a CPU before a measurement, where that has not been done; print a note then, because it takes minutes."""
    from mlxspec.cli.terminal import note
    from mlxspec.platform import device

    if device.compile_kernels():
        note("Once, in a minute or two, g++ compiles MLX's kernels for this CPU.")


def load_engine(
    args: argparse.Namespace,
    spec: SpecConfig,
    *,
    draft: str | None = None,
    quiet: bool = False,
    adapter: Mapping[str, str] | None = None,
) -> Engine:
    """Load the model with its drafters as the options set it, and return the engine. draft: drafters in place of those of --draft;
    quiet: do not print notices; adapter: adapters by name, in place of that of --adapter. Raises MlxspecError."""
    config, asked = engine_config(args), args.draft if draft is None else draft
    variables = template_variables(args)
    from mlxspec.cli.progress_bar import Waiting, shown_progress
    from mlxspec.cli.settings import drafter_of
    from mlxspec.cli.terminal import note, trace

    with Waiting(f"loading {args.model}"), shown_progress(), _budget_by_flag():
        from mlxspec.engine.load import load

        engine = load(
            args.model,
            revision=args.revision,
            draft=asked,
            draft_model=args.draft_model or (drafter_of(args.model) if asked == "auto" else None),
            spec=spec,
            config=config,
            dtype=args.dtype,
            adapter=adapter or args.adapter,
            chat_template=args.chat_template,
            images=not args.no_images,
            ranks=getattr(args, "ranks", None),
            engine=args.engine,
        )
        notices = [*engine.notices, *_tell_template(engine, variables)]
    if quiet:
        return engine
    own = engine.model.max_context
    if config.max_context is not None and config.max_context > own:
        note(
            f"The model has {own:,} tokens of context, less than --max-context {config.max_context:,}; {own:,} are used."
        )
    for notice in notices:
        note(notice)
    if args.trace and engine.policies.auto is not None:
        engine.policies.auto.log = trace
    return engine
