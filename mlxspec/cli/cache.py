"""`mlxspec cache`: what is kept on disk of earlier texts (the prefix store, and the texts themselves), and how to clear it. Knows options,
the question and the answer."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from mlxspec.cli import terminal
from mlxspec.cli.confirm import confirmed
from mlxspec.cli.table import print_table
from mlxspec.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """One line a model, or one JSON object; or clear it. Returns 1 where the answer is no."""
    from mlxspec.engine.prefix_disk.folder import PieceFolder, default_folder
    from mlxspec.engine.text_files import texts_size

    if args.prefix_dir == "":
        raise ConfigError("--prefix-dir must not be empty.")
    path = default_folder() if args.prefix_dir is None else Path(args.prefix_dir).expanduser().absolute()
    texts = texts_size() if args.prefix_dir is None else 0
    if not path.exists() and not (args.clear and texts):
        if args.json:
            terminal.say(json.dumps({"folder": str(path), "bytes": 0, "models": [], "texts": texts}) + "\n")
        else:
            terminal.say(f"There is no prefix store in {path}; --prefix-disk of chat and serve makes one.\n")
            _say_texts(texts)
        return 0
    folder = PieceFolder(path, None)
    try:
        return _clear(folder, texts, args) if args.clear else _list(folder, texts, args)
    finally:
        folder.close()


def _list(folder, texts: int, args: argparse.Namespace) -> int:  # type: ignore[no-untyped-def]  # a PieceFolder
    from mlxspec.engine.prefix_disk.folder import summary
    from mlxspec.loading.progress import amount

    found = summary(folder)
    if args.json:
        models = [
            {"model": m.model, "states": m.num_states, "bytes": m.nbytes, "used": m.used} for m in found
        ]
        terminal.say(
            json.dumps({"folder": str(folder.path), "bytes": folder.nbytes, "models": models, "texts": texts})
            + "\n"
        )
        return 0
    _say_texts(texts)
    if not found:
        terminal.say(f"The prefix store in {folder.path} is empty.\n")
        return 0
    rows = [(m.model, str(m.num_states), amount(m.nbytes), _ago(m.used)) for m in found]
    print_table(("model", "states", "size", "last used"), rows, right=(1, 2))
    terminal.note(f"{folder.path}, {amount(folder.nbytes)}. `mlxspec cache --clear` removes all of it.")
    return 0


def _clear(folder, texts: int, args: argparse.Namespace) -> int:  # type: ignore[no-untyped-def]  # a PieceFolder
    from mlxspec.engine.text_files import clear_texts
    from mlxspec.loading.progress import amount

    what = f"the prefix store in {folder.path}, {amount(folder.nbytes)}"
    what += f", and earlier texts, {amount(texts)}" if texts else ""
    if not confirmed("Clearing", "Clear", what, yes=args.yes):
        return 1
    num, nbytes = folder.clear()
    if texts:
        more, freed = clear_texts()
        num, nbytes = num + more, nbytes + freed
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
