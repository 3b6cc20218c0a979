"""The options of the commands about checkpoints. Knows flags and argparse; knows no terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mlxspec.cli.parser import number

COMMANDS = {
    "pull": "fetch a model from Hugging Face",
    "search": "find models on Hugging Face that run here",
    "models": "list the models that are known to run, with their memory and drafters",
    "list": "show the models in the local cache",
    "rm": "remove a model from the local cache",
    "cache": "show what the prefix store on disk holds, or clear it",
    "convert": "write a copy of a model, quantized if asked, with its MTP head",
    "inspect": "show what a model is made of and what running it takes",
}
_REVISION = "branch, tag or commit (default: the newest)"


def _pull(parser: argparse.ArgumentParser) -> None:
    _add_repo(parser)
    parser.add_argument("--revision", metavar="R", help=_REVISION)
    _add_context(parser)
    parser.add_argument("--force", action="store_true", help="fetch it even if it would not fit into memory")
    parser.add_argument(
        "--with-mtp",
        action="store_true",
        help="fetch the MTP head of the original repository too, where the model lacks it (a terminal is asked)",
    )
    parser.add_argument(
        "--mtp-from", metavar="ORIGINAL", help="the repository of that head (default: the card's base_model)"
    )
    parser.add_argument(
        "--mtp-bits",
        type=number("--mtp-bits", int),
        metavar="N",
        help="bits of that head: 4 (the default), 8, or 16 to leave it as it is",
    )
    parser.add_argument(
        "--drafter",
        metavar="D",
        help="fetch a published drafter too: auto for the best one that fits, a repository, or none to leave it out (a terminal is asked)",
    )
    parser.add_argument("--json", action="store_true", help="the outcome as one JSON object")
    add_debug(parser)


def _search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="WORD", help="a part of the id, like qwen3.5 or 4bit")
    parser.add_argument(
        "--limit", type=number("--limit", int), default=20, metavar="N", help="show at most N (default 20)"
    )
    parser.add_argument("--all", action="store_true", help="also models that mlxspec does not run")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    add_debug(parser)


def _models(parser: argparse.ArgumentParser) -> None:
    _add_context(parser)
    parser.add_argument("--fits", action="store_true", help="only what fits into this machine's memory")
    parser.add_argument("--drafters", action="store_true", help="the drafters that were published for models")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    add_debug(parser)


def _list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    add_debug(parser)


def _rm(parser: argparse.ArgumentParser) -> None:
    _add_repo(parser)
    parser.add_argument("--revision", metavar="R", help="commit, branch or tag (default: all of them)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_debug(parser)


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix-dir", metavar="DIR", help="the store's folder (default: prefix in the cache folder)"
    )
    parser.add_argument("--clear", action="store_true", help="remove all of it")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    add_debug(parser)


def _convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="MODEL", help="demo, demo-gemma, demo-vision, a folder, or a Hugging Face id"
    )
    add = parser.add_argument
    add("-o", "--output", required=True, metavar="DIR", help="a folder that is absent or empty")
    add("--revision", metavar="R", help=_REVISION)
    add("-q", "--quantize", action="store_true", help="quantize, by default affine, 4 bits, groups of 64")
    add("--bits", "--q-bits", type=number("--bits", int), metavar="N", help="bits a weight")
    add(
        "--group-size",
        "--q-group-size",
        type=number("--group-size", int),
        metavar="N",
        help="weights a scale",
    )
    add("--mode", "--q-mode", metavar="NAME", help="affine, mxfp4, nvfp4 or mxfp8")
    add(
        "--mtp-bits",
        type=number("--mtp-bits", int),
        metavar="N",
        help="bits of the MTP head: 4 (the default), 8, or 16 to leave it as it is",
    )
    add(
        "--dtype",
        metavar="TYPE",
        help="type of the weights that are not quantized: float32, float16, bfloat16 (default: unchanged)",
    )
    add(
        "--graft-mtp",
        metavar="ORIGINAL",
        help="take the MTP head from this folder or Hugging Face id; only the files that hold it are fetched",
    )
    add("--text-only", action="store_true", help="leave the vision tower out (default: keep it)")
    add_debug(parser)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="demo, demo-gemma, demo-vision, a folder, or a Hugging Face id in the local cache",
    )
    parser.add_argument("--revision", metavar="R", help=_REVISION)
    _add_context(parser)
    parser.add_argument(
        "--rows",
        type=number("--rows", int),
        default=1,
        metavar="B",
        help="texts at once that the memory is computed for (default 1)",
    )
    parser.add_argument("--draft-model", metavar="M", help="include this draft model")
    parser.add_argument(
        "--kv-bits",
        type=number("--kv-bits", int),
        default=16,
        metavar="B",
        help="keys and values that the memory is reckoned for in 8 or 4 bits (default 16)",
    )
    parser.add_argument(
        "--draft-kv-bits",
        type=number("--draft-kv-bits", int),
        default=16,
        metavar="B",
        help="the same for drafters' own keys and values (default 16)",
    )
    parser.add_argument(
        "--ranks",
        type=number("--ranks", int),
        default=1,
        metavar="N",
        help="show what each of N processes needs that share the model (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    add_debug(parser)


def _add_repo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", metavar="MODEL", help="a Hugging Face id like owner/name")


def _add_context(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context",
        type=number("--context", int),
        metavar="N",
        help="tokens of context that the memory is computed for (default 8192, or the model's limit)",
    )


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback when something goes wrong")


BUILDERS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "pull": _pull,
    "search": _search,
    "models": _models,
    "list": _list,
    "rm": _rm,
    "cache": _cache,
    "convert": _convert,
    "inspect": _inspect,
}
