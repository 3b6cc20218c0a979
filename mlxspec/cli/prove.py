"""`mlxspec prove`: decodes recorded answers again without drafts, and prints of each whether the text is the same.

Knows options, lines of a file and what is printed; receipts are made by the engine. All lines are read before the model is loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.parser import declare
from mlxspec.config import SpecConfig
from mlxspec.errors import ConfigError, MlxspecError
from mlxspec.option import shown

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.record import Record

_WRITERS = "`mlxspec generate --json` and `mlxspec serve --record` write records of answers."
_NO_PROMPT = "It holds no prompt, as it had images or callables chose its tokens."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="records of answers, one a line; - is the standard input"
    )
    options.add_model(
        parser, about=f"the model of the answers (default: the one that is named in FILE): {options.MODEL}"
    )
    parser.set_defaults(model=None, draft="off", draft_model=None, trace=False)
    declare(parser, ("--json", bool, "", "one JSON object an answer, on a line of its own"), options.DEBUG)


def run(args: argparse.Namespace) -> int:
    """Decode recorded answers again without drafts and compare the texts. Returns 0, or 1 where a text differs or an answer cannot be
    compared."""
    is_named = args.model is not None
    args.model = args.model if is_named else options.DEMO
    options.engine_config(args)  # what is wrong with it is said before the file is read
    by_model: dict[tuple[str, int], dict[int, Record]] = {}  # a server may have several models
    for number, record in _records(args.file):
        by_model.setdefault((record.model, record.kv_bits), {})[number] = record
    if not by_model:
        raise ConfigError(f"{args.file} is empty. {_WRITERS}")
    num_equal, total = 0, sum(map(len, by_model.values()))
    for (model, kv_bits), records in by_model.items():
        own = {"model": args.model if is_named else model, "kv_bits": args.kv_bits or kv_bits}
        with options.load_engine(argparse.Namespace(**{**vars(args), **own}), SpecConfig()) as engine:
            if engine.name != model:
                terminal.note(f"The answers are {model}'s, and {engine.name} decodes them again.")
            if not is_named:
                records = dict(_of_these_weights(engine, records))
            num_equal += _prove(engine, records, as_json=args.json)
    terminal.note(f"{num_equal} of {total} answers are the same.")
    return int(num_equal < total)


def _of_these_weights(engine: Engine, records: Mapping[int, Record]) -> Iterator[tuple[int, Record]]:
    """Yield the records, by number of their line, of answers that the engine's weights gave, and those that do not name their weights.
    Print a notice on each of the others."""
    for number, record in records.items():
        if record.weights is None or engine.weights_digest in (None, record.weights):
            yield number, record
        else:
            terminal.note(
                f"line {number} is not proved: {engine.name} had other weights, or another dtype, when it gave the answer; "
                "with --model it is decoded again by those that are there now."
            )


def _prove(engine: Engine, records: Mapping[int, Record], *, as_json: bool) -> int:
    """Prove the answers of one model and print each result. records: by number of their line. Returns the number of answers whose text
    is the same."""
    num_equal = 0
    for number, record in records.items():
        if record.prompt is None:
            terminal.note(f"line {number} is not proved: {_NO_PROMPT}")
            continue
        try:
            receipt = engine.prove(record.prompt, record.result, record.params)
        except MlxspecError as error:
            terminal.note(f"line {number} is not proved: {error}")
            continue
        num_equal += receipt.is_equal
        if as_json:
            said = json.dumps({"line": number, "equal": receipt.is_equal, **asdict(receipt)})
        else:
            said = f"line {number}: {stats_line.proof(receipt, engine.tokenizer)}"
        terminal.say(said + "\n")
    return num_equal


def _records(name: str) -> Iterator[tuple[int, Record]]:
    """Yield the records of a file, each with the number of its line. name: path of the file, - for stdin. Raises ConfigError where it
    cannot be read."""
    from mlxspec.engine.record import Record

    try:
        text = terminal.read_stdin() if name == "-" else Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"{shown(name)} cannot be read: {why}.") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, Record.read(line)
            except ConfigError as error:
                raise ConfigError(
                    f"Line {number} of {name} is no record of an answer: {error} {_WRITERS}"
                ) from error
