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
from typing import TYPE_CHECKING, Any, get_args

from mlxspec import __version__
from mlxspec.cli import checkpoint_options, other_programs
from mlxspec.cli.parser import (
    CommandParser,
    aliases_of,
    declare,
    flags,
    near,
    refuse,
    size,
    text_or_file,
)
from mlxspec.config import (
    AUTO_DEPTH,
    DRAFTER_NAMES,
    FIXED_DEPTH,
    MAX_CONTEXT,
    OTHER_NAMES,
    EngineConfig,
    LoopBreaker,
    Policy,
    SamplingParams,
    SpecConfig,
    shown,
)
from mlxspec.errors import ConfigError, MemoryBudgetError

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_ASKS_AGAIN = ("bench", "tune", "demo")  # the same prompts, which must not be drafted from their own answers
COMMANDS = {
    "generate": "answer one prompt, or several together",
    "chat": "hold a conversation",
    "demo": "answer the same prompts with and without drafting, and compare texts and speeds",
    "run": "fetch a model if it is not here, and hold a conversation",
    "serve": "run a local HTTP server for clients of OpenAI, Anthropic and Ollama",
    "launch": "run Claude Code, Codex or opencode with a model on this machine",
    "bench": "measure drafting against plain decoding on recorded prompts",
    "tune": "measure what rounds and drafters cost and gain on this machine, and keep it for --policy auto",
    "doctor": "say what this machine is, what is wrong, and what to do",
    **checkpoint_options.COMMANDS,
    "flags": "list flags and fields of other programs, and what becomes of them here",
    "completion": "print a script that completes commands and options in a shell",
}
_MOVED = {
    "list": "`mlxspec models` lists the models that are here.",
    "search": "`mlxspec models WORD` searches Hugging Face.",
    "bench mtp": "`mlxspec bench --workloads mtp` asks the ten tasks.",
    "adapt": "`adapt` is no command of the package any more; `scripts/adapt` in a checkout of the repository does the same.",
}
DEMO = "demo"
DEMO_VISION = "demo-vision"
DEMO_FAMILY = (DEMO, "demo-gemma", DEMO_VISION)
DTYPES = ("float32", "float16", "bfloat16")
ENGINES = ("auto", "mlx-lm")
HEADS = ("adapted", "base")

# Flags that are not their field's name with dashes.
_OTHER_WORDS = {
    "temperature": "--temp",
    "dry_sequence_breakers": "--dry-sequence-breaker",
    "bad_words": "--bad-word",
    "n_max": "--draft-max",
    "n_min": "--draft-min",
    "p_min": "--draft-p-min",
}


def _flags_of(fields: str) -> dict[str, str]:
    """The flag of each field of a config class."""
    return {field: _OTHER_WORDS.get(field, f"--{field.replace('_', '-')}") for field in fields.split()}


SAMPLING = _flags_of(
    "max_tokens temperature top_p top_k min_p top_n_sigma typical_p xtc_probability xtc_threshold repeat_last_n "
    "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers min_tokens "
    "repetition_penalty presence_penalty frequency_penalty seed stop json_schema regex lark bad_words "
    "thinking_budget loop_breaker"
)
_SPEC = _flags_of("n_max n_min p_min ngram_n ngram_m ngram_min_hits draft_vocab draft_bits draft_kv_bits")
_ENGINE = _flags_of(
    "max_context kv_bits max_rows prefill_chunk memory_budget prefix_budget prefix_disk prefix_dir "
    "past_texts_disk"
)
_SERVER = _flags_of("host port idle_unload")
_FLAGS = {**SAMPLING, **_SPEC, **_ENGINE, **_SERVER}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command and its options, those of the user's config file among them. Raises ConfigError, or SystemExit after --help and
    --version."""
    parser = CommandParser(
        prog="mlxspec", description="Speculative decoding on MLX that never changes the text."
    )
    parser.add_argument("--version", action="version", version=f"mlxspec {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.")
        for name, what in COMMANDS.items()
    }
    first = next((a for a in arguments if not a.startswith("-")), None)
    notes, given = list[str](), list[str]()
    if first is not None and arguments[0] != first and arguments[0] not in ("-h", "--help", "--version"):
        raise ConfigError(f"The command comes before {arguments[0]}; there are: {', '.join(COMMANDS)}.")
    if first is not None and first not in COMMANDS:
        _refuse_command(first)
    if first is not None:
        builder(first)(parsers[first])
        parsers[first].epilog = aliases_of(parsers[first])
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
        raise ConfigError(f"No command was named; there are: {', '.join(COMMANDS)}.")
    if extra:
        _refuse_moved(f"{args.command} {extra[0]}")
        refuse(extra[0], args.command, parsers[args.command])
    return args


def in_own_words(command: str, parser: argparse.ArgumentParser, given: Sequence[str]) -> other_programs.Said:
    """Arguments of a command, those of other programs in ours. Raises ConfigError."""
    takes = {s for action in parser._actions if action.nargs != 0 for s in action.option_strings}
    return other_programs.translated(given, flags(parser), takes, command)


def for_model(args: argparse.Namespace, *names: str) -> argparse.Namespace:
    """The options as they are for one model: those of its table in the config file, unless the command line sets them. Raises
    ConfigError."""
    from mlxspec.cli.settings import arguments_of_model

    parser = parser_of(args.command)
    words = arguments_of_model(names, parser, args.given)
    known = {s: a.dest for a in parser._actions for s in a.option_strings}
    found = vars(parser.parse_args(words))
    changed = {known[word.partition("=")[0]] for word in words}
    return argparse.Namespace(**vars(args) | {dest: found[dest] for dest in changed})


def parser_of(command: str) -> CommandParser:
    """A parser of one command's options."""
    made = CommandParser(prog=command)
    builder(command)(made)
    return made


def builder(command: str) -> Callable[[argparse.ArgumentParser], None]:
    """What adds the options of a command to its parser."""
    found = checkpoint_options.BUILDERS.get(command)
    if found is not None:
        return found
    add: Callable[[argparse.ArgumentParser], None] = import_module(f"mlxspec.cli.{command}").add_options
    return add


def _refuse_command(word: str) -> None:
    if " " in word.strip():
        raise ConfigError('There was no command before the text; `mlxspec generate "TEXT"` answers it.')
    _refuse_moved(word)
    tip = near(word, COMMANDS) or f"there are: {', '.join(COMMANDS)}."
    raise ConfigError(f"There is no command {word!r}; {tip}")


def _refuse_moved(words: str) -> None:
    if words in _MOVED:
        raise ConfigError(_MOVED[words])


MODEL = "demo (the default), demo-gemma, demo-vision, a folder, or a Hugging Face id like owner/name"


def add_model(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    more = "; NAME=M serves it under another name, NAME=M+DIR with an adapter; given again: another one, loaded when asked for"
    declare(
        parser.add_argument_group("model"),
        ("--model", list, "M", MODEL + more) if several else ("--model", str, "M", MODEL, DEMO),
        ("--revision", str, "R", "branch, tag or commit of a Hugging Face id (default: the newest)"),
        ("--preset", str, "NAME", "options kept under this name in the config file (docs/commands.md)"),
        ("--max-context", int, "N", "tokens of context (default: the model's)"),
        ("--kv-bits", int, "B", _KV_BITS),
        ("--dtype", DTYPES, "TYPE", f"{', '.join(DTYPES)} (default: what fits)"),
        ("--engine", ENGINES, "NAME", "whose code runs the model: auto, or mlx-lm for any that mlx-lm has", "auto"),
        ("--adapter", str, "DIR", "LoRA or DoRA layers as mlx-lm's training or PEFT writes them"),
        ("--chat-template", str, "FILE", "a chat template that counts instead of the model's own"),
        ("--thinking", ("on", "off"), "on|off", "what the chat template is told of thinking (default: nothing)"),
        ("--preserve-thinking", bool, "", "keep the thinking of earlier turns in the prompt"),
        ("--chat-template-args", list, "JSON", "an object of variables of the chat template; may be given again"),
        ("--no-images", bool, "", "do not load the vision tower of a model that reads images"),
        ("--exact", bool, "", "draft only where results equal plain decoding bit for bit; may leave no drafting"),
    )  # fmt: skip


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int, *, recommended: bool = False) -> None:
    """recommended: what is not given is the model's own recommendation. max_tokens: MAX_CONTEXT stands for no limit but the context's."""
    default = "the model's recommendation, else 0" if recommended else "0"
    longest = "to the end of the context" if max_tokens == MAX_CONTEXT else str(max_tokens)
    declare(
        parser.add_argument_group("sampling"),
        ("--max-tokens", int, "N", f"longest answer in tokens (default: {longest})"),
        ("--temp", float, "T", f"temperature; 0 always takes the most likely token (default: {default})"),
        ("--top-p", float, "P", "keep the most likely tokens up to this probability (default 1: off)"),
        ("--top-k", int, "K", "keep the K most likely tokens (default 0: off)"),
        ("--min-p", float, "P", "keep tokens at least P times as likely as the likeliest (default 0: off)"),
        ("--repetition-penalty", float, "R", "above 1: tokens that occurred become less likely (default 1)"),
        ("--presence-penalty", float, "R", "above 0: tokens of the answer become less likely (default 0)"),
        ("--frequency-penalty", float, "R", "above 0: tokens become less likely each time they occur (default 0)"),
        ("--repeat-last-n", int, "N", "penalties look at the last N tokens only (default -1: at all)"),
        ("--top-n-sigma", float, "N", "keep logits within N deviations of the highest (default 0: off)"),
        ("--typical-p", float, "P", "keep the tokens of the most usual surprise up to P (default 1: off)"),
        ("--xtc-probability", float, "P", "how often all likely tokens but the least likely go (default 0)"),
        ("--xtc-threshold", float, "P", "XTC: tokens at least so probable are likely ones (default 0.1)"),
        ("--dry-multiplier", float, "M", "above 0: against repeating sequences (default 0: off)"),
        ("--dry-base", float, "B", "DRY: what loses B times as much with each token (default 1.75)"),
        ("--dry-allowed-length", int, "N", "DRY: the shortest sequence that costs (default 2)"),
        ("--dry-penalty-last-n", int, "N", "DRY looks at the last N tokens only (default -1: at all)"),
        ("--dry-sequence-breaker", list, "TEXT", "DRY: no sequence goes beyond it; again for more; none: none"),
        ("--min-tokens", int, "N", "nothing ends the answer before N tokens (default 0)"),
        ("--seed", int, "S", "the same seed gives the same text, with drafting and without"),
        ("--stop", list, "TEXT", "end the answer before this text; may be given again"),
        ("--bad-word", list, "TEXT", "the answer never contains this text; may be given again"),
        ("--thinking-budget", int, "N", "close the model's thinking after N tokens (default: no limit)"),
        ("--loop-breaker", get_args(LoopBreaker), "WHAT", "thinking (the default): close thinking that loops; all: end answers too; off"),
        ("--json-schema", text_or_file, "JSON", "the answer is JSON of this schema; @FILE reads it"),
        ("--regex", text_or_file, "REGEX", "the answer matches this expression; @FILE reads it, [@] begins one with @"),
        ("--lark", text_or_file, "GRAMMAR", "the answer is of this Lark grammar; @FILE reads it"),
    )  # fmt: skip


def add_drafting(parser: argparse.ArgumentParser) -> None:
    declare(
        parser.add_argument_group("drafting"),
        ("--draft", str, "LIST", f"off, auto (the default), or in order: {', '.join(DRAFTER_NAMES)}", "auto"),
        ("--policy", get_args(Policy), None, "auto (the default) drafts where it pays, fixed always"),
        DRAFT_MODEL,
        ("--head", HEADS, None, "which drafters draft: adapted ones (the default; by `scripts/adapt`) or base, those in the folders"),
        ("--draft-max", int, "N", f"most tokens a model drafts at once (default {AUTO_DEPTH}, {_FIXED})"),
        ("--draft-min", int, "N", f"drop drafts shorter than this (default {SpecConfig.n_min})"),
        ("--draft-p-min", float, "P", "end a draft before a token less probable than this (default 0)"),
        ("--draft-vocab", int, "N", _DRAFT_VOCAB),
        ("--draft-bits", int, "B", _DRAFT_BITS),
        ("--draft-kv-bits", int, "B", "the same as --kv-bits for drafters' own keys and values (default 16)"),
        ("--ngram-n", int, "N", f"n-gram lookup: tokens that must repeat (default {SpecConfig.ngram_n})"),
        ("--ngram-m", int, "M", f"n-gram lookup: most tokens drafted (default {SpecConfig.ngram_m})"),
        ("--ngram-min-hits", int, "N", "ngram-map-*: how often they must have stood before (default 1)"),
    )  # fmt: skip


def add_prefix_disk(parser: argparse._ActionsContainer) -> None:
    declare(
        parser,
        ("--prefix-disk", size, "SIZE", _PREFIX_DISK),
        ("--prefix-dir", str, "DIR", "a private folder for these files (default: prefix in the cache folder)"),
        ("--past-texts-disk", size, "SIZE", "keep texts in files of at most SIZE bytes, for the drafter suffix"),
    )  # fmt: skip


def add_debug(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        ("--trace", bool, "", "print for each round which drafter was used and why (policy auto)"),
        DEBUG,
    )


_PREFIX_DISK = "keep computed states in files of at most SIZE bytes, for later runs (default: none)"
_FIXED = f"policy fixed {FIXED_DEPTH}"
_DRAFT_VOCAB = (
    "a model proposes over the N most frequent tokens only; 0: all (default: 32768 of a large vocabulary)"
)
_KV_BITS = "bits of keys and values: 8, 4, or 16 for as they are computed (default 16)"
_DRAFT_BITS = f"bits of a drafter's weights if the model is quantized, 16 to leave floats (default {SpecConfig.draft_bits})"
_DRAFT_MODEL = "a small model of the same vocabulary, an MTP head, a Gemma 4 assistant, an EAGLE-3 or a block drafter: folder or id"
DRAFT_MODEL = ("--draft-model", str, "D", _DRAFT_MODEL)
DEBUG = ("--debug", bool, "", "show the traceback when something goes wrong")
JSON = ("--json", bool, "", "everything as one JSON object")
PLOT = ("--plot", str, "FILE", "draw costs, speed by depth, acceptance by position (.png, .svg, .pdf)")


@contextmanager
def named_by_flags() -> Iterator[None]:
    """Errors of the config classes name the flag, not the field."""
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
    """The request's sampling. `defaults` fill in what was not given. Raises ConfigError."""
    given = {field: getattr(args, flag[2:].replace("-", "_"), None) for field, flag in SAMPLING.items()}
    stop, bad_words = given.pop("stop") or (), given.pop("bad_words") or ()
    if given["dry_sequence_breakers"] == ["none"]:
        given["dry_sequence_breakers"] = ()
    if "" in stop:
        raise ConfigError("--stop must not be empty.")
    with named_by_flags():
        return SamplingParams(**{**defaults, **_given(given)}, stop=tuple(stop), bad_words=tuple(bad_words))


def spec_config(args: argparse.Namespace) -> SpecConfig:
    """Limits of the drafts. Which drafters run is a matter of loading. Raises ConfigError."""
    given = _given({field: getattr(args, flag[2:].replace("-", "_"), None) for field, flag in _SPEC.items()})
    given |= _given({"policy": args.policy})
    with named_by_flags():
        SpecConfig(
            drafters=("mtp",), **given
        )  # checks what only matters with drafters, before anything is loaded
        return SpecConfig(**given)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """What these options say of an engine before any model is looked at. Raises ConfigError."""
    template_variables(args)
    for flag in ("--model", "--draft-model", "--adapter", "--chat-template"):
        if getattr(args, flag[2:].replace("-", "_")) == "":
            raise ConfigError(f"{flag} must not be empty.")
    is_elsewhere = "/" in args.model or os.path.exists(args.model)
    if args.model not in DEMO_FAMILY and not is_elsewhere and (tip := near(args.model, DEMO_FAMILY)):
        raise ConfigError(f"There is no folder {shown(args.model)}; {tip}")
    listed = args.draft.split(",") if isinstance(args.draft, str) else ()
    for name in () if args.draft in ("off", "auto") else listed:
        known = (*DRAFTER_NAMES, *OTHER_NAMES, "off", "auto")
        if name.strip() not in known and (tip := near(name.strip(), known)):
            raise ConfigError(
                f"There is no drafter {name.strip()!r}; {tip} All are: {', '.join(DRAFTER_NAMES)}."
            )
    with named_by_flags():
        sizes = _given({field: getattr(args, field, None) for field in _ENGINE})
        if args.command in _ASKS_AGAIN:
            sizes["past_texts"] = 0
        return EngineConfig(**sizes, exact=args.exact)


def template_variables(args: argparse.Namespace) -> dict[str, Any]:
    """What chat templates are told where a request says nothing. Raises ConfigError."""
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
    """Variables that hold for every conversation; returns notices. Raises ConfigError."""
    template = None if engine.tokenizer is None else engine.tokenizer.template
    if variables and template is None:
        raise ConfigError(
            f"{engine.name} has no chat template, which --thinking and --chat-template-args are for."
        )
    if template is None:
        return []
    template.defaults = variables
    unread = [name for name in variables if name not in template.source]
    return [f"The chat template of {engine.name} does not read {', '.join(unread)}."] if unread else []


def load_engine(
    args: argparse.Namespace,
    spec: SpecConfig,
    *,
    draft: str | None = None,
    quiet: bool = False,
    adapter: Mapping[str, str] | None = None,
) -> Engine:
    """The engine these options ask for. quiet: notices are not told. adapter: several, see `load`. Raises MlxspecError subclasses."""
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
            peers=getattr(args, "peers", None),
            engine=args.engine,
            head=getattr(args, "head", None) or "adapted",
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
    if args.trace and engine.drafting.auto is not None:
        engine.drafting.auto.log = trace
    return engine


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}
