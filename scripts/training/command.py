"""`scripts/adapt`: teach a model's drafter the user's texts, and keep it if it drafts better. Knows options and output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.cli import options, saved, terminal
from mlxspec.cli.interrupt import Ended, clearing_away
from mlxspec.cli.parser import CommandParser, declare
from mlxspec.cli.settings import drafter_of
from mlxspec.errors import ConfigError, MlxspecError
from mlxspec.option import check_number

if TYPE_CHECKING:
    from training.adapt import Adapted, Named

_MINUTES = 20.0


def parser_of_options() -> CommandParser:
    parser = CommandParser(
        prog="adapt", description="Teach the drafter of a model your texts, and keep it if it drafts better."
    )
    parser.add_argument("model", metavar="MODEL", help=options.MODEL)
    declare(
        parser,
        ("--texts", list, "PATH", "a file or a folder of UTF-8 text like what you write; may be given again"),
        ("--minutes", float, "M", f"how long it may take (default {_MINUTES:g})", _MINUTES),
        (
            "--from-conversations",
            bool,
            "",
            "use the chats that were kept with this model, too; they are listed",
        ),
        options.DRAFT_MODEL,
        ("--new", str, "FOLDER", "make a small drafter (EAGLE-3) for this model in a new folder"),
        ("--fresh", bool, "", "begin with the drafter itself, not with what was adapted of it before"),
        (
            "--export",
            str,
            "FOLDER",
            "train nothing: write tokens and hidden states for the speculators library",
        ),
        ("--remove", bool, "", "remove what was adapted for this model"),
        options.JSON,
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    try:
        return run(parser_of_options().parse_args(argv))
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except MlxspecError as error:
        terminal.complain(str(error))
        return 2
    except Ended as ended:
        return 128 + ended.number
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> int:
    """Adapt, tell. Returns 0, also where the head was no better and the one before stays."""
    if args.remove:
        return _remove(args)
    check_number("--minutes", args.minutes, 0.05, 24 * 60)
    given = args.texts or ()
    if not all(given) or not (given or args.from_conversations):
        raise ConfigError("--texts names no file; give a file or a folder of text like what you write.")
    from mlxspec.bench.texts import named_texts_in

    passed_over: list[Path] = []
    texts: list[Named] = list(named_texts_in((Path(p).expanduser() for p in given), passed_over))
    if given and not texts:
        raise ConfigError("--texts: there is no text to be read.")
    if args.from_conversations:
        texts += _conversations(args.model)
    if passed_over:
        terminal.note(
            f"{len(passed_over)} files are no UTF-8 text of up to 16 MiB and were passed over, such as {passed_over[0]}."
        )
    from training.adapt import adapt, export_states

    if args.new is not None and (args.draft_model or args.export):
        raise ConfigError("--new makes a drafter; leave --draft-model and --export out.")
    new = None if args.new is None else Path(args.new).expanduser()
    drafter = None if new else args.draft_model or drafter_of(args.model)
    if args.export is not None:
        folder = Path(args.export).expanduser()
        num = export_states(args.model, texts, folder, minutes=args.minutes, drafter=drafter)
        terminal.say(f"{num:,} tokens and their hidden states were written to {folder}.\n")
        return 0
    with clearing_away():
        made = adapt(
            args.model,
            texts,
            minutes=args.minutes,
            drafter=drafter,
            new=new,
            is_fresh=args.fresh,
            told=terminal.note,
        )
    if args.json:
        terminal.say(json.dumps(asdict(made)) + "\n")
        return 0
    terminal.say(told(made, args.new))
    return 0


def _conversations(model: str) -> list[Named]:
    """Those with this model that `chat` kept, each of them told. Raises ConfigError where there is none."""
    found: list[Named] = []
    for path in saved.kept_files():
        with suppress(ConfigError):  # a damaged one is no text
            kept = saved.load(path)
            if kept.model == model and kept.messages and not any("images" in m for m in kept.messages):
                system = [{"role": "system", "content": kept.system}] if kept.system else []
                found.append((str(path), [*system, *kept.messages]))
                terminal.note(f"uses the conversation {saved.title(path)}, {path}")
    if not found:
        raise ConfigError("--from-conversations: no conversation of text with this model is kept.")
    return found


def told(made: Adapted, new: str | None = None) -> str:
    """What came of it, a line for each depth and two more. new: the folder of a drafter that was to be made."""
    before, after = made.card.before, made.card.after
    lines = [
        f"depth {i + 1}: {100 * was:.1f} % → {100 * now:.1f} % of drafted tokens accepted on held-out text"
        for i, (was, now) in enumerate(zip(before, after, strict=True))
    ]
    was, now = made.general
    lines.append(f"on the model's own texts, depth 1: {100 * was:.1f} % → {100 * now:.1f} %")
    if new is None:
        kept, lost = "It is kept and drafts from now on; --head base leaves it.", "what drafted before stays"
    else:
        kept, lost = (
            f"It is in {new}, and drafts with --draft-model.",
            "nothing is kept; give it more minutes",
        )
    lines.append(kept if made.is_kept else f"It is not better, so {lost}.")
    return "\n".join(lines) + "\n"


def _remove(args: argparse.Namespace) -> int:
    from mlxspec.checkpoints import adapted_head

    found = adapted_head.files_of(adapted_head.folder_of(args.model))
    for path in found:
        path.unlink(missing_ok=True)
    terminal.say(
        "What was adapted for this model was removed.\n" if found else "Nothing was adapted for this model.\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
