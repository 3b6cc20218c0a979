"""The options of every command, the same words everywhere, and the way from them to the checked options of `mlxspec.config`.

Knows flags and argparse; knows no terminal. A default stands in one place only, the config class: an option not given is not passed on.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

from mlxspec import __version__
from mlxspec.cli import checkpoint_options, serve_options, tool_options
from mlxspec.cli.parser import CommandParser, aliases_of, choice, number, numbers, refuse, spelled
from mlxspec.config import (
    AUTO_DEPTH,
    DRAFTER_NAMES,
    FIXED_DEPTH,
    ROLLBACKS,
    Acceptance,
    EngineConfig,
    Policy,
    SamplingParams,
    SpecConfig,
)
from mlxspec.errors import ConfigError, MemoryBudgetError

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

COMMANDS = {
    "generate": "answer one prompt, or several together",
    "chat": "hold a conversation",
    "demo": "show drafting at work on the built-in model, off and on",
    "serve": "answer OpenAI-style requests over HTTP",
    **tool_options.COMMANDS,
    **checkpoint_options.COMMANDS,
}
DEMO = "demo"
DEMO_FAMILY = (DEMO, "demo-gemma")
_DTYPES = ("float32", "float16", "bfloat16")

# Fields of the config classes, and what they are called here.
_SAMPLING = {
    "max_tokens": "--max-tokens",
    "temperature": "--temp",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "seed": "--seed",
    "stop": "--stop",
    "json_schema": "--json-schema",
    "regex": "--regex",
    "lark": "--lark",
    "bad_words": "--bad-word",
    "thinking_budget": "--thinking-budget",
}
_SPEC = {
    "n_max": "--draft-max",
    "n_min": "--draft-min",
    "p_min": "--draft-p-min",
    "ngram_n": "--ngram-n",
    "ngram_m": "--ngram-m",
    "acceptance": "--acceptance",
}
_ENGINE = {"max_context": "--max-context", "max_rows": "--max-rows", "prefill_chunk": "--prefill-chunk"}
_ENGINE |= serve_options.BUDGETS
_FLAGS = {**_SAMPLING, **_SPEC, **_ENGINE, **serve_options.FLAGS}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command and its options. Raises ConfigError, or SystemExit after --help and --version."""
    parser = CommandParser(
        prog="mlxspec", description="Speculative decoding on MLX that never changes the text."
    )
    parser.add_argument("--version", action="version", version=f"mlxspec {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=what, description=_about(name))
        for name, what in COMMANDS.items()
    }
    first = next((a for a in arguments if not a.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        raise ConfigError(f"There is no command {first!r}; there are: {', '.join(COMMANDS)}.")
    if first is not None:
        _BUILDERS[first](parsers[first])
        parsers[first].epilog = aliases_of(parsers[first])
        arguments = spelled(arguments, parsers[first])
    args, extra = parser.parse_known_args(arguments)
    if args.command is None:
        raise ConfigError(f"No command was named; there are: {', '.join(COMMANDS)}.")
    if extra:
        refuse(extra[0], args.command, parsers[args.command])
    return args


def _about(command: str) -> str:
    return f"{COMMANDS[command][:1].upper()}{COMMANDS[command][1:]}."


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="the prompt, - to read stdin; given again, answered together",
    )
    add_model(parser)
    _add_sampling(parser, SamplingParams.max_tokens)
    add_drafting(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="what stands before the conversation")
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="continue the prompt as it stands instead of answering it",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object an answer, on a line of its own")
    parser.add_argument(
        "--show-draft", action="store_true", help="colour what was drafted and stood (on a terminal)"
    )
    add_debug(parser)


def _chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="say this, print the answer and end; given again: the next turn",
    )
    add_model(parser)
    _add_sampling(parser, CHAT_MAX_TOKENS)
    add_drafting(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="what stands before the conversation")
    add_debug(parser)


CHAT_MAX_TOKENS = 1024


def _demo(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add(
        "--max-tokens",
        type=number("--max-tokens", int),
        default=96,
        metavar="N",
        help="longest answer in tokens (default 96)",
    )
    add(
        "--draft",
        action="append",
        metavar="LIST",
        help="drafters to compare with plain decoding, separated by commas; given again, compared too",
    )
    _add_draft_model(parser)
    add(
        "--repeat",
        type=number("--repeat", int),
        default=3,
        metavar="N",
        help="measured runs of each, medians count (default 3)",
    )
    add("--json", action="store_true", help="everything as one JSON object")
    add_debug(parser)


def _serve(parser: argparse.ArgumentParser) -> None:
    add_model(parser, several=True)
    serve_options.add(parser)
    _add_sampling(parser, serve_options.MAX_TOKENS)
    add_drafting(parser)
    add_debug(parser)


_BUILDERS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "generate": _generate,
    "chat": _chat,
    "demo": _demo,
    "serve": _serve,
    **tool_options.BUILDERS,
    **checkpoint_options.BUILDERS,
}


def add_model(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    group = parser.add_argument_group("model")
    text = "demo (the default), demo-gemma, a folder, or a Hugging Face id like owner/name"
    if several:
        text += "; NAME=M serves it under another name; given again: another model, loaded when asked for"
        group.add_argument("--model", action="append", metavar="M", help=text)
    else:
        group.add_argument("--model", default=DEMO, metavar="M", help=text)
    group.add_argument(
        "--revision", metavar="R", help="branch, tag or commit of a Hugging Face id (default: the newest)"
    )
    group.add_argument(
        "--max-context",
        type=number("--max-context", int),
        metavar="N",
        help="tokens of context (default: the model's)",
    )
    group.add_argument(
        "--dtype",
        type=choice("--dtype", _DTYPES),
        metavar="TYPE",
        help=f"{', '.join(_DTYPES)} (default: what fits)",
    )
    group.add_argument(
        "--exact",
        action="store_true",
        help="only rounds of widths that give the very bits of plain steps on this machine; may cost all drafting",
    )
    group.add_argument(
        "--rollback",
        default=EngineConfig.rollback,
        type=choice("--rollback", ROLLBACKS),
        metavar="NAME",
        help=f"how recurrent layers undo a rejected draft: {', '.join(ROLLBACKS)} (default {EngineConfig.rollback})",
    )


def _add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    add = numbers(group)
    add("--max-tokens", int, "N", f"longest answer in tokens (default {max_tokens})")
    add("--temp", float, "T", "temperature; 0, the default, always takes the most likely token")
    add("--top-p", float, "P", "keep the most likely tokens up to this probability (default 1: off)")
    add("--top-k", int, "K", "keep the K most likely tokens (default 0: off)")
    add("--min-p", float, "P", "keep tokens at least P times as likely as the likeliest (default 0: off)")
    add(
        "--repetition-penalty",
        float,
        "R",
        "above 1: tokens of prompt and answer become less likely (default 1)",
    )
    add("--presence-penalty", float, "R", "above 0: tokens of the answer become less likely (default 0)")
    add("--frequency-penalty", float, "R", "the same for each time a token occurred (default 0)")
    add("--seed", int, "S", "the same seed gives the same text, with drafting and without")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before this text; may be given again"
    )
    group.add_argument(
        "--bad-word", action="append", metavar="TEXT", help="never say this text; may be given again"
    )
    add("--thinking-budget", int, "N", "close the model's thinking after N tokens (default: no limit)")
    group.add_argument("--json-schema", metavar="JSON", help="the answer is JSON of this schema")
    group.add_argument("--regex", metavar="REGEX", help="the answer matches this regular expression")
    group.add_argument("--lark", metavar="GRAMMAR", help="the answer is of this grammar, in Lark's notation")


def add_drafting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting")
    add = numbers(group)
    group.add_argument(
        "--draft",
        default="auto",
        metavar="LIST",
        help=f"off, auto (the default), or names in order: {', '.join(DRAFTER_NAMES)}",
    )
    group.add_argument(
        "--policy",
        type=choice("--policy", get_args(Policy)),
        help="auto drafts where it pays, fixed always in the order of --draft (default: auto)",
    )
    group.add_argument(
        "--acceptance",
        type=choice("--acceptance", get_args(Acceptance)),
        help="match keeps drafts equal to the model's own choice; rejection keeps more of them and the distribution, not the seed's text",
    )
    _add_draft_model(group)
    add(
        "--draft-max",
        int,
        "N",
        f"most tokens a model drafts at once (default {AUTO_DEPTH}, policy fixed {FIXED_DEPTH})",
    )
    add("--draft-min", int, "N", f"drop drafts shorter than this (default {SpecConfig.n_min})")
    add("--draft-p-min", float, "P", "end a draft before a token less probable than this (default 0)")
    add("--ngram-n", int, "N", f"n-gram lookup: tokens that must repeat (default {SpecConfig.ngram_n})")
    add("--ngram-m", int, "M", f"n-gram lookup: most tokens drafted (default {SpecConfig.ngram_m})")


def _add_draft_model(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--draft-model",
        metavar="D",
        help="folder or id of a small model with the same vocabulary, of an MTP head, or of a Gemma 4 assistant",
    )


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", action="store_true", help="tell for each round who drafted and why (policy auto)"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback when something goes wrong")


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
    given = {field: getattr(args, flag[2:].replace("-", "_"), None) for field, flag in _SAMPLING.items()}
    stop = tuple(checked_stop(s) for s in given.pop("stop") or ())
    bad_words = tuple(given.pop("bad_words") or ())
    with named_by_flags():
        return SamplingParams(**{**defaults, **_given(given)}, stop=stop, bad_words=bad_words)


def checked_stop(text: str) -> str:
    """A stop string. Raises ConfigError for an empty one."""
    if not text:
        raise ConfigError("--stop must not be empty.")
    return text


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
    for flag in ("--model", "--draft-model"):
        if getattr(args, flag[2:].replace("-", "_")) == "":
            raise ConfigError(f"{flag} must not be empty.")
    with named_by_flags():
        sizes = _given({field: getattr(args, field, None) for field in _ENGINE})
        return EngineConfig(**sizes, rollback=args.rollback, exact=args.exact)


def load_engine(args: argparse.Namespace, spec: SpecConfig, *, draft: str | None = None) -> Engine:
    """The engine these options ask for. Raises MlxspecError subclasses."""
    config = engine_config(args)
    from mlxspec.cli.progress_bar import shown_progress
    from mlxspec.engine.load import load

    with shown_progress(), _budget_by_flag():  # of a download, if there is one
        engine = load(
            args.model,
            revision=args.revision,
            draft=args.draft if draft is None else draft,
            draft_model=args.draft_model,
            spec=spec,
            config=config,
            dtype=args.dtype,
        )
    from mlxspec.cli.terminal import note

    for notice in engine.notices:
        note(notice)
    if args.trace and engine.drafting.auto is not None:
        engine.drafting.auto.log = note
    return engine


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}
