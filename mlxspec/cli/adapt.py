"""`mlxspec adapt`: teach a model's drafter the user's texts, and keep it if it drafts better. Knows options and output; what is done is
training/adapt.py's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.cli import options, terminal
from mlxspec.cli.interrupt import clearing_away
from mlxspec.cli.parser import declare
from mlxspec.cli.settings import drafter_of
from mlxspec.config import check_number
from mlxspec.errors import ConfigError

if TYPE_CHECKING:
    from mlxspec.training.adapt import Adapted

_MINUTES = 20.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=options.MODEL)
    declare(
        parser,
        ("--texts", list, "PATH", "a file or a folder of UTF-8 text like what you write; may be given again"),
        ("--minutes", float, "M", f"how long it may take (default {_MINUTES:g})", _MINUTES),
        options.DRAFT_MODEL,
        ("--fresh", bool, "", "begin with the drafter itself, not with what was adapted of it before"),
        ("--remove", bool, "", "remove what was adapted for this model"),
        options.JSON,
    )
    options.add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Adapt, tell. Returns 0, also where the head was no better and the one before stays."""
    if args.remove:
        return _remove(args)
    check_number("--minutes", args.minutes, 0.05, 24 * 60)
    if not args.texts or not all(args.texts):
        raise ConfigError("--texts names no file; give a file or a folder of text like what you write.")
    from mlxspec.bench.texts import named_texts_in

    passed_over: list[Path] = []
    texts = list(named_texts_in((Path(p).expanduser() for p in args.texts), passed_over))
    if not texts:
        raise ConfigError("--texts: there is no text to be read.")
    if passed_over:
        terminal.note(
            f"{len(passed_over)} files are no UTF-8 text of up to 16 MiB and were passed over, such as {passed_over[0]}."
        )
    from mlxspec.training.adapt import adapt

    drafter = args.draft_model or drafter_of(args.model)
    with clearing_away():
        made = adapt(
            args.model,
            texts,
            minutes=args.minutes,
            drafter=drafter,
            is_fresh=args.fresh,
            told=terminal.note,
        )
    if args.json:
        terminal.say(json.dumps(asdict(made)) + "\n")
        return 0
    terminal.say(told(made))
    return 0


def told(made: Adapted) -> str:
    """What came of it, a line for each depth and two more."""
    before, after = made.card.before, made.card.after
    lines = [
        f"depth {i + 1}: {100 * was:.1f} % → {100 * now:.1f} % of drafted tokens accepted on held-out text"
        for i, (was, now) in enumerate(zip(before, after, strict=True))
    ]
    was, now = made.general
    lines.append(f"on the model's own texts, depth 1: {100 * was:.1f} % → {100 * now:.1f} %")
    lines.append(
        "It is kept and drafts from now on; --head base leaves it."
        if made.is_kept
        else "It is not better, so what drafted before stays."
    )
    return "\n".join(lines) + "\n"


def _remove(args: argparse.Namespace) -> int:
    from mlxspec.checkpoints import adapted_head

    was_there = adapted_head.remove(args.model)
    terminal.say(
        "What was adapted for this model was removed.\n"
        if was_there
        else "Nothing was adapted for this model.\n"
    )
    return 0
