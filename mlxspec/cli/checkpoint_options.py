"""The options of the commands about checkpoints: pull, list, rm, inspect. Knows flags and argparse; knows no terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mlxspec.cli.parser import number

COMMANDS = {
    "pull": "fetch a model from Hugging Face",
    "list": "show the models in the local cache",
    "rm": "take a model out of the local cache",
    "inspect": "show what a model is made of and what running it takes",
}
_REVISION = "branch, tag or commit (default: the newest)"


def _pull(parser: argparse.ArgumentParser) -> None:
    _add_repo(parser)
    parser.add_argument("--revision", metavar="R", help=_REVISION)
    _add_context(parser)
    parser.add_argument("--force", action="store_true", help="fetch it even if it would not fit into memory")
    parser.add_argument("--json", action="store_true", help="the outcome as one JSON object")
    add_debug(parser)


def _list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    add_debug(parser)


def _rm(parser: argparse.ArgumentParser) -> None:
    _add_repo(parser)
    parser.add_argument("--revision", metavar="R", help="commit, branch or tag (default: all of them)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_debug(parser)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="demo, a folder, or a Hugging Face id in the local cache"
    )
    parser.add_argument("--revision", metavar="R", help=_REVISION)
    _add_context(parser)
    parser.add_argument(
        "--rows",
        type=number("--rows", int),
        default=1,
        metavar="B",
        help="texts at once that the memory is reckoned for (default 1)",
    )
    parser.add_argument("--draft-model", metavar="M", help="count this draft model in")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    add_debug(parser)


def _add_repo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", metavar="MODEL", help="a Hugging Face id like owner/name")


def _add_context(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context",
        type=number("--context", int),
        metavar="N",
        help="tokens a row that the memory is reckoned for (default 8192, or the model's limit)",
    )


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback when something goes wrong")


BUILDERS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "pull": _pull,
    "list": _list,
    "rm": _rm,
    "inspect": _inspect,
}
