"""`mlxspec flags`: flags and fields of other programs, and what becomes of them here. Knows the tables that commands and forms read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from mlxspec.cli import options, other_programs, terminal
from mlxspec.cli.parser import declare
from mlxspec.cli.table import print_table


def add_options(parser: argparse.ArgumentParser) -> None:
    declare(parser, options.JSON)
    options.add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print both tables. Returns 0."""
    flags, fields = list(flag_rows()), list(field_rows())
    if args.json:
        terminal.say(json.dumps({"flags": flags, "fields": fields}) + "\n")
        return 0
    terminal.say("Flags that are other names of ours:\n\n")
    print_table(["flags", "of", "option here"], flags)
    terminal.say("\nFields of /v1/chat/completions, /v1/completions and /completion:\n\n")
    print_table(["fields", "here"], fields)
    terminal.note("A flag or a field that is refused says in its error what to use instead.")
    return 0


def flag_rows() -> Iterator[list[str]]:
    """[flags, program, option here]: flags that are other names of ours, those of one option together."""
    found: dict[tuple[str, str], list[str]] = {}
    for flag, meanings in other_programs.table().items():
        for meant in meanings:
            if meant.fate == "same":
                own = meant.target if meant.fixed is None else f"{meant.target} {meant.fixed}"
                found.setdefault((meant.program, own), []).append(flag)
    for (program, own), flags in found.items():
        yield [" ".join(flags), program, own]


def field_rows() -> Iterator[list[str]]:
    """[fields, what becomes of them] of requests. Refused ones are left out: their error says what to use."""
    from mlxspec.server.forms.chat import ChatCompletionRequest
    from mlxspec.server.forms.shared import HARMLESS, Continued

    forms = (Continued, ChatCompletionRequest)
    own = dict.fromkeys(f.alias or name for form in forms for name, f in form.model_fields.items())
    yield [" ".join(own), "honoured"]
    found: dict[str, list[str]] = {}
    for name, why in HARMLESS.items():
        found.setdefault(why, []).append(name)
    for why, names in found.items():
        yield [" ".join(names), f"no effect: {why}"]
