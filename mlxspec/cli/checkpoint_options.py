"""The options of the commands about checkpoints. Knows flags and argparse; knows no terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from mlxspec.cli.parser import declare

COMMANDS = {
    "pull": "fetch a model from Hugging Face",
    "models": "list the models that are here, or search Hugging Face for words; published drafters",
    "rm": "remove a model from the local cache",
    "convert": "write a copy of a model, quantized if asked, with its MTP head",
    "inspect": "show what a model is made of and what running it takes",
}
_MODEL = "demo, demo-gemma, demo-vision, a folder, or a Hugging Face id"
_HEAD_BITS = "bits of {} head: 4 (the default), 8, or 16 to leave it as it is"
_DEBUG = ("--debug", bool, "", "show the traceback when something goes wrong")
_JSON = ("--json", bool, "", "everything as one JSON object")
_REPO = ("repo", str, "MODEL", "a Hugging Face id like owner/name, or a short name like qwen3.5:4b")
_REVISION = ("--revision", str, "R", "branch, tag or commit (default: the newest)")
_CONTEXT = (
    "--context",
    int,
    "N",
    "tokens of context that the memory is computed for (default 8192, or the model's limit)",
)
# rows as `declare` has them, by command
_ROWS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "pull": (
        _REPO, _REVISION, _CONTEXT,
        ("--force", bool, "", "fetch it even if it would not fit into memory, or its tokenizer or template cannot be used"),
        ("--with-mtp", bool, "", "refuse a model whose MTP head cannot be had, in it or from the original repository"),
        ("--mtp-from", str, "ORIGINAL", "the repository of that head (default: the card's base_model)"),
        ("--mtp-bits", int, "N", _HEAD_BITS.format("that")),
        ("--drafter", str, "D",
         "what drafts: auto for the best published drafter beside the head, a repository, none (default: the head, or else that drafter)"),
        ("--json", bool, "", "the outcome as one JSON object"),
    ),
    "models": (
        _CONTEXT,
        ("--fits", bool, "", "only what fits into this machine's memory"),
        ("--limit", int, "N", "with words: show at most N (default 20)", 20),
        ("--all", bool, "", "with words: also models that mlxspec does not run"),
        ("--drafters", bool, "", "the drafters that were published for models"),
        _JSON,
    ),
    "rm": (_REPO, ("--revision", str, "R", "commit, branch or tag (default: all of them)"), ("--yes", bool, "", "do not ask")),
    "convert": (
        ("source", str, "MODEL", _MODEL),
        _REVISION,
        ("-q --quantize", bool, "", "quantize, by default affine, 4 bits, groups of 64"),
        ("--bits --q-bits", int, "N", "bits a weight"),
        ("--group-size --q-group-size", int, "N", "weights a scale"),
        ("--mode --q-mode", str, "NAME", "affine, mxfp4, nvfp4 or mxfp8"),
        ("--mtp-bits", int, "N", _HEAD_BITS.format("the MTP")),
        ("--dtype", str, "TYPE", "type of the weights that are not quantized: float32, float16, bfloat16 (default: unchanged)"),
        ("--graft-mtp", str, "ORIGINAL",
         "take the MTP head from this folder or Hugging Face id; only the files that hold it are fetched"),
        ("--text-only", bool, "", "leave the vision tower out (default: keep it)"),
    ),
    "inspect": (
        ("model", str, "MODEL", f"{_MODEL} in the local cache"),
        _REVISION, _CONTEXT,
        ("--rows", int, "B", "texts at once that the memory is computed for (default 1)", 1),
        ("--draft-model", str, "M", "include this draft model"),
        ("--kv-bits", int, "B", "compute the memory for keys and values of 8 or 4 bits (default 16)", 16),
        ("--draft-kv-bits", int, "B", "the same for drafters' own keys and values (default 16)", 16),
        _JSON,
    ),
}  # fmt: skip


def _add(command: str, parser: argparse.ArgumentParser) -> None:
    if command == "models":
        about = "search Hugging Face for a part of the id, like qwen3.5 or 4bit (default: the models that are here)"
        parser.add_argument("words", nargs="*", metavar="WORD", help=about)
    declare(parser, *_ROWS[command], _DEBUG)
    if command == "convert":
        output = "a folder that is absent or empty"
        parser.add_argument("folder", nargs="?", metavar="DIR", help=output)
        parser.add_argument("-o", "--output", metavar="DIR", help="the same, as an option")


BUILDERS: dict[str, Callable[[argparse.ArgumentParser], None]] = {name: partial(_add, name) for name in _ROWS}
