"""`mlxspec flags`: lists the options of models and requests with their flags and fields, and the meaning of other programs' flags and
fields. Knows the tables that commands and forms are made from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from mlxspec import option
from mlxspec.cli import options, other_programs, terminal
from mlxspec.cli.parser import declare
from mlxspec.cli.table import print_table
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.settings import ServerConfig


def add_options(parser: argparse.ArgumentParser) -> None:
    declare(parser, options.JSON)
    options.add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables of options, flags and fields. Returns 0."""
    own, flags, fields = list(option_rows()), list(flag_rows()), list(field_rows())
    if args.json:
        terminal.say(json.dumps({"options": own, "flags": flags, "fields": fields}) + "\n")
        return 0
    terminal.say("Options of a server, an engine and a request:\n\n")
    print_table(["flag", "field of a request", "in Python", "values", "default", "meaning"], own)
    terminal.say("\nFlags that are other names of ours:\n\n")
    print_table(["flags", "of", "option here"], flags)
    terminal.say("\nFields of /v1/chat/completions, /v1/completions and /completion:\n\n")
    print_table(["fields", "here"], fields)
    terminal.note("A flag or a field that is refused says in its error what to use instead.")
    return 0


def option_rows() -> Iterator[list[str]]:
    """Yield a row for each option: [flag, field and its other names, name in Python, values, default, meaning]. A dash is in place of a
    flag or field that an option does not have."""
    for config in (ServerConfig, ServerLimits, EngineConfig, SamplingParams, SpecConfig):
        is_asked, other = config in (SamplingParams, SpecConfig), "--limit" if config is ServerLimits else "-"
        for own in option.options(config).values():
            fields = " ".join((own.body, *own.aliases)) if is_asked and own.body else "-"
            yield [
                own.flag or other,
                fields,
                f"{config.__name__}.{own.name}",
                own.values,
                own.usual,
                own.about,
            ]


def flag_rows() -> Iterator[list[str]]:
    """Yield a row for each option that has flags of other programs: [those flags, the program, the option here]."""
    found: dict[tuple[str, str], list[str]] = {}
    for flag, meanings in other_programs.table().items():
        for meant in meanings:
            if meant.fate == "same":
                own = meant.target if meant.fixed is None else f"{meant.target} {meant.fixed}"
                found.setdefault((meant.program, own), []).append(flag)
    for (program, own), flags in found.items():
        yield [" ".join(flags), program, own]


def field_rows() -> Iterator[list[str]]:
    """Yield rows on the fields of requests: [fields, their effect here]. Refused fields are left out, because their error names the
    alternative."""
    from mlxspec.server.chat_api import ChatCompletionRequest
    from mlxspec.server.forms.shared import HARMLESS, Continued

    forms = (Continued, ChatCompletionRequest)
    own = dict.fromkeys(f.alias or name for form in forms for name, f in form.model_fields.items())
    yield [" ".join(own), "honoured"]
    found: dict[str, list[str]] = {}
    for name, why in HARMLESS.items():
        found.setdefault(why, []).append(name)
    for why, names in found.items():
        yield [" ".join(names), f"no effect: {why}"]
