"""`mlxspec convert`: writes another folder of the same model, quantized as requested, with its MTP head. Knows options and output."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlxspec.cli import terminal
from mlxspec.cli.interrupt import clearing_away
from mlxspec.cli.progress_bar import shown_progress
from mlxspec.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Convert a model or drafter and print the sizes of what was written. Returns 0."""
    from mlxspec.checkpoints.convert import Wish, convert
    from mlxspec.checkpoints.quantize import Format
    from mlxspec.loading.progress import amount

    if not args.folder and not args.output:
        raise ConfigError("Name the folder that is to be written: `mlxspec convert MODEL DIR`.")
    if args.folder and args.output:
        raise ConfigError("The folder is named twice, as DIR and by --output.")
    asked = args.quantize or any(x is not None for x in (args.bits, args.group_size, args.mode))
    wish = Wish(
        trunk=Format.of(args.mode or "affine", args.bits, args.group_size) if asked else None,
        head_bits=args.mtp_bits,
        dtype=args.dtype,
        graft=args.graft_mtp,
        vision=not args.text_only,
    )
    with shown_progress(), clearing_away():
        made = convert(
            args.source, Path(args.folder or args.output).expanduser(), wish, revision=args.revision
        )
    head = f"an MTP head of {amount(made.head_bytes)}" if made.head_bytes else "no MTP head"
    tower = f", a vision tower of {amount(made.vision_bytes)}" if made.vision_bytes else ""
    beside = f"{tower} and {head}" if made.title == "a model" else f" of {made.title}"
    terminal.say(f"{made.folder}: {amount(made.trunk_bytes)}{beside}.\n")
    if made.vision_bytes and made.skipped:
        terminal.note(f"Tensors for sound were left out: {made.skipped}.")
    elif made.skipped:
        terminal.note(
            f"Only text was converted; tensors for images, video and sound left out: {made.skipped}."
            + (f" {made.no_images}" if made.no_images else "")
        )
    return 0
