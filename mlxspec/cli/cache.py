"""`mlxspec cache`: what is kept on disk of earlier texts (the prefix store, and the texts themselves), and how to clear it. Knows options,
the question and the answer."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.cli import terminal
from mlxspec.cli.confirm import confirmed
from mlxspec.cli.table import print_table
from mlxspec.errors import ConfigError

if TYPE_CHECKING:
    from mlxspec.engine.kept_files import KeptFiles


def run(args: argparse.Namespace) -> int:
    """One line a model, or one JSON object; or clear it. Returns 1 where the answer is no."""
    from mlxspec.engine.prefix.disk import default_folder, open_files
    from mlxspec.engine.text_files import text_files, texts_folder

    if args.prefix_dir == "":
        raise ConfigError("--prefix-dir must not be empty.")
    path = default_folder() if args.prefix_dir is None else Path(args.prefix_dir).expanduser().absolute()
    texts = text_files() if args.prefix_dir is None and texts_folder().exists() else None
    if not path.exists() and not (args.clear and texts is not None):
        num = 0 if texts is None else texts.nbytes
        if args.json:
            terminal.say(json.dumps({"folder": str(path), "bytes": 0, "models": [], "texts": num}) + "\n")
        else:
            terminal.say(f"There is no prefix store in {path}; --prefix-disk of chat and serve makes one.\n")
            _say_texts(num)
        return 0
    files = open_files(path, None)
    return _clear(files, texts, args) if args.clear else _list(files, texts, args)


def _list(files: KeptFiles, texts: KeptFiles | None, args: argparse.Namespace) -> int:
    from mlxspec.engine.prefix.disk import stored_models
    from mlxspec.loading.progress import amount

    found, num = stored_models(files), 0 if texts is None else texts.nbytes
    if args.json:
        models = [
            {"model": m.model, "states": m.num_states, "bytes": m.nbytes, "used": m.used} for m in found
        ]
        terminal.say(
            json.dumps({"folder": str(files.path), "bytes": files.nbytes, "models": models, "texts": num})
            + "\n"
        )
        return 0
    _say_texts(num)
    if not found:
        terminal.say(f"The prefix store in {files.path} is empty.\n")
        return 0
    rows = [(m.model, str(m.num_states), amount(m.nbytes), _ago(m.used)) for m in found]
    print_table(("model", "states", "size", "last used"), rows, right=(1, 2))
    terminal.note(f"{files.path}, {amount(files.nbytes)}. `mlxspec cache --clear` removes all of it.")
    return 0


def _clear(files: KeptFiles, texts: KeptFiles | None, args: argparse.Namespace) -> int:
    from mlxspec.loading.progress import amount

    what = f"the prefix store in {files.path}, {amount(files.nbytes)}"
    what += "" if texts is None else f", and earlier texts, {amount(texts.nbytes)}"
    if not confirmed("Clearing", "Clear", what, yes=args.yes):
        return 1
    cleared = [found.clear() for found in (files, texts) if found is not None]
    num, nbytes = (sum(column) for column in zip(*cleared, strict=True))
    terminal.say(f"Removed {num} files: {amount(nbytes)} freed.\n")
    return 0


def _say_texts(nbytes: int) -> None:
    from mlxspec.loading.progress import amount

    if nbytes:
        terminal.note(
            f"Texts for the drafter suffix: {amount(nbytes)}. `mlxspec cache --clear` removes them too."
        )


def _ago(used: int) -> str:
    """used: nanoseconds, as files have them."""
    seconds = max(0, time.time() - used / 1e9)
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
