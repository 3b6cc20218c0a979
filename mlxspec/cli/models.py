"""`mlxspec models`: lists the models on this disk, or those of Hugging Face whose ids contain the given words, and whether each fits into
this machine's memory; or the drafters that were published for models. Knows options and output."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from mlxspec.cli import terminal
from mlxspec.cli.table import print_table
from mlxspec.errors import ConfigError
from mlxspec.option import check_number

_SAID = {True: "yes", False: "no", None: "?"}


def run(args: argparse.Namespace) -> int:
    """Print the models that the options select, one a line or as one JSON object: those on this disk, those of the hub, or published
    drafters. Returns 0."""
    if args.drafters:
        if args.words:
            raise ConfigError("--drafters lists all of them; leave the words out.")
        return _drafters(json_wanted=args.json)
    check_number("--limit", args.limit, 1, 100, integer=True)
    if args.context is not None:
        check_number("--context", args.context, 1, 1 << 24, integer=True)
    return _search(args) if args.words else _here(args)


def _here(args: argparse.Namespace) -> int:
    """Print the models of Hugging Face's cache and of LM Studio's folders. Returns 0."""
    from mlxspec.checkpoints.cache import listing
    from mlxspec.loading.progress import amount
    from mlxspec.platform.memory import machine_memory

    found, machine = listing(args.context), machine_memory()
    fits = {id(e): None if e.memory is None else e.memory <= machine for e in found.entries}
    entries = [e for e in found.entries if fits[id(e)] or not args.fits]
    if args.json:
        data = {"cache": str(found.folder), "machine": machine, "models": [e.data() for e in entries]}
        terminal.say(json.dumps(data | {"others": found.num_others}) + "\n")
        return 0
    if entries:
        rows = [
            (
                e.name,
                e.revision[:12] + (f" ({', '.join(e.refs)})" if e.refs else ""),
                amount(e.size),
                e.model_type,
                e.quantization,
                _SAID[e.has_head],
                "" if e.memory is None else amount(e.memory),
                "" if e.memory is None else _SAID[fits[id(e)]],
            )
            for e in entries
        ]
        headings = ("model", "revision", "size", "type", "weights", "MTP head", "memory", "fits")
        print_table(headings, rows, right=(2, 6))
    else:
        terminal.say(
            f"There is no model that mlxspec runs in {found.folder}, nor in LM Studio's folders; "
            "`mlxspec models WORD` searches Hugging Face, and `mlxspec pull owner/name` fetches one.\n"
        )
    for e in entries:
        if e.problem:
            terminal.note(f"{e.name} {e.revision[:12]}: {e.problem}.")
    if found.num_others:
        terminal.note(f"Of the cache's other repositories, {found.num_others}, mlxspec runs none.")
    return 0


def _search(args: argparse.Namespace) -> int:
    """Print models of the Hugging Face Hub whose ids contain the given words, the most downloaded first. A model counts as fitting if
    its weights alone fit into this machine's memory. Returns 0."""
    from mlxspec.checkpoints.search import search
    from mlxspec.loading.progress import amount
    from mlxspec.platform.memory import machine_memory

    machine = machine_memory()
    found = search(" ".join(args.words), limit=args.limit, all_kinds=args.all)
    found = [m for m in found if not args.fits or 0 < m.size <= machine]
    if args.json:
        terminal.say(json.dumps({"machine": machine, "models": [asdict(m) for m in found]}) + "\n")
        return 0
    if not found:
        fitting = " and fits here" if args.fits else ""
        terminal.say(
            f"Hugging Face has no model that mlxspec runs, whose id holds {' '.join(args.words)!r}{fitting}.\n"
        )
        return 0
    rows = [
        (
            m.name,
            m.model_type or "?",
            m.quantization or "",
            amount(m.size) if m.size else "?",
            _SAID[m.size <= machine if m.size else None],
            f"{m.downloads:,}",
            ", ".join(m.base_models),
            "gated" if m.gated else "",
        )
        for m in found
    ]
    headings = ("model", "type", "weights", "size", "fits", "downloads", "made from", "")
    print_table(headings, rows, right=(3, 5))
    terminal.note("`mlxspec pull MODEL` fetches one with what drafts for it.")
    return 0


def _drafters(*, json_wanted: bool) -> int:
    """Print the published drafters of the catalogue. Returns 0."""
    from mlxspec.checkpoints.catalogue import catalogue

    found = catalogue()
    if json_wanted:
        terminal.say(json.dumps({"drafters": [asdict(p) for p in found]}) + "\n")
        return 0
    rows = [
        (
            ", ".join(p.targets),
            p.repo,
            p.kind,
            f"{p.parameters:g}B" if p.parameters else "",
            p.license,
            p.note,
        )
        for p in found
    ]
    print_table(("model", "drafter", "kind", "size", "license", ""), rows, right=(3,))
    terminal.note(
        "The best of each model comes first. `mlxspec pull MODEL --drafter auto` fetches a model, or a conversion of it, with the first "
        "that fits; --json tells the sources."
    )
    return 0
