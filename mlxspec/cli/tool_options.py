"""The options of the commands about this machine: bench, tune, doctor. Knows flags and argparse; knows no terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mlxspec.cli.checkpoint_options import add_debug
from mlxspec.cli.parser import number
from mlxspec.errors import ConfigError

COMMANDS = {
    "bench": "measure drafting against plain decoding on recorded prompts",
    "tune": "measure what rounds cost here and who drafts well, and keep it for policy auto",
    "doctor": "say what this machine is, what is wrong, and what to do",
}


def _bench(parser: argparse.ArgumentParser) -> None:
    from mlxspec.cli import options  # which imports this module

    parser.add_argument(
        "suite",
        nargs="?",
        metavar="mtp",
        type=_suite,
        help="the nine tasks of llama.cpp's MTP benchmark instead of recorded prompts",
    )
    options.add_model(parser)
    options.add_drafting(parser)
    parser.add_argument(
        "--workloads", metavar="LIST", help="which recorded prompts, separated by commas (default: all)"
    )
    _add_numbers(
        parser,
        ("--items", 1000, "at most so many prompts of each"),
        ("--rows", 1, "prompts answered together"),
        ("--repeat", 3, "measured pairs of each"),
        ("--max-tokens", 192, "longest answer in tokens"),
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="with mtp: ask the OpenAI-compatible server at this address; --model then names its model",
    )
    _add_plot(parser)
    _add_json(parser)
    options.add_debug(parser)


def _tune(parser: argparse.ArgumentParser) -> None:
    from mlxspec.cli import options  # which imports this module

    options.add_model(parser)
    options.add_drafting(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="your own prompts, one a line; or a .jsonl of objects with prompt or messages (default: built-in ones)",
    )
    _add_numbers(
        parser,
        ("--repeat", 2, "measured answers of each drafter to each prompt"),
        ("--max-tokens", 96, "longest answer in tokens"),
    )
    _add_plot(parser)
    _add_json(parser)
    options.add_debug(parser)


def _suite(text: str) -> str:
    if text != "mtp":
        raise ConfigError(f"There is no benchmark {text!r}; there is `bench mtp`, and `bench` alone.")
    return text


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw costs, speed by depth and acceptance by position (.png, .svg, .pdf)",
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="demo",
        metavar="M",
        help="the model that is probed: demo (the default), demo-gemma, a folder, or a Hugging Face id",
    )
    _add_json(parser)
    add_debug(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")


def _add_numbers(parser: argparse.ArgumentParser, *options: tuple[str, int, str]) -> None:
    """Flags that take an integer: (flag, default, what it is)."""
    for flag, default, text in options:
        parser.add_argument(
            flag, type=number(flag, int), default=default, metavar="N", help=f"{text} (default {default})"
        )


BUILDERS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "bench": _bench,
    "tune": _tune,
    "doctor": _doctor,
}
